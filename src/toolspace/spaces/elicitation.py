"""What an MCP server asks of the user while one of its tools runs: a question to the people in the call's space."""

from __future__ import annotations

from typing import Any, Final

from toolspace.core.context import ToolContext
from toolspace.core.elicitation import ELICITATION_CALL, ElicitationForm, ElicitationResult, parse_elicitation_result
from toolspace.errors import ToolError
from toolspace.providers.mcp.callbacks import FORWARD_TO_CALLER, ElicitationRequest, McpCallbacks
from toolspace.spaces.call_host import GatewayCallHost

_ATTEMPTS: Final = 3
"""How often people may answer with what does not fit the form."""


async def ask_space(question: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
    """Asks in the active space of the call, else its caller. Raises `ToolError` where nobody can be asked."""
    room = context.host if context is not None else None
    if context is None or not isinstance(room, GatewayCallHost) or room.space_id is None:
        if context is None or context.caller_client is None:
            raise ToolError(
                f'the server "{question.server}" has a question, and nobody can be asked: '
                "make the call in a run that has entered a space, or from a client that takes questions"
            )
        assert FORWARD_TO_CALLER.elicit is not None
        return await FORWARD_TO_CALLER.elicit(question, context)
    form = ElicitationForm(question.schema) if question.schema is not None else None
    asked: dict[str, Any] = {"message": question.message, "server": question.server}
    if question.url is not None:
        asked["url"] = question.url
    else:
        asked["requestedSchema"] = question.schema
    for attempt in range(1, _ATTEMPTS + 1):
        said = await room.ask_space(ELICITATION_CALL, asked, context, timeout=context.remaining_seconds)
        try:
            answer = parse_elicitation_result(said)
            return answer if form is None else form.validate(answer)
        except ToolError as error:
            if attempt == _ATTEMPTS:
                raise
            asked = {**asked, "error": str(error)}  # Asked once more, with what was wrong.
    raise AssertionError("the last attempt returns or raises")


ASK_SPACE_MEMBERS: Final = McpCallbacks(elicit=ask_space, sample=FORWARD_TO_CALLER.sample)
"""Leads a server's questions to the people around the call: for the toolspace of a gateway."""
