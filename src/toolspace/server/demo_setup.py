"""The demo for a start without configuration: an agent, a person, a space for them, and a folder of sample files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from toolspace.config.agent_settings import AgentModelSettings
from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.load import load_config
from toolspace.core.ids import derived_id
from toolspace.models.registry import DEMO, find_default_model
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces

DEMO_NAME: Final = "demo"
DEMO_AGENT_ID: Final = derived_id("ent", "agent", DEMO_NAME)
LOBBY_SPACE_ID: Final = "spc_lobby"
YOU_ENTITY_ID: Final = "ent_you"
_DESCRIPTION: Final = Path(__file__).with_name("demo.yaml")
_SAMPLE: Final = Path(__file__).with_name("sample")
_FOLDER_VARIABLE: Final = "DEMO_FOLDER"


def demo_agent(config: Config, environ: Mapping[str, str]) -> AgentSpec | None:
    """Returns the demo agent; None if agents are configured or the demo is disabled.

    It uses the model whose key is in the environment; without a key it answers by rules. The sample files are copied
    once and never overwritten.
    """
    if config.agents or not config.demo:
        return None
    folder = _sample_folder(config.state_dir)
    demo_config = load_config(_DESCRIPTION, environ={_FOLDER_VARIABLE: str(folder)})
    assert demo_config.agent is not None
    provider, name = find_default_model(environ) or (DEMO, None)
    merged_config = msgspec.structs.replace(
        demo_config,
        agents={},
        agent=None,
        defaults=config.defaults,
        storage=config.storage,
        server=config.server,
        state_dir=config.state_dir,
        parent=config,
    )
    return msgspec.structs.replace(
        demo_config.agent, model=AgentModelSettings(provider=provider, name=name), config=merged_config
    )


async def set_up_demo(ledger: Ledger) -> None:
    """Creates the lobby space with the agent and a person. Runs on every start; existing records stay unchanged."""
    await ledger.write(_create_lobby)


def uses_model(spec: AgentSpec) -> bool:
    """Whether the agent uses a model rather than rules."""
    return spec.model.provider != DEMO


def _create_lobby() -> Program[None]:
    yield from entities_and_spaces.create_entity(DEMO_AGENT_ID, "agent", "Demo", {})
    yield from entities_and_spaces.create_entity(YOU_ENTITY_ID, "human", "You", {})
    yield from entities_and_spaces.create_space(LOBBY_SPACE_ID, "Lobby", {})
    for entity_id in (DEMO_AGENT_ID, YOU_ENTITY_ID):
        yield from entities_and_spaces.add_member(LOBBY_SPACE_ID, entity_id)


def _sample_folder(state_dir: Path) -> Path:
    """Returns the folder of the sample files. It is created by a rename, so that it is never incomplete."""
    folder = state_dir.absolute() / "demo"
    if folder.is_dir():
        return folder
    state_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=state_dir, ignore_cleanup_errors=True) as scratch:
        new_folder = Path(scratch) / "demo"
        for file in sorted(_SAMPLE.rglob("*")):
            if file.is_file():
                target = new_folder / file.relative_to(_SAMPLE)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())  # Without the mode: installed files may be read-only.
        try:
            os.rename(new_folder, folder)
        except OSError:
            if not folder.is_dir():  # Otherwise another process created it first.
                raise
    return folder
