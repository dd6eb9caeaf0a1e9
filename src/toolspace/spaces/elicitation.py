"""What an MCP server asks of the user while one of its tools runs: a question to the people in the call's space."""

from __future__ import annotations

from typing import Any, Final

from toolspace.core.context import ToolContext
from toolspace.core.questions import ELICITATION, Answer, Form, read_answer
from toolspace.errors import ToolError
from toolspace.providers.mcp.callbacks import ASK_THE_CALLER, Callbacks, Question
from toolspace.spaces.call_host import CallRoom

_ATTEMPTS: Final = 3
"""How often people may answer with what does not fit the form."""


async def ask_the_space(question: Question, context: ToolContext | None) -> Answer:
    """Asks in the active space of the call, else its caller. Raises `ToolError` where nobody can be asked."""
    room = context.host if context is not None else None
    if context is None or not isinstance(room, CallRoom) or room.space_id is None:
        if context is None or context.questions is None:
            raise ToolError(
                f'the server "{question.server}" has a question, and nobody can be asked: '
                "make the call in a run that has entered a space, or from a client that takes questions"
            )
        assert ASK_THE_CALLER.elicit is not None
        return await ASK_THE_CALLER.elicit(question, context)
    form = Form(question.schema) if question.schema is not None else None
    asked: dict[str, Any] = {"message": question.message, "server": question.server}
    if question.url is not None:
        asked["url"] = question.url
    else:
        asked["requestedSchema"] = question.schema
    for attempt in range(1, _ATTEMPTS + 1):
        said = await room.ask(ELICITATION, asked, context, timeout=context.remaining_seconds)
        try:
            answer = read_answer(said)
            return answer if form is None else form.read(answer)
        except ToolError as error:
            if attempt == _ATTEMPTS:
                raise
            asked = {**asked, "error": str(error)}  # Asked once more, with what was wrong.
    raise AssertionError("the last attempt returns or raises")


ASK_THE_SPACE: Final = Callbacks(elicit=ask_the_space, sample=ASK_THE_CALLER.sample)
"""Leads a server's questions to the people around the call: for the toolspace of a gateway."""
