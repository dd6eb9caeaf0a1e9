"""The loaded configuration: `Config`, the agents in it, and the origin of each setting. Reads nothing.

Used by `composition`, the agents, the server and the CLI.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolspace.config.agent_settings import (
    AgentLimits,
    AgentLoopSettings,
    AgentModelSettings,
    ConsciousnessSettings,
    RouterSettings,
)
from toolspace.config.document import ConfigDocument, KeyPath, format_key_path
from toolspace.config.provider_settings import McpServerSettings, OpenApiSettings, ProviderSettings, RestToolSettings
from toolspace.config.reader import Section
from toolspace.config.server_settings import EmbeddingSettings, NotificationSettings, ServerSettings, StorageSettings
from toolspace.config.tool_settings import DefaultSettings, QueueSettings, ToolSettings

FUNCTION_FILE = re.compile(r"(.+\.py)(?::[\w.]+)?")
"""An entry of `functions` or of `uses` that refers to a Python file."""
_NOT_INHERITED = ("definitions", "mcpServers")


class AgentSpec(Section, frozen=True, kw_only=True):
    """An agent as the configuration describes it."""

    name: str
    description: str = ""
    system: str = ""
    """Its instructions."""
    version: str | None = None
    model: AgentModelSettings = AgentModelSettings()
    loop: AgentLoopSettings = AgentLoopSettings()
    consciousness: ConsciousnessSettings = ConsciousnessSettings()
    limits: AgentLimits = AgentLimits()
    router: RouterSettings = RouterSettings()
    agents: tuple[str, ...] = ()
    """The agents that it may call."""
    spaces: tuple[str, ...] = ()
    """The names of the spaces that it is a member of from the start."""
    knowledge: tuple[Path, ...] = ()
    """Files and directories that `search_knowledge` searches."""
    notifications: NotificationSettings = NotificationSettings()
    runtime: Mapping[str, Any] = {}
    """As written; it has no effect."""
    config: Config | None = None
    """The configuration of its own tools. None: it has none."""
    path: Path | None = None
    """The file that describes it."""

    @property
    def has_own_tools(self) -> bool:
        """Whether it has tools, or settings of tools, that other agents do not have."""
        return self.config is not None


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration, validated, and the origin of each value."""

    hidden = frozenset(("document", "origins", "secret_values", "parent"))

    defaults: DefaultSettings = DefaultSettings()
    queues: Mapping[str, QueueSettings] = {}
    tools: ToolSettings = ToolSettings()
    mcp_servers: Mapping[str, McpServerSettings] = {}
    """All servers, in whichever place the file has them."""
    rest_tools: Mapping[str, RestToolSettings] = {}
    openapi: Mapping[str, OpenApiSettings] = {}
    providers: Mapping[str, ProviderSettings] = {}
    agents: Mapping[str, AgentSpec] = {}
    """All agents, of the main file and of the files that it refers to."""
    agent: AgentSpec | None = None
    """The main file's own agent, if it has one: one of `agents`."""
    router: RouterSettings = RouterSettings()
    """Of the main file's own agent."""
    notifications: NotificationSettings = NotificationSettings()
    embeddings: EmbeddingSettings | None = None
    storage: StorageSettings = StorageSettings()
    server: ServerSettings = ServerSettings()
    functions: tuple[str, ...] = ()
    demo: bool = True
    """Whether a demo agent is created if no agent is configured."""
    path: Path | None = None
    base_dir: Path
    """The directory that relative paths are relative to: that of the file."""
    state_dir: Path
    warnings: tuple[str, ...] = ()
    document: ConfigDocument
    origins: Mapping[KeyPath, KeyPath | str] = {}
    secret_values: frozenset[str] = frozenset()
    """The values that no log may show."""
    parent: Config | None = None
    """For the configuration of one agent: the main configuration, which it inherits settings from."""

    def source(self, *key_path: str | int) -> str:
        """The origin of a setting: `toolspace.yaml:12 (defaults.toolTimeout)`, a variable, or `default`.

        Entries are addressed by their name, whatever shape the file gives them:
        `config.source("mcpServers", "github", "cache")`.
        """
        for end in range(len(key_path), 0, -1):
            origin = self.origins.get(key_path[:end])
            if isinstance(origin, str):
                return f"{origin} (environment)"
            if origin is not None:
                path = (*origin, *key_path[end:])
                if path in self.document.lines:
                    return f"{self.document.format_location(path)} ({format_key_path(path)})"
                break
        if self.parent is not None and _is_inherited(key_path):
            return self.parent.source(*key_path)
        return "default"

    def files(self) -> tuple[Path, ...]:
        """All files that the configuration depends on. A change of one of them requires a reload."""
        paths = [*self._own_files()]
        for agent in self.agents.values():
            paths += [agent.path] if agent.path is not None else []
            paths += agent.config.files() if agent.config is not None else []
        return tuple(dict.fromkeys(paths))

    def _own_files(self) -> Iterator[Path]:
        if self.path is not None:
            yield self.path
        plugins = [entry.uses for entry in self.providers.values() if entry.uses is not None and entry.enabled]
        for match in filter(None, map(FUNCTION_FILE.fullmatch, (*self.functions, *plugins))):
            yield self.base_dir / Path(match[1]).expanduser()
        for service in self.openapi.values():
            if Path(service.spec).is_absolute():
                yield Path(service.spec)


def _is_inherited(key_path: tuple[str | int, ...]) -> bool:
    """Whether an agent inherits a setting of the main file."""
    if key_path[:1] == ("tools",):
        return len(key_path) > 1 and key_path[1] not in _NOT_INHERITED
    return key_path[:1] in (("defaults",), ("queues",), ("storage",), ("server",))
