"""Describes every setting, for documentation and `toolspace explain`. Reads no file."""

from __future__ import annotations

from typing import NamedTuple

from toolspace.config.document import KeyPath, format_key_path
from toolspace.config.reader import Setting
from toolspace.config.tool_settings import SECTIONS, SINGLE


class SettingRow(NamedTuple):
    """One documented setting."""

    path: str
    type: str
    default: str
    effect: str


def list_rows(section: str) -> list[SettingRow]:
    """The settings of one section."""
    return [_row(f"{section}.{setting.key}", setting) for setting in SECTIONS[section].settings]


def _row(path: str, setting: Setting) -> SettingRow:
    default = "required" if setting.required else f"`{setting.default}`" if setting.default else ""
    return SettingRow(path, setting.kind.label, default, setting.effect)


def list_all_rows() -> list[SettingRow]:
    """Every documented setting, in the order of the documentation."""
    found = [row for section in SECTIONS for row in list_rows(section)]
    return found + [_row(setting.key, setting) for setting in SINGLE]


def render_table(section: str) -> str:
    """The table of one section, as docs/configuration.md has it."""
    lines = ["| key | type | default | effect |", "| --- | --- | --- | --- |"]
    for row in list_rows(section):
        key = row.path.removeprefix(f"{section}.")
        lines.append(f"| `{key}` | {row.type} | {row.default} | {row.effect} |")
    return "\n".join(lines)


def describe_setting(path: KeyPath) -> str:
    """What a setting does, for `toolspace explain`; empty for what is no setting."""
    wanted = format_key_path(path)
    return next((row.effect for row in list_all_rows() if row.path == wanted), "")


# MERGED from starter: The file that `toolspace init` writes: every section that is in effect, commented out, with …

_HEAD = """\
# Configuration of Toolspace. Everything here is optional: remove the "# " before a line to use it.
# ${VAR} and ${VAR:-default} are filled in from the environment. Durations are milliseconds, or "250ms",
# "30s", "5m", "2h", "1d". Every setting is described in docs/configuration.md; `toolspace explain NAME` shows
# what holds for a tool, and which line says so.
"""

_TAIL = """\
# --- Python tools: the @tool functions of a file, of a module, or one by name.
#functions:
#  - ./tools.py
#  - my_package.tools:search

# --- MCP servers, as in .mcp.json. `toolspace servers` shows how they are.
#mcpServers:
#  files: {command: npx, args: ["-y", "@modelcontextprotocol/server-filesystem", "."], idleTimeout: 10m}
#  search: {url: https://search.example.com/mcp, auth: oauth}

# --- Services: one request each, or all operations of an OpenAPI document.
#restTools:
#  weather: {url: "https://api.example.com/${parameters.city}", description: The weather in a city}
#openapi:
#  billing: {spec: ./billing.yaml, methods: [get]}

# --- How many calls run at once, and how often.
#queues:
#  web: {concurrent: 3, rate: 100/minute, maxWaiting: 50, waitTimeout: 1m}

# --- Providers from installed packages, or of your own.
#providers:
#  notes:
#    uses: my_package.notes:NotesProvider
#    settings: {file: "${workspaceFolder}/notes.db"}

# --- The built-in tools, and what they may touch.
#tools:
#  builtins: true
#  allowedPaths: [./data]
#  allowedEnv: [MY_APP_*]
#  allowedHosts: [localhost]
#  memoryDir: ./memory
#  webSearch: {provider: duckduckgo, maxResults: 10}
#  toolsDenied: [delete_file]
#  aliases: {find: grep_files}
#  overrides:
#    "http_*": {queue: web, timeout: 10s, cache: 5m}

# --- Agents. A model needs the key of its provider, such as OPENAI_API_KEY. `toolspace chat NAME` talks to one.
#agents:
#  assistant:
#    system: You help, and say when you do not know.
#    model: openai:gpt-6.1-sol
#    agents: [researcher]
#    limits: {maxCost: 0.50}
#  researcher: {system: "You look things up, and say where.", model: "anthropic:claude-sonnet-5-5"}

# --- How agents reach people who are not looking.
#notifications:
#  webhook: https://hooks.example.com/agents

# --- Where state is kept.
#storage:
#  cache: disk
"""


def render_starter_file() -> str:
    """A commented `toolspace.yaml` that changes nothing until a line of it is taken in."""
    settings = [
        f"#  {row.path.removeprefix('defaults.')}: {row.default.strip('`')}  # {row.effect}"
        for row in list_rows("defaults")
    ]
    return "\n".join((_HEAD, "# --- What holds for every call.", "#defaults:", *settings, "", _TAIL))
