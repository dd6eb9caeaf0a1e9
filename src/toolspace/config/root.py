"""What may stand at the top of a file, or of an agent that is described inside one: read and checked by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.config import agentsettings, kinds, settings
from toolspace.config.agentsettings import AgentFile
from toolspace.config.document import Document, KeyPath, dotted, shown
from toolspace.config.expand import expand
from toolspace.config.model import (
    Defaults,
    Embeddings,
    McpServer,
    OpenApi,
    Provider,
    Queue,
    RestTool,
    Server,
    Storage,
    ToolSettings,
)
from toolspace.config.reading import Record, Reported, Session, Setting, Value, Wrong, named_values
from toolspace.core.names import did_you_mean


class _Mcp(msgspec.Struct, frozen=True):
    servers: Mapping[str, McpServer] = {}


class Root(AgentFile, frozen=True, kw_only=True):
    """Everything that may stand at the top."""

    defaults: Defaults = Defaults()
    queues: Mapping[str, Queue] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServer] = {}
    servers: Mapping[str, McpServer] = {}
    mcp: _Mcp = _Mcp()
    rest_tools: Mapping[str, RestTool] = {}
    openapi: Mapping[str, OpenApi] = {}
    providers: Mapping[str, Provider] = {}
    functions: tuple[str, ...] = ()
    storage: Storage = Storage()
    server: Server = Server()
    embeddings: Embeddings | None = None
    demo: bool = True
    version: str | None = None
    runtime: Mapping[str, Any] = {}
    name: str | None = None
    description: str = ""
    system: str = ""

    @property
    def all_servers(self) -> Mapping[str, McpServer]:
        """The MCP servers, whichever of the places for them they stand in."""
        return {**self.mcp_servers, **self.servers, **self.mcp.servers, **self.tools.mcp_servers}


TOOL_KEYS = (
    Setting("defaults", settings.DEFAULTS, ""),
    Setting("queues", settings.queues, ""),
    Setting("tools", settings.tools, ""),
    Setting("mcp", Record(_Mcp, Setting("servers", settings.mcp_servers, "")), ""),
    Setting("mcpServers", settings.mcp_servers, ""),
    Setting("servers", settings.mcp_servers, ""),
    Setting("restTools", settings.rest_tools, ""),
    Setting("openapi", settings.openapi, ""),
    Setting("providers", settings.providers, ""),
    Setting("functions", settings.functions, ""),
)
"""What says which tools there are, for all or for one agent alone."""
PROCESS_KEYS = (
    Setting("storage", settings.STORAGE, ""),
    Setting("server", settings.SERVER, ""),
    Setting("embeddings", agentsettings.EMBEDDINGS, ""),
    *(setting for setting in settings.SINGLE if setting.key == "demo"),
)
"""What only the main file can say."""
ANY_FILE_KEYS = tuple(
    setting for setting in agentsettings.AGENT.settings if setting.key in ("agents", "router", "notifications")
)
AGENT_KEYS = (
    *(setting for setting in agentsettings.AGENT.settings if setting not in ANY_FILE_KEYS),
    Setting("version", kinds.word, ""),
    Setting("runtime", kinds.mapping, ""),
)
INLINE_KEYS = agentsettings.HEAD.settings
"""What a definition in place may say without a key `agent` around it."""


def _ignored(key: str) -> bool:
    # `x-` is the user's own room, for anchors; `inputs` is what VS Code asks for, where we have variables.
    return key.startswith("x-") or key in ("$schema", "inputs")


def open_session(
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


class Part:
    """A whole file, or the part of one that describes an agent."""

    def __init__(self, session: Session, at: KeyPath = ()) -> None:
        self.session = session
        self.at = at
        self.data: Mapping[str, Any] = session.document.data
        for key in at:
            self.data = cast("Any", self.data)[key]

    def read(self, *keys: Setting) -> Root:
        """What it says, as far as it can be read. What is wrong is noted, and the checks after it still run."""
        record = _Lenient(Root, *keys, ignored=_ignored)
        try:
            return record.read(Value(self.data, self.session, self.at))
        except (Reported, Wrong):
            return Root()

    def place(self) -> str:
        return self.session.document.place(self.at)

    def origin(self, *name: str | int) -> KeyPath:
        """Where in the document a setting stands."""
        found = self.session.origins.get(name)
        return found if isinstance(found, tuple) else (*self.at, *name)

    def check(self, root: Root, more_queues: Iterable[str] = ()) -> None:
        """What no single setting can know: that what it refers to exists."""
        known = [*self.queue_names(), *more_queues]
        for name, queue in _queue_references(root):
            if queue not in known and name in self.session.origins:
                origin = self.session.origins[name]
                hint = did_you_mean(queue, known) or f"; add it: queues: {{{dotted((queue,))}: {{concurrent: 3}}}}"
                variable = origin if isinstance(origin, str) else None
                self.session.note(self.origin(*name), f"there is no queue {shown(queue)}{hint}", variable)
        self._check_aliases(root.tools.aliases)

    def queue_names(self) -> list[str]:
        """The queues that it means to define, be they right or not: a wrong one has its own problem."""
        with suppress(Wrong):
            silent = Session(self.session.document, base_dir=self.session.base_dir)
            return [name for name, _ in named_values(Value(self.data.get("queues"), silent), what="queues")]
        return []

    def _check_aliases(self, aliases: Mapping[str, str]) -> None:
        reported: set[str] = set()
        for alias in aliases:
            seen = [alias]
            while (target := aliases.get(seen[-1])) is not None and target not in seen:
                seen.append(target)
            if target == alias and alias not in reported:
                reported.update(seen)
                self.session.note(
                    (*self.origin("tools", "aliases"), alias),
                    f"the alias leads back to itself: {' → '.join(dotted((name,)) for name in (*seen, alias))}",
                )

    def defaults(self, root: Root, base: Defaults | None = None) -> Defaults:
        """The defaults, with what `tools` says of the same things; over those of `base`."""
        origins = self.session.origins
        found = root.defaults
        if base is not None:
            given = [one.attribute for one in settings.DEFAULTS.settings if ("defaults", one.key) in origins]
            found = msgspec.structs.replace(base, **{name: getattr(root.defaults, name) for name in given})
        changes: dict[str, Any] = {}
        for key, main, attribute, given in (
            ("timeout", "toolTimeout", "tool_timeout", root.tools.timeout),
            ("maxConcurrent", "maxConcurrentTools", "max_concurrent_tools", root.tools.max_concurrent),
        ):
            if given is None:
                continue
            if ("defaults", main) not in origins:
                changes[attribute] = given
                origins["defaults", main] = origins["tools", key]
            elif getattr(root.defaults, attribute) != given:
                self.session.warn(
                    self.origin("tools", key), f"has no effect, as {dotted(('defaults', main))} says otherwise"
                )
        return msgspec.structs.replace(found, **changes)


class _Lenient(Record[Root]):
    """One wrong section does not keep the others from being checked."""

    def _fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields, _ = super()._fields(value, mapping)
        return fields, True

    def _unknown(self, value: Value, mapping: Mapping[str, Any]) -> dict[str, Any]:
        super()._unknown(value, mapping)
        return {}


def _queue_references(root: Root) -> Iterator[tuple[KeyPath, str]]:
    groups: Iterable[tuple[KeyPath, Mapping[str, Any]]] = (
        (("mcpServers",), root.all_servers),
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
