"""The whole configuration as one value, which knows where each setting came from. Reads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from toolspace.config.document import ConfigDocument, KeyPath, format_key_path
from toolspace.config.model import (
    AgentSpec,
    DefaultSettings,
    EmbeddingSettings,
    McpServerSettings,
    NotificationSettings,
    OpenApiSettings,
    ProviderSettings,
    QueueSettings,
    RestToolSettings,
    RouterSettings,
    Section,
    ServerSettings,
    StorageSettings,
    ToolSettings,
)

FUNCTION_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")
_NOT_HANDED_DOWN = ("definitions", "mcpServers")


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration, checked, and where each value came from."""

    secrets = frozenset(("document", "origins", "secret_values", "parent"))

    defaults: DefaultSettings = DefaultSettings()
    queues: Mapping[str, QueueSettings] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServerSettings] = {}
    """All servers, wherever the file has them."""
    rest_tools: Mapping[str, RestToolSettings] = {}
    openapi: Mapping[str, OpenApiSettings] = {}
    providers: Mapping[str, ProviderSettings] = {}
    agents: Mapping[str, AgentSpec] = {}
    """Every agent there is, wherever it is described: in the file, in files that it names, and so on."""
    agent: AgentSpec | None = None
    """The file's own, where the file is an agent's: one of `agents`."""
    router: RouterSettings = RouterSettings()
    """Of the file's own agent."""
    notifications: NotificationSettings = NotificationSettings()
    embeddings: EmbeddingSettings | None = None
    storage: StorageSettings = StorageSettings()
    server: ServerSettings = ServerSettings()
    functions: tuple[str, ...] = ()
    demo: bool = True
    """Whether an agent is there to try things out with, where none is configured."""
    path: Path | None = None
    base_dir: Path
    """What relative paths are relative to: the folder of the file."""
    state_dir: Path
    warnings: tuple[str, ...] = ()
    document: ConfigDocument
    origins: Mapping[KeyPath, KeyPath | str] = {}
    secret_values: frozenset[str] = frozenset()
    """What no log may show."""
    parent: Config | None = None
    """Of an agent's own: the configuration that it takes from what it does not say itself."""

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
                if at in self.document.lines:
                    return f"{self.document.format_location(at)} ({format_key_path(at)})"
                break
        if self.parent is not None and _is_handed_down(key_path):
            return self.parent.source(*key_path)
        return "default"

    def files(self) -> tuple[Path, ...]:
        """Every file that the configuration depends on: watch these to know when to load it again."""
        found = [*self._own_files()]
        for agent in self.agents.values():
            found += [agent.path] if agent.path is not None else []
            found += agent.config.files() if agent.config is not None else []
        return tuple(dict.fromkeys(found))

    def _own_files(self) -> Iterator[Path]:
        if self.path is not None:
            yield self.path
        own = [entry.uses for entry in self.providers.values() if entry.uses is not None and entry.enabled]
        for match in filter(None, map(FUNCTION_FILE.fullmatch, (*self.functions, *own))):
            yield self.base_dir / Path(match[1]).expanduser()
        for service in self.openapi.values():
            if Path(service.spec).is_absolute():
                yield Path(service.spec)


def _is_handed_down(key_path: tuple[str | int, ...]) -> bool:
    """Whether an agent takes it from the main file where its own says nothing."""
    if key_path[:1] == ("tools",):
        return len(key_path) > 1 and key_path[1] not in _NOT_HANDED_DOWN
    return key_path[:1] in (("defaults",), ("queues",), ("storage",), ("server",))
