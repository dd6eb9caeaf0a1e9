"""What the configuration says of MCP servers, for those that do not build their providers. Imports nothing heavy.

`providers` uses it to build them, `toolspace servers` for logins, and `toolspace mcp` for its first answer.
"""

from __future__ import annotations

from pathlib import Path

from toolspace.config.configuration import Config
from toolspace.config.provider_settings import McpServerSettings
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.tool_cache import FOLDER_NAME, ToolCacheFile


def login_dir(config: Config) -> Path:
    """The directory of the logins at MCP servers."""
    return config.state_dir / "logins"


def build_server_spec(server: McpServerSettings, config: Config) -> ServerSpec:
    """The settings of a server as its provider needs them. References to secrets stay."""
    fields = {name: getattr(server, name) for name in ServerSpec.__struct_fields__}
    if server.description_prefix is None:
        fields["description_prefix"] = config.defaults.description_prefix
    return ServerSpec(**fields)


def open_tool_cache(server: McpServerSettings, config: Config) -> ToolCacheFile:
    """The file with the tools of a server's last start. References to secrets must not be resolved yet."""
    return ToolCacheFile(config.state_dir / FOLDER_NAME, server.name, build_server_spec(server, config))


def read_last_instructions(config: Config) -> str:
    """The instructions that the servers sent at their last start, as `ToolOrchestrator.instructions` joins them."""
    texts: list[str] = []
    for server in config.mcp_servers.values():
        if server.enabled and server.transport is not None:
            last_tools = open_tool_cache(server, config).load()
            if last_tools is not None and last_tools.instructions:
                texts.append(f"## {server.name}\n{last_tools.instructions}")
    return "\n\n".join(texts)
