"""What a tool asks, put to the MCP client that called it. How a question gets there is each era's own."""

from __future__ import annotations

import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import mcp_types as types
from mcp.server.session import ServerSession
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from pydantic import BaseModel, ValidationError

from toolspace.core.elicitation import ElicitationResult
from toolspace.errors import ToolError

ClientRequest = types.ElicitRequest | types.CreateMessageRequest | types.ListRootsRequest
ResultT = TypeVar("ResultT", bound=BaseModel)
STDIO_CLIENT = "pipes"
"""The client of a server on pipes: there is only one."""
_NO_FIELDS: dict[str, Any] = {"type": "object", "properties": {}}
"""Of a question that is answered by accepting it."""


class ClientAbilities(NamedTuple):
    """What a client says it can be asked."""

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
            # Before there were pages to open, all that was said was that it can be asked.
            form=elicitation is not None and (elicitation.form is not None or elicitation.url is None),
            url=elicitation is not None and elicitation.url is not None,
            sample=sampling is not None,
            sample_with_tools=sampling is not None and sampling.tools is not None,
            roots=capabilities.roots is not None,
        )


NO_ABILITIES = ClientAbilities()
_FORM = types.ClientCapabilities(elicitation=types.ElicitationCapability(form=types.FormElicitationCapability()))
_URL = types.ClientCapabilities(elicitation=types.ElicitationCapability(url=types.UrlElicitationCapability()))
_SAMPLING = types.ClientCapabilities(sampling=types.SamplingCapability())
_TOOLS = types.ClientCapabilities(sampling=types.SamplingCapability(tools=types.SamplingToolsCapability()))
_ROOTS = types.ClientCapabilities(roots=types.RootsCapability())


class SendQuestion(Protocol):
    """Puts one question to the client, and waits for the answer. Raises `ToolError` where there will be none."""

    async def __call__(self, request: ClientRequest, answer: type[ResultT], key: str | None) -> ResultT: ...


class ClientQuestions:
    """The `questions` of a call that came over MCP.

    Two are equal where they are known to reach the same client: a server behind us that does not say for which call it
    asks may then be answered all the same.
    """

    def __init__(self, abilities: ClientAbilities, ask: SendQuestion, *, client: Hashable | None = None) -> None:
        self._abilities = abilities
        self._ask = ask
        self._client = client if client is not None else object()
        self.missing_capability: types.ClientCapabilities | None = None
        """What the client would have had to declare for something that was asked."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClientQuestions) and self._client == other._client

    def __hash__(self) -> int:
        return hash(self._client)

    def close(self) -> None:
        """The call is over. Who still remembers it cannot ask, and keeps nothing else of it alive."""
        self._ask = _ask_too_late

    async def elicit(
        self,
        message: str,
        *,
        schema: Mapping[str, Any] | None = None,
        url: str | None = None,
        key: str | None = None,
    ) -> ElicitationResult:
        if url is not None:
            self._require("questions with a page to open", self._abilities.url, _URL)
            params = types.ElicitRequestURLParams(message=message, url=url, elicitation_id=str(uuid.uuid4()))
        else:
            self._require("questions to its user", self._abilities.form, _FORM)
            fields = dict(schema) if schema is not None else _NO_FIELDS
            params = types.ElicitRequestFormParams(message=message, requested_schema=fields)
        said = await self._ask(types.ElicitRequest(params=params), types.ElicitResult, key)
        return ElicitationResult(action=said.action, content=cast("Mapping[str, Any] | None", said.content))

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        try:
            wanted = types.CreateMessageRequestParams.model_validate(dict(params), by_name=False)
        except ValidationError as error:
            raise ToolError(f"a model cannot be asked this: {_first(error)}") from None
        self._require("questions to its model", self._abilities.sample, _SAMPLING)
        request = types.CreateMessageRequest(params=wanted)
        if wanted.tools is None and wanted.tool_choice is None:
            said = await self._ask(request, types.CreateMessageResult, key)
        else:
            self._require("tools for its model", self._abilities.sample_with_tools, _TOOLS)
            said = await self._ask(request, types.CreateMessageResultWithTools, key)
        return said.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        self._require("questions for its folders", self._abilities.roots, _ROOTS)
        said = await self._ask(types.ListRootsRequest(), types.ListRootsResult, key)
        return [str(root.uri) for root in said.roots]

    def _require(self, what: str, is_able: bool, capability: types.ClientCapabilities) -> None:
        if not is_able:
            self.missing_capability = capability
            raise ToolError(f"nobody can be asked: the MCP client does not say that it takes {what}")


class SendQuestionInSession:
    """Asks in the handshake era: by a request of our own, on the way of the call's answer."""

    def __init__(self, session: ServerSession, request_id: types.RequestId | None) -> None:
        self._session = session
        self._related = ServerMessageMetadata(related_request_id=request_id)

    async def __call__(self, request: ClientRequest, answer: type[ResultT], key: str | None) -> ResultT:
        try:
            return await self._session.send_request(request, answer, metadata=self._related)
        except MCPError as error:
            raise ToolError(f"the MCP client did not answer {request.method}: {error.message}"[:1_000]) from None
        except ValidationError as error:
            raise ToolError(f"the MCP client's answer to {request.method} is none: {_first(error)}") from None


async def _ask_too_late(request: ClientRequest, answer: type[ResultT], key: str | None) -> ResultT:
    raise ToolError("the call that asks is over")


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, found['loc']))}: {found['msg']}".removeprefix(": ")
