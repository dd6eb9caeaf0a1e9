"""Asks the MCP client that made a call: elicitation, sampling, roots. Knows no HTTP.

`McpCallerClient` is the `caller_client` in the context of a call over MCP. In the handshake era `SendInSession` sends
its questions as requests of the server. The stateless era has no such requests, so `SuspendedCalls` keeps a call that
asks running, and its request is answered with the questions and a state. The client sends the request again with the
answers and the state, and gets what the same call returns next. No call runs twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import uuid
from collections.abc import Awaitable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar, cast

import mcp_types as types
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import methods
from mcp_types.version import LATEST_MODERN_VERSION
from pydantic import BaseModel, ValidationError

from toolspace.core import json_text
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ElicitationResult, ToolContext
from toolspace.errors import ToolCanceledError, ToolError, ToolLimitError
from toolspace.orchestrator.call import Arguments
from toolspace.server.mcp.tool_service import McpService, with_caller_client

ClientRequest = types.ElicitRequest | types.CreateMessageRequest | types.ListRootsRequest
ResultT = TypeVar("ResultT", bound=BaseModel)
STDIO_CLIENT = "stdio"
"""Identifies the only client of a stdio server."""
EXPIRY_SECONDS = 300.0
"""How long a suspended call waits for its client. The tool's own timeout applies as well."""
MAX_SUSPENDED = 1_000
MAX_PER_CALLER = 50
_MAX_QUESTIONS = 16
_STATE_BYTES = 32
_EMPTY_FORM: dict[str, Any] = {"type": "object", "properties": {}}
"""The form of a question that the user only accepts or declines."""
_FORM = types.ClientCapabilities(elicitation=types.ElicitationCapability(form=types.FormElicitationCapability()))
_URL = types.ClientCapabilities(elicitation=types.ElicitationCapability(url=types.UrlElicitationCapability()))
_SAMPLING = types.ClientCapabilities(sampling=types.SamplingCapability())
_TOOLS = types.ClientCapabilities(sampling=types.SamplingCapability(tools=types.SamplingToolsCapability()))
_ROOTS = types.ClientCapabilities(roots=types.RootsCapability())


class InvalidRequestState(Exception):
    """The client sent a state that belongs to no suspended call of its own."""


class MissingClientCapability(Exception):
    """The call failed because its client does not support a question that it asked."""

    def __init__(self, required: types.ClientCapabilities) -> None:
        self.data: dict[str, Any] = {"requiredCapabilities": required.model_dump(by_alias=True, exclude_none=True)}
        super().__init__("the tool asks something that the client did not declare a capability for")


class ClientAbilities(NamedTuple):
    """The requests that a client declares to support."""

    form: bool = False
    url: bool = False
    sample: bool = False
    sample_with_tools: bool = False
    roots: bool = False

    @classmethod
    def from_capabilities(cls, capabilities: types.ClientCapabilities | None) -> ClientAbilities:
        if capabilities is None:
            return NO_ABILITIES
        elicitation, sampling = capabilities.elicitation, capabilities.sampling
        return cls(
            # Before URL elicitation existed, an empty capability meant forms.
            form=elicitation is not None and (elicitation.form is not None or elicitation.url is None),
            url=elicitation is not None and elicitation.url is not None,
            sample=sampling is not None,
            sample_with_tools=sampling is not None and sampling.tools is not None,
            roots=capabilities.roots is not None,
        )


NO_ABILITIES = ClientAbilities()


class SendToClient(Protocol):
    """Sends one request to the client and waits for the result. Raises `ToolError` if there will be none."""

    async def __call__(self, request: ClientRequest, result_type: type[ResultT], key: str | None) -> ResultT: ...


class McpCallerClient:
    """Implements `CallerClient` for a call over MCP.

    Two are equal if they certainly reach the same client. An MCP server behind Toolspace that does not say for which
    call it asks can then be answered.
    """

    def __init__(self, abilities: ClientAbilities, send: SendToClient, *, client: Hashable | None = None) -> None:
        self._abilities = abilities
        self._send = send
        self._client = client if client is not None else object()
        self.missing_capability: types.ClientCapabilities | None = None
        """The capability that the client did not declare, but a question needed."""

    def __eq__(self, value: object) -> bool:
        return isinstance(value, McpCallerClient) and self._client == value._client

    def __hash__(self) -> int:
        return hash(self._client)

    def close(self) -> None:
        """Ends questions after the call, and releases what the call referred to."""
        self._send = _refuse_after_call

    async def elicit(
        self,
        message: str,
        *,
        schema: Mapping[str, Any] | None = None,
        url: str | None = None,
        key: str | None = None,
    ) -> ElicitationResult:
        if url is not None:
            self._require("URL elicitation", self._abilities.url, _URL)
            params = types.ElicitRequestURLParams(message=message, url=url, elicitation_id=str(uuid.uuid4()))
        else:
            self._require("elicitation", self._abilities.form, _FORM)
            form = dict(schema) if schema is not None else _EMPTY_FORM
            params = types.ElicitRequestFormParams(message=message, requested_schema=form)
        result = await self._send(types.ElicitRequest(params=params), types.ElicitResult, key)
        return ElicitationResult(action=result.action, content=cast("Mapping[str, Any] | None", result.content))

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        try:
            sampling_params = types.CreateMessageRequestParams.model_validate(dict(params), by_name=False)
        except ValidationError as error:
            raise ToolError(f"the sampling request is invalid: {_first_problem(error)}") from None
        self._require("sampling", self._abilities.sample, _SAMPLING)
        result_type = types.CreateMessageResult
        if sampling_params.tools is not None or sampling_params.tool_choice is not None:
            self._require("sampling with tools", self._abilities.sample_with_tools, _TOOLS)
            result_type = types.CreateMessageResultWithTools
        result = await self._send(types.CreateMessageRequest(params=sampling_params), result_type, key)
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        self._require("roots", self._abilities.roots, _ROOTS)
        result = await self._send(types.ListRootsRequest(), types.ListRootsResult, key)
        return [str(root.uri) for root in result.roots]

    def _require(self, feature: str, is_supported: bool, capability: types.ClientCapabilities) -> None:
        if not is_supported:
            self.missing_capability = capability
            raise ToolError(f"the caller cannot be asked: the MCP client does not support {feature}")


class SendInSession:
    """Sends a question in the handshake era: as a request of the server, on the stream of the call."""

    def __init__(self, session: ServerSession, request_id: types.RequestId | None) -> None:
        self._session = session
        self._metadata = ServerMessageMetadata(related_request_id=request_id)

    async def __call__(self, request: ClientRequest, result_type: type[ResultT], key: str | None) -> ResultT:
        try:
            return await self._session.send_request(request, result_type, metadata=self._metadata)
        except MCPError as error:
            raise ToolError(f"the MCP client did not answer {request.method}: {error.message}"[:1_000]) from None
        except ValidationError as error:
            detail = f"the MCP client's answer to {request.method} is invalid: {_first_problem(error)}"
            raise ToolError(detail) from None


def create_unsupported_client(client: Hashable) -> McpCallerClient:
    """Creates the caller client for a client that supports no questions. It only explains that."""
    return McpCallerClient(NO_ABILITIES, _refuse_after_call, client=client)


class CallIdentity(NamedTuple):
    """Caller, tool and arguments of a call. A state is valid for the same identity only."""

    context: ToolContext | None
    name: str
    arguments: Arguments

    @property
    def caller(self) -> tuple[str | None, ...]:
        context = self.context
        if context is None:
            return ()
        return context.user_id, context.agent_entity_id, context.agent_id, context.session_id, context.space_id

    @property
    def digest(self) -> bytes:
        """The same for equal arguments, however they are formatted."""
        arguments = json_text.parse_arguments(self.arguments)
        return hashlib.sha256(json_text.encode_canonical([self.caller, self.name, arguments])).digest()


class InputRequired(NamedTuple):
    """Returned instead of a result: the questions that the client has to answer first."""

    wire: dict[str, Any]


class SuspendedCalls:
    """The suspended calls of one endpoint. Leaving its `async with` cancels them.

    `client` identifies the only client of an endpoint that cannot have more than one.
    """

    def __init__(self, service: McpService, *, client: Hashable | None = None) -> None:
        self._service = service
        self._client = client
        self._calls: dict[str, _Call] = {}
        """Suspended calls by state."""
        self._ending_tasks: set[asyncio.Task[ToolResult]] = set()
        self._is_open = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        for state in list(self._calls):
            self._expire(state)
        if self._ending_tasks:
            await asyncio.wait(self._ending_tasks)

    async def start(
        self,
        identity: CallIdentity,
        call_id: str,
        abilities: ClientAbilities,
        early_answers: Mapping[str, Any] | None = None,
    ) -> ToolResult | InputRequired:
        """Runs a call until it ends or asks. Raises `UnknownToolError`, `MissingClientCapability`."""
        client = self._client or (identity.caller if any(identity.caller) else None)
        call = _Call(call_id, abilities, client=client, early_answers=early_answers or {})
        context = with_caller_client(identity.context, call.caller_client)
        work = self._service.call(identity.name, identity.arguments, context=context, call_id=call_id)
        if not any(abilities):  # The client cannot be asked, so the call need not outlive its request.
            try:
                return _check_result(call, await work)
            finally:
                call.caller_client.close()
        call.start(work)
        return await self._wait_for_call(call, identity)

    def get_call_id(self, state: str, identity: CallIdentity) -> str:
        """Returns the id of a suspended call. Raises `InvalidRequestState`."""
        return self._get(state, identity).id

    async def resume(
        self, state: str, identity: CallIdentity, answers: Mapping[str, Any]
    ) -> ToolResult | InputRequired:
        """Continues a suspended call. Raises `InvalidRequestState`, and the same as `start`."""
        call = self._get(state, identity)
        self._remove(state)
        call.answer(answers)
        return await self._wait_for_call(call, identity)

    async def _wait_for_call(self, call: _Call, identity: CallIdentity) -> ToolResult | InputRequired:
        assert call.task is not None
        while True:
            try:
                await call.wait()
            except asyncio.CancelledError:
                self._service.cancel(call.id)
                await asyncio.wait((call.task,))
                raise
            if call.task.done():
                return _check_result(call, call.task.result())
            try:
                return self._suspend(call, identity)
            except ToolError as error:
                call.fail_questions(error)

    def _suspend(self, call: _Call, identity: CallIdentity) -> InputRequired:
        """Returns the questions of a call. Raises `ToolError` if they cannot be asked."""
        if not self._is_open:
            raise ToolCanceledError("the server is stopping", executed=True)
        caller_count = sum(other_call.caller == identity.caller for other_call in self._calls.values())
        if len(self._calls) >= MAX_SUSPENDED or caller_count >= MAX_PER_CALLER:
            reason = "too many calls wait for the answers of their clients; try again later"
            raise ToolLimitError(reason, executed=True)
        # Random and used once: a client learns nothing else of a call, and can forge nothing.
        state = secrets.token_urlsafe(_STATE_BYTES)
        wire = {"resultType": "input_required", "inputRequests": call.encode_questions(), "requestState": state}
        try:
            outcome = InputRequired(methods.serialize_server_result("tools/call", LATEST_MODERN_VERSION, wire))
        except ValidationError:
            detail = 'the question cannot be asked over MCP: its schema needs type "object" and properties'
            raise ToolError(detail) from None
        call.caller, call.digest = identity.caller, identity.digest
        self._calls[state] = call
        call.expiry = asyncio.get_running_loop().call_later(EXPIRY_SECONDS, self._expire, state)
        return outcome

    def _get(self, state: str, identity: CallIdentity) -> _Call:
        call = self._calls.get(state)
        if call is None or call.digest != identity.digest:
            raise InvalidRequestState("Invalid or expired requestState")
        return call

    def _remove(self, state: str) -> _Call:
        call = self._calls.pop(state)
        if call.expiry is not None:
            call.expiry.cancel()
        return call

    def _expire(self, state: str) -> None:
        call = self._remove(state)
        if call.task is not None and not call.task.done():
            self._ending_tasks.add(call.task)
            call.task.add_done_callback(self._ending_tasks.discard)
            self._service.cancel(call.id)


class _Question(NamedTuple):
    request: ClientRequest
    result_type: type[BaseModel]
    result: asyncio.Future[Any]


class _Call:
    """One call and its open questions."""

    def __init__(
        self, id: str, abilities: ClientAbilities, *, client: Hashable | None, early_answers: Mapping[str, Any]
    ) -> None:
        self.id = id
        self.caller: tuple[str | None, ...] = ()
        self.digest = b""
        """The digest of its identity. The arguments may be large and are not kept."""
        self.caller_client = McpCallerClient(abilities, self._ask, client=client)
        self.expiry: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[ToolResult] | None = None
        self._early_answers = dict(early_answers)
        """Answers that came before their questions, by key."""
        self._questions: dict[str, _Question] = {}
        self._question_count = 0
        self._wake_event = asyncio.Event()
        """Set when the call has ended or has asked."""

    def start(self, work: Awaitable[ToolResult]) -> None:
        self.task = asyncio.ensure_future(work)
        self.task.add_done_callback(self._handle_end)

    async def wait(self) -> None:
        """Returns when the call has ended or has open questions."""
        while not self._questions and self.task is not None and not self.task.done():
            self._wake_event.clear()
            await self._wake_event.wait()

    def encode_questions(self) -> dict[str, Any]:
        return {
            key: {"params": {}, **question.request.model_dump(by_alias=True, mode="json", exclude_none=True)}
            for key, question in self._questions.items()
        }

    def answer(self, answers: Mapping[str, Any]) -> None:
        """Resolves questions. An invalid answer leaves its question open, so that it is asked again."""
        for key, question in list(self._questions.items()):
            if key not in answers:
                continue
            try:
                result = question.result_type.model_validate(answers[key], by_name=False)
            except ValidationError:
                continue
            del self._questions[key]
            if not question.result.done():
                question.result.set_result(result)

    def fail_questions(self, error: ToolError) -> None:
        for question in self._questions.values():
            if not question.result.done():
                question.result.set_exception(error)
        self._questions.clear()

    async def _ask(self, request: ClientRequest, result_type: type[ResultT], key: str | None) -> ResultT:
        self._question_count += 1
        key = key if key is not None and key not in self._questions else f"question-{self._question_count}"
        if key in self._early_answers:
            try:
                return result_type.model_validate(self._early_answers.pop(key), by_name=False)
            except ValidationError:
                pass  # The question is asked.
        if len(self._questions) >= _MAX_QUESTIONS:
            raise ToolError(f"a call may ask at most {_MAX_QUESTIONS} questions at once")
        question = _Question(request, result_type, asyncio.get_running_loop().create_future())
        self._questions[key] = question
        self._wake_event.set()
        try:
            return await question.result
        finally:
            if self._questions.get(key) is question:
                del self._questions[key]

    def _handle_end(self, task: asyncio.Task[ToolResult]) -> None:
        if not task.cancelled():
            task.exception()  # Marked as retrieved: the client may never come back for it.
        self.caller_client.close()
        self._wake_event.set()


async def _refuse_after_call(request: ClientRequest, result_type: type[ResultT], key: str | None) -> ResultT:
    raise ToolError("the call that asks is over")


def _check_result(call: _Call, result: ToolResult) -> ToolResult:
    if not result.ok and call.caller_client.missing_capability is not None:
        raise MissingClientCapability(call.caller_client.missing_capability)
    return result


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
