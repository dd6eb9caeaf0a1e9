"""`toolspace doctor`: checks the installation and the configuration, and prints how to fix problems.

The checks start every provider and MCP server once, and open the cache if it exists. They call no model and migrate no
database.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
import re
import shlex
import shutil
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

import click
import msgspec

from toolspace.cli.agent_checks import (
    check_agent_tools,
    check_agents,
    check_failed_events,
    check_session_scopes,
)
from toolspace.cli.check_result import CheckResult, CheckState, print_check
from toolspace.cli.config_file import config_environment, config_path
from toolspace.cli.local_toolspace import inspected_toolspace
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import show_status
from toolspace.cli.servers import suggest_fix
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config.configuration import Config
from toolspace.config.load import load_config
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings
from toolspace.config.secret_references import find_readable_file
from toolspace.core.clock import LARGE_SKEW_SECONDS
from toolspace.core.extension_points import ToolProvider
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ConfigError, StorageDamaged, StorageError, ToolspaceError
from toolspace.providers.functions import load_functions
from toolspace.providers.mcp.server_spec import ServerStatus
from toolspace.providers.plugins import MountedProvider
from toolspace.toolspace import Toolspace

_DATABASE = "database"
_DATABASE_SECONDS = 10.0
_PAGE_CHECK_SECONDS = 60.0
"""How long the pages of an SQLite database are checked at most."""
_VERSION_QUERY = "SELECT COALESCE(MAX(version), 0) FROM migrations"
_TIME_QUERY = "SELECT CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
_LOW_SPACE, _NO_SPACE = 500 * 1024 * 1024, 20 * 1024 * 1024
_EXTRAS = {
    "otel": "opentelemetry",
    "pydantic-ai": "pydantic_ai",
    "langchain": "langchain_core",
    "tokens": "tiktoken",
    "keyring": "keyring",
}
"""Extra → a module that it installs."""
_MAX_WARNINGS = 5
"""Warnings that are printed for one OpenAPI service. Its document may cause a thousand."""


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
                print_check(output, check)
    problems = sum(check.state == "problem" for check in checks)
    if options.json:
        output.document({"ok": not problems, "checks": msgspec.to_builtins(checks)})
    elif problems:
        output.error(f"{problems} {'problem' if problems == 1 else 'problems'} to fix")
    return 1 if problems else 0


async def _check_all(options: Options) -> AsyncIterator[CheckResult]:
    """Yields the results of all checks. Checks that an earlier problem makes impossible are skipped."""
    # The version is always new enough, or this module could not be imported; the path shows which Python it is.
    yield CheckResult("ok", "Python", f"{platform.python_version()}, {sys.executable}")
    yield _check_extras()
    config, checks = _check_config(options)
    for check in checks:
        yield check
    if config is None:
        return
    for check in (*_check_functions(config), *_check_storage(config.state_dir)):
        yield check
    yield await _check_cache(config)
    yield await _check_database(config)
    async for check in check_agents(config, config_environment(options)):
        yield check
    async for check in check_session_scopes(config):
        yield check
    async for check in check_failed_events(config):
        yield check
    async for check in _check_toolspace(options, config):
        yield check


def _check_extras() -> CheckResult:
    is_installed = {extra: importlib.util.find_spec(module) is not None for extra, module in _EXTRAS.items()}
    installed = ", ".join(extra for extra, present in is_installed.items() if present) or "none"
    missing = ", ".join(extra for extra, present in is_installed.items() if not present)
    hint = f"to install {missing}: pip install 'toolspace[{missing.replace(' ', '')}]'" if missing else ""
    return CheckResult("ok", "optional parts", installed, hint)


def _check_config(options: Options) -> tuple[Config | None, list[CheckResult]]:
    """Returns the configuration, or None if it is invalid."""
    subject = "configuration"
    try:
        path = config_path(options)
        config = load_config(path, environ=config_environment(options))
    except ConfigError as error:
        lines = [line.partition(": ") for line in str(error).splitlines()]
        return None, [
            CheckResult("problem", subject, "".join(line), f"correct {line[0]}" if line[2] else "") for line in lines
        ]
    if path is None:
        result = CheckResult("ok", subject, "none: built-in tools only", "to write one: toolspace init")
    else:
        result = CheckResult("ok", subject, str(path))
    warnings = [
        CheckResult("warning", subject, warning, f"correct or remove {warning.partition(':')[0]}")
        for warning in config.warnings
    ]
    return config, [result, *warnings, *_check_secret_files(config)]


def _check_secret_files(config: Config) -> Iterator[CheckResult]:
    for reference in config.secret_references:
        if (message := find_readable_file(reference)) is not None:
            yield CheckResult("warning", "secrets", message, f"chmod 600 {shlex.quote(reference.text)}")


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
    from toolspace.storage.sqlite_cache import SqliteCache  # Imported here, because it imports SQLite.

    path = config.state_dir / "cache.db"
    if not path.exists():
        return CheckResult("ok", "cache", f"{path}: created with the first cached result")
    cache = SqliteCache(path)
    try:
        await cache.get("toolspace doctor")
    except Exception as error:
        return CheckResult("problem", "cache", f"{path}: {error}", f"remove {path}; it has only cached results")
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
            for check in (*_check_providers(ts), *_check_servers(config, ts, started_at), *_check_services(config, ts)):
                yield check
            async for check in check_agent_tools(config, ts):
                yield check
    except ToolspaceError as error:
        if "functions: " not in str(error):  # Those are reported already.
            yield CheckResult("problem", "tools", str(error), "correct the configuration or the code that it names")
    except OSError as error:
        yield CheckResult("problem", "storage", str(error), "set storage.dir to a folder that you may write")


def _check_providers(ts: Toolspace) -> Iterator[CheckResult]:
    """Checks the providers that have no check of their own."""
    failures = ts.orchestrator.unavailable_providers()
    counts: Counter[str] = Counter()  # A sum, because several providers share the namespace `agent`.
    for provider in ts.orchestrator.providers:
        name = provider.namespace or provider.kind
        if provider.kind in ("mcp", "openapi"):
            continue
        if name in failures:
            fix = f"correct {name}, or set enabled: false"
            yield CheckResult("problem", "providers", f"{name}: {failures[name]}", fix)
        elif count := len(provider.list_tools()):
            counts[name] += count
    for name, count in counts.items():
        yield CheckResult("ok", "providers", f"{name}: {count} {'tool' if count == 1 else 'tools'}")


# Database


async def _check_database(config: Config) -> CheckResult:
    """Checks the database of the gateway: whether it can be opened, and its version."""
    from toolspace.storage.database import describe_database, find_database_file

    try:
        storage = (await asyncio.to_thread(resolve_process_secrets, config)).storage
    except ConfigError as error:
        return CheckResult("problem", _DATABASE, str(error), "correct the configuration")
    file = find_database_file(storage.url, config.state_dir)
    if file is not None:
        return await asyncio.to_thread(_check_sqlite, file)
    place = describe_database(storage.url, config.state_dir)
    return await _check_postgres(storage.url or "", place, config.source("storage", "url"))


def _check_sqlite(file: Path) -> CheckResult:
    import sqlite3

    from toolspace.storage.sqlite.damage import ADVICE, find_page_damage
    from toolspace.storage.sqlite.database_file import check_idle_files

    try:
        check_idle_files(file)
    except StorageDamaged as error:
        return CheckResult("problem", _DATABASE, str(error), ADVICE)
    if not file.exists():
        return CheckResult("ok", _DATABASE, f"{file}: created when the gateway first starts (toolspace serve)")
    fix = f"move {file} away, or set storage.url to another file"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if not tables:
                return CheckResult("ok", _DATABASE, f"{file}: empty")
            if "migrations" not in tables:
                return CheckResult("problem", _DATABASE, f"{file} is a database of another program", fix)
            (version,) = connection.execute(_VERSION_QUERY).fetchone()
            damage, _ = find_page_damage(connection, _PAGE_CHECK_SECONDS)
            if damage is not None:
                return CheckResult("problem", _DATABASE, f"{file} is damaged: {damage}", ADVICE)
    except sqlite3.Error as error:
        return CheckResult(
            "problem", _DATABASE, f"{file} cannot be read: {error}", f"{fix}; if it is damaged, {ADVICE}"
        )
    return _check_version(f"{file}, SQLite {sqlite3.sqlite_version}", version)


async def _check_postgres(url: str, place: str, source: str) -> CheckResult:
    from toolspace.storage.postgres.database import load_driver

    fix = f"start it, or correct {source}"
    try:
        driver = load_driver()
    except StorageError as error:
        return CheckResult("problem", _DATABASE, f"{place}: {error}", "pip install 'toolspace[postgres]'")
    try:
        async with asyncio.timeout(_DATABASE_SECONDS):
            connection = await driver.connect(url)
            try:
                server = connection.get_server_version()
                has_tables = await connection.fetchval("SELECT to_regclass('migrations') IS NOT NULL")
                version = await connection.fetchval(_VERSION_QUERY) if has_tables else 0
                skew = time.time() - await connection.fetchval(_TIME_QUERY)
            finally:
                connection.terminate()
    except TimeoutError:
        return CheckResult("problem", _DATABASE, f"{place} does not respond", fix)
    except (driver.InvalidAuthorizationSpecificationError, driver.InvalidPasswordError):
        return CheckResult("problem", _DATABASE, f"{place} refuses the user or the password", f"correct {source}")
    except (OSError, ValueError, driver.PostgresError, driver.InterfaceError) as error:
        # Of other errors, only the class is shown: their text may quote the URL with its password.
        reason = str(error) if isinstance(error, OSError | driver.PostgresError) else type(error).__name__
        return CheckResult("problem", _DATABASE, f"{place} cannot be reached: {reason}", fix)
    result = _check_version(f"{place}, PostgreSQL {server.major}.{server.minor}", version)
    if result.state == "ok" and abs(skew) > LARGE_SKEW_SECONDS:
        direction = "ahead of" if skew > 0 else "behind"
        message = f"{result.message}; the clock of this machine is {abs(skew):.0f} s {direction} the database"
        return CheckResult("warning", _DATABASE, message, "synchronize the clocks of both machines")
    return result


def _check_version(description: str, version: int) -> CheckResult:
    from toolspace.storage.migrations import MIGRATIONS

    newest = len(MIGRATIONS)
    if version > newest:
        return CheckResult(
            "problem",
            _DATABASE,
            f"{description}: has version {version} of a newer Toolspace; this one supports {newest}",
            "pip install --upgrade toolspace",
        )
    if version < newest:
        note = "the gateway creates its tables" if version == 0 else f"the gateway migrates it from version {version}"
        return CheckResult("ok", _DATABASE, f"{description}: {note} at its next start")
    return CheckResult("ok", _DATABASE, f"{description}, version {version}")


# MCP servers


def _check_servers(config: Config, ts: Toolspace, started_at: float) -> Iterator[CheckResult]:
    """Checks every MCP server of the configuration. `started_at`: when they were started, in Unix seconds."""
    statuses = {status.name: status for status in ts.list_servers()}
    for name, server in config.mcp_servers.items():
        status = statuses.get(name)
        if not server.enabled:
            yield CheckResult("ok", "servers", f"{name}: disabled", _enable_hint(config, "mcpServers", name))
        elif status is not None:
            yield from _check_server(config, server, status, started_at)


def _check_server(
    config: Config, server: McpServerSettings, status: ServerStatus, started_at: float
) -> Iterator[CheckResult]:
    name = server.name
    if status.state not in ("ready", "idle"):
        reason = status.last_error or f"it is {status.state}"
        yield CheckResult("problem", "servers", f"{name}: {reason}", suggest_fix(config, server, reason))
        return
    duration = f", ready after {max(0.0, status.since - started_at):.1f}s" if status.since is not None else ""
    protocol = f"{status.protocol_version or '?'} {status.era or ''}".strip()
    yield CheckResult("ok", "servers", f"{name}: {status.tools} tools, {status.transport}, {protocol}{duration}")
    for skipped in status.left_out:
        fix = "if you do not need it, add it to toolsDenied"
        yield CheckResult("warning", "servers", f"{name}: left out {skipped}", fix)


# OpenAPI services


def _check_services(config: Config, ts: Toolspace) -> Iterator[CheckResult]:
    """Checks every OpenAPI service, and lists the REST tools that are disabled."""
    failures = ts.orchestrator.unavailable_providers()
    providers = {provider.namespace: provider for provider in ts.orchestrator.providers if provider.kind == "openapi"}
    for name, service in config.openapi.items():
        if not service.enabled:
            yield CheckResult("ok", "openapi", f"{name}: disabled", _enable_hint(config, "openapi", name))
        elif name in failures:
            fix = _suggest_service_fix(config, service, failures[name])
            yield CheckResult("problem", "openapi", f"{name}: {failures[name]}", fix)
        elif name in providers:
            yield from _check_service(config, name, providers[name])
    disabled_names = [name for name, tool in config.rest_tools.items() if not tool.enabled]
    if disabled_names:
        yield CheckResult("ok", "rest", f"disabled: {', '.join(disabled_names)}")


def _check_service(config: Config, name: str, provider: ToolProvider) -> Iterator[CheckResult]:
    count = len(provider.list_tools())
    inner = provider.inner if isinstance(provider, MountedProvider) else provider
    place = config.source("openapi", name)
    # By getattr, because the class of the provider is imported only if a service is configured.
    warnings = cast("Sequence[str]", getattr(inner, "warnings", ()))
    if count:
        yield CheckResult("ok", "openapi", f"{name}: {count} tools")
    elif not warnings:
        yield CheckResult("warning", "openapi", f"{name}: offers no operation", f"correct {place}")
    for warning in warnings[:_MAX_WARNINGS]:
        fix = _find_service_fix(warning) or f"correct {place}"
        yield CheckResult("warning", "openapi", f"{name}: {mask_secrets(warning)}", fix)
    if len(warnings) > _MAX_WARNINGS:
        more = len(warnings) - _MAX_WARNINGS
        yield CheckResult("warning", "openapi", f"{name}: {more} more warnings about its operations")


def _suggest_service_fix(config: Config, service: OpenApiSettings, reason: str) -> str:
    if "://" not in service.spec and not Path(service.spec).is_file():
        return f"there is no file {service.spec}: correct its spec"
    return _find_service_fix(reason) or f"correct {config.source('openapi', service.name)}, or set enabled: false"


def _find_service_fix(reason: str) -> str:
    if re.search(r"baseUrl|no servers?\b", reason, re.IGNORECASE):
        return "set its baseUrl to the URL of the service"
    if re.search(r"\bauth\b|credential|security scheme|\b401\b|\b403\b", reason, re.IGNORECASE):
        return "set its auth or headers"
    if "filters accept none" in reason:
        return "correct its tags, methods, paths and operations"
    return ""


def _enable_hint(config: Config, section: str, name: str) -> str:
    return f"to use it: {config.source(section, name, 'enabled')}"
