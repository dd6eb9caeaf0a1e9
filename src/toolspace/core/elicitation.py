"""Requests of a running tool to its caller: elicitation, sampling and roots, as MCP defines them.

Tools use them through `ToolContext`; the MCP server and clients implement `CallerClient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.validation import compile_schema, find_issues
from toolspace.errors import ToolError

ELICITATION_CALL: Final = "elicitation"
"""The name of the call that shows a question in a space. A frontend has a component for it."""
_MAX_ISSUES = 5
_EXPECTED_RESULT: Final = '{"action": "accept", "content": {…}}, or "decline" or "cancel" as the action'


class ElicitationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The user's reaction to a question; `content` if the user accepted."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any] | None = None


def parse_elicitation_result(data: object) -> ElicitationResult:
    """Returns the result that people in a space submitted. Raises `ToolError` if it is none."""
    try:
        return msgspec.convert(data, ElicitationResult)
    except (msgspec.ValidationError, TypeError):
        raise ToolError(
            f"the answer to a question is {_EXPECTED_RESULT}; this was {json_text.describe(data)}"
        ) from None


class CallerClient(Protocol):
    """Sends requests of a running call to its caller. Every method raises `ToolError` if the caller cannot be asked.

    `key` identifies a request, for callers that store results by name.
    """

    async def elicit(
        self,
        message: str,
        *,
        schema: Mapping[str, Any] | None = None,
        url: str | None = None,
        key: str | None = None,
    ) -> ElicitationResult:
        """Asks the user to fill in `schema`, an object of flat fields, or to open the page `url`."""
        ...

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        """Asks the caller's model. Takes `{messages, maxTokens, …}`, returns `{role, content, model, …}`."""
        ...

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        """Returns the folders that the caller works in, as URIs."""
        ...


class ElicitationForm:
    """A form for the user. Its schema is compiled before it is shown, and validates what comes back."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._validator = compile_schema(schema, owner="a question to the user")

    def validate(self, result: ElicitationResult) -> ElicitationResult:
        """Returns the result. Raises `ToolError` if its content does not fit the form: clients are not trusted."""
        if result.action != "accept":
            return ElicitationResult(action=result.action)
        content = dict(result.content or {})
        try:
            is_valid = self._validator.is_valid(content)
            issues = [] if is_valid else [str(issue) for issue in find_issues(self._validator, content)]
        except (ValueError, TypeError) as error:
            issues = [str(error)]
        if issues:
            raise ToolError(f"the user's answer does not fit the question: {'; '.join(issues[:_MAX_ISSUES])}")
        return ElicitationResult(action="accept", content=content)
