"""Runs agents for programs: continues conversations, checks the type of the answer, and streams events.

`Toolspace.run_agent` and `Toolspace.stream_agent` use it. `subagents.py` runs the request itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from toolspace.agents.agent_run import AgentRun, find_agent_run
from toolspace.agents.history import add_missing_results, shorten
from toolspace.agents.loop_hooks import LoopObserver
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.structured_output import OutputCheck
from toolspace.agents.subagents import AgentRequest, AgentResult, OpenConversation, error_result, run_request
from toolspace.core import json_text
from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import ModelListener, ModelStreamPart, ModelTurn, Turn, convert_turns, encode_turns
from toolspace.core.tool_context import ToolContext
from toolspace.errors import StorageError, ToolError, ToolspaceError
from toolspace.orchestrator.call import current_call

_MAX_CONVERSATION_BYTES = 16 * 1024 * 1024
"""A longer conversation is shortened before it is saved."""


class AgentRunOptions(TypedDict, total=False):
    """The options of `run_agent` and `stream_agent` besides the output type."""

    session: str | None
    """The id of a conversation to continue, or to start."""
    history: Iterable[Turn | Mapping[str, Any]] | None
    """The turns of an earlier result, to continue them."""
    context: ToolContext | None
    """Who asks, and what the tools may do."""
    max_steps: int | None
    """None: the agent's own setting."""


class RunOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`AgentRunOptions` with their defaults, and the output type."""

    session: str | None = None
    history: Iterable[Turn | Mapping[str, Any]] | None = None
    output_type: Any = None
    context: ToolContext | None = None
    max_steps: int | None = None


class ModelOutputListener(LoopObserver):
    """Passes the model's output to a function."""

    def __init__(self, listen: ModelListener) -> None:
        self._listen = listen

    def on_model_output(self, part: ModelStreamPart) -> None:
        self._listen(part)


async def run_agent(
    agents: AgentRegistry, name: str, prompt: str, options: RunOptions, observer: LoopObserver | None = None
) -> AgentResult[Any]:
    """Runs an agent for a program. Errors are in the result; raises `ToolNotFoundError` if there is no such agent, and
    `ToolspaceError` if the options contradict each other.

    Called in a tool that an agent has called, the new run is part of that agent's run.
    """
    history = _read_history(options)
    output = OutputCheck(options.output_type) if options.output_type not in (None, str) else None
    agents.get(name)
    call = current_call.get()
    caller = call.context if call is not None else ToolContext()
    request = AgentRequest(
        prompt=json_text.valid_text(prompt),
        caller=caller if options.context is None else options.context.with_defaults(caller),
        parent=find_agent_run(caller),
        history=history,
        observer=observer,
        output=output,
        max_steps=options.max_steps,
    )
    try:
        if request.parent is not None:
            request.parent.check_depth(name)
    except ToolError as error:
        return error_result(name, error)
    if options.session is None:
        return await run_request(agents, name, request)
    return await _run_in_session(agents, name, request, options.session)


def _read_history(options: RunOptions) -> tuple[Turn, ...]:
    if options.session is not None and options.history is not None:
        raise ToolspaceError("session and history are both given; give one: a session has its own history")
    if options.session is not None and not options.session:
        raise ToolspaceError("session is empty; give the id of a conversation, or None")
    try:
        return add_missing_results(convert_turns(options.history or ()))
    except ValueError as error:
        raise ToolspaceError(f"history: {error}; give the turns of an AgentResult") from None


# Sessions


async def _run_in_session(agents: AgentRegistry, name: str, request: AgentRequest, session: str) -> AgentResult[Any]:
    """Continues the conversation of a session. A run that is under way there ends first."""
    context = request.caller.with_defaults(agents.shared_tools.context)
    owner = context.principal
    _check_nesting(request.parent, session, owner)
    store = agents.conversations
    try:
        async with _open_conversation(store, session, owner) as (conversation, history):
            caller = request.caller
            if context.session_id is None:  # So that its later runs can read what its tools stored.
                caller = ToolContext(session_id=_outputs_session(session, owner)).with_defaults(caller)
            request = msgspec.structs.replace(request, caller=caller, history=history, conversation=conversation)
            try:
                result = await run_request(agents, name, request)
            except BaseException:  # Cancelled: what happened until then is part of the conversation.
                with contextlib.suppress(StorageError):
                    await _run_to_end(_save(store, conversation, history))
                raise
            try:
                await _run_to_end(_save(store, conversation, history))
            except StorageError as error:
                message = f"the answer is not part of the session: {error}"
                return msgspec.structs.replace(
                    result, ok=False, output=None, error=message, error_kind="internal_error"
                )
            return result
    except StorageError as error:
        return error_result(name, error)


async def _run_to_end(work: Coroutine[Any, Any, None]) -> None:
    """Awaits work; if the caller is cancelled, only after the work has ended."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


@contextlib.asynccontextmanager
async def _open_conversation(
    store: ConversationStore, session: str, owner: str
) -> AsyncGenerator[tuple[OpenConversation, tuple[Turn, ...]]]:
    async with store.lock(session, owner=owner):
        history = await store.load(session, owner=owner)
        conversation = OpenConversation(session, owner)
        try:
            yield conversation, history
        finally:
            conversation.is_open = False


def _check_nesting(run: AgentRun | None, session: str, owner: str) -> None:
    """Raises if a run that waits for this one continues the same conversation: both would wait forever."""
    for ancestor in run.lineage() if run is not None else ():
        conversation = ancestor.conversation
        if not isinstance(conversation, OpenConversation) or not conversation.is_open:
            continue
        if (conversation.session, conversation.owner) == (session, owner):
            raise ToolspaceError(
                f'session "{session}" is in use by the run of the agent "{ancestor.name}" that this run is part of; '
                "use another session"
            )


async def _save(store: ConversationStore, conversation: OpenConversation, history: Sequence[Turn]) -> None:
    """Saves the conversation. If the model has had no turn, the old one stays: the program may ask again."""
    old_turns = set(map(id, history))
    if not any(isinstance(turn, ModelTurn) and id(turn) not in old_turns for turn in conversation.turns):
        return
    turns = list(add_missing_results(conversation.turns))
    while len(encode_turns(turns)) > _MAX_CONVERSATION_BYTES and shorten(turns, keep=2):
        pass
    await store.save(conversation.session, turns, owner=conversation.owner)


def _outputs_session(session: str, owner: str) -> str:
    digest = hashlib.sha256(f"{len(owner)}:{owner}{session}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"conversation-{digest[:32]}"
