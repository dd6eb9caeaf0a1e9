"""`toolspace doctor`: prints what the checks found, and how to fix it."""

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

import click
import msgspec

from toolspace.cli.doctor_checks import CheckResult, State, agent_checks, server_checks, service_checks
from toolspace.cli.local_toolspace import config_environment, config_path, inspected_toolspace
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, escape_control_characters, show_status
from toolspace.cli.runner import run
from toolspace.config.load import Config, load_config
from toolspace.errors import ConfigError, ToolspaceError
from toolspace.providers.function_loader import load_functions
from toolspace.toolspace import Toolspace

# MERGED from checks: What `toolspace doctor` looks at. Each check says what it found and how to fix it; none chang…

_LOW_SPACE, _NO_SPACE = 500 * 1024 * 1024, 20 * 1024 * 1024
_EXTRAS = {
    "otel": "opentelemetry",
    "pydantic-ai": "pydantic_ai",
    "langchain": "langchain_core",
    "tokens": "tiktoken",
}
"""Extra → the module that it brings."""


async def all_checks(options: Options) -> AsyncIterator[CheckResult]:
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
    from toolspace.cli.doctor_checks import database_check  # With SQLite, which other checks do not need.

    yield await database_check(config)
    async for check in agent_checks(config, config_environment(options)):
        yield check
    async for check in _toolspace(options, config):
        yield check


def _python() -> CheckResult:
    # An older one cannot even import this; which one it is, is what people get wrong.
    return CheckResult("ok", "Python", f"{platform.python_version()}, {sys.executable}")


def _extras() -> CheckResult:
    there = {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()}
    found = ", ".join(extra for extra, present in there.items() if present) or "none"
    missing = ", ".join(extra for extra, present in there.items() if not present)
    hint = f"if you want {missing}: pip install 'toolspace[{missing.replace(' ', '')}]'" if missing else ""
    return CheckResult("ok", "optional parts", found, hint)


def _config(options: Options) -> Iterator[CheckResult | Config]:
    """The findings on the configuration, and the configuration where it is right."""
    try:
        path = config_path(options)
        config = load_config(path, environ=config_environment(options))
    except ConfigError as error:
        for line in str(error).splitlines():
            place, _, message = line.partition(": ")
            yield CheckResult("problem", "configuration", line, f"mend {place}" if message else "")
        return
    if path is None:
        yield CheckResult("ok", "configuration", "none: built-in tools only", "to write one: toolspace init")
    else:
        yield CheckResult("ok", "configuration", str(path))
    for warning in config.warnings:
        yield CheckResult("warning", "configuration", warning, f"mend or remove {warning.partition(':')[0]}")
    yield config


def _functions(config: Config) -> Iterator[CheckResult]:
    for spec in config.functions:
        try:
            tools = load_functions(spec, config.base_dir)
        except ConfigError as error:
            yield CheckResult("problem", "functions", str(error), f"mend it, or take {spec} out of functions")
            continue
        yield CheckResult("ok", "functions", f"{spec}: {', '.join(tool.name for tool in tools)}")
        for tool in tools:
            if tool.queue is not None and tool.queue not in config.queues:
                yield CheckResult(
                    "problem",
                    "queues",
                    f'{tool.name} asks for the queue "{tool.queue}", which does not exist',
                    f"add queues: {{{tool.queue}: {{concurrent: 3}}}}",
                )


def _storage(folder: Path) -> Iterator[CheckResult]:
    existing = next((one for one in (folder, *folder.parents) if one.exists()), folder)
    if not existing.is_dir():
        yield CheckResult("problem", "storage", f"{existing} is not a folder", "move it away, or set storage.dir")
        return
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fix = f"chown or chmod {existing}, or set storage.dir to a folder that you may write"
        yield CheckResult("problem", "storage", f"{existing} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(existing).free
    room = f"{folder}, {free / 1024**3:.1f} GiB free"
    if free < _LOW_SPACE:
        state: State = "problem" if free < _NO_SPACE else "warning"
        yield CheckResult(state, "storage", room, "make room there, or set storage.dir to another disk")
    else:
        yield CheckResult("ok", "storage", room)
    if folder.is_dir() and os.name == "posix":
        status = folder.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
            mode = f"{stat.S_IMODE(status.st_mode):o}"
            yield CheckResult("warning", "storage", f"others may write {folder} (mode {mode})", f"chmod 700 {folder}")


async def _cache(config: Config) -> CheckResult:
    if config.storage.cache != "disk":
        return CheckResult("ok", "cache", "in memory")
    from toolspace.storage.caches.sqlite import SqliteCache  # SQLite only where it is asked for.

    path = config.state_dir / "cache.db"
    cache = SqliteCache(path)
    try:
        await cache.get("toolspace doctor")
    except Exception as error:
        return CheckResult("problem", "cache", f"{path}: {error}", f"remove {path}; it only holds copies")
    finally:
        await cache.aclose()
    return CheckResult("ok", "cache", str(path))


async def _toolspace(options: Options, config: Config) -> AsyncIterator[CheckResult]:
    """Starts everything once, as a command would."""
    began = time.time()
    try:
        async with inspected_toolspace(options) as ts:
            for warning in ts.warnings:
                if warning not in config.warnings:
                    yield CheckResult("warning", "providers", warning)
            for check in (*_providers(ts), *server_checks(config, ts, began), *service_checks(config, ts)):
                yield check
    except ToolspaceError as error:
        if "functions: " not in str(error):  # Those were found already.
            yield CheckResult("problem", "tools", str(error), "mend the configuration or the code that it names")
    except OSError as error:
        yield CheckResult("problem", "storage", str(error), "set storage.dir to a folder that you may write")


def _providers(ts: Toolspace) -> Iterator[CheckResult]:
    """Those that have no check of their own."""
    failures = ts.orchestrator.unavailable_providers()
    counts: Counter[str] = Counter()  # Agents share a namespace with the tools that every agent has.
    for provider in ts.orchestrator.providers:
        name = provider.namespace or provider.kind
        if provider.kind in ("mcp", "openapi"):
            continue
        if name in failures:
            yield CheckResult(
                "problem", "providers", f"{name}: {failures[name]}", f"mend {name}, or set its enabled: false"
            )
        elif count := len(provider.list_tools()):
            counts[name] += count
    for name, count in counts.items():
        yield CheckResult("ok", "providers", f"{name}: {count} {'tool' if count == 1 else 'tools'}")


_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command("doctor", cls=Command)
@click.pass_obj
def command(options: Options) -> int:
    """Check the installation, the configuration, the storage, the servers and providers; say how to fix each."""
    return run(lambda _: _examine(options))


async def _examine(options: Options) -> int:
    output = options.output
    set_up_logs(options, os.environ)
    checks: list[CheckResult] = []
    async with show_status(output, "checking"):
        async for check in all_checks(options):
            checks.append(check)
            if not options.json:
                _print(output, check)
    problems = sum(check.state == "problem" for check in checks)
    if options.json:
        output.document({"ok": not problems, "checks": msgspec.to_builtins(checks)})
    elif problems:
        output.error(f"{problems} {'problem' if problems == 1 else 'problems'} to mend")
    return 1 if problems else 0


def _print(output: CommandOutput, check: CheckResult) -> None:
    mark, colour = _MARKS[check.state]
    if output.quiet and check.state == "ok":
        return
    output.line(f"{output.style(mark, fg=colour, bold=True)} {check.what}: {escape_control_characters(check.found)}")
    if check.fix:
        output.line(f"    {'to fix: ' if check.state != 'ok' else ''}{escape_control_characters(check.fix)}")
