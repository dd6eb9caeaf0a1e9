"""One finding of `toolspace doctor`. Looks at nothing itself."""

from __future__ import annotations

import asyncio
import re
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal, cast
from urllib.parse import urlsplit

import msgspec

from toolspace.config.configuration import AgentSpec
from toolspace.config.load import Config
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings
from toolspace.config.server_settings import EmbeddingSettings
from toolspace.core.interfaces import ToolProvider
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ModelError, StorageError
from toolspace.providers.mcp.status import ServerStatus
from toolspace.providers.plugins import MountedProvider
from toolspace.storage.database import describe_database, find_database_file
from toolspace.storage.postgres.driver import load_driver
from toolspace.storage.schema import MIGRATIONS
from toolspace.toolspace import Toolspace

State = Literal["ok", "warning", "problem"]


class CheckResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found, and how to fix it."""

    state: State
    what: str
    found: str
    fix: str = ""


# MERGED from agentcheck: What `toolspace doctor` looks at in agents: their models, the keys of these, what they ar…


async def agent_checks(config: Config, environ: Mapping[str, str]) -> AsyncIterator[CheckResult]:
    """One for each agent, or for the one to try things out with, and one for everything that they lack."""
    for agent in config.agents.values():
        yield await _model(agent, environ)
        for check in _knowledge(agent):
            yield check
    if not config.agents and config.demo:
        yield _demo(environ)
    if config.embeddings is not None:
        yield await _embeddings(config.embeddings, environ)


async def _model(agent: AgentSpec, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import choose_model, open_model  # Here: few look at agents.

    said = agent.model
    try:
        model = open_model(
            said.provider,
            said.name,
            environ=environ,
            base_url=said.base_url,
            api_key=said.api_key,
            headers=said.headers,
        )
    except ModelError as error:
        if said.provider is None and said.name is None and error.kind == "no_key":
            fix = "set a key such as OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY, or give it a model"
            return CheckResult("problem", "agents", f"{agent.name}: names no model, and no key is set", fix)
        found, _, way = str(error).partition("; ")
        return CheckResult("problem", "agents", f"{agent.name}: {found}", way or f"mend its model in {agent.path}")
    await model.aclose()
    provider, name = choose_model(said.provider, said.name, environ)
    # Without its query, which some have a key in.
    place = f" at {said.base_url.partition('?')[0]}" if said.base_url is not None else ""
    return CheckResult("ok", "agents", f"{agent.name}: {provider}:{name}".removesuffix(":") + place)


def _demo(environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.registry import find_default_model

    found = find_default_model(environ)
    how = f"thinks with {found[0]}:{found[1]}" if found is not None else "goes by a few rules, as no key is set"
    return CheckResult("ok", "agents", f"none is configured; the one to try things out with {how}")


async def _embeddings(said: EmbeddingSettings, environ: Mapping[str, str]) -> CheckResult:
    from toolspace.models.embeddings import open_embedder

    try:
        embedder = open_embedder(
            said.model, environ=environ, base_url=said.base_url, api_key=said.api_key, headers=said.headers
        )
    except ModelError as error:
        found, _, way = str(error).partition("; ")
        return CheckResult("problem", "embeddings", found, way or "mend embeddings in the configuration")
    await embedder.aclose()
    return CheckResult("ok", "embeddings", said.model)


def _knowledge(agent: AgentSpec) -> Iterator[CheckResult]:
    for path in agent.knowledge:
        if not path.exists():
            fix = f"make it, or take it out of knowledge in {agent.path}"
            yield CheckResult("warning", "agents", f"{agent.name}: there is no {path} to know", fix)


# MERGED from servercheck: What `toolspace doctor` says of MCP servers and OpenAPI services: how each started, or w…

_PROGRAMS = {
    "npx": "install Node.js 20 or newer, which brings npx",
    "npm": "install Node.js 20 or newer, which brings npm",
    "node": "install Node.js 20 or newer",
    "uvx": "install uv, which brings uvx",
    "uv": "install uv",
    "bunx": "install Bun, which brings bunx",
    "docker": "install Docker, and start it",
    "python": "write python3, or the whole path of one",
}
_SHOWN = 5
"""Warnings of one service: a document may have a thousand."""
_SCRIPT = re.compile(r".+\.(?:py|js|mjs|cjs|ts|sh|rb|jar)")
_ADVICE: tuple[tuple[str, str], ...] = (
    (r"\b401\b|login|log in|authori[sz]ation", "toolspace servers login {name}, or set its headers"),
    (r"\b403\b|forbidden", "its credentials lack a right: mend its headers or auth"),
    (r"\b404\b|\b405\b|is its url right", "mend the path in its url"),
    (r"not known|getaddrinfo|name resolution|nodename", "mend the host in its url: {origin}"),
    (r"certificate|ssl", "mend its certificate, or name its authority with SSL_CERT_FILE"),
    (r"refused|connect|unreachable", "is it running at {origin}? Start it, or mend its url"),
)
"""What the reason says of a server at a URL → what to do."""


def server_checks(config: Config, ts: Toolspace, began: float) -> Iterator[CheckResult]:
    """Every MCP server of the configuration. `began` is when they were started, in Unix seconds."""
    statuses = {status.name: status for status in ts.list_servers()}
    for name, server in config.mcp_servers.items():
        status = statuses.get(name)
        if not server.enabled:
            yield CheckResult("ok", "servers", f"{name}: disabled", _enabling(config, name))
        elif status is not None:
            yield from _checked(config, server, status, began)


def service_checks(config: Config, ts: Toolspace) -> Iterator[CheckResult]:
    """Every OpenAPI service, and the REST tools."""
    failures = ts.orchestrator.unavailable_providers()
    providers = {provider.namespace: provider for provider in ts.orchestrator.providers if provider.kind == "openapi"}
    for name, service in config.openapi.items():
        if not service.enabled:
            yield CheckResult("ok", "openapi", f"{name}: disabled", _enabling(config, name, "openapi"))
        elif name in failures:
            fix = _service_advice(config, service, failures[name])
            yield CheckResult("problem", "openapi", f"{name}: {failures[name]}", fix)
        elif name in providers:
            yield from _service(config, name, providers[name])
    off = [name for name, tool in config.rest_tools.items() if not tool.enabled]
    if off:
        yield CheckResult("ok", "rest", f"disabled: {', '.join(off)}")


def _service(config: Config, name: str, provider: ToolProvider) -> Iterator[CheckResult]:
    count = len(provider.list_tools())
    inner = provider.inner if isinstance(provider, MountedProvider) else provider
    place = config.source("openapi", name)
    # Asked for by name: its class is imported only where a service is configured.
    warnings = cast("Sequence[str]", getattr(inner, "warnings", ()))
    if count:
        yield CheckResult("ok", "openapi", f"{name}: {count} tools")
    elif not warnings:
        yield CheckResult("warning", "openapi", f"{name}: no operation is offered", f"mend {place}")
    for warning in warnings[:_SHOWN]:
        yield CheckResult(
            "warning", "openapi", f"{name}: {mask_secrets(warning)}", _service_fix(warning) or f"mend {place}"
        )
    if len(warnings) > _SHOWN:
        yield CheckResult("warning", "openapi", f"{name}: {len(warnings) - _SHOWN} more of its operations have faults")


def _checked(config: Config, server: McpServerSettings, status: ServerStatus, began: float) -> Iterator[CheckResult]:
    name = server.name
    if status.state not in ("ready", "idle"):
        reason = status.last_error or f"it is {status.state}"
        yield CheckResult("problem", "servers", f"{name}: {reason}", advice(config, server, reason))
        return
    took = f", ready after {max(0.0, status.since - began):.1f}s" if status.since is not None else ""
    era = f"{status.protocol_version or '?'} {status.era or ''}".strip()
    yield CheckResult("ok", "servers", f"{name}: {status.tools} tools, {status.transport}, {era}{took}")
    for left in status.left_out:
        yield CheckResult(
            "warning", "servers", f"{name}: left out {left}", "if you do not need it, put it into toolsDenied"
        )


def advice(config: Config, server: McpServerSettings, reason: str) -> str:
    """The way out of what went wrong with a server."""
    if server.transport == "stdio" and (missing := _missing(server)):
        return missing
    place = config.source("mcpServers", server.name)
    if server.transport == "stdio":
        if re.search(r"is not executable|cannot be started: .*permission denied", reason, re.IGNORECASE):
            return f"chmod +x {server.command}, or name the program that runs it"
        return f"start {server.command} by hand with its args to see more, or mend {place}"
    for pattern, said in _ADVICE:
        if re.search(pattern, reason, re.IGNORECASE):
            return said.format(name=server.name, origin=_origin(server.url))
    return f"mend {place}, or set its enabled: false"


def _missing(server: McpServerSettings) -> str:
    """What a command line names that is not there."""
    command = server.command or ""
    if server.cwd is not None and not server.cwd.is_dir():
        return f"make the folder {server.cwd}, or mend its cwd"
    if shutil.which(command, path=server.env.get("PATH")) is None:
        if "/" in command or "\\" in command:
            return (
                f"there is no program {command}: mend its command"
                if not Path(command).exists()
                else f"chmod +x {command}"
            )
        return _PROGRAMS.get(command, f"install {command}, or write its whole path as command")
    folder = server.cwd or Path.cwd()
    gone = next((arg for arg in server.args if _SCRIPT.fullmatch(arg) and not (folder / arg).exists()), None)
    return f"there is no file {gone}: mend its args, or set its cwd" if gone is not None else ""


def _service_advice(config: Config, service: OpenApiSettings, reason: str) -> str:
    if "://" not in service.spec and not Path(service.spec).is_file():
        return f"there is no file {service.spec}: mend its spec"
    return _service_fix(reason) or f"mend {config.source('openapi', service.name)}, or set its enabled: false"


def _service_fix(reason: str) -> str:
    if re.search(r"baseUrl|no servers?\b", reason, re.IGNORECASE):
        return "set its baseUrl to where the service is"
    if re.search(r"\bauth\b|credential|security scheme|\b401\b|\b403\b", reason, re.IGNORECASE):
        return "set its auth or headers"
    if "filters let none" in reason:
        return "mend its tags, methods, paths and operations"
    return ""


def _enabling(config: Config, name: str, section: str = "mcpServers") -> str:
    return f"to use it: {config.source(section, name, 'enabled')}"


def _origin(url: str | None) -> str:
    """Where a URL leads, without what could be secret in it."""
    parts = urlsplit(url or "")
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}"


# MERGED from storagecheck: What `toolspace doctor` finds on the gateway's database: is it there, whose is it, how …

_WHAT = "database"
_SECONDS = 10.0
_VERSION = "SELECT COALESCE(MAX(version), 0) FROM migrations"


async def database_check(config: Config) -> CheckResult:
    """How the gateway would find its database."""
    place = describe_database(config.storage.url, config.state_dir)
    file = find_database_file(config.storage.url, config.state_dir)
    if file is not None:
        return await asyncio.to_thread(_sqlite, file)
    return await _postgres(config.storage.url or "", place, config.source("storage", "url"))


def _sqlite(file: Path) -> CheckResult:
    if not file.exists():
        return CheckResult("ok", _WHAT, f"{file}: made when the gateway first starts (toolspace serve)")
    fix = f"move {file} away, or set storage.url to another file"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            if not tables:
                return CheckResult("ok", _WHAT, f"{file}: empty")
            if "migrations" not in tables:
                return CheckResult("problem", _WHAT, f"{file} is a database of another program", fix)
            (version,) = connection.execute(_VERSION).fetchone()
    except sqlite3.Error as error:
        return CheckResult("problem", _WHAT, f"{file} cannot be read: {error}", fix)
    return _aged(f"{file}, SQLite {sqlite3.sqlite_version}", version)


async def _postgres(url: str, place: str, source: str) -> CheckResult:
    mend = f"start it, or mend {source}"
    try:
        driver = load_driver()
    except StorageError as error:
        return CheckResult("problem", _WHAT, f"{place}: {error}", "pip install 'toolspace[postgres]'")
    try:
        async with asyncio.timeout(_SECONDS):
            connection = await driver.connect(url)
            try:
                server = connection.get_server_version()
                made = await connection.fetchval("SELECT to_regclass('migrations') IS NOT NULL")
                version = await connection.fetchval(_VERSION) if made else 0
            finally:
                connection.terminate()
    except TimeoutError:
        return CheckResult("problem", _WHAT, f"{place} does not answer", mend)
    except (driver.InvalidAuthorizationSpecificationError, driver.InvalidPasswordError):
        return CheckResult("problem", _WHAT, f"{place} refuses the user or the password", f"mend {source}")
    except (OSError, ValueError, driver.PostgresError, driver.InterfaceError) as error:
        # The kind alone where the text may quote the URL.
        reason = str(error) if isinstance(error, OSError | driver.PostgresError) else type(error).__name__
        return CheckResult("problem", _WHAT, f"{place} cannot be reached: {reason}", mend)
    return _aged(f"{place}, PostgreSQL {server.major}.{server.minor}", version)


def _aged(found: str, version: int) -> CheckResult:
    newest = len(MIGRATIONS)
    if version > newest:
        return CheckResult(
            "problem",
            _WHAT,
            f"{found}: at version {version}, which a newer Toolspace wrote; this one knows {newest}",
            "pip install --upgrade toolspace",
        )
    if version < newest:
        note = "the gateway makes its tables" if version == 0 else f"the gateway brings it from version {version}"
        return CheckResult("ok", _WHAT, f"{found}: {note} when it next starts")
    return CheckResult("ok", _WHAT, f"{found}, version {version}")
