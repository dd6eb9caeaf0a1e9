"""The checks of `toolspace doctor` for the database, agents, MCP servers and OpenAPI services.

Each returns what it found and how to fix it. None changes anything, and none calls a model.
"""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import msgspec

from toolspace.config.agent_settings import AgentModelSettings
from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings
from toolspace.config.server_settings import EmbeddingSettings
from toolspace.core.interfaces import ToolProvider
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, StorageError
from toolspace.providers.mcp.spec import ServerStatus
from toolspace.providers.plugins import MountedProvider
from toolspace.toolspace import Toolspace

CheckState = Literal["ok", "warning", "problem"]
_DATABASE = "database"
_DATABASE_SECONDS = 10.0
_VERSION_QUERY = "SELECT COALESCE(MAX(version), 0) FROM migrations"
_PROGRAM_FIXES = {
    "npx": "install Node.js 20 or newer, which includes npx",
    "npm": "install Node.js 20 or newer, which includes npm",
    "node": "install Node.js 20 or newer",
    "uvx": "install uv, which includes uvx",
    "uv": "install uv",
    "bunx": "install Bun, which includes bunx",
    "docker": "install Docker, and start it",
    "python": "write python3, or the whole path of a Python",
}
_SCRIPT = re.compile(r".+\.(?:py|js|mjs|cjs|ts|sh|rb|jar)")
_REMOTE_FIXES: tuple[tuple[str, str], ...] = (
    (r"\b401\b|login|log in|authori[sz]ation", "toolspace servers login {name}, or set its headers"),
    (r"\b403\b|forbidden", "its credentials lack a permission: correct its headers or auth"),
    (r"\b404\b|\b405\b|is its url right", "correct the path in its url"),
    (r"not known|getaddrinfo|name resolution|nodename", "correct the host in its url: {origin}"),
    (r"certificate|ssl", "correct its certificate, or name its authority with SSL_CERT_FILE"),
    (r"refused|connect|unreachable", "is it running at {origin}? Start it, or correct its url"),
)
"""A pattern for the error of a server at a URL → how to fix it."""
_MAX_WARNINGS = 5
"""Of one service: an OpenAPI document may cause a thousand."""


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of one check."""

    state: CheckState
    subject: str = msgspec.field(name="what")
    message: str = msgspec.field(name="found")
    fix: str = ""


# Database


async def check_database(config: Config) -> CheckResult:
    """Checks the database of the gateway: whether it can be opened, and its version."""
    from toolspace.storage.database import describe_database, find_database_file  # Here: with SQLite.

    file = find_database_file(config.storage.url, config.state_dir)
    if file is not None:
        return await asyncio.to_thread(_check_sqlite, file)
    place = describe_database(config.storage.url, config.state_dir)
    return await _check_postgres(config.storage.url or "", place, config.source("storage", "url"))


def _check_sqlite(file: Path) -> CheckResult:
    import sqlite3

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
    except sqlite3.Error as error:
        return CheckResult("problem", _DATABASE, f"{file} cannot be read: {error}", fix)
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
            finally:
                connection.terminate()
    except TimeoutError:
        return CheckResult("problem", _DATABASE, f"{place} does not respond", fix)
    except (driver.InvalidAuthorizationSpecificationError, driver.InvalidPasswordError):
        return CheckResult("problem", _DATABASE, f"{place} refuses the user or the password", f"correct {source}")
    except (OSError, ValueError, driver.PostgresError, driver.InterfaceError) as error:
        # Only the class of other errors: their text may quote the URL with its password.
        reason = str(error) if isinstance(error, OSError | driver.PostgresError) else type(error).__name__
        return CheckResult("problem", _DATABASE, f"{place} cannot be reached: {reason}", fix)
    return _check_version(f"{place}, PostgreSQL {server.major}.{server.minor}", version)


def _check_version(description: str, version: int) -> CheckResult:
    from toolspace.storage.schema import MIGRATIONS

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


# Agents


async def check_agents(config: Config, environ: Mapping[str, str]) -> AsyncIterator[CheckResult]:
    """Checks the model and the knowledge files of each agent, the demo agent, and the embedding model."""
    for agent in config.agents.values():
        yield await _check_model(agent, environ)
        for path in agent.knowledge:
            if not path.exists():
                fix = f"create it, or remove it from knowledge in {agent.path}"
                yield CheckResult("warning", "agents", f"{agent.name}: its knowledge {path} does not exist", fix)
    if not config.agents and config.demo:
        yield _check_demo(environ)
    if config.embeddings is not None:
        yield await _check_embeddings(config.embeddings, environ)


async def _check_model(agent: AgentSpec, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import choose_model, open_model  # Here: only configurations with agents need it.

    settings = agent.model
    try:
        model = open_model(settings.provider, settings.name, environ=environ, **_endpoint(settings))
    except ModelError as error:
        if settings.provider is None and settings.name is None and error.kind == "no_key":
            fix = "set a key such as OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY, or set its model"
            return CheckResult("problem", "agents", f"{agent.name}: has no model, and no key is set", fix)
        message, _, fix = str(error).partition("; ")
        return CheckResult("problem", "agents", f"{agent.name}: {message}", fix or f"correct its model in {agent.path}")
    await model.aclose()
    provider, name = choose_model(settings.provider, settings.name, environ)
    # Without the query of the URL, which may have a key in it.
    place = f" at {settings.base_url.partition('?')[0]}" if settings.base_url is not None else ""
    return CheckResult("ok", "agents", f"{agent.name}: {provider}:{name}".removesuffix(":") + place)


def _endpoint(settings: AgentModelSettings | EmbeddingSettings) -> dict[str, Any]:
    return {"base_url": settings.base_url, "api_key": settings.api_key, "headers": settings.headers}


def _check_demo(environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import find_default_model

    model = find_default_model(environ)
    how = f"uses {model[0]}:{model[1]}" if model is not None else "follows a few fixed rules, as no key is set"
    return CheckResult("ok", "agents", f"none is configured; the demo agent {how}")


async def _check_embeddings(settings: EmbeddingSettings, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.embeddings import open_embedder

    try:
        embedder = open_embedder(settings.model, environ=environ, **_endpoint(settings))
    except ModelError as error:
        message, _, fix = str(error).partition("; ")
        return CheckResult("problem", "embeddings", message, fix or "correct embeddings in the configuration")
    await embedder.aclose()
    return CheckResult("ok", "embeddings", settings.model)


# MCP servers


def check_servers(config: Config, ts: Toolspace, started_at: float) -> Iterator[CheckResult]:
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


def suggest_fix(config: Config, server: McpServerSettings, reason: str) -> str:
    """Returns how to fix a server that does not start."""
    place = config.source("mcpServers", server.name)
    if server.transport == "stdio":
        if fix := _missing_file_fix(server):
            return fix
        if re.search(r"is not executable|cannot be started: .*permission denied", reason, re.IGNORECASE):
            return f"chmod +x {server.command}, or set the program that runs it"
        return f"start {server.command} by hand with its args to see more, or correct {place}"
    for pattern, fix in _REMOTE_FIXES:
        if re.search(pattern, reason, re.IGNORECASE):
            return fix.format(name=server.name, origin=_origin(server.url))
    return f"correct {place}, or set its enabled: false"


def _missing_file_fix(server: McpServerSettings) -> str:
    """Returns how to fix a command line with a file that does not exist; empty if all exist."""
    command = server.command or ""
    if server.cwd is not None and not server.cwd.is_dir():
        return f"create the folder {server.cwd}, or correct its cwd"
    if shutil.which(command, path=server.env.get("PATH")) is None:
        if "/" not in command and "\\" not in command:
            return _PROGRAM_FIXES.get(command, f"install {command}, or write its whole path as command")
        if Path(command).exists():
            return f"chmod +x {command}"
        return f"there is no program {command}: correct its command"
    folder = server.cwd or Path.cwd()
    missing = next((arg for arg in server.args if _SCRIPT.fullmatch(arg) and not (folder / arg).exists()), None)
    return f"there is no file {missing}: correct its args, or set its cwd" if missing is not None else ""


def _origin(url: str | None) -> str:
    """Returns the scheme, host and port of a URL, without parts that may be secret."""
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"


# OpenAPI services


def check_services(config: Config, ts: Toolspace) -> Iterator[CheckResult]:
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
        yield CheckResult("warning", "openapi", f"{name}: {more} more of its operations have faults")


def _suggest_service_fix(config: Config, service: OpenApiSettings, reason: str) -> str:
    if "://" not in service.spec and not Path(service.spec).is_file():
        return f"there is no file {service.spec}: correct its spec"
    return _find_service_fix(reason) or f"correct {config.source('openapi', service.name)}, or set its enabled: false"


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
