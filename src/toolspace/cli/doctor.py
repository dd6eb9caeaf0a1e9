"""`toolspace doctor`: checks the installation and the configuration, and prints how to fix problems.

No check changes anything. `doctor_checks` has the checks of the database, agents, MCP servers and OpenAPI services.
"""

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

from toolspace.cli.doctor_checks import (
    CheckResult,
    CheckState,
    check_agents,
    check_database,
    check_servers,
    check_services,
)
from toolspace.cli.local_toolspace import config_environment, config_path, inspected_toolspace
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, escape_control_characters, show_status
from toolspace.config.configuration import Config
from toolspace.config.load import load_config
from toolspace.errors import ConfigError, ToolspaceError
from toolspace.providers.functions import load_functions
from toolspace.toolspace import Toolspace

_LOW_SPACE, _NO_SPACE = 500 * 1024 * 1024, 20 * 1024 * 1024
_EXTRAS = {
    "otel": "opentelemetry",
    "pydantic-ai": "pydantic_ai",
    "langchain": "langchain_core",
    "tokens": "tiktoken",
}
"""Extra → a module that it installs."""
_MARKS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "problem": ("✗", "red")}


@click.command("doctor", cls=Command)
@click.pass_obj
async def command(options: Options) -> int:
    """Check the installation, configuration, storage, agents, servers and providers, and say how to fix problems."""
    output = options.output
    set_up_logs(options, os.environ)
    checks: list[CheckResult] = []
    async with show_status(output, "checking"):
        async for check in _check_all(options):
            checks.append(check)
            if not options.json:
                _print(output, check)
    problems = sum(check.state == "problem" for check in checks)
    if options.json:
        output.document({"ok": not problems, "checks": msgspec.to_builtins(checks)})
    elif problems:
        output.error(f"{problems} {'problem' if problems == 1 else 'problems'} to fix")
    return 1 if problems else 0


def _print(output: CommandOutput, check: CheckResult) -> None:
    mark, colour = _MARKS[check.state]
    if output.quiet and check.state == "ok":
        return
    message = escape_control_characters(check.message)
    output.line(f"{output.style(mark, fg=colour, bold=True)} {check.subject}: {message}")
    if check.fix:
        output.line(f"    {'to fix: ' if check.state != 'ok' else ''}{escape_control_characters(check.fix)}")


async def _check_all(options: Options) -> AsyncIterator[CheckResult]:
    """Yields the results of all checks. Checks that an earlier problem makes impossible are skipped."""
    # The version is always new enough, or this module could not be imported; the path shows which Python it is.
    yield CheckResult("ok", "Python", f"{platform.python_version()}, {sys.executable}")
    yield _check_extras()
    config: Config | None = None
    for item in _check_config(options):
        if isinstance(item, Config):
            config = item
        else:
            yield item
    if config is None:
        return
    for check in (*_check_functions(config), *_check_storage(config.state_dir)):
        yield check
    yield await _check_cache(config)
    yield await check_database(config)
    async for check in check_agents(config, config_environment(options)):
        yield check
    async for check in _check_toolspace(options, config):
        yield check


def _check_extras() -> CheckResult:
    is_installed = {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()}
    installed = ", ".join(extra for extra, present in is_installed.items() if present) or "none"
    missing = ", ".join(extra for extra, present in is_installed.items() if not present)
    hint = f"to install {missing}: pip install 'toolspace[{missing.replace(' ', '')}]'" if missing else ""
    return CheckResult("ok", "optional parts", installed, hint)


def _check_config(options: Options) -> Iterator[CheckResult | Config]:
    """Yields the results for the configuration, and the configuration itself if it is valid."""
    try:
        path = config_path(options)
        config = load_config(path, environ=config_environment(options))
    except ConfigError as error:
        for line in str(error).splitlines():
            place, _, message = line.partition(": ")
            yield CheckResult("problem", "configuration", line, f"correct {place}" if message else "")
        return
    if path is None:
        yield CheckResult("ok", "configuration", "none: built-in tools only", "to write one: toolspace init")
    else:
        yield CheckResult("ok", "configuration", str(path))
    for warning in config.warnings:
        yield CheckResult("warning", "configuration", warning, f"correct or remove {warning.partition(':')[0]}")
    yield config


def _check_functions(config: Config) -> Iterator[CheckResult]:
    for spec in config.functions:
        try:
            tools = load_functions(spec, config.base_dir)
        except ConfigError as error:
            yield CheckResult("problem", "functions", str(error), f"correct it, or remove {spec} from functions")
            continue
        yield CheckResult("ok", "functions", f"{spec}: {', '.join(tool.name for tool in tools)}")
        for tool in tools:
            if tool.queue is not None and tool.queue not in config.queues:
                yield CheckResult(
                    "problem",
                    "queues",
                    f'{tool.name} uses the queue "{tool.queue}", which does not exist',
                    f"add queues: {{{tool.queue}: {{concurrent: 3}}}}",
                )


def _check_storage(folder: Path) -> Iterator[CheckResult]:
    nearest_folder = next((path for path in (folder, *folder.parents) if path.exists()), folder)
    if not nearest_folder.is_dir():
        yield CheckResult("problem", "storage", f"{nearest_folder} is not a folder", "move it away, or set storage.dir")
        return
    try:
        with tempfile.TemporaryFile(dir=nearest_folder):
            pass
    except OSError as error:
        fix = f"chown or chmod {nearest_folder}, or set storage.dir to a folder that you may write"
        yield CheckResult("problem", "storage", f"{nearest_folder} cannot be written: {error.strerror}", fix)
        return
    free = shutil.disk_usage(nearest_folder).free
    message = f"{folder}, {free / 1024**3:.1f} GiB free"
    if free < _LOW_SPACE:
        state: CheckState = "problem" if free < _NO_SPACE else "warning"
        yield CheckResult(state, "storage", message, "free some space, or set storage.dir to another disk")
    else:
        yield CheckResult("ok", "storage", message)
    if folder.is_dir() and os.name == "posix":
        status = folder.stat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o022:
            message = f"other users may write {folder} (mode {stat.S_IMODE(status.st_mode):o})"
            yield CheckResult("warning", "storage", message, f"chmod 700 {folder}")


async def _check_cache(config: Config) -> CheckResult:
    if config.storage.cache != "disk":
        return CheckResult("ok", "cache", "in memory")
    from toolspace.storage.sqlite_cache import SqliteCache  # Here: with SQLite.

    path = config.state_dir / "cache.db"
    cache = SqliteCache(path)
    try:
        await cache.get("toolspace doctor")
    except Exception as error:
        return CheckResult("problem", "cache", f"{path}: {error}", f"remove {path}; it only has copies")
    finally:
        await cache.aclose()
    return CheckResult("ok", "cache", str(path))


async def _check_toolspace(options: Options, config: Config) -> AsyncIterator[CheckResult]:
    """Starts every provider once, as a command would."""
    started_at = time.time()
    try:
        async with inspected_toolspace(options) as ts:
            for warning in ts.warnings:
                if warning not in config.warnings:
                    yield CheckResult("warning", "providers", warning)
            for check in (*_check_providers(ts), *check_servers(config, ts, started_at), *check_services(config, ts)):
                yield check
    except ToolspaceError as error:
        if "functions: " not in str(error):  # Those are reported already.
            yield CheckResult("problem", "tools", str(error), "correct the configuration or the code that it names")
    except OSError as error:
        yield CheckResult("problem", "storage", str(error), "set storage.dir to a folder that you may write")


def _check_providers(ts: Toolspace) -> Iterator[CheckResult]:
    """Checks the providers that have no check of their own."""
    failures = ts.orchestrator.unavailable_providers()
    counts: Counter[str] = Counter()  # Summed up, because several providers share the namespace `agent`.
    for provider in ts.orchestrator.providers:
        name = provider.namespace or provider.kind
        if provider.kind in ("mcp", "openapi"):
            continue
        if name in failures:
            fix = f"correct {name}, or set its enabled: false"
            yield CheckResult("problem", "providers", f"{name}: {failures[name]}", fix)
        elif count := len(provider.list_tools()):
            counts[name] += count
    for name, count in counts.items():
        yield CheckResult("ok", "providers", f"{name}: {count} {'tool' if count == 1 else 'tools'}")
