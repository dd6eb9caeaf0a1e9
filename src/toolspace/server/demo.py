"""The first minute without a configuration: an agent, a person and a space for them, with a folder of sample files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from toolspace.config.agent_settings import AgentModelSettings
from toolspace.config.configuration import AgentSpec
from toolspace.config.load import Config, load_config
from toolspace.core.ids import derived_id
from toolspace.models.registry import DEMO, find_default_model
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import entities

DEMO_NAME: Final = "demo"
DEMO_AGENT_ID: Final = derived_id("ent", "agent", DEMO_NAME)
LOBBY_SPACE_ID: Final = "spc_lobby"
YOU_ENTITY_ID: Final = "ent_you"
_DESCRIPTION: Final = Path(__file__).with_name("demo.yaml")
_SAMPLE: Final = Path(__file__).with_name("sample")
_FOLDER_VARIABLE: Final = "DEMO_FOLDER"


def demo_agent(config: Config, environ: Mapping[str, str]) -> AgentSpec | None:
    """The agent to try things out with; None where others are configured, or none is wanted.

    It thinks with the model whose key is in the environment; without a key, by rules. Its files are copied from the
    sample once; what becomes of them then is between it and people.
    """
    if config.agents or not config.demo:
        return None
    folder = _sample_folder(config.state_dir)
    described = load_config(_DESCRIPTION, environ={_FOLDER_VARIABLE: str(folder)})
    assert described.agent is not None
    provider, name = find_default_model(environ) or (DEMO, None)
    own = msgspec.structs.replace(
        described,
        agents={},
        agent=None,
        defaults=config.defaults,
        storage=config.storage,
        server=config.server,
        state_dir=config.state_dir,
        parent=config,
    )
    return msgspec.structs.replace(described.agent, model=AgentModelSettings(provider=provider, name=name), config=own)


async def set_up_demo(ledger: Ledger) -> None:
    """Makes the lobby, and puts the agent and a person into it. Again on every start: what is there stays as it is."""
    await ledger.write(_set_up)


def uses_model(spec: AgentSpec) -> bool:
    """Whether the agent has a model, and not just rules."""
    return spec.model.provider != DEMO


def _set_up() -> Program[None]:
    yield from entities.create_entity(DEMO_AGENT_ID, "agent", "Demo", {})
    yield from entities.create_entity(YOU_ENTITY_ID, "human", "You", {})
    yield from entities.create_space(LOBBY_SPACE_ID, "Lobby", {})
    for entity_id in (DEMO_AGENT_ID, YOU_ENTITY_ID):
        yield from entities.add_member(LOBBY_SPACE_ID, entity_id)


def _sample_folder(state_dir: Path) -> Path:
    """The folder of the sample files. Made as a whole, so that no start finds half of it."""
    folder = state_dir.absolute() / "demo"
    if folder.is_dir():
        return folder
    state_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=state_dir, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "demo"
        for file in sorted(_SAMPLE.rglob("*")):
            if file.is_file():
                target = made / file.relative_to(_SAMPLE)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())  # Without its mode: an installed one may be read-only.
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # Else another process was faster.
                raise
    return folder
