"""What `toolspace doctor` looks at. Each check says what it found and how to fix it; none changes anything."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from toolspace.cli.agentcheck import agent_checks
from toolspace.cli.checking import Check, State
from toolspace.cli.options import Options
from toolspace.cli.servercheck import server_checks, service_checks
from toolspace.cli.session import config_path, environment
from toolspace.cli.starting import started
from toolspace.config.load import Config, load_config
from toolspace.errors import ConfigError, ToolspaceError
from toolspace.providers.loader import load_functions
from toolspace.toolspace import Toolspace

_LOW_SPACE, _NO_SPACE = 500 * 1024 * 1024, 20 * 1024 * 1024
_EXTRAS = {
    "otel": "opentelemetry",
    "pydantic-ai": "pydantic_ai",
    "langchain": "langchain_core",
    "tokens": "tiktoken",
}
"""Extra → the module that it brings."""


async def all_checks(options: Options) -> AsyncIterator[Check]:
    """Every check in turn. What cannot be looked at because of an earlier problem is left out."""
    yield _python()
    yield _extras()
    config: Config | None = None
    for item in _config(options):
        if isinstance(item, Config):
            config = item
        else:
            yield item
    if config is None:
        return
    for check in (*_functions(config), *_storage(config.state_dir)):
        yield check
    yield await _cache(config)
    from toolspace.cli.storagecheck import database_check  # With SQLite, which other checks do not need.

    yield await database_check(config)
    async for check in agent_checks(config, environment(options)):
        yield check
    async for check in _toolspace(options, config):
        yield check


def _python() -> Check:
    # An older one cannot even import this; which one it is, is what people get wrong.
    return Check("ok", "Python", f"{platform.python_version()}, {sys.executable}")


def _extras() -> Check:
    there = {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()}
    found = ", ".join(extra for extra, present in there.items() if present) or "none"
    missing = ", ".join(extra for extra, present in there.items() if not present)
    hint = f"if you want {missing}: pip install 'toolspace[{missing.replace(' ', '')}]'" if missing else ""
    return Check("ok", "optional parts", found, hint)


def _config(options: Options) -> Iterator[Check | Config]:
    """The findings on the configuration, and the configuration where it is right."""
    try:
        path = config_path(options)
        config = load_config(path, environ=environment(options))
    except ConfigError as error:
        for line in str(error).splitlines():
            place, _, message = line.partition(": ")
            yield Check("problem", "configuration", line, f"mend {place}" if message else "")
        return
    if path is None:
        yield Check("ok", "configuration", "none: built-in tools only", "to write one: toolspace init")
    else:
        yield Check("ok", "configuration", str(path))
    for warning in config.warnings:
        yield Check("warning", "configuration", warning, f"mend or remove {warning.partition(':')[0]}")
    yield config


def _functions(config: Config) -> Iterator[Check]:
    for spec in config.functions:
        try:
            tools = load_functions(spec, config.base_dir)
        except ConfigError as error:
            yield Check("problem", "functions", str(error), f"mend it, or take {spec} out of functions")
            continue
        yield Check("ok", "functions", f"{spec}: {', '.join(tool.name for tool in tools)}")
        for tool in tools:
            if tool.queue is not None and tool.queue not in config.queues:
                yield Check(
                    "problem",
                    "queues",
                    f'{tool.name} asks for the queue "{tool.queue}", which does not exist',
                    f"add queues: {{{tool.queue}: {{concurrent: 3}}}}",
                )


def _storage(folder: Path) -> Iterator[Check]:
    existing = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if not existing.is_dir():
        yield Check("problem", "storage", f"{existing} is not a folder", "move it away, or set storage.dir")
        return
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fix = f"chown or chmod {existing}, or set storage.dir to a folder that you may write"
        yield Check("problem", "storage", f"{existing} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(existing).free
    room = f"{folder}, {free / 1024**3:.1f} GiB free"
    if free < _LOW_SPACE:
        state: State = "problem" if free < _NO_SPACE else "warning"
        yield Check(state, "storage", room, "make room there, or set storage.dir to another disk")
    else:
        yield Check("ok", "storage", room)
    if folder.is_dir() and os.name == "posix":
        status = folder.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            yield Check("warning", "storage", f"others may write {folder} (mode {mode})", f"chmod 700 {folder}")


async def _cache(config: Config) -> Check:
    if config.storage.cache != "disk":
        return Check("ok", "cache", "in memory")
    from toolspace.storage.cache_sqlite import SqliteCache  # SQLite only where it is asked for.

    path = config.state_dir / "cache.db"
    cache = SqliteCache(path)
    try:
        await cache.get("toolspace doctor")
    except Exception as error:
        return Check("problem", "cache", f"{path}: {error}", f"remove {path}; it only holds copies")
    finally:
        await cache.aclose()
    return Check("ok", "cache", str(path))


async def _toolspace(options: Options, config: Config) -> AsyncIterator[Check]:
    """Starts everything once, as a command would."""
    began = time.time()
    try:
        async with started(options) as ts:
            for warning in ts.warnings:
                if warning not in config.warnings:
                    yield Check("warning", "providers", warning)
            for check in (*_providers(ts), *server_checks(config, ts, began), *service_checks(config, ts)):
                yield check
    except ToolspaceError as error:
        if "functions: " not in str(error):  # Those were found already.
            yield Check("problem", "tools", str(error), "mend the configuration or the code that it names")
    except OSError as error:
        yield Check("problem", "storage", str(error), "set storage.dir to a folder that you may write")


def _providers(ts: Toolspace) -> Iterator[Check]:
    """Those that have no check of their own."""
    failures = ts.orchestrator.unavailable()
    counts: Counter[str] = Counter()  # Agents share a namespace with the tools that every agent has.
    for provider in ts.orchestrator.providers:
        name = provider.namespace or provider.kind
        if provider.kind in ("mcp", "openapi"):
            continue
        if name in failures:
            yield Check("problem", "providers", f"{name}: {failures[name]}", f"mend {name}, or set its enabled: false")
        elif count := len(provider.list_tools()):
            counts[name] += count
    for name, count in counts.items():
        yield Check("ok", "providers", f"{name}: {count} {'tool' if count == 1 else 'tools'}")
