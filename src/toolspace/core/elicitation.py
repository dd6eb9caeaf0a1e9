"""What a tool may ask of whoever called it: the user, their model, their folders. Who answers is not known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.validation import compile_schema, find_issues
from toolspace.errors import ToolError

_SHOWN = 5


class ElicitationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What the user said: `content` where they accepted."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any] | None = None


ELICITATION_CALL: Final = "elicitation"
"""The name of the call that shows a question in a space; a frontend has a component for it."""
_SHAPE: Final = '{"action": "accept", "content": {…}}, or "decline" or "cancel" as the action'


def parse_elicitation_result(said: object) -> ElicitationResult:
    """What people in a space answered. Raises `ToolError` where it is no answer."""
    try:
        return msgspec.convert(said, ElicitationResult)
    except (msgspec.ValidationError, TypeError):
        raise ToolError(f"the answer to a question is {_SHAPE}; this was {json_text.describe(said)}") from None


class CallerClient(Protocol):
    """Leads questions of a running call to its caller. Each raises a `ToolError` where the caller cannot be asked.

    `key` is the name of a question, for callers that keep answers by name.
    """

    async def elicit(
        self,
        message: str,
        *,
        schema: Mapping[str, Any] | None = None,
        url: str | None = None,
        key: str | None = None,
    ) -> ElicitationResult:
        """Asks the user to fill in `schema`, an object of flat fields; or to open a page, where `url` is given."""
        ...

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        """Asks the caller's model: `{messages, maxTokens, …}` as MCP has it; gives `{role, content, model, …}`."""
        ...

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        """The folders that the caller works in, as URIs."""
        ...


class ElicitationForm:
    """A form for the user, checked before it is shown: what comes back fits it, or is refused."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._check = compile_schema(schema, owner="a question to the user")

    def validate(self, answer: ElicitationResult) -> ElicitationResult:
        """The answer, unless it is one that the form does not allow. Clients need not be careful, or honest."""
        if answer.action != "accept":
            return ElicitationResult(action=answer.action)
        content = dict(answer.content or {})
        try:
            issues = [] if self._check.is_valid(content) else [str(one) for one in find_issues(self._check, content)]
        except (ValueError, TypeError) as error:
            issues = [str(error)]
        if issues:
            raise ToolError(f"the user's answer does not fit the question: {'; '.join(issues[:_SHOWN])}")
        return ElicitationResult(action="accept", content=content)
