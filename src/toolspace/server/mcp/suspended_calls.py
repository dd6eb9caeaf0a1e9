"""Calls that wait for their client between two requests, which is how the stateless era asks. Knows no HTTP.

A call that asks goes on running; its request is answered with the questions and a state. The client sends the request
again with the answers and the state, and gets what the same call says next. No call ever runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Hashable, Mapping
from typing import Any, NamedTuple, Self, TypeVar

import mcp_types as types
from mcp_types import methods
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import BaseModel, ValidationError

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.result import ToolResult
from toolspace.errors import ToolCanceledError, ToolError, ToolLimitError
from toolspace.orchestrator.call import Arguments
from toolspace.server.mcp.elicitation import ClientAbilities, ClientQuestions, ClientRequest
from toolspace.server.mcp.service import McpService, with_questions

EXPIRY_SECONDS = 300.0
"""How long a call is kept for the answer of its client. The time-out of its tool holds besides."""
MAX_SUSPENDED = 1_000
MAX_PER_CALLER = 50
_MOST_QUESTIONS = 16
_STATE_BYTES = 32
ResultT = TypeVar("ResultT", bound=BaseModel)


class InvalidRequestState(Exception):
    """The client gave a state that is not, or not any more, that of a call of its own."""


class MissingClientCapability(Exception):
    """The call failed because its client did not say that it can be asked."""

    def __init__(self, required: types.ClientCapabilities) -> None:
        self.data: dict[str, Any] = {"requiredCapabilities": required.model_dump(by_alias=True, exclude_none=True)}
        super().__init__("the tool asks something that the client did not declare a capability for")


class CallIdentity(NamedTuple):
    """What is called and by whom. A state is good for nothing else."""

    context: ToolContext | None
    name: str
    arguments: Arguments

    @property
    def caller(self) -> tuple[str | None, ...]:
        who = self.context
        if who is None:
            return ()
        return who.user_id, who.agent_entity_id, who.agent_id, who.session_id, who.space_id

    @property
    def digest(self) -> bytes:
        """However the arguments are written."""
        given = json_text.parse_arguments(self.arguments)
        return hashlib.sha256(json_text.encode_canonical([self.caller, self.name, given])).digest()


class InputRequired(NamedTuple):
    """In place of a result: what the client has to answer first."""

    wire: dict[str, Any]


class _Question(NamedTuple):
    request: ClientRequest
    answer: type[BaseModel]
    said: asyncio.Future[Any]


class _Call:
    """One call, with what it asks just now."""

    def __init__(
        self, id: str, abilities: ClientAbilities, *, client: Hashable | None, given: Mapping[str, Any]
    ) -> None:
        self.id = id
        self.caller: tuple[str | None, ...] = ()
        self.digest = b""
        """Of what it was called with. The arguments themselves may be large, and are not kept."""
        self.questions = ClientQuestions(abilities, self._ask, client=client)
        self.expiry: asyncio.TimerHandle | None = None
        self._given = dict(given)
        """Answers that came before the questions, by the questions' names."""
        self._open: dict[str, _Question] = {}
        self._asked = 0
        self._changed: asyncio.Future[None] | None = None
        self.task: asyncio.Task[ToolResult] | None = None

    def start(self, work: Awaitable[ToolResult]) -> asyncio.Task[ToolResult]:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(self._ended)
        return self.task

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def settle(self) -> None:
        """Returns when the call has ended, or waits for an answer."""
        while not self.is_over and not self._open:
            self._changed = asyncio.get_running_loop().create_future()
            await self._changed

    def requests(self) -> dict[str, Any]:
        return {
            key: {"params": {}, **one.request.model_dump(by_alias=True, mode="json", exclude_none=True)}
            for key, one in self._open.items()
        }

    def take(self, answers: Mapping[str, Any]) -> None:
        """Hands answers on. What is no answer to its question leaves it open, so that it is asked again."""
        for key, question in list(self._open.items()):
            if key not in answers:
                continue
            try:
                said = question.answer.model_validate(answers[key], by_name=False)
            except ValidationError:
                continue
            del self._open[key]
            if not question.said.done():
                question.said.set_result(said)

    def refuse(self, reason: ToolError) -> None:
        for question in self._open.values():
            if not question.said.done():
                question.said.set_exception(reason)
        self._open.clear()

    async def _ask(self, request: ClientRequest, answer: type[ResultT], key: str | None) -> ResultT:
        self._asked += 1
        key = key if key is not None and key not in self._open else f"question-{self._asked}"
        if key in self._given:
            try:
                return answer.model_validate(self._given.pop(key), by_name=False)
            except ValidationError:
                pass  # Then it is asked.
        if len(self._open) >= _MOST_QUESTIONS:
            raise ToolError(f"a call may ask at most {_MOST_QUESTIONS} questions at once")
        question = _Question(request, answer, asyncio.get_running_loop().create_future())
        self._open[key] = question
        self._wake()
        try:
            return await question.said
        finally:
            if self._open.get(key) is question:
                del self._open[key]

    def _ended(self, task: asyncio.Task[ToolResult]) -> None:
        if not task.cancelled():
            task.exception()  # Looked at: its client may never come back for it.
        self.questions.close()
        self._wake()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class SuspendedCalls:
    """The calls of one endpoint that wait for their clients. Ends them when it is left.

    `client` is the name of its only one, where it cannot have more.
    """

    def __init__(self, service: McpService, *, client: Hashable | None = None) -> None:
        self._service = service
        self._client = client
        self._parked: dict[str, _Call] = {}
        self._ending: set[asyncio.Task[ToolResult]] = set()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for state in list(self._parked):
            self._expire(state)
        if self._ending:
            await asyncio.wait(self._ending)

    async def start(
        self, subject: CallIdentity, call_id: str, abilities: ClientAbilities, given: Mapping[str, Any] | None = None
    ) -> ToolResult | InputRequired:
        """Runs a call until it ends or asks. Raises `UnknownTool`, `MissingCapability`."""
        client = self._client or (subject.caller if any(subject.caller) else None)
        call = _Call(call_id, abilities, client=client, given=given or {})
        context = with_questions(subject.context, call.questions)
        work = self._service.call(subject.name, subject.arguments, context=context, call_id=call_id)
        if not any(abilities):  # It cannot be asked, so it need not outlive its request.
            try:
                return _judged(call, await work)
            finally:
                call.questions.close()
        call.start(work)
        return await self._follow(call, subject)

    def get_call_id(self, state: str, subject: CallIdentity) -> str:
        """The id of the call that a state stands for. Raises `WrongState`."""
        return self._find(state, subject).id

    async def resume(self, state: str, subject: CallIdentity, answers: Mapping[str, Any]) -> ToolResult | InputRequired:
        """Goes on with a call that asked. Raises `WrongState`, and what `begin` does."""
        call = self._find(state, subject)
        self._release(state)
        call.take(answers)
        return await self._follow(call, subject)

    async def _follow(self, call: _Call, subject: CallIdentity) -> ToolResult | InputRequired:
        assert call.task is not None
        while True:
            try:
                await call.settle()
            except asyncio.CancelledError:
                self._service.cancel(call.id)
                await asyncio.wait((call.task,))
                raise
            if call.is_over:
                return _judged(call, call.task.result())
            try:
                return self._park(call, subject)
            except ToolError as reason:
                call.refuse(reason)

    def _check_room(self, subject: CallIdentity) -> None:
        if not self._is_open:
            raise ToolCanceledError("the server is stopping", executed=True)
        own = sum(one.caller == subject.caller for one in self._parked.values())
        if len(self._parked) >= MAX_SUSPENDED or own >= MAX_PER_CALLER:
            reason = "too many calls wait for the answers of their clients; try again later"
            raise ToolLimitError(reason, executed=True)

    def _park(self, call: _Call, subject: CallIdentity) -> InputRequired:
        self._check_room(subject)
        # All that a client can know of a call: nothing to forge, and nothing left of it once it was used.
        state = secrets.token_urlsafe(_STATE_BYTES)
        wire = {"resultType": "input_required", "inputRequests": call.requests(), "requestState": state}
        try:
            asked = InputRequired(methods.serialize_server_result("tools/call", LATEST_MODERN_VERSION, wire))
        except ValidationError:
            raise ToolError(
                'the question cannot be asked over MCP: its schema needs type "object" and properties'
            ) from None
        call.caller, call.digest = subject.caller, subject.digest
        self._parked[state] = call
        call.expiry = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._expire, state)
        return asked

    def _find(self, state: str, subject: CallIdentity) -> _Call:
        call = self._parked.get(state)
        if call is None or call.digest != subject.digest:
            raise InvalidRequestState("Invalid or expired requestState")
        return call

    def _release(self, state: str) -> _Call:
        call = self._parked.pop(state)
        if call.expiry is not None:
            call.expiry.cancel()
        return call

    def _expire(self, state: str) -> None:
        call = self._release(state)
        if call.task is not None and not call.task.done():
            self._ending.add(call.task)
            call.task.add_done_callback(self._ending.discard)
            self._service.cancel(call.id)


def _judged(call: _Call, result: ToolResult) -> ToolResult:
    if not result.ok and call.questions.missing_capability is not None:
        raise MissingClientCapability(call.questions.missing_capability)
    return result
