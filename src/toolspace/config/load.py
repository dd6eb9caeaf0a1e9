"""Loads the configuration: files, variables and defaults together, checked as a whole. Builds nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolspace.config.agent_files import AgentResolver
from toolspace.config.configuration import FUNCTION_FILE, Config
from toolspace.config.document import EMPTY, KeyPath
from toolspace.config.environment import read_overrides
from toolspace.config.files import default_state_dir
from toolspace.config.parsing import read_document
from toolspace.config.reader import ReadingContext
from toolspace.config.top_level import AGENT_KEYS, ANY_FILE_KEYS, PROCESS_KEYS, TOOL_KEYS, ConfigPart, create_context
from toolspace.core.secret_masking import is_secret_name

__all__ = ["Config", "load_config"]


def load_config(path: Path | None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration in a file; all defaults for None. Raises `ConfigError` with all that is wrong."""
    path = None if path is None else path.absolute()
    document = EMPTY if path is None else read_document(path)
    base_dir = Path.cwd() if path is None else path.parent
    overrides = read_overrides(environ)
    session = create_context(document, base_dir, environ, overrides.values)
    main = ConfigPart(session)
    is_agent = "agent" in document.data
    root = main.read(*TOOL_KEYS, *PROCESS_KEYS, *ANY_FILE_KEYS, *(AGENT_KEYS if is_agent else ()))
    defaults = main.defaults(root)
    main.check(root)
    agents = AgentResolver(main, root, path=path, written=document, environ=environ, is_agent=is_agent)
    agents.check()
    config = Config(
        defaults=defaults,
        queues=root.queues,
        tools=root.tools,
        mcp_servers=root.all_servers,
        rest_tools=root.rest_tools,
        openapi=root.openapi,
        providers=root.providers,
        router=root.router,
        notifications=root.notifications,
        embeddings=root.embeddings,
        storage=root.storage,
        server=root.server,
        functions=_functions(root.functions, session),
        demo=root.demo,
        path=path,
        base_dir=base_dir,
        state_dir=root.storage.dir or default_state_dir(environ),
        document=document,
        origins=session.origins,
    )
    made = agents.build_specs(config)
    return msgspec.structs.replace(
        config,
        agents=made,
        agent=made[agents.main_agent] if agents.main_agent is not None else None,
        warnings=(*overrides.warnings, *agents.warnings()),
        secret_values=agents.find_secrets().union(_given_secrets(overrides.values)),
    )


def _functions(specs: tuple[str, ...], session: ReadingContext) -> tuple[str, ...]:
    """As written; but a file that a variable names is relative to the working folder, as in every command."""
    if not isinstance(session.origins.get(("functions",)), str):
        return specs
    return tuple(str(Path.cwd() / spec) if FUNCTION_FILE.fullmatch(spec) else spec for spec in specs)


def _given_secrets(overrides: Mapping[KeyPath, tuple[str, Any]]) -> Iterator[str]:
    """The secrets among the settings that variables give."""
    for path, (_, value) in overrides.items():
        if isinstance(value, str) and is_secret_name(str(path[-1])):
            yield value
