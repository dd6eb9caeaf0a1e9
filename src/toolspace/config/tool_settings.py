"""The sections `defaults`, `queues` and `tools`: limits of calls, and settings of the built-in and local tools.

Also reads the tools that `tools.definitions` defines, including older ways to write them. Used by `configuration`.
Builds nothing; `composition` does.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import msgspec

from toolspace.config import value_types as types
from toolspace.config.file_formats import format_value
from toolspace.config.provider_settings import (
    Approval,
    Cache,
    CacheScopeSetting,
    CircuitBreakerDelay,
    CircuitBreakerFailures,
    McpServers,
    Priority,
    QueueName,
    SingleToolSettings,
    Timeout,
)
from toolspace.config.tool_lists import ToolPatterns, boolean_or_tools, check_collections
from toolspace.config.validation import (
    SECRET,
    AlreadyReported,
    Section,
    SectionType,
    SettingOptions,
    Value,
    ValueType,
    read_named_elements,
    read_value,
    value_type,
)
from toolspace.config.value_types import (
    Count,
    Duration,
    Globs,
    NullableCount,
    ObjectSchema,
    RateSetting,
    ScalarText,
)
from toolspace.core import defaults
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.tool import CacheScope, ExecutionType, ToolCategory, WhenUnserved

SearchEngine = Literal["tavily", "google", "bing", "duckduckgo"]

# A function is code, which no file can define.
EXECUTION_TYPES: tuple[ExecutionType, ...] = tuple(name for name in get_args(ExecutionType) if name != "function")
OLDER_TYPES: Mapping[str, ExecutionType] = {
    "request": "gateway",
    "ai-agent": "agent",
    "image-generator": "image",
    "waiting": "wait",
}
BASIC_MODES: Mapping[str, ExecutionType] = {
    "no-execution": "external",
    "pass-through": "internal",
    "static": "static",
}
"""`execution.mode` of the older type `basic` → the current execution type."""

_INVISIBLE: frozenset[ExecutionType] = frozenset(("internal", "static", "compute", "prebuilt"))
_RUN_BY_OTHERS: frozenset[ExecutionType] = frozenset(("external", "space"))
_REQUEST: Mapping[str, ValueType[Any]] = {
    "url": types.string,
    "method": types.choice(*types.HTTP_METHODS),
    "headers": types.string_map,
    "query": types.mapping,
    "body": types.any_value,
}
_EXECUTION: Mapping[ExecutionType, Mapping[str, ValueType[Any]]] = {
    "gateway": _REQUEST,
    "external": _REQUEST,
    "space": _REQUEST,
    "internal": {},
    "static": {"output": types.any_value},
    "prebuilt": {"action": types.string},
    "compute": {"expression": types.string},
    "wait": {"duration": types.duration},
}
"""The keys of `execution`, by execution type. The types that are not here accept any key."""
_REQUIRED_KEY: Mapping[ExecutionType, str] = {
    "gateway": "url",
    "static": "output",
    "compute": "expression",
    "prebuilt": "action",
}


class DefaultSettings(Section, frozen=True, kw_only=True):
    """Settings that apply to every call, unless the tool, its provider or an override has its own value."""

    tool_timeout: Annotated[Duration, "How long one call may take."] = defaults.TOOL_TIMEOUT_SECONDS
    tool_response_max_bytes: Annotated[
        Count, "A larger result is stored, and the model gets a handle and a preview."
    ] = defaults.TOOL_RESPONSE_MAX_BYTES
    max_inline_bytes: Annotated[
        Count, "Programs and the command line get a whole result up to this size; a larger one is stored for them, too."
    ] = defaults.MAX_INLINE_BYTES
    tool_output_ttl: Annotated[Duration, "How long stored results are kept."] = defaults.TOOL_OUTPUT_TTL_SECONDS
    pending_call_ttl: Annotated[
        Duration, "How long a pending call waits for a worker or a person; then it expires, and its agent is notified."
    ] = 604_800.0
    max_tool_calls_per_turn: Annotated[
        NullableCount, "How many calls a model may make in one turn; null: any number."
    ] = None
    max_concurrent_tools: Annotated[
        NullableCount,
        "How many calls of one run may run at once; null: any number. "
        f"Without it {defaults.AGENT_CONCURRENT_TOOLS} in a run of an agent, and any number in a run of a program.",
    ] = None
    context_window: Annotated[NullableCount, "How many tokens of results fit into one run; null: no budget."] = None
    tool_search_threshold: Annotated[
        int | None,
        types.integer(0, nullable=True),
        "Above this many tokens of tool definitions the model gets a search tool instead; 0: always, null: never.",
    ] = defaults.TOOL_SEARCH_THRESHOLD
    circuit_breaker_failures: Annotated[
        NullableCount,
        "After how many transport errors or timeouts in a row calls of a provider fail at once; null: never.",
    ] = defaults.CIRCUIT_BREAKER_FAILURES
    circuit_breaker_delay: Annotated[
        Duration, "How long until the next call of that provider is let through, to test whether it is back."
    ] = defaults.CIRCUIT_BREAKER_DELAY_SECONDS
    mcp_init_concurrency: Annotated[Count, "How many MCP servers start at once."] = 32
    start_patience: Annotated[
        float,
        types.duration_or_zero,
        "How long a `tools/list` of an MCP client and the prompt of an agent wait for servers that are starting.",
    ] = defaults.START_PATIENCE_SECONDS
    description_prefix: Annotated[
        bool, "Whether the descriptions of the tools of MCP servers begin with the name of their server: `[github] …`."
    ] = True
    trace_mcp: Annotated[bool, "Log every message to and from MCP servers.", SettingOptions(key="traceMCP")] = False


class QueueSettings(Section, frozen=True, kw_only=True):
    """A limit on calls that several tools may share."""

    concurrent: Annotated[Count, "How many calls run at once."]
    rate: Annotated[
        RateSetting | None, types.rate, "The rate limit: how many calls may start per second, minute or hour."
    ] = None
    max_waiting: Annotated[
        int | None, types.integer(0), "How many calls may wait; one more fails with `limit_exceeded`."
    ] = None
    wait_timeout: Annotated[Duration | None, "How long a call may wait for its turn."] = None


class WebSearchSettings(Section, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The engine of `web_search`. `msgspec.to_builtins` returns it as the file has it."""

    provider: Annotated[SearchEngine, "The search engine."] = "duckduckgo"
    api_key: Annotated[str | None, "The API key of the search engine.", SECRET] = None
    max_results: Annotated[Count, "How many results a search returns at most, and if the model names no number."] = 10
    search_engine_id: Annotated[
        ScalarText | None, "Google's id of your search engine.", SettingOptions(aliases=("cx",))
    ] = None
    url: Annotated[str | None, "Another URL of the engine's API."] = None


class ToolOverride(Section, frozen=True, kw_only=True):
    """The user's settings for tools whose name matches. None: not set. A cache of 0 is off."""

    timeout: Timeout = None
    queue: QueueName = None
    priority: Priority = None
    cache: Cache = None
    cache_scope: CacheScopeSetting = None
    max_bytes: Annotated[Count | None, "A larger result is stored; without it `defaults.toolResponseMaxBytes`."] = None
    enabled: Annotated[bool | None, "Whether it is offered at all."] = None
    visible: Annotated[bool | None, "Whether its calls are shown in the active space."] = None
    approval: Approval = None
    circuit_breaker_failures: CircuitBreakerFailures = None
    circuit_breaker_delay: CircuitBreakerDelay = None


class ToolDefinition(SingleToolSettings, frozen=True, kw_only=True):
    """A tool that the configuration defines. Its execution type has its current name."""

    name: str
    description: Annotated[str, "The description that the model reads."] = ""
    input_schema: Annotated[
        ObjectSchema | None,
        "The schema of its arguments; the model gets it unchanged.",
        SettingOptions(aliases=("parametersSchema",)),
    ] = None
    category: Annotated[ToolCategory, "What sort of tool it is."] = ToolCategory.CUSTOM
    execution_type: Annotated[ExecutionType, types.choice(*EXECUTION_TYPES), "Who executes it."]
    visible: Annotated[bool, "Whether its calls are shown in the active space."] = True
    is_async: Annotated[bool, "Return `pending` at once; the result comes later."] = False
    expires_after: Annotated[
        Duration | None, "How long a pending call waits for its result; without it `defaults.pendingCallTtl`."
    ] = None
    when_unserved: Annotated[
        WhenUnserved,
        "What a call of an external tool that nobody serves does: `wait` for its timeout, or `fail` at once.",
    ] = "wait"
    execution: Annotated[Mapping[str, Any], "How it is executed; the keys depend on the type.", SECRET] = {}
    version: Annotated[ScalarText | None, "The version of the tool."] = None
    pauses_run: bool = False
    """Whether a call pauses its run until the result comes, however long. Written as `basic` without a timeout."""


# Definitions of tools


_definition_section = SectionType(ToolDefinition)


@value_type("mapping", "a mapping", {"type": "object"}, fits_variable=False)
def _definition(value: Value) -> ToolDefinition:
    name = str(value.key[-1])
    if not is_local_name(name):
        value.fail(f"{format_value(name)} cannot name a tool; use 1 to 64 of the characters A-Z a-z 0-9 _ -")
    entry = dict(value.mapping())
    written_type = entry.get("executionType")
    execution_type = _resolve_type(value, entry)
    entry["executionType"] = execution_type
    if entry.get("visible") is None:
        entry["visible"] = execution_type not in _INVISIBLE
    elif execution_type == "prebuilt" and entry["visible"] is not False:
        value.context.warn((*value.path, "visible"), "has no effect: calls of prebuilt tools are never shown")
    tool = _definition_section.read(value.with_data(entry))
    execution_value = value.child("execution", tool.execution)
    required_key = _REQUIRED_KEY.get(execution_type)
    if required_key is not None and required_key not in tool.execution:
        execution_value.fail(f'"{required_key}" is missing, which the execution type {written_type} needs')
    execution = _read_execution(execution_value, execution_type)
    properties: Mapping[str, Any] = (tool.input_schema or {}).get("properties") or {}
    has_duration = tool.input_schema is None or "duration" in tool.execution or "duration" in properties
    if execution_type == "wait" and not has_duration:
        execution_value.fail('"duration" is missing, and the inputSchema has no "duration" either; give one of them')
    is_basic = written_type == "basic" and execution_type == "external"
    pauses_run = is_basic and tool.timeout is None and not tool.is_async
    return msgspec.structs.replace(tool, execution=execution, pauses_run=pauses_run)


def _read_execution(value: Value, execution_type: ExecutionType) -> Mapping[str, Any]:
    """Reads `execution` and checks each of its keys. Messages show the keys, never the values."""
    value_types = _EXECUTION.get(execution_type)
    if value_types is None:
        return value.mapping()
    execution: dict[str, Any] = {}
    is_valid = True
    for key, inner in value.items():
        if key == "mode":  # Of the older type `basic`.
            execution[key] = inner.data
        elif key not in value_types:
            keys = f"; the keys here are {', '.join(value_types)}" if value_types else ""
            hint = did_you_mean(key, value_types) or keys or f"; {execution_type} tools have none"
            inner.report(f"unknown key{hint}")
            is_valid = False
        elif inner.data is None and key != "output":
            continue
        else:
            try:
                result = read_value(value_types[key], inner, secret=True)
            except AlreadyReported:
                is_valid = False
            else:
                # A duration stays as it was written: the tool's definition shows it.
                execution[key] = inner.data if value_types[key] is types.duration else result
    if not is_valid:
        raise AlreadyReported
    return execution


def _resolve_type(value: Value, entry: Mapping[str, Any]) -> ExecutionType:
    """The current execution type. If `execution.url` is set, the gateway requests it, and nobody else runs the tool."""
    execution = entry.get("execution")
    details = cast("dict[str, Any]", execution if isinstance(execution, dict) else {})
    execution_type = _read_type(value, entry.get("executionType"), details)
    if execution_type not in _RUN_BY_OTHERS or details.get("url") is None:
        return execution_type
    if str(details["url"]).lower().startswith(("http://", "https://")):
        return "gateway"
    value.context.warn(
        (*value.path, "execution", "url"), "has no effect, as it does not begin with https:// or http://"
    )
    return execution_type


def _read_type(value: Value, written_type: Any, details: Mapping[str, Any]) -> ExecutionType:
    if written_type is None:
        if "url" in details:
            return "gateway"
        value.fail(f'"executionType" is missing; expected one of {", ".join(EXECUTION_TYPES)}')
    if written_type == "basic":
        mode = details.get("mode", "no-execution")
        if not isinstance(mode, str) or mode not in BASIC_MODES:
            value.child("execution", details).child("mode", mode).report_invalid(f"one of {', '.join(BASIC_MODES)}")
            raise AlreadyReported
        return BASIC_MODES[mode]
    if isinstance(written_type, str) and written_type in OLDER_TYPES:
        return OLDER_TYPES[written_type]
    if written_type not in EXECUTION_TYPES:
        hint = did_you_mean(written_type, EXECUTION_TYPES) if isinstance(written_type, str) else ""
        value.child("executionType", written_type).report_invalid(f"one of {', '.join(EXECUTION_TYPES)}", hint)
        raise AlreadyReported
    return written_type


_definitions = types.entries_by_name(_definition, "tools")


# The section `tools`


class ToolSettings(Section, frozen=True, kw_only=True):
    """The section `tools`. A list there is its `definitions`."""

    timeout: Annotated[
        Duration | None,
        "The same as `defaults.toolTimeout`, which takes precedence if both are given.",
        SettingOptions(environment=False),
    ] = None
    """As written; `Config.defaults` has the value in force."""
    max_concurrent: Annotated[
        Count | None,
        "The same as `defaults.maxConcurrentTools`, which takes precedence if both are given.",
        SettingOptions(environment=False),
    ] = None
    """As written; `Config.defaults` has the value in force."""
    allowed_paths: Annotated[
        tuple[Path, ...] | None, "The only directories that the file tools may use; without it the working directory."
    ] = None
    allow_writing_code: Annotated[
        tuple[Path, ...], "Patterns of code that runs, or is beside code that runs, which the file tools may write."
    ] = ()
    allowed_env: Annotated[
        Globs | None,
        "The variables that `get_env` and `set_env` may use; without it a few harmless ones such as `LANG`.",
    ] = None
    """None: a few harmless ones. An empty list allows none."""
    allowed_hosts: Annotated[
        Globs | None, "Private network addresses that the network tools may reach nevertheless."
    ] = None
    memory_dir: Annotated[Path | None, "The directory of the memory tools."] = None
    memory_scope: Annotated[
        CacheScope,
        types.choice("principal", "shared"),
        "Which memories calls over HTTP and MCP use: those of their key (`principal`), in a directory beside "
        "`memoryDir`, or those in `memoryDir` (`shared`).",
    ] = "principal"
    session_dir: Annotated[Path | None, "The directory of archived sessions."] = None
    web_search: Annotated[WebSearchSettings | None, "The search engine of `web_search`."] = None
    builtins: Annotated[bool | tuple[str, ...], boolean_or_tools, "Which built-in tools are offered."] = True
    tools_allowed: Annotated[
        ToolPatterns | None, "Offer only these local tools.", SettingOptions(aliases=("allowedTools",))
    ] = None
    tools_denied: Annotated[
        ToolPatterns, "Do not offer these local tools, even if allowed.", SettingOptions(aliases=("deniedTools",))
    ] = ()
    aliases: Annotated[Mapping[str, str], "Other names for tools: alias to name."] = {}
    overrides: Annotated[
        Mapping[str, ToolOverride],
        types.entries_by_name(SectionType(ToolOverride), "overrides"),
        "Settings for tools by name or glob.",
    ] = {}
    definitions: Annotated[
        Mapping[str, ToolDefinition], _definitions, "Tools that are defined here, each with a `name`."
    ] = {}
    mcp_servers: Annotated[McpServers, "The same as the section `mcpServers`."] = {}
    """As written; `Config.mcp_servers` has all of them."""
    names: tuple[str, ...] = ()
    """The names in a list of tools: built-in tools and collections that agents get besides the read-only ones."""

    @property
    def named_tools(self) -> tuple[str, ...]:
        """All names and patterns by which it names built-in tools."""
        builtins = self.builtins if not isinstance(self.builtins, bool) else ()
        return (*self.names, *builtins, *(self.tools_allowed or ()))


_tools_section = SectionType(ToolSettings)


_TOOL = {"anyOf": [{"type": "object", "required": ["name"]}, {"type": "string"}]}


@value_type(
    "mapping of settings, or list of tools",
    "a mapping of settings or a list of tools",
    {"anyOf": [_tools_section, {"type": "array", "items": _TOOL}, {"type": "string"}]},
    fits_variable=False,
    has_settings=True,
)
def _tools(value: Value) -> ToolSettings:
    if not isinstance(value.data, list | str):
        return _tools_section.read(value)
    # A list holds names and definitions; the file then has no other settings of `tools`, but the environment may.
    tools = _tools_section.read(value.with_data({}))
    elements = value.elements()
    name_values = [element for element in elements if isinstance(element.data, str)]
    check_collections(name_values, is_strict=True)
    definitions = read_named_elements(
        _definition, [element for element in elements if element not in name_values], (*value.key, "definitions")
    )
    return msgspec.structs.replace(
        tools, names=tuple(str(element.data) for element in name_values), definitions=definitions
    )


Tools = Annotated[ToolSettings, _tools]
Queues = Annotated[Mapping[str, QueueSettings], types.entries_by_name(SectionType(QueueSettings), "queues")]
