"""The sections of an agent: its identity, model, loop, limits and so on.

Used by `configuration`. `load` finds the file that describes an agent.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec

from toolspace.config import value_types as types
from toolspace.config.file_formats import KeyPath
from toolspace.config.provider_settings import Headers
from toolspace.config.server_settings import NotificationSettings
from toolspace.config.tool_lists import selected_tools
from toolspace.config.validation import (
    SECRET,
    AlreadyReported,
    InvalidValue,
    Section,
    SectionType,
    SettingOptions,
    Value,
    value_type,
)
from toolspace.config.value_types import Count, Duration, HttpUrl, Name, Names, NullableCount, StorableText
from toolspace.core import defaults
from toolspace.core.call_limits import DEFAULT_REPEATED_CALLS, RepeatedCallLimits
from toolspace.core.stored_records import SessionScope

FILE_ENDINGS = (".yaml", ".yml", ".json", ".jsonc", ".toml")

Review = Literal["rules", "model"]
PlainText = Literal["deliver", "private"]


class AgentIdentity(Section, frozen=True, kw_only=True):
    """The name, description and instructions of an agent."""

    name: Annotated[Name | None, "Its name, unless the entry that refers to its file has another one."] = None
    description: Annotated[StorableText, "The description that other agents read."] = ""
    system: Annotated[StorableText, "Its instructions.", SettingOptions(aliases=("instructions",))] = ""


@value_type(
    "string or `{effort: …}`",
    "a word such as low, medium, high or none",
    {"anyOf": [{"type": "string"}, {"const": False}, {"type": "object"}]},
)
def _reasoning(value: Value) -> str:
    data = value.data
    if data is False:
        return "none"
    if isinstance(data, Mapping):
        unknown = [inner for key, inner in value.items() if key != "effort"]
        for inner in unknown:
            inner.report("unknown key; the key here is effort")
        if unknown:
            raise AlreadyReported
        data = value.mapping().get("effort")
    if not isinstance(data, str) or not data.strip():
        raise InvalidValue("a word such as low, medium, high or none")
    return data.strip()


class ModelPriceSettings(Section, frozen=True, kw_only=True):
    """The price of a model in US dollars per million tokens."""

    input: Annotated[float, types.number(0), "US dollars for a million input tokens."]
    output: Annotated[float, types.number(0), "US dollars for a million output tokens."]
    cached_input: Annotated[
        float | None, types.number(0), "The same for input that the provider has cached; without it `input`."
    ] = None


class AgentModelSettings(Section, frozen=True, kw_only=True):
    """The model of an agent. Without a provider it is one whose key is in the environment."""

    provider: Annotated[
        Name | None,
        "The provider of the model: `openai`, `anthropic`, `google`, another one listed in [models](models.md), or "
        "`demo`.",
    ] = None
    name: Annotated[Name | None, "The provider's name of the model."] = None
    """None: the provider's usual one."""
    temperature: Annotated[float | None, types.number(0, 2), "The sampling temperature."] = None
    max_output_tokens: Annotated[
        Count | None, "The length limit of one response, in tokens.", SettingOptions(aliases=("maxTokens",))
    ] = None
    reasoning: Annotated[
        str | None, _reasoning, "How much it reasons before it answers: `low`, `medium`, `high`, `none`."
    ] = None
    base_url: Annotated[
        HttpUrl | None,
        "The URL of the API; without it the provider's own. Without a `provider` it is any endpoint that is "
        "compatible with OpenAI's.",
    ] = None
    api_key: Annotated[str | None, "The API key; without it the provider's environment variable.", SECRET] = None
    headers: Headers = {}
    price: Annotated[
        ModelPriceSettings | None,
        "Its price, if Toolspace does not know it or yours is another one; `limits.maxCost` needs a price.",
    ] = None
    timeout: Annotated[Duration, "How long one response may take."] = defaults.MODEL_TIMEOUT_SECONDS
    retries: Annotated[int, types.integer(0), "How often a request that failed for a temporary reason is retried."] = (
        defaults.MODEL_RETRIES
    )


_MODEL_EXPECTED = 'a mapping, or text such as "openai:gpt-5"'
_model_section = SectionType(AgentModelSettings)


@value_type(
    "mapping or `provider:name`",
    _MODEL_EXPECTED,
    {"anyOf": [_model_section, {"type": "string"}]},
    fits_variable=False,
    has_settings=True,
)
def _model(value: Value) -> AgentModelSettings:
    """Reads a model: a mapping with its settings, or `provider:name`."""
    data = value.data
    if isinstance(data, str):
        data = _parse_model_name(data)
    elif data is not None and not isinstance(data, Mapping):
        raise InvalidValue(_MODEL_EXPECTED)
    model = _model_section.read(value.with_data(data))
    provider = model.provider.lower() if model.provider is not None else None
    if provider is None and model.base_url is not None:
        provider = "openai-compatible"  # Not OpenAI itself: its key must not go to other servers.
    missing_key = "provider" if provider is None else "name"
    if (provider is None) != (model.name is None) and provider != "demo":
        value.fail(f'"{missing_key}" is missing; give both "provider" and "name", or neither')
    return msgspec.structs.replace(model, provider=provider)


def _parse_model_name(text: str) -> dict[str, Any]:
    provider, _, name = (part.strip() for part in text.partition(":"))
    if provider.lower() == "demo" and not name:
        return {"provider": "demo"}
    if not provider or not name:
        raise InvalidValue(_MODEL_EXPECTED)
    return {"provider": provider, "name": name}


@value_type(
    "`auto` \\| `required` \\| `none` \\| name",
    "auto, required, none, or the name of a tool",
    {"anyOf": [{"type": "string"}, {"type": "object", "required": ["toolName"]}]},
)
def _tool_choice(value: Value) -> str:
    data = value.data
    if isinstance(data, Mapping):  # As the AI SDK writes it: {type: tool, toolName: search}.
        data = cast("Mapping[str, Any]", data).get("toolName")
    if not isinstance(data, str) or not data.strip():
        raise InvalidValue("auto, required, none, or the name of a tool")
    word = data.strip()
    return word.lower() if word.lower() in ("auto", "required", "none") else word


class AgentLoopSettings(Section, frozen=True, kw_only=True):
    """The loop of model responses and tool calls."""

    max_steps: Annotated[Count, "How many model requests one cycle may make."] = 20
    tool_choice: Annotated[
        str,
        _tool_choice,
        "Whether the model may, must or must not call tools, or the one tool that it must call first.",
    ] = "auto"
    max_tool_calls_per_turn: Annotated[
        Count | None, "How many calls the model may make in one turn; without it `defaults.maxToolCallsPerTurn`."
    ] = None
    review: Annotated[
        Review,
        "What decides after a failed tool whether to continue, change the plan or stop: rules, or a request to "
        "the model.",
    ] = "rules"
    plain_text: Annotated[
        PlainText,
        "Whether the text of the last turn is delivered if a message of a person triggered the cycle and it has sent "
        "no message: to the space of the newest such message.",
    ] = "deliver"


class TaskSettings(Section, frozen=True, kw_only=True):
    """The background tasks of an agent."""

    tools: Annotated[
        tuple[str, ...] | None,
        selected_tools,
        "The tools of its tasks: names, globs and collections; without it those of the agent. A list of collections "
        "alone selects only among the built-in tools.",
    ] = None


class ConsciousnessSettings(Section, frozen=True, kw_only=True):
    """How much of its session an agent keeps in the prompt."""

    max_tokens: Annotated[Count, "Above this many tokens of history, older cycles are summarized and archived."] = (
        100_000
    )
    min_recent_cycles: Annotated[Count, "This many of the latest cycles are never summarized."] = 3


@value_type(
    "integer or null",
    "an integer of at least 1, or null",
    {"type": ["integer", "null"], "minimum": 1},
    nullable=True,
)
def _repeated_calls(value: Value) -> RepeatedCallLimits:
    limit = types.integer(1, nullable=True).read(value)
    return RepeatedCallLimits(limit, limit)


class AgentLimits(Section, frozen=True, kw_only=True):
    """The limits of an agent and of its runs."""

    max_agent_turns: Annotated[
        int, types.integer(0), "How many cycles in a row may be triggered by messages of other agents only."
    ] = 6
    cycles_per_minute: Annotated[Count, "How many cycles of one session may start in a minute."] = 60
    max_parallel_sessions: Annotated[
        Count, "How many of its sessions may run at the same time in one process (`session: space` or `user`)."
    ] = defaults.MAX_PARALLEL_SESSIONS
    max_tokens: Annotated[
        NullableCount, "How many tokens one run may use, including its sub-agents; null: any number."
    ] = None
    max_cost: Annotated[
        float | None,
        types.number(0, nullable=True),
        "How many US dollars one run may cost, including its sub-agents; null: any amount.",
    ] = None
    timeout: Annotated[float | None, types.nullable(types.duration), "How long one run may take; null: any time."] = (
        None
    )
    max_repeated_calls: Annotated[
        RepeatedCallLimits | None,
        _repeated_calls,
        "How often the model may make the same call in one run: the same tool with the same arguments. Without it "
        "5 times, and 20 for read-only tools; null: any number.",
    ] = DEFAULT_REPEATED_CALLS
    max_depth: Annotated[int, types.integer(0), "How deeply agents may call agents."] = 8
    inbox_batch: Annotated[int, types.integer(1, 1000), "How many inbox events one cycle claims at most."] = 50


class MemorySettings(Section, frozen=True, kw_only=True):
    """The memories of an agent."""

    shared: Annotated[bool, "Whether all sessions of the agent also see, and may store, memories that they share."] = (
        False
    )


class RouterSettings(Section, frozen=True, kw_only=True):
    """The agents that a request may be handed off to."""

    destinations: Annotated[Names, "The agents that a request may be handed off to."] = ()


class AgentEntry(Section, frozen=True, kw_only=True):
    """One entry of `agents`: a definition, the file that contains one, or only the name of an agent."""

    path: KeyPath
    name: str | None = None
    """None: the name in the definition."""
    file: Path | None = None
    is_definition: bool = False
    """Whether the definition itself is at `path`."""


_AGENTS_EXPECTED = "a mapping of agents by name, or a list of files, names and agents"


@value_type(
    "agents by name, or list of files, names and agents",
    _AGENTS_EXPECTED,
    {"$ref": "#/$defs/agents"},
    fits_variable=False,
)
def _agents(value: Value) -> tuple[AgentEntry, ...]:
    if isinstance(value.data, Mapping):
        pairs: list[tuple[str | None, Value]] = [*value.items()]
    elif isinstance(value.data, str | list):
        pairs = [(None, inner) for inner in value.elements()]
    else:
        raise InvalidValue(_AGENTS_EXPECTED)
    return tuple(entry for name, inner in pairs if (entry := _read_entry(inner, name)) is not None)


def _read_entry(value: Value, name: str | None) -> AgentEntry | None:
    """One entry, or None if it is invalid, which is reported. A definition is read later, by `load`."""
    data = value.data
    if isinstance(data, Mapping):
        return AgentEntry(path=value.path, name=name, is_definition=True)
    if not isinstance(data, str) or not data.strip():
        value.report_invalid("the path of an agent's file, or a mapping that describes it")
        return None
    if name is None and not ("/" in data or data.strip().lower().endswith(FILE_ENDINGS)):
        return AgentEntry(path=value.path, name=data.strip())
    try:
        return AgentEntry(path=value.path, name=name, file=types.resolve_path(value, data.strip()))
    except InvalidValue as error:
        value.report_invalid(str(error))
        return None


class AgentSettings(Section, frozen=True, kw_only=True):
    """The settings of an agent, apart from its tools."""

    agent: Annotated[AgentIdentity | None, "Its name, description and instructions."] = None
    model: Annotated[AgentModelSettings, _model, "Its model; without it one whose key is in the environment."] = (
        AgentModelSettings()
    )
    loop: Annotated[AgentLoopSettings, "The loop of model responses and tool calls."] = AgentLoopSettings()
    consciousness: Annotated[ConsciousnessSettings, "How much of its history it keeps in the prompt."] = (
        ConsciousnessSettings()
    )
    limits: Annotated[AgentLimits, "Its limits and budgets."] = AgentLimits()
    session: Annotated[
        SessionScope,
        "Whether it has one conversation for everything (`agent`), one for each space (`space`) or one for each person "
        "(`user`).",
    ] = "agent"
    memories: Annotated[MemorySettings, "Memories of all its sessions."] = MemorySettings()
    router: Annotated[RouterSettings, "The agents that it may hand a request off to."] = RouterSettings()
    agents: Annotated[
        tuple[AgentEntry, ...],
        _agents,
        "The agents that it may call, by name; files and definitions as in the main file.",
    ] = ()
    tasks: Annotated[TaskSettings, "Its background tasks."] = TaskSettings()
    auto_enter: Annotated[
        bool,
        "Whether a cycle that messages of one space triggered begins in that space, as after `enter_space`.",
    ] = False
    spaces: Annotated[Names, "The spaces that it is a member of from the start, by name; created if missing."] = ()
    knowledge: Annotated[tuple[Path, ...], "Files and directories that `search_knowledge` searches."] = ()
    notifications: Annotated[
        NotificationSettings, "Its own ways to notify people; without one that of the main file."
    ] = NotificationSettings()
