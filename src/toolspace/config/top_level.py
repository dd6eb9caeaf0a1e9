"""What may stand at the top of a file, or of an agent that is described inside one: read and checked by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.config import agent_settings, tool_settings, value_types
from toolspace.config.agent_settings import AgentSettings
from toolspace.config.document import ConfigDocument, KeyPath, format_key_path, format_value
from toolspace.config.model import (
    DefaultSettings,
    EmbeddingSettings,
    McpServerSettings,
    OpenApiSettings,
    ProviderSettings,
    QueueSettings,
    RestToolSettings,
    ServerSettings,
    StorageSettings,
    ToolSettings,
)
from toolspace.config.reader import (
    AlreadyReported,
    InvalidValue,
    ReadingContext,
    SectionType,
    Setting,
    Value,
    list_named_values,
)
from toolspace.config.variables import expand
from toolspace.core.names import did_you_mean


class _Mcp(msgspec.Struct, frozen=True):
    servers: Mapping[str, McpServerSettings] = {}


class TopLevelSettings(AgentSettings, frozen=True, kw_only=True):
    """Everything that may stand at the top."""

    defaults: DefaultSettings = DefaultSettings()
    queues: Mapping[str, QueueSettings] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServerSettings] = {}
    servers: Mapping[str, McpServerSettings] = {}
    mcp: _Mcp = _Mcp()
    rest_tools: Mapping[str, RestToolSettings] = {}
    openapi: Mapping[str, OpenApiSettings] = {}
    providers: Mapping[str, ProviderSettings] = {}
    functions: tuple[str, ...] = ()
    storage: StorageSettings = StorageSettings()
    server: ServerSettings = ServerSettings()
    embeddings: EmbeddingSettings | None = None
    demo: bool = True
    version: str | None = None
    runtime: Mapping[str, Any] = {}
    name: str | None = None
    description: str = ""
    system: str = ""

    @property
    def all_servers(self) -> Mapping[str, McpServerSettings]:
        """The MCP servers, whichever of the places for them they stand in."""
        return {**self.mcp_servers, **self.servers, **self.mcp.servers, **self.tools.mcp_servers}


TOOL_KEYS = (
    Setting("defaults", tool_settings.DEFAULTS, ""),
    Setting("queues", tool_settings.queues, ""),
    Setting("tools", tool_settings.tools, ""),
    Setting("mcp", SectionType(_Mcp, Setting("servers", tool_settings.mcp_servers, "")), ""),
    Setting("mcpServers", tool_settings.mcp_servers, ""),
    Setting("servers", tool_settings.mcp_servers, ""),
    Setting("restTools", tool_settings.rest_tools, ""),
    Setting("openapi", tool_settings.openapi, ""),
    Setting("providers", tool_settings.providers, ""),
    Setting("functions", tool_settings.functions, ""),
)
"""What says which tools there are, for all or for one agent alone."""
PROCESS_KEYS = (
    Setting("storage", tool_settings.STORAGE, ""),
    Setting("server", tool_settings.SERVER, ""),
    Setting("embeddings", agent_settings.EMBEDDINGS, ""),
    *(setting for setting in tool_settings.SINGLE if setting.key == "demo"),
)
"""What only the main file can say."""
ANY_FILE_KEYS = tuple(
    setting for setting in agent_settings.AGENT.settings if setting.key in ("agents", "router", "notifications")
)
AGENT_KEYS = (
    *(setting for setting in agent_settings.AGENT.settings if setting not in ANY_FILE_KEYS),
    Setting("version", value_types.scalar_string, ""),
    Setting("runtime", value_types.mapping, ""),
)
INLINE_KEYS = agent_settings.HEAD.settings
"""What a definition in place may say without a key `agent` around it."""


def _ignored(key: str) -> bool:
    # `x-` is the user's own room, for anchors; `inputs` is what VS Code asks for, where we have variables.
    return key.startswith("x-") or key in ("$schema", "inputs")


def create_context(
    document: ConfigDocument,
    base_dir: Path,
    environ: Mapping[str, str],
    overrides: Mapping[KeyPath, tuple[str, Any]],
) -> ReadingContext:
    # What editors know as variables in the files that we read unchanged.
    folder = base_dir.parent if base_dir.name in (".vscode", ".cursor") else base_dir
    known = {"workspaceFolder": str(folder), "userHome": environ.get("HOME", ""), **environ}
    data, written, problems = expand(document, known)
    expanded = document._replace(data=data)
    return ReadingContext(expanded, base_dir=base_dir, unexpanded=written, overrides=overrides, problems=problems)


class ConfigPart:
    """A whole file, or the part of one that describes an agent."""

    def __init__(self, session: ReadingContext, at: KeyPath = ()) -> None:
        self.session = session
        self.at = at
        self.data: Mapping[str, Any] = session.document.data
        for key in at:
            self.data = cast("Any", self.data)[key]

    def read(self, *keys: Setting) -> TopLevelSettings:
        """What it says, as far as it can be read. What is wrong is noted, and the checks after it still run."""
        record = _Lenient(TopLevelSettings, *keys, ignored=_ignored)
        try:
            return record.read(Value(self.data, self.session, self.at))
        except (AlreadyReported, InvalidValue):
            return TopLevelSettings()

    def place(self) -> str:
        return self.session.document.format_location(self.at)

    def origin(self, *name: str | int) -> KeyPath:
        """Where in the document a setting stands."""
        found = self.session.origins.get(name)
        return found if isinstance(found, tuple) else (*self.at, *name)

    def check(self, root: TopLevelSettings, more_queues: Iterable[str] = ()) -> None:
        """What no single setting can know: that what it refers to exists."""
        known = [*self.queue_names(), *more_queues]
        for name, queue in _queue_references(root):
            if queue not in known and name in self.session.origins:
                origin = self.session.origins[name]
                hint = (
                    did_you_mean(queue, known)
                    or f"; add it: queues: {{{format_key_path((queue,))}: {{concurrent: 3}}}}"
                )
                variable = origin if isinstance(origin, str) else None
                self.session.report(self.origin(*name), f"there is no queue {format_value(queue)}{hint}", variable)
        self._check_aliases(root.tools.aliases)

    def queue_names(self) -> list[str]:
        """The queues that it means to define, be they right or not: a wrong one has its own problem."""
        with suppress(InvalidValue):
            silent = ReadingContext(self.session.document, base_dir=self.session.base_dir)
            return [name for name, _ in list_named_values(Value(self.data.get("queues"), silent), what="queues")]
        return []

    def _check_aliases(self, aliases: Mapping[str, str]) -> None:
        reported: set[str] = set()
        for alias in aliases:
            seen = [alias]
            while (target := aliases.get(seen[-1])) is not None and target not in seen:
                seen.append(target)
            if target == alias and alias not in reported:
                reported.update(seen)
                self.session.report(
                    (*self.origin("tools", "aliases"), alias),
                    f"the alias refers to itself: {' → '.join(format_key_path((name,)) for name in (*seen, alias))}",
                )

    def defaults(self, root: TopLevelSettings, base: DefaultSettings | None = None) -> DefaultSettings:
        """The defaults, with what `tools` says of the same things; over those of `base`."""
        origins = self.session.origins
        found = root.defaults
        if base is not None:
            given = [one.attribute for one in tool_settings.DEFAULTS.settings if ("defaults", one.key) in origins]
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
                    self.origin("tools", key), f"has no effect, as {format_key_path(('defaults', main))} says otherwise"
                )
        return msgspec.structs.replace(found, **changes)


class _Lenient(SectionType[TopLevelSettings]):
    """One wrong section does not keep the others from being checked."""

    def _fields(self, value: Value, mapping: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
        fields, _ = super()._fields(value, mapping)
        return fields, True

    def _unknown(self, value: Value, mapping: Mapping[str, Any]) -> dict[str, Any]:
        super()._unknown(value, mapping)
        return {}


def _queue_references(root: TopLevelSettings) -> Iterator[tuple[KeyPath, str]]:
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
