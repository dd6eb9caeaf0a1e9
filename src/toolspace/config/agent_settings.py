"""Every setting of an agent, and of how it reaches people: its key, what it takes, its default and its effect.

The part of the table in `settings` that is about agents. Which file describes which agent is for `agents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.config import value_types
from toolspace.config.document import KeyPath
from toolspace.config.model import (
    AgentLimits,
    AgentLoopSettings,
    AgentModelSettings,
    ConsciousnessSettings,
    EmbeddingSettings,
    NotificationSettings,
    RouterSettings,
    Section,
    SmtpSettings,
    WebhookSettings,
)
from toolspace.config.reader import AlreadyReported, InvalidValue, SectionType, Setting, Value, ValueType

FILE_ENDINGS = (".yaml", ".yml", ".json", ".jsonc", ".toml")


class AgentIdentity(Section, frozen=True, kw_only=True):
    """Who an agent is."""

    name: str | None = None
    description: str = ""
    system: str = ""


class AgentEntry(Section, frozen=True, kw_only=True):
    """One entry of `agents`: a definition in place, the file that has one, or only the name of an agent."""

    at: KeyPath
    name: str | None = None
    """None: as the definition says."""
    file: Path | None = None
    is_definition: bool = False
    """Whether it stands at `at` itself."""


class AgentSettings(Section, frozen=True, kw_only=True):
    """What a file says of its agent, apart from tools."""

    agent: AgentIdentity | None = None
    model: AgentModelSettings = AgentModelSettings()
    loop: AgentLoopSettings = AgentLoopSettings()
    consciousness: ConsciousnessSettings = ConsciousnessSettings()
    limits: AgentLimits = AgentLimits()
    router: RouterSettings = RouterSettings()
    agents: tuple[AgentEntry, ...] = ()
    spaces: tuple[str, ...] = ()
    knowledge: tuple[Path, ...] = ()
    notifications: NotificationSettings = NotificationSettings()


HEAD = SectionType(
    AgentIdentity,
    Setting("name", value_types.name, "What it is called, unless the entry that names its file says otherwise."),
    Setting("description", value_types.storable_string, "What other agents read about it."),
    Setting("system", value_types.storable_string, "Its instructions.", aliases=("instructions",)),
)


def _reasoning(value: Value) -> str:
    data = value.data
    if data is False:
        return "none"
    if isinstance(data, Mapping):
        data = _only(value, "effort")
    if not isinstance(data, str) or not data.strip():
        raise InvalidValue("a word such as low, medium, high or none")
    return data.strip()


def _only(value: Value, key: str) -> Any:
    """The value of the one key that a mapping may have."""
    mapping = value.mapping()
    others = [value.child(other, None) for other in mapping if other != key]
    for other in others:
        other.report(f"unknown key; the key here is {key}")
    if others:
        raise AlreadyReported
    return mapping.get(key)


_effort = ValueType("string or `{effort: …}`", "a word such as low, medium, high or none", _reasoning)

MODEL = SectionType(
    AgentModelSettings,
    Setting(
        "provider",
        value_types.name,
        "Who serves the model: `openai`, `anthropic`, `google`, another that [models](models.md) names, or `demo`.",
    ),
    Setting("name", value_types.name, "The model, as its provider calls it."),
    Setting("temperature", value_types.number(0, 2), "How freely it chooses its words."),
    Setting(
        "maxOutputTokens",
        value_types.integer(1),
        "How long one of its answers may be, in tokens.",
        aliases=("maxTokens",),
    ),
    Setting("reasoning", _effort, "How much it thinks before it answers: `low`, `medium`, `high`, `none`."),
    Setting(
        "baseUrl",
        value_types.http_url,
        "Where the API is, if not where the provider has it; without a `provider` any endpoint that is compatible with "
        "OpenAI's.",
    ),
    Setting("apiKey", value_types.string, "The key; without it the provider's own variable.", secret=True),
    Setting("headers", value_types.string_map, "HTTP headers to send.", secret=True),
    Setting("timeout", value_types.duration, "How long one answer may take.", default="10m"),
    Setting(
        "retries", value_types.integer(0), "How often a request that failed and may pass is made again.", default="4"
    ),
)


class AgentModelType(ValueType[AgentModelSettings]):
    """A model: its settings, or `provider:name`."""

    def __init__(self) -> None:
        expects = 'a mapping, or text such as "openai:gpt-5"'
        super().__init__("mapping or `provider:name`", expects, self._model, fits_variable=False, has_settings=True)

    def _model(self, value: Value) -> AgentModelSettings:
        data = value.data
        if isinstance(data, str):
            data = self._split(data)
        elif data is not None and not isinstance(data, Mapping):
            raise InvalidValue(self.expected)
        made = MODEL.read(Value(data, value.context, value.path, value.key))
        provider = made.provider.lower() if made.provider is not None else None
        if provider is None and made.base_url is not None:
            provider = "openai-compatible"  # Not OpenAI itself: its key is not for others.
        missing = "provider" if provider is None else "name"
        if (provider is None) != (made.name is None) and provider != "demo":
            value.report(f'"{missing}" is missing; give both "provider" and "name", or neither')
            raise AlreadyReported
        return msgspec.structs.replace(made, provider=provider)

    def _split(self, text: str) -> dict[str, Any]:
        provider, _, name = (part.strip() for part in text.partition(":"))
        if provider.lower() == "demo" and not name:
            return {"provider": "demo"}
        if not provider or not name:
            raise InvalidValue(self.expected)
        return {"provider": provider, "name": name}


model = AgentModelType()


def _tool_choice(value: Value) -> str:
    data = value.data
    if isinstance(data, Mapping):  # As others write it: {type: tool, toolName: search}.
        data = cast("Mapping[str, Any]", data).get("toolName")
    if not isinstance(data, str) or not data.strip():
        raise InvalidValue("auto, required, none, or the name of a tool")
    word = data.strip()
    return word.lower() if word.lower() in ("auto", "required", "none") else word


_choice = ValueType(
    "`auto` \\| `required` \\| `none` \\| name",
    "auto, required, none, or the name of a tool",
    _tool_choice,
    fits_variable=True,
)

LOOP = SectionType(
    AgentLoopSettings,
    Setting("maxSteps", value_types.integer(1), "How often the model may be asked in one cycle.", default="20"),
    Setting(
        "toolChoice",
        _choice,
        "Whether the model may, must or must not call tools, or the one tool that it must call first.",
        default="auto",
    ),
    Setting(
        "maxToolCallsPerTurn",
        value_types.integer(1),
        "How many calls the model may make in one turn, if not `defaults.maxToolCallsPerTurn`.",
    ),
    Setting(
        "review",
        value_types.choice("rules", "model"),
        "Who decides after a failed tool whether to go on, plan anew or stop: rules, or the model, asked for that.",
        default="rules",
    ),
)

CONSCIOUSNESS = SectionType(
    ConsciousnessSettings,
    Setting(
        "maxTokens",
        value_types.integer(1),
        "Above so many tokens of what it has in mind, older cycles are summed up and archived.",
        default="100000",
    ),
    Setting("minRecentCycles", value_types.integer(1), "So many of the latest cycles stay as they were.", default="3"),
)

LIMITS = SectionType(
    AgentLimits,
    Setting(
        "maxAgentTurns",
        value_types.integer(0),
        "How often agents may answer one another in a space before a person says something.",
        default="6",
    ),
    Setting("cyclesPerMinute", value_types.integer(1), "How many cycles it may begin in a minute.", default="60"),
    Setting(
        "maxTokens",
        value_types.integer(1, nullable=True),
        "How many tokens one run may use, with the agents that it calls; null: any number.",
        default="null",
    ),
    Setting(
        "maxCost",
        value_types.number(0, nullable=True),
        "How many US dollars one run may cost, with the agents that it calls; null: any number.",
        default="null",
    ),
    Setting(
        "timeout",
        value_types.nullable(value_types.duration),
        "How long one run may take; null: any time.",
        default="null",
    ),
    Setting("maxDepth", value_types.integer(0), "How deep agents may call agents.", default="8"),
    Setting("inboxBatch", value_types.integer(1, 1000), "How many events of its inbox one cycle takes.", default="50"),
)

ROUTER = SectionType(
    RouterSettings, Setting("destinations", value_types.names, "The agents that a call can be handed to.")
)

WEBHOOK = SectionType(
    WebhookSettings,
    Setting("url", value_types.http_url, "Where each notification is posted to, as JSON.", required=True, secret=True),
    Setting("headers", value_types.string_map, "HTTP headers to send.", secret=True),
    shorthand="url",
)

SMTP = SectionType(
    SmtpSettings,
    Setting("host", value_types.name, "The mail server.", required=True),
    Setting("port", value_types.integer(1, 65535), "Its port; without it 25, 587 or 465, as `tls` says."),
    Setting("from", value_types.mail_address, "Whom mails come from.", attribute="sender", required=True),
    Setting("to", value_types.mail_addresses, "Whom mails go to.", required=True),
    Setting(
        "allowedRecipients", value_types.globs, "Whom agents may choose besides: addresses, or globs (`*@example.com`)."
    ),
    Setting("username", value_types.string, "The account to log in with.", secret=True),
    Setting("password", value_types.string, "Its password.", secret=True),
    Setting(
        "tls",
        value_types.choice("none", "starttls", "tls"),
        "How the connection is made safe: not at all, after a plain greeting, or from the start.",
        default="starttls",
    ),
)

NOTIFICATIONS = SectionType(
    NotificationSettings,
    Setting("webhook", WEBHOOK, "Post notifications to a URL."),
    Setting("smtp", SMTP, "Send notifications by mail."),
)

EMBEDDINGS = SectionType(
    EmbeddingSettings,
    Setting(
        "model",
        value_types.name,
        "The model that tells meanings apart: `openai:text-embedding-3-small`, `ollama:nomic-embed-text`; without a "
        "provider OpenAI's, or whoever is at `baseUrl`.",
        required=True,
    ),
    Setting(
        "baseUrl",
        value_types.http_url,
        "Where the API is, if not where the provider has it: all before `/embeddings`.",
    ),
    Setting("apiKey", value_types.string, "The key; without it the provider's own variable.", secret=True),
    Setting("headers", value_types.string_map, "HTTP headers to send.", secret=True),
    shorthand="model",
)


def _agents(value: Value) -> tuple[AgentEntry, ...]:
    if isinstance(value.data, Mapping):
        return tuple(entry for name, inner in value.items() if (entry := _entry(inner, name)) is not None)
    try:
        elements = value.elements()
    except InvalidValue:
        raise InvalidValue(agents.expected) from None
    return tuple(entry for inner in elements if (entry := _entry(inner, None)) is not None)


def _entry(value: Value, name: str | None) -> AgentEntry | None:
    """One entry; None where it is none, which is noted. What a definition says is read later, by itself."""
    data = value.data
    if isinstance(data, Mapping):
        return AgentEntry(at=value.path, name=name, is_definition=True)
    if not isinstance(data, str) or not data.strip():
        value.report_invalid("the path of an agent's file, or a mapping that describes it")
        return None
    if name is None and not ("/" in data or data.strip().lower().endswith(FILE_ENDINGS)):
        return AgentEntry(at=value.path, name=data.strip())
    try:
        return AgentEntry(at=value.path, name=name, file=value_types.resolve_path(value, data.strip()))
    except InvalidValue as wrong:
        value.report_invalid(str(wrong))
        return None


agents: ValueType[tuple[AgentEntry, ...]] = ValueType(
    "agents by name, or list of files, names and agents",
    "a mapping of agents by name, or a list of files, names and agents",
    _agents,
    fits_variable=False,
)

AGENT = SectionType(
    AgentSettings,
    Setting("agent", HEAD, "Who it is."),
    Setting("model", model, "What it thinks with; without it a model whose key is in the environment."),
    Setting("loop", LOOP, "How the model and its tools take turns."),
    Setting("consciousness", CONSCIOUSNESS, "How much of its past it has in mind."),
    Setting("limits", LIMITS, "What it may not exceed."),
    Setting("router", ROUTER, "Whom it may hand what it was asked to."),
    Setting("agents", agents, "The agents that it may call, by name; files and definitions as in the main file."),
    Setting("spaces", value_types.names, "The spaces that it is in from the start, by name; made if they are missing."),
    Setting("knowledge", value_types.paths, "Files and folders that `search_knowledge` looks into."),
    Setting("notifications", NOTIFICATIONS, "Its own ways to reach people; what it leaves out is as in the main file."),
)

SECTIONS: Mapping[str, SectionType[Any]] = {
    "agents.<name>": AGENT,
    "agents.<name>.agent": HEAD,
    "agents.<name>.model": MODEL,
    "agents.<name>.loop": LOOP,
    "agents.<name>.consciousness": CONSCIOUSNESS,
    "agents.<name>.limits": LIMITS,
    "router": ROUTER,
    "notifications": NOTIFICATIONS,
    "notifications.webhook": WEBHOOK,
    "notifications.smtp": SMTP,
    "embeddings": EMBEDDINGS,
}
"""The section of every record, as the documentation names it."""
