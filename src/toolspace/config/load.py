"""Loads the configuration: reads the files, applies environment variables and defaults, and validates the whole.

Used by `Toolspace.open`, the server and the CLI. Builds nothing from it; `composition` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from toolspace.config.agent_files import AgentResolver
from toolspace.config.configuration import FUNCTION_FILE, Config
from toolspace.config.document import EMPTY, KeyPath, read_document
from toolspace.config.environment import read_overrides
from toolspace.config.files import default_state_dir
from toolspace.config.reader import ReadingContext
from toolspace.config.top_level import AGENT_KEYS, ANY_FILE_KEYS, PROCESS_KEYS, TOOL_KEYS, ConfigPart, create_context
from toolspace.core.secret_masking import is_secret_name

__all__ = ["Config", "load_config"]


def load_config(path: Path | None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration of a file; without a file, the defaults. Raises `ConfigError` with all problems at once."""
    path = None if path is None else path.absolute()
    document = EMPTY if path is None else read_document(path)
    base_dir = Path.cwd() if path is None else path.parent
    overrides = read_overrides(environ)
    context = create_context(document, base_dir, environ, overrides.values)
    main = ConfigPart(context)
    is_agent = "agent" in document.data
    settings = main.read(*TOOL_KEYS, *PROCESS_KEYS, *ANY_FILE_KEYS, *(AGENT_KEYS if is_agent else ()))
    defaults = main.merge_defaults(settings)
    main.check_references(settings)
    resolver = AgentResolver(main, settings, path=path, document=document, environ=environ, is_agent=is_agent)
    resolver.check()
    config = Config(
        defaults=defaults,
        queues=settings.queues,
        tools=settings.tools,
        mcp_servers=settings.all_servers,
        rest_tools=settings.rest_tools,
        openapi=settings.openapi,
        providers=settings.providers,
        router=settings.router,
        notifications=settings.notifications,
        embeddings=settings.embeddings,
        storage=settings.storage,
        server=settings.server,
        functions=_resolve_functions(settings.functions, context),
        demo=settings.demo,
        path=path,
        base_dir=base_dir,
        state_dir=settings.storage.dir or default_state_dir(environ),
        document=document,
        origins=context.origins,
    )
    agents = resolver.build_specs(config)
    return msgspec.structs.replace(
        config,
        agents=agents,
        agent=agents[resolver.main_agent] if resolver.main_agent is not None else None,
        warnings=(*overrides.warnings, *resolver.warnings()),
        secret_values=resolver.find_secrets().union(_find_override_secrets(overrides.values)),
    )


def _resolve_functions(functions: tuple[str, ...], context: ReadingContext) -> tuple[str, ...]:
    """As written, except that files in an environment variable are relative to the working directory."""
    if not isinstance(context.origins.get(("functions",)), str):
        return functions
    return tuple(str(Path.cwd() / entry) if FUNCTION_FILE.fullmatch(entry) else entry for entry in functions)


def _find_override_secrets(overrides: Mapping[KeyPath, tuple[str, Any]]) -> Iterator[str]:
    """The values of environment variables that override a secret setting."""
    for key, (_, value) in overrides.items():
        if isinstance(value, str) and is_secret_name(str(key[-1])):
            yield value
