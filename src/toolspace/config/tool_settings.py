"""The sections `defaults`, `queues` and `tools`: limits of calls, and settings of the built-in and local tools.

Used by `top_level`. Builds nothing.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from toolspace.config import value_types as types
from toolspace.config.provider_settings import McpServerSettings, mcp_servers_type
from toolspace.config.reader import Section, SectionType, Setting, Value, ValueType
from toolspace.config.shared_settings import Cache, QueueName, Timeout
from toolspace.config.tool_definitions import ToolDefinition, definitions_type
from toolspace.config.value_types import RateSetting
from toolspace.core import defaults

SearchEngine = Literal["tavily", "google", "bing", "duckduckgo"]


class DefaultSettings(Section, frozen=True, kw_only=True):
    """Holds for every call, unless the tool, its provider or an override has its own value."""

    tool_timeout: Annotated[float, Setting(types.duration, "How long one call may take.")] = (
        defaults.TOOL_TIMEOUT_SECONDS
    )
    tool_response_max_bytes: Annotated[
        int, Setting(types.integer(1), "A larger result is stored, and the model gets a handle and a preview.")
    ] = defaults.TOOL_RESPONSE_MAX_BYTES
    tool_output_ttl: Annotated[float, Setting(types.duration, "How long stored results are kept.")] = (
        defaults.TOOL_OUTPUT_TTL_SECONDS
    )
    pending_call_ttl: Annotated[
        float,
        Setting(
            types.duration,
            "How long a pending call waits for a worker or a person; then it expires, and its agent is notified.",
        ),
    ] = 604_800.0
    max_tool_calls_per_turn: Annotated[
        int | None,
        Setting(types.integer(1, nullable=True), "How many calls a model may make in one turn; null: any number."),
    ] = None
    max_concurrent_tools: Annotated[
        int | None,
        Setting(types.integer(1, nullable=True), "How many calls of one run may run at once; null: any number."),
    ] = None
    context_window: Annotated[
        int | None,
        Setting(types.integer(1, nullable=True), "How many tokens of results fit into one run; null: no budget."),
    ] = None
    tool_search_threshold: Annotated[
        int | None,
        Setting(
            types.integer(0, nullable=True),
            "Above this many tokens of tool definitions the model gets a search tool instead; 0: always, null: never.",
        ),
    ] = defaults.TOOL_SEARCH_THRESHOLD
    mcp_init_concurrency: Annotated[int, Setting(types.integer(1), "How many MCP servers start at once.")] = 32
    trace_mcp: Annotated[bool, Setting(types.boolean, "Log every message to and from MCP servers.", key="traceMCP")] = (
        False
    )


class QueueSettings(Section, frozen=True, kw_only=True):
    """A limit on calls that several tools may share."""

    concurrent: Annotated[int, Setting(types.integer(1), "How many calls run at once.")]
    rate: Annotated[
        RateSetting | None, Setting(types.rate, "The rate limit: how many calls may start per second, minute or hour.")
    ] = None
    max_waiting: Annotated[
        int | None, Setting(types.integer(0), "How many calls may wait; one more fails with `limit_exceeded`.")
    ] = None
    wait_timeout: Annotated[float | None, Setting(types.duration, "How long a call may wait for its turn.")] = None


class WebSearchSettings(Section, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The engine of `web_search`. `msgspec.to_builtins` returns it as the file has it."""

    provider: Annotated[
        SearchEngine, Setting(types.choice("tavily", "google", "bing", "duckduckgo"), "The search engine.")
    ] = "duckduckgo"
    api_key: Annotated[str | None, Setting(types.string, "The API key of the search engine.", secret=True)] = None
    max_results: Annotated[
        int, Setting(types.integer(1), "How many results a search returns at most, and if the model names no number.")
    ] = 10
    search_engine_id: Annotated[
        str | None, Setting(types.scalar_string, "Google's id of your search engine.", aliases=("cx",))
    ] = None
    url: Annotated[str | None, Setting(types.string, "Another URL of the engine's API.")] = None


class ToolOverride(Section, frozen=True, kw_only=True):
    """The user's settings for tools whose name matches. None: not set. A cache of 0 is off."""

    timeout: Timeout = None
    queue: QueueName = None
    cache: Cache = None
    cache_per_user: Annotated[bool | None, Setting(types.boolean, "Cache the results of each user separately.")] = None
    max_bytes: Annotated[
        int | None,
        Setting(types.integer(1), "A larger result is stored; without it `defaults.toolResponseMaxBytes`."),
    ] = None
    enabled: Annotated[bool | None, Setting(types.boolean, "Whether it is offered at all.")] = None
    visible: Annotated[bool | None, Setting(types.boolean, "Whether its calls are shown in the active space.")] = None


WEB_SEARCH = SectionType(WebSearchSettings)
OVERRIDE = SectionType(ToolOverride)


class ToolSettings(Section, frozen=True, kw_only=True):
    """The section `tools`. A list there is its `definitions`."""

    timeout: Annotated[
        float | None,
        Setting(
            types.duration,
            "The same as `defaults.toolTimeout`, which takes precedence if both are given.",
            environment=False,
        ),
    ] = None
    """As written; `Config.defaults` has the value in force."""
    max_concurrent: Annotated[
        int | None,
        Setting(
            types.integer(1),
            "The same as `defaults.maxConcurrentTools`, which takes precedence if both are given.",
            environment=False,
        ),
    ] = None
    """As written; `Config.defaults` has the value in force."""
    allowed_paths: Annotated[
        tuple[Path, ...] | None,
        Setting(types.paths, "The only directories that the file tools may use; without it the working directory."),
    ] = None
    allowed_env: Annotated[
        tuple[str, ...] | None,
        Setting(
            types.globs,
            "The variables that `get_env` and `set_env` may use; without it a few harmless ones such as `LANG`.",
        ),
    ] = None
    """None: a few harmless ones. An empty list allows none."""
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Setting(types.globs, "Private network addresses that the network tools may reach nevertheless."),
    ] = None
    memory_dir: Annotated[Path | None, Setting(types.path, "The directory of the memory tools.")] = None
    session_dir: Annotated[Path | None, Setting(types.path, "The directory of archived sessions.")] = None
    web_search: Annotated[WebSearchSettings | None, Setting(WEB_SEARCH, "The search engine of `web_search`.")] = None
    builtins: Annotated[
        bool | tuple[str, ...], Setting(types.boolean_or_globs, "Which built-in tools are offered.")
    ] = True
    tools_allowed: Annotated[
        tuple[str, ...] | None, Setting(types.globs, "Offer only these local tools.", aliases=("allowedTools",))
    ] = None
    tools_denied: Annotated[
        tuple[str, ...],
        Setting(types.globs, "Do not offer these local tools, even if allowed.", aliases=("deniedTools",)),
    ] = ()
    aliases: Annotated[Mapping[str, str], Setting(types.string_map, "Other names for tools: alias to name.")] = {}
    overrides: Annotated[
        Mapping[str, ToolOverride],
        Setting(types.entries_by_name(OVERRIDE, "overrides"), "Settings for tools by name or glob."),
    ] = {}
    definitions: Annotated[
        Mapping[str, ToolDefinition], Setting(definitions_type, "Tools that are defined here, each with a `name`.")
    ] = {}
    mcp_servers: Annotated[
        Mapping[str, McpServerSettings], Setting(mcp_servers_type, "The same as the section `mcpServers`.")
    ] = {}
    """As written; `Config.mcp_servers` has all of them."""


DEFAULTS = SectionType(DefaultSettings)
QUEUE = SectionType(QueueSettings)
TOOLS = SectionType(ToolSettings)


def _read_tools(value: Value) -> ToolSettings:
    if not isinstance(value.data, list):
        return TOOLS.read(value)
    # A list holds the definitions; the file then has no other settings of `tools`, but the environment may.
    tools = TOOLS.read(Value({}, value.context, value.path, value.key))
    return msgspec.structs.replace(tools, definitions=definitions_type.read(value.with_key(*value.key, "definitions")))


tools_type = ValueType(
    "mapping of settings, or list of tools",
    "a mapping of settings or a list of tools",
    _read_tools,
    schema={"anyOf": [TOOLS, {"type": "array", "items": {"type": "object", "required": ["name"]}}]},
    fits_variable=False,
    has_settings=True,
)
queues_type = types.entries_by_name(QUEUE, "queues")
