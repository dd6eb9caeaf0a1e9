"""Loads the configuration: file, variables and defaults together, checked as a whole. Builds nothing."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from toolspace.config import kinds, settings
from toolspace.config.document import EMPTY, Document, KeyPath, config_error, dotted, shown
from toolspace.config.environment import read_overrides
from toolspace.config.expand import expand
from toolspace.config.locate import default_state_dir
from toolspace.config.model import (
    AgentFile,
    Defaults,
    McpServer,
    OpenApi,
    Provider,
    Queue,
    RestTool,
    Router,
    Section,
    Server,
    Storage,
    ToolSettings,
)
from toolspace.config.parse import read_document
from toolspace.config.reading import Record, Reported, Session, Setting, Value, Wrong, named_values
from toolspace.config.secrets import secrets_in
from toolspace.core.names import did_you_mean
from toolspace.core.redact import is_secret_name

_FUNCTION_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")


class _Mcp(msgspec.Struct, frozen=True):
    servers: Mapping[str, McpServer] = {}


class _Root(msgspec.Struct):
    """Everything that may stand at the top of a file."""

    defaults: Defaults = Defaults()
    queues: Mapping[str, Queue] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServer] = {}
    servers: Mapping[str, McpServer] = {}
    mcp: _Mcp = _Mcp()
    rest_tools: Mapping[str, RestTool] = {}
    openapi: Mapping[str, OpenApi] = {}
    providers: Mapping[str, Provider] = {}
    agents: Any = None
    router: Router = Router()
    storage: Storage = Storage()
    server: Server = Server()
    functions: tuple[str, ...] = ()
    version: str | None = None
    agent: Mapping[str, Any] | None = None
    model: Mapping[str, Any] = {}
    loop: Mapping[str, Any] = {}
    runtime: Mapping[str, Any] = {}
    consciousness: Mapping[str, Any] = {}
    limits: Mapping[str, Any] = {}


_SHARED = (
    Setting("tools", settings.tools, ""),
    Setting("mcp", Record(_Mcp, Setting("servers", settings.mcp_servers, "")), ""),
    Setting("agents", kinds.anything, ""),
    Setting("router", settings.ROUTER, ""),
)
_CONFIG = (
    Setting("defaults", settings.DEFAULTS, ""),
    Setting("queues", settings.queues, ""),
    Setting("mcpServers", settings.mcp_servers, ""),
    Setting("servers", settings.mcp_servers, ""),
    Setting("restTools", settings.rest_tools, ""),
    Setting("openapi", settings.openapi, ""),
    Setting("providers", settings.providers, ""),
    Setting("storage", settings.STORAGE, ""),
    Setting("server", settings.SERVER, ""),
    Setting("functions", settings.functions, ""),
)
_AGENT = (
    Setting("version", kinds.word, ""),
    Setting("agent", kinds.mapping, ""),
    Setting("model", kinds.mapping, ""),
    Setting("loop", kinds.mapping, ""),
    Setting("runtime", kinds.mapping, ""),
    Setting("consciousness", kinds.mapping, ""),
    Setting("limits", kinds.mapping, ""),
)


def _ignored(key: str) -> bool:
    # `x-` is the user's own room, for anchors; `inputs` is what VS Code asks for, where we have variables.
    return key.startswith("x-") or key in ("$schema", "inputs")


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration, checked, and where each value came from."""

    secrets = frozenset(("document", "origins", "secret_values"))

    defaults: Defaults = Defaults()
    queues: Mapping[str, Queue] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServer] = {}
    """All servers, wherever the file has them."""
    rest_tools: Mapping[str, RestTool] = {}
    openapi: Mapping[str, OpenApi] = {}
    providers: Mapping[str, Provider] = {}
    agents: Any = None
    router: Router = Router()
    storage: Storage = Storage()
    server: Server = Server()
    functions: tuple[str, ...] = ()
    agent: AgentFile | None = None
    """Set where the file is an agent's."""
    path: Path | None = None
    base_dir: Path
    """What relative paths are relative to: the folder of the file."""
    state_dir: Path
    warnings: tuple[str, ...] = ()
    document: Document
    origins: Mapping[KeyPath, KeyPath | str] = {}
    secret_values: frozenset[str] = frozenset()
    """What no log may show."""

    def source(self, *key_path: str | int) -> str:
        """Where a setting came from: `toolspace.yaml:12 (defaults.toolTimeout)`, a variable, or `default`.

        Entries go by their name, whatever shape the file gives them:
        `config.source("mcpServers", "github", "cache")`.
        """
        for end in range(len(key_path), 0, -1):
            origin = self.origins.get(key_path[:end])
            if isinstance(origin, str):
                return f"{origin} (environment)"
            if origin is not None:
                at = (*origin, *key_path[end:])
                known = at in self.document.lines
                return f"{self.document.place(at)} ({dotted(at)})" if known else "default"
        return "default"

    def files(self) -> tuple[Path, ...]:
        """Every file that the configuration depends on: watch these to know when to load it again."""
        found = [self.path] if self.path is not None else []
        own = [entry.uses for entry in self.providers.values() if entry.uses is not None and entry.enabled]
        files = filter(None, map(_FUNCTION_FILE.fullmatch, (*self.functions, *own)))
        found += [self.base_dir / Path(match[1]).expanduser() for match in files]
        found += [Path(service.spec) for service in self.openapi.values() if Path(service.spec).is_absolute()]
        return tuple(dict.fromkeys(found))


def load_config(path: Path | None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """The configuration in a file; all defaults for None. Raises `ConfigError` with all that is wrong."""
    path = None if path is None else path.absolute()
    document = EMPTY if path is None else read_document(path)
    base_dir = Path.cwd() if path is None else path.parent
    overrides = read_overrides(environ)
    session = _session(document, base_dir, environ, overrides.values)
    root = _read(session, (*_CONFIG, *_SHARED, *(_AGENT if "agent" in document.data else ())))
    servers = {**root.mcp_servers, **root.servers, **root.mcp.servers, **root.tools.mcp_servers}
    defaults = _with_tool_settings(root, session)
    _check(session, root, servers)
    if session.problems:
        raise config_error(document, session.problems)
    return Config(
        defaults=defaults,
        queues=root.queues,
        tools=root.tools,
        mcp_servers=servers,
        rest_tools=root.rest_tools,
        openapi=root.openapi,
        providers=root.providers,
        agents=root.agents,
        router=root.router,
        storage=root.storage,
        server=root.server,
        functions=_functions(root.functions, session),
        agent=_agent(root, servers, path) if root.agent is not None else None,
        path=path,
        base_dir=base_dir,
        state_dir=root.storage.dir or default_state_dir(environ),
        warnings=(*overrides.warnings, *session.warnings),
        document=document,
        origins=session.origins,
        secret_values=frozenset((*secrets_in(document.data, environ), *_given_secrets(overrides.values))),
    )


def load_agent(path: Path, *, environ: Mapping[str, str] = os.environ) -> AgentFile:
    """The agent that a file describes. Raises `ConfigError` with everything that is wrong."""
    path = path.absolute()
    document = read_document(path)
    session = _session(document, path.parent, environ, {})
    root = _read(session, (*_AGENT, *_SHARED))
    if "agent" not in document.data:
        session.note((), '"agent" is missing; expected a mapping with the agent\'s name and instructions')
    _check_aliases(session, root.tools.aliases)
    if session.problems:
        raise config_error(document, session.problems)
    return _agent(root, {**root.mcp.servers, **root.tools.mcp_servers}, path)


def _session(
    document: Document,
    base_dir: Path,
    environ: Mapping[str, str],
    overrides: Mapping[KeyPath, tuple[str, Any]],
) -> Session:
    # What editors know as variables in the files that we read unchanged.
    folder = base_dir.parent if base_dir.name in (".vscode", ".cursor") else base_dir
    known = {"workspaceFolder": str(folder), "userHome": environ.get("HOME", ""), **environ}
    data, written, problems = expand(document, known)
    expanded = document._replace(data=data)
    return Session(expanded, base_dir=base_dir, written=written, overrides=overrides, problems=problems)


def _read(session: Session, keys: tuple[Setting, ...]) -> _Root:
    """The file as far as it can be read. What is wrong is noted, and the checks after it still run."""
    record = _Lenient(_Root, *keys, ignored=_ignored)
    try:
        return record.read(Value(session.document.data, session))
    except (Reported, Wrong):
        return _Root()


class _Lenient(Record[_Root]):
    """The top of the file: one wrong section does not keep the others from being checked."""

    def _fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields, _ = super()._fields(value, mapping)
        return fields, True

    def _unknown(self, value: Value, mapping: Mapping[str, Any]) -> dict[str, Any]:
        super()._unknown(value, mapping)
        return {}


def _with_tool_settings(root: _Root, session: Session) -> Defaults:
    """The defaults, with what `tools` says of the same things."""
    changes: dict[str, Any] = {}
    for key, attribute, given in (
        ("timeout", "tool_timeout", root.tools.timeout),
        ("maxConcurrent", "max_concurrent_tools", root.tools.max_concurrent),
    ):
        main = ("defaults", "toolTimeout" if key == "timeout" else "maxConcurrentTools")
        if given is None:
            continue
        if main not in session.origins:
            changes[attribute] = given
            session.origins[main] = session.origins["tools", key]
        elif getattr(root.defaults, attribute) != given:
            session.warn(("tools", key), f"has no effect, as {dotted(main)} says otherwise")
    return msgspec.structs.replace(root.defaults, **changes)


def _check(session: Session, root: _Root, servers: Mapping[str, McpServer]) -> None:
    """What no single setting can know: that what it refers to exists."""
    known = _queue_names(session)
    for name, queue in _queue_references(root, servers):
        if queue not in known and name in session.origins:
            origin = session.origins[name]
            hint = did_you_mean(queue, known) or f"; add it: queues: {{{dotted((queue,))}: {{concurrent: 3}}}}"
            at = origin if isinstance(origin, tuple) else name
            session.note(at, f"there is no queue {shown(queue)}{hint}", origin if isinstance(origin, str) else None)
    _check_aliases(session, root.tools.aliases)


def _queue_names(session: Session) -> list[str]:
    """The queues that the file means to define, be they right or not: a wrong one has its own problem."""
    queues = session.document.data.get("queues")
    with suppress(Wrong):
        silent = Session(session.document, base_dir=session.base_dir)
        return [name for name, _ in named_values(Value(queues, silent), what="queues")]
    return []


def _queue_references(root: _Root, servers: Mapping[str, McpServer]) -> Iterator[tuple[KeyPath, str]]:
    groups: Iterable[tuple[KeyPath, Mapping[str, Any]]] = (
        (("mcpServers",), servers),
        (("restTools",), root.rest_tools),
        (("openapi",), root.openapi),
        (("providers",), root.providers),
        (("tools", "definitions"), root.tools.definitions),
        (("tools", "overrides"), root.tools.overrides),
    )
    for prefix, entries in groups:
        for name, entry in entries.items():
            if entry.queue is not None and entry.enabled is not False:
                yield (*prefix, name, "queue"), entry.queue


def _check_aliases(session: Session, aliases: Mapping[str, str]) -> None:
    reported: set[str] = set()
    for alias in aliases:
        seen = [alias]
        while (target := aliases.get(seen[-1])) is not None and target not in seen:
            seen.append(target)
        if target == alias and alias not in reported:
            reported.update(seen)
            session.note(
                ("tools", "aliases", alias),
                f"the alias leads back to itself: {' → '.join(dotted((name,)) for name in (*seen, alias))}",
            )


def _functions(specs: tuple[str, ...], session: Session) -> tuple[str, ...]:
    """As written; but a file that a variable names is relative to the working folder, as in every command."""
    if not isinstance(session.origins.get(("functions",)), str):
        return specs
    return tuple(str(Path.cwd() / spec) if _FUNCTION_FILE.fullmatch(spec) else spec for spec in specs)


def _given_secrets(overrides: Mapping[KeyPath, tuple[str, Any]]) -> Iterator[str]:
    """The secrets among the settings that variables give."""
    for path, (_, value) in overrides.items():
        if isinstance(value, str) and is_secret_name(str(path[-1])):
            yield value


def _agent(root: _Root, servers: Mapping[str, McpServer], path: Path | None) -> AgentFile:
    return AgentFile(
        version=root.version,
        agent=root.agent or {},
        model=root.model,
        loop=root.loop,
        tools=root.tools,
        mcp_servers=servers,
        runtime=root.runtime,
        router=root.router,
        agents=root.agents,
        consciousness=root.consciousness,
        limits=root.limits,
        path=path,
    )
