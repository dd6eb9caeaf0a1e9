"""The section `hooks`: what runs before and after calls. Used by `configuration`. Loads no function."""

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from toolspace.config.tool_lists import ToolPatterns
from toolspace.config.validation import (
    SECRET,
    AlreadyReported,
    InvalidValue,
    Section,
    SectionType,
    Value,
    read_value,
    value_type,
)
from toolspace.config.value_types import Duration
from toolspace.core.hooks import HOOK_TIMEOUT_SECONDS, FailureMode, HookPoint
from toolspace.core.names import did_you_mean

IncludedHook = Literal["mask_secrets", "mask_personal_data"]
INCLUDED_HOOKS: tuple[IncludedHook, ...] = get_args(IncludedHook)
_URL = re.compile(r"https?://", re.IGNORECASE)
_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_FUNCTION = re.compile(rf"(?:.+\.py|{_NAME}):{_NAME}")
_EXPECTED = f"module:function, ./file.py:function, the URL of a webhook, {' or '.join(INCLUDED_HOOKS)}"


@value_type("string", _EXPECTED, {"type": "string"})
def _hook_function(value: Value) -> str:
    text = value.data.strip() if isinstance(value.data, str) else ""
    if _URL.match(text):
        if not urlsplit(text).hostname:
            raise InvalidValue(_EXPECTED)
        return text
    if text not in INCLUDED_HOOKS and not _FUNCTION.fullmatch(text):
        raise InvalidValue(_EXPECTED, did_you_mean(text, INCLUDED_HOOKS))
    return text


class HookSettings(Section, frozen=True, kw_only=True):
    """A hook. A function or webhook sees the calls of some tools, and may change or deny them."""

    on: Annotated[HookPoint, "When it runs: before a call, after it succeeded, or on its error."]
    use: Annotated[
        str,
        _hook_function,
        "What runs: `module:function`, `./file.py:function`, the URL of a webhook, `mask_secrets` or "
        "`mask_personal_data`.",
    ]
    tools: Annotated[ToolPatterns, "The tools whose calls it sees; without it all."] = ("*",)
    on_failure: Annotated[
        FailureMode,
        "What happens to the call if the hook fails or takes too long: `open` lets it pass, `closed` denies it.",
    ] = "closed"
    timeout: Annotated[Duration, "How long the hook may take."] = HOOK_TIMEOUT_SECONDS
    headers: Annotated[Mapping[str, str], "Headers of the requests to a webhook.", SECRET] = {}

    @property
    def is_webhook(self) -> bool:
        return _URL.match(self.use) is not None


_hook_section = SectionType(HookSettings)


@value_type(
    "list of hooks",
    "a list of hooks such as {on: after, use: mask_secrets}",
    {"type": "array", "items": _hook_section},
    fits_variable=False,
)
def _hooks(value: Value) -> tuple[HookSettings, ...]:
    if not isinstance(value.data, list):
        raise InvalidValue("a list of hooks such as {on: after, use: mask_secrets}")
    hooks: list[HookSettings] = []
    for inner in value.elements():
        with suppress(AlreadyReported):
            hook = read_value(_hook_section, inner)
            if hook.use in INCLUDED_HOOKS and hook.on == "before":
                inner.child("on", hook.on).report(f"{hook.use} masks results; write on: after, or on: error")
            if hook.headers and not hook.is_webhook:
                inner.child("headers", hook.headers).report("only a webhook has headers")
            hooks.append(hook)
    return tuple(hooks)


Hooks = Annotated[tuple[HookSettings, ...], _hooks]
