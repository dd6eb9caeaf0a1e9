"""Asks the MCP client that made a call: elicitation, sampling, roots. How a request reaches the client differs by era.

`McpCallerClient` is the `caller_client` in the context of a call over MCP. `sdk_server` sends its requests in the
handshake era, `suspended_calls` in the stateless era.
"""

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
STDIO_CLIENT = "stdio"
"""Identifies the only client of a stdio server."""
_EMPTY_FORM: dict[str, Any] = {"type": "object", "properties": {}}
"""The form of a question that the user only accepts or declines."""


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
_FORM = types.ClientCapabilities(elicitation=types.ElicitationCapability(form=types.FormElicitationCapability()))
_URL = types.ClientCapabilities(elicitation=types.ElicitationCapability(url=types.UrlElicitationCapability()))
_SAMPLING = types.ClientCapabilities(sampling=types.SamplingCapability())
_TOOLS = types.ClientCapabilities(sampling=types.SamplingCapability(tools=types.SamplingToolsCapability()))
_ROOTS = types.ClientCapabilities(roots=types.RootsCapability())


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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, McpCallerClient) and self._client == other._client

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
        request = types.CreateMessageRequest(params=sampling_params)
        if sampling_params.tools is None and sampling_params.tool_choice is None:
            result = await self._send(request, types.CreateMessageResult, key)
        else:
            self._require("sampling with tools", self._abilities.sample_with_tools, _TOOLS)
            result = await self._send(request, types.CreateMessageResultWithTools, key)
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
            raise ToolError(
                f"the MCP client's answer to {request.method} is invalid: {_first_problem(error)}"
            ) from None


def create_unsupported_client(client: Hashable) -> McpCallerClient:
    """Creates the caller client for a client that supports no questions. It only explains that."""
    return McpCallerClient(NO_ABILITIES, _refuse_after_call, client=client)


async def _refuse_after_call(request: ClientRequest, result_type: type[ResultT], key: str | None) -> ResultT:
    raise ToolError("the call that asks is over")


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
