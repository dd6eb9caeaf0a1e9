"""Renders the declared settings: the tables of docs/configuration.md, and the starter file of `toolspace init`.

Used by the CLI and by the test that compares the documentation with the declarations. Reads no file.
"""

from __future__ import annotations

from typing import NamedTuple

from toolspace.config.configuration import SECTIONS, SINGLE_SETTINGS
from toolspace.config.environment_variables import list_variables
from toolspace.config.file_formats import format_key_path
from toolspace.config.validation import Setting


class SettingRow(NamedTuple):
    """One documented setting."""

    path: str
    type: str
    default: str
    effect: str


def list_rows(section: str) -> list[SettingRow]:
    """The settings of one section."""
    return [_build_row(f"{section}.{setting.key}", setting) for setting in SECTIONS[section].settings]


def list_all_rows() -> list[SettingRow]:
    """Every documented setting, in the order of the documentation."""
    rows = [row for section in SECTIONS for row in list_rows(section)]
    return rows + [_build_row(setting.key, setting) for setting in SINGLE_SETTINGS]


def _build_row(path: str, setting: Setting) -> SettingRow:
    default = "required" if setting.is_required else f"`{setting.default_text}`" if setting.default_text else ""
    return SettingRow(path, setting.value_type.label, default, setting.effect)


def render_table(section: str) -> str:
    """The table of one section in docs/configuration.md."""
    lines = ["| key | type | default | effect |", "| --- | --- | --- | --- |"]
    for row in list_rows(section):
        key = row.path.removeprefix(f"{section}.")
        lines.append(f"| `{key}` | {row.type} | {row.default} | {row.effect} |")
    return "\n".join(lines)


def render_variables_table() -> str:
    """The table of environment variables in docs/configuration.md."""
    rows = (f"| `{variable}` | `{format_key_path(path)}` |" for variable, (path, _) in list_variables().items())
    return "\n".join(("| variable | setting |", "| --- | --- |", *rows))


_STARTER_HEAD = """\
# Configuration of Toolspace. Everything here is optional: remove the "#" before a line to use it.
# ${VAR} and ${VAR:-default} are filled in from the environment. Durations are milliseconds, or "250ms",
# "30s", "5m", "2h", "1d". docs/configuration.md describes every setting; `toolspace explain NAME` shows the
# settings in force for a tool, and the line that each comes from.
"""

_STARTER_TAIL = """\
# --- Python tools: the @tool functions of a file, of a module, or one by name.
#functions:
#  - ./tools.py
#  - my_package.tools:search

# --- MCP servers, as in .mcp.json. `toolspace servers` shows their status.
#mcpServers:
#  files: {command: npx, args: ["-y", "@modelcontextprotocol/server-filesystem", "."], idleTimeout: 10m}
#  search: {url: https://search.example.com/mcp, auth: oauth}

# --- Services: one request each, or all operations of an OpenAPI document.
#restTools:
#  weather: {url: "https://api.example.com/${parameters.city}", description: The weather in a city}
#openapi:
#  billing: {spec: ./billing.yaml, methods: [get]}

# --- Limits: how many calls run at once, and how often they start.
#queues:
#  web: {concurrent: 3, rate: 100/minute, maxWaiting: 50, waitTimeout: 1m}

# --- Which calls run, which a person has to approve (ask), and which are denied: the first rule that matches decides.
# `cautious` asks before tools that delete something, or that change something outside this system.
#policies:
#  - {tool: "github__search_*", decision: allow}
#  - cautious

# --- How much each caller may use, and functions or webhooks that check calls and mask results.
#quotas:
#  - {per: principal, callsPerDay: 1000, costPerDay: 5}
#hooks:
#  - {on: after, use: mask_secrets}

# --- Providers of installed packages, or of your own.
#providers:
#  notes:
#    uses: my_package.notes:NotesProvider
#    settings: {file: "${workspaceFolder}/notes.db"}

# --- The built-in tools, and what they may access.
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
#    autoEnter: true # A cycle that messages of one space triggered begins in that space.
#    session: space # Each space has a conversation of its own; user: each person, agent: one for everything.
#    agents: [researcher]
#    limits: {maxCost: 0.50}
#  researcher: {system: "You look things up, and say where.", model: "anthropic:claude-sonnet-5-5", session: space}

# --- How agents notify people who are not online.
#notifications:
#  webhook: https://hooks.example.com/agents

# --- Where state is stored.
#storage:
#  cache: disk
"""


def render_starter_file() -> str:
    """A commented `toolspace.yaml` that changes nothing until the user removes a comment sign."""
    settings = [
        f"#  {setting.key}: {setting.default_text}  # {setting.effect}" for setting in SECTIONS["defaults"].settings
    ]
    return "\n".join((_STARTER_HEAD, "# --- Defaults of every call.", "#defaults:", *settings, "", _STARTER_TAIL))
