"""The file that `toolspace init` writes: every section, commented out, with what each setting does."""

from __future__ import annotations

from toolspace.config.describe import rows

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

# --- MCP servers, as .mcp.json and desktop clients have them.
#mcpServers:
#  files:
#    command: npx
#    args: ["-y", "@modelcontextprotocol/server-filesystem", "."]
#    toolsAllowed: ["read_*", "list_*"]
#  github:
#    url: https://api.githubcopilot.com/mcp/
#    headers: {Authorization: "Bearer ${GITHUB_TOKEN:-}"}
#    queue: github
#    cache: 5m

# --- How many calls run at once, and how often.
#queues:
#  github: {concurrent: 3, rate: 100/minute, maxWaiting: 50, waitTimeout: 1m}

# --- Requests to services: each one a tool named rest__<name>.
#restTools:
#  weather:
#    description: The weather in a city
#    url: https://api.example.com/v1/weather/${parameters.city}
#    parametersSchema:
#      type: object
#      properties: {city: {type: string}}
#      required: [city]

# --- Services with an OpenAPI document: each operation a tool.
#openapi:
#  petstore:
#    spec: https://petstore3.swagger.io/api/v3/openapi.json
#    tags: [pet]

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
#    "github__search_*": {timeout: 10s, cache: 1h}

# --- Where state is kept.
#storage:
#  cache: disk
"""


def starter_config() -> str:
    """A commented `toolspace.yaml` that changes nothing until a line of it is taken in."""
    settings = [
        f"#  {row.path.removeprefix('defaults.')}: {row.default.strip('`')}  # {row.effect}" for row in rows("defaults")
    ]
    return "\n".join((_HEAD, "# --- What holds for every call.", "#defaults:", *settings, "", _TAIL))
