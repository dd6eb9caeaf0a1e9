"""What `toolspace doctor` says of MCP servers and OpenAPI services: how each started, or what keeps it from it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

from toolspace.cli.checking import Check
from toolspace.config.load import Config
from toolspace.config.model import McpServer, OpenApi
from toolspace.core.interfaces import ToolProvider
from toolspace.core.secret_masking import redact
from toolspace.providers.mcp.status import ServerStatus
from toolspace.providers.namespaced import Mounted
from toolspace.toolspace import Toolspace

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


def server_checks(config: Config, ts: Toolspace, began: float) -> Iterator[Check]:
    """Every MCP server of the configuration. `began` is when they were started, in Unix seconds."""
    statuses = {status.name: status for status in ts.servers()}
    for name, server in config.mcp_servers.items():
        status = statuses.get(name)
        if not server.enabled:
            yield Check("ok", "servers", f"{name}: disabled", _enabling(config, name))
        elif status is not None:
            yield from _checked(config, server, status, began)


def service_checks(config: Config, ts: Toolspace) -> Iterator[Check]:
    """Every OpenAPI service, and the REST tools."""
    failures = ts.orchestrator.unavailable()
    providers = {provider.namespace: provider for provider in ts.orchestrator.providers if provider.kind == "openapi"}
    for name, service in config.openapi.items():
        if not service.enabled:
            yield Check("ok", "openapi", f"{name}: disabled", _enabling(config, name, "openapi"))
        elif name in failures:
            fix = _service_advice(config, service, failures[name])
            yield Check("problem", "openapi", f"{name}: {failures[name]}", fix)
        elif name in providers:
            yield from _service(config, name, providers[name])
    off = [name for name, tool in config.rest_tools.items() if not tool.enabled]
    if off:
        yield Check("ok", "rest", f"disabled: {', '.join(off)}")


def _service(config: Config, name: str, provider: ToolProvider) -> Iterator[Check]:
    count = len(provider.list_tools())
    inner = provider.inner if isinstance(provider, Mounted) else provider
    place = config.source("openapi", name)
    # Asked for by name: its class is imported only where a service is configured.
    warnings = cast("Sequence[str]", getattr(inner, "warnings", ()))
    if count:
        yield Check("ok", "openapi", f"{name}: {count} tools")
    elif not warnings:
        yield Check("warning", "openapi", f"{name}: no operation is offered", f"mend {place}")
    for warning in warnings[:_SHOWN]:
        yield Check("warning", "openapi", f"{name}: {redact(warning)}", _service_fix(warning) or f"mend {place}")
    if len(warnings) > _SHOWN:
        yield Check("warning", "openapi", f"{name}: {len(warnings) - _SHOWN} more of its operations have faults")


def _checked(config: Config, server: McpServer, status: ServerStatus, began: float) -> Iterator[Check]:
    name = server.name
    if status.state not in ("ready", "idle"):
        reason = status.last_error or f"it is {status.state}"
        yield Check("problem", "servers", f"{name}: {reason}", advice(config, server, reason))
        return
    took = f", ready after {max(0.0, status.since - began):.1f}s" if status.since is not None else ""
    era = f"{status.protocol_version or '?'} {status.era or ''}".strip()
    yield Check("ok", "servers", f"{name}: {status.tools} tools, {status.transport}, {era}{took}")
    for left in status.left_out:
        yield Check("warning", "servers", f"{name}: left out {left}", "if you do not need it, put it into toolsDenied")


def advice(config: Config, server: McpServer, reason: str) -> str:
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


def _missing(server: McpServer) -> str:
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


def _service_advice(config: Config, service: OpenApi, reason: str) -> str:
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
