"""Elicitation in a space: a question that an MCP server asks during a call goes to the people in the call's space."""

from __future__ import annotations

from typing import Any, Final

from toolspace.core.tool_context import (
    ELICITATION_CALL,
    ElicitationForm,
    ElicitationResult,
    ToolContext,
    parse_elicitation_result,
)
from toolspace.errors import ToolError
from toolspace.providers.mcp.server_spec import FORWARD_TO_CALLER, ElicitationRequest, McpCallbacks
from toolspace.spaces.call_context import GatewayCallHost

_ATTEMPTS: Final = 3
"""How often people may submit an answer that does not match the form."""


async def ask_space(question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
    """Asks the members of the call's space; without a space, the caller. Raises `ToolError` if nobody can be asked."""
    host = context.host if context is not None else None
    if context is None or not isinstance(host, GatewayCallHost) or host.space_id is None:
        if context is None or context.caller_client is None:
            raise ToolError(
                f'the server "{question.server}" has a question, and nobody can be asked: '
                "make the call in a run that has entered a space, or from a client that takes questions"
            )
        assert FORWARD_TO_CALLER.elicit is not None
        return await FORWARD_TO_CALLER.elicit(question, context)
    form = ElicitationForm(question.schema) if question.schema is not None else None
    arguments: dict[str, Any] = {"message": question.message, "server": question.server}
    if question.url is not None:
        arguments["url"] = question.url
    else:
        arguments["requestedSchema"] = question.schema
    for attempt in range(1, _ATTEMPTS + 1):
        response = await host.ask_space(ELICITATION_CALL, arguments, context, timeout=context.remaining_seconds)
        try:
            answer = parse_elicitation_result(response)
            return answer if form is None else form.validate(answer)
        except ToolError as error:
            if attempt == _ATTEMPTS:
                raise
            arguments = {**arguments, "error": str(error)}  # Asks again, and says what was wrong.
    raise AssertionError("the last attempt returns or raises")


ASK_SPACE_MEMBERS: Final = McpCallbacks(elicit=ask_space, sample=FORWARD_TO_CALLER.sample)
"""Asks the people around a call: for the toolspace of a gateway."""
