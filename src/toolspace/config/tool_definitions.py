"""Tools that a configuration defines itself: their settings, and the reader that accepts older ways to write them.

Used by `tool_settings`. Builds no tools; `composition` does.
"""

from collections.abc import Mapping
from typing import Annotated, Any, cast, get_args

import msgspec

from toolspace.config import value_types as types
from toolspace.config.document import format_value
from toolspace.config.reader import AlreadyReported, Section, SectionType, Setting, Value, ValueType, read_value
from toolspace.config.shared_settings import Cache, CachePerUser, Enabled, QueueName, Tags, Timeout
from toolspace.core.names import did_you_mean, is_local_name
from toolspace.core.tool import NO_ANNOTATIONS, Annotations, ExecutionType, ToolCategory

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
"""`execution.mode` of the older type `basic` → the type of today."""

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

ANNOTATIONS = SectionType(
    Annotations,
    settings=(
        Setting(types.boolean, "It changes nothing.", aliases=("readOnlyHint",)).bind("read_only", None),
        Setting(types.boolean, "It may destroy data.", aliases=("destructiveHint",)).bind("destructive", None),
        Setting(types.boolean, "A repeated call has no further effect.", aliases=("idempotentHint",)).bind(
            "idempotent", None
        ),
        Setting(types.boolean, "It reaches outside this system.", aliases=("openWorldHint",)).bind("open_world", None),
    ),
    is_ignored=lambda key: key == "title",
)
ToolAnnotations = Annotated[
    Annotations,
    Setting(
        ANNOTATIONS,
        "What kind of effect it has: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
    ),
]


class ToolDefinition(Section, frozen=True, kw_only=True):
    """A tool that the configuration defines. Its execution type has the name of today."""

    name: str
    description: Annotated[str, Setting(types.string, "The description that the model reads.")] = ""
    input_schema: Annotated[
        Mapping[str, Any] | None,
        Setting(
            types.schema, "The schema of its arguments; the model gets it unchanged.", aliases=("parametersSchema",)
        ),
    ] = None
    output_schema: Annotated[Mapping[str, Any] | None, Setting(types.mapping, "The schema of its result.")] = None
    category: Annotated[ToolCategory, Setting(types.choice(*ToolCategory), "What sort of tool it is.")] = (
        ToolCategory.CUSTOM
    )
    execution_type: Annotated[ExecutionType, Setting(types.choice(*EXECUTION_TYPES), "Who executes it.")]
    visible: Annotated[bool, Setting(types.boolean, "Whether its calls are shown in the active space.")] = True
    is_async: Annotated[bool, Setting(types.boolean, "Return `pending` at once; the result comes later.")] = False
    timeout: Timeout = None
    expires_after: Annotated[
        float | None,
        Setting(types.duration, "How long a pending call waits for its result; without it `defaults.pendingCallTtl`."),
    ] = None
    execution: Annotated[
        Mapping[str, Any],
        Setting(types.mapping, "How it is executed; the keys depend on the type.", secret=True),
    ] = {}
    queue: QueueName = None
    cache: Cache = None
    cache_per_user: CachePerUser = False
    annotations: ToolAnnotations = NO_ANNOTATIONS
    tags: Tags = ()
    version: Annotated[str | None, Setting(types.scalar_string, "The version of the tool.")] = None
    enabled: Enabled = True
    pauses_run: bool = False
    """Whether a call pauses its run until the result comes, however long. Written as `basic` without a timeout."""


class ToolDefinitionType(ValueType[ToolDefinition]):
    """Reads the definition of a tool."""

    def __init__(self, section: SectionType[ToolDefinition]) -> None:
        super().__init__("mapping", "a mapping", self._read_definition, schema={"type": "object"}, fits_variable=False)
        self.section = section

    def _read_definition(self, value: Value) -> ToolDefinition:
        name = str(value.key[-1])
        if not is_local_name(name):
            value.report(f"{format_value(name)} cannot name a tool; use 1 to 64 of the characters A-Z a-z 0-9 _ -")
            raise AlreadyReported
        entry = dict(value.mapping())
        written_type = entry.get("executionType")
        execution_type = self._resolve_type(value, entry)
        entry["executionType"] = execution_type
        if entry.get("visible") is None:
            entry["visible"] = execution_type not in _INVISIBLE
        elif execution_type == "prebuilt" and entry["visible"] is not False:
            value.context.warn((*value.path, "visible"), "has no effect: calls of prebuilt tools are never shown")
        tool = self.section.read(Value(entry, value.context, value.path, value.key))
        execution_value = value.child("execution", tool.execution)
        required_key = _REQUIRED_KEY.get(execution_type)
        if required_key is not None and required_key not in tool.execution:
            execution_value.report(f'"{required_key}" is missing, which the execution type {written_type} needs')
            raise AlreadyReported
        execution = self._read_execution(execution_value, execution_type)
        if execution_type == "wait" and not _has_duration(tool):
            execution_value.report(
                '"duration" is missing, and the inputSchema has no "duration" either; give one of them'
            )
            raise AlreadyReported
        is_basic = written_type == "basic" and execution_type == "external"
        pauses_run = is_basic and tool.timeout is None and not tool.is_async
        return msgspec.structs.replace(tool, execution=execution, pauses_run=pauses_run)

    def _read_execution(self, value: Value, execution_type: ExecutionType) -> Mapping[str, Any]:
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

    def _resolve_type(self, value: Value, entry: Mapping[str, Any]) -> ExecutionType:
        """The execution type of today. A tool with an `execution.url` is requested there, and nobody else runs it."""
        execution = entry.get("execution")
        details = cast("dict[str, Any]", execution if isinstance(execution, dict) else {})
        execution_type = self._read_type(value, entry.get("executionType"), details)
        if execution_type not in _RUN_BY_OTHERS or details.get("url") is None:
            return execution_type
        if str(details["url"]).lower().startswith(("http://", "https://")):
            return "gateway"
        value.context.warn(
            (*value.path, "execution", "url"), "has no effect, as it does not begin with https:// or http://"
        )
        return execution_type

    def _read_type(self, value: Value, written_type: Any, details: Mapping[str, Any]) -> ExecutionType:
        if written_type is None:
            if "url" in details:
                return "gateway"
            value.report(f'"executionType" is missing; expected one of {", ".join(EXECUTION_TYPES)}')
            raise AlreadyReported
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


def _has_duration(tool: ToolDefinition) -> bool:
    schema = tool.input_schema
    return "duration" in tool.execution or schema is None or "duration" in (schema.get("properties") or {})


DEFINITION = SectionType(ToolDefinition)
definitions_type = types.entries_by_name(ToolDefinitionType(DEFINITION), "tools")
