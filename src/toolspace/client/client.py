"""`ToolspaceClient`: the HTTP API of a gateway as methods. The routes for tools, calls and runs stand here.

`resources` has the other routes. Used by programs of users and by the command line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Literal, Self

from toolspace.client.acknowledgements import Acknowledgements
from toolspace.client.events import EventSubscription
from toolspace.client.resources import (
    AgentsApi,
    ApiResource,
    ApprovalsApi,
    EntitiesApi,
    KeysApi,
    Page,
    ServersApi,
    SpacesApi,
    decode_response,
    iterate_pages,
    without_none,
)
from toolspace.client.transport import GatewayCredentials, LocateGateway, Token, Transport, api_path
from toolspace.core.ids import new_id
from toolspace.core.stored_records import (
    CallRecord,
    CallStatus,
    ExecutionTarget,
    Record,
    ResultSource,
    RunRecord,
    RunStatus,
    StreamFormat,
)
from toolspace.errors import ERROR_CLASSES, ErrorKind, ToolExecutionError

Arguments = Mapping[str, Any] | str | None
"""A mapping, or the JSON text that a model sent."""


class ToolspaceClient:
    """The API of a gateway.

    async with ToolspaceClient("http://127.0.0.1:8787", secret_key="sk_…") as client:
        space = await client.spaces.create("Support")
        async for event in client.spaces.subscribe(space.id):
            ...

    With a `secret_key` (or a tool key) it has the permissions of the key; with a `public_key` and a `token` those of
    the entity in the token. A token may be a function, which is called for a new one when the old one has expired.
    """

    def __init__(
        self,
        url: str,
        *,
        secret_key: str | None = None,
        public_key: str | None = None,
        token: Token | None = None,
        timeout: float = 60.0,
        attempts: int = 5,
        locate: LocateGateway | None = None,
    ) -> None:
        """`locate` finds the URL and a secret key of the gateway again after a restart that changed them."""
        credentials = GatewayCredentials(secret_key=secret_key, public_key=public_key, token=token)
        self._transport = Transport(url, credentials, timeout=timeout, attempts=attempts, locate=locate)
        self.entities = EntitiesApi(self._transport)
        self.spaces = SpacesApi(self._transport)
        self._acknowledgements = Acknowledgements(self._transport)
        self.agents = AgentsApi(self._transport, self._acknowledgements)
        self.runs = RunsApi(self._transport, self._acknowledgements)
        self.tools = ToolsApi(self._transport, self._acknowledgements)
        self.calls = CallsApi(self._transport)
        self.approvals = ApprovalsApi(self._transport)
        self.servers = ServersApi(self._transport)
        self.keys = KeysApi(self._transport)

    @property
    def url(self) -> str:
        return self._transport.url

    async def me(self) -> dict[str, Any]:
        """Returns the identity of these credentials."""
        return await self._transport.request("GET", "/api/me")

    def subscribe(self) -> EventSubscription:
        """Iterates over new events of all spaces and runs; for secret keys.

        Events during a lost connection are missed: only the streams of single spaces and runs are replayed.
        """
        return self.stream("/api/events")

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | int | None = None,
        retry_unreachable: bool = True,
        on_connection: Callable[[bool], None] | None = None,
    ) -> EventSubscription:
        """Iterates over any stream. With `retry_unreachable=False` it raises if the gateway cannot be reached.

        `on_connection` is called with True when the connection is open, and with False when it is lost.
        """
        return EventSubscription(
            self._transport,
            path,
            query=query,
            last_event_id=last_event_id,
            retry_unreachable=retry_unreachable,
            on_connection=on_connection,
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Sends any other request, for routes without a method of their own."""
        return await self._transport.request(method, path, query=query, body=body, idempotency_key=idempotency_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._acknowledgements.aclose()
        await self._transport.aclose()


class CallingApi(ApiResource):
    """A part of the API that calls tools, and acknowledges that it has their results."""

    def __init__(self, transport: Transport, acknowledgements: Acknowledgements) -> None:
        super().__init__(transport)
        self._acknowledgements = acknowledgements

    async def _call(self, path: str, body: object, **options: Any) -> CallResult:
        result = await self._send(CallResult, "POST", path, body, no_timeout=True, **options)
        if result.acknowledge:
            self._acknowledgements.add(result.acknowledge)
        return result


class ToolInfo(Record, frozen=True):
    """A tool as the gateway lists it."""

    name: str
    description: str = ""
    input_schema: Mapping[str, Any] = {}
    output_schema: Mapping[str, Any] | None = None
    category: str = "custom"
    execution_type: str | None = None
    visible: bool = False
    is_async: bool = False


class CallResult(Record, frozen=True):
    """The result of a call. If it is pending, the result comes later to the agent's inbox and to `calls.get`."""

    ok: bool
    result: Any = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    executed: bool = False
    tool: str | None = None
    call_id: str | None = None
    duration_ms: float = 0.0
    content: Any = None
    extras: Mapping[str, Any] = {}
    status: Literal["pending"] | None = None
    pending_tool_call_id: str | None = None
    acknowledge: Sequence[str] = ()
    """Calls whose results this response delivers. The client acknowledges them by itself."""

    @property
    def is_pending(self) -> bool:
        return self.pending_tool_call_id is not None

    def unwrap(self) -> Any:
        """Returns the result of a successful call. Raises the `ToolError` of a failed one."""
        if self.ok:
            return self.result
        raise ERROR_CLASSES.get(self.error_kind or "execution_error", ToolExecutionError)(
            self.error or "the tool failed", tool=self.tool, executed=self.executed
        )


class ToolsApi(CallingApi):
    """Tools, and the results of pending calls."""

    async def list(
        self,
        *,
        category: str | None = None,
        search: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[ToolInfo]:
        """Returns the tools that the key may use, by name; with `search` the best matches first."""
        query = {"category": category, "search": search, "limit": limit, "cursor": cursor}
        return await self._get(Page[ToolInfo], "/api/tools", **query)

    def all(self) -> AsyncIterator[ToolInfo]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def get(self, name: str) -> ToolInfo:
        return await self._get(ToolInfo, api_path("tools", name))

    async def get_statistics(self) -> Any:
        return await self._get(dict[str, Any], "/api/tools/stats")

    async def call(
        self, name: str, args: Arguments = None, *, call_id: str | None = None, timeout: float | None = None
    ) -> CallResult:
        """Calls a tool outside a run. A failed call is a result too; `is_pending` is true if the result comes later.

        The call is not retried after a lost connection, because its effect may have happened.
        """
        path, body = api_path("tools", name, "call"), without_none(args=args, callId=call_id)
        return await self._call(path, body, timeout=timeout)

    async def submit_result(
        self,
        space_id: str,
        run_id: str | None,
        tool_call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        client_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Submits the result of a pending call that a space shows. A repeated submission has no effect.

        `client_id` is stored with the call. `idempotency_key`: for a program that repeats the submission by itself.
        Raises `Unprocessable` if the result does not match the output schema of the tool; the call stays open.
        """
        body = {"toolCallId": tool_call_id, "result": result, "isError": is_error, "source": source}
        body |= without_none(runId=run_id, clientId=client_id)
        return await self._submit(api_path("spaces", space_id, "tool-results"), body, idempotency_key)

    async def submit_run_result(
        self,
        run_id: str,
        call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        client_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Submits the result of a pending call of a run. A repeated submission has no effect."""
        body = {"callId": call_id, "result": result, "isError": is_error, "source": source}
        body |= without_none(clientId=client_id)
        return await self._submit(api_path("runs", run_id, "tool-results"), body, idempotency_key)

    async def submit_call_result(
        self,
        call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        client_id: str | None = None,
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Submits the result of a pending call by its id, also of a call outside a run."""
        body = {"result": result, "isError": is_error, "source": source}
        body |= without_none(clientId=client_id)
        return await self._submit(api_path("calls", call_id, "result"), body, idempotency_key)

    async def _submit(self, path: str, body: Mapping[str, Any], key: str | None) -> CallRecord:
        # All attempts have the same key, so the gateway accepts a repetition after a lost response.
        return await self._send(CallRecord, "POST", path, body, idempotency_key=key or new_id("idk"))


class CallsApi(ApiResource):
    """Stored calls: pending and completed ones."""

    async def list(
        self,
        *,
        status: CallStatus | Sequence[CallStatus] | None = None,
        run_id: str | None = None,
        agent_entity_id: str | None = None,
        space_id: str | None = None,
        tool_name: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[CallRecord]:
        """Returns calls, newest first."""
        filters = {"runId": run_id, "agentEntityId": agent_entity_id, "spaceId": space_id, "toolName": tool_name}
        statuses = [status] if isinstance(status, str) else status
        return await self._get(Page[CallRecord], "/api/calls", status=statuses, limit=limit, cursor=cursor, **filters)

    async def get(self, call_id: str) -> CallRecord:
        return await self._get(CallRecord, api_path("calls", call_id))

    async def cancel(self, call_id: str) -> None:
        await self._transport.request("POST", api_path("calls", call_id, "cancel"), is_repeatable=True)

    async def acknowledge(self, call_id: str) -> None:
        """Says that this program has the result of a call: it is not delivered again. Repeating it has no effect."""
        await self._transport.request("POST", api_path("calls", call_id, "ack"), is_repeatable=True)


class RunCall(Record, frozen=True):
    """A call of a run. Of calls to the agent's own tools, members of the space see only the tool."""

    tool_call_id: str
    tool_name: str
    seq: int | None = None
    args: Any = None
    execution_type: str | None = None
    execution_target: ExecutionTarget | None = None
    status: CallStatus | None = None
    result: Any = None
    is_error: bool = False
    source: ResultSource | None = None
    started_at: int | None = None
    completed_at: int | None = None


class RunsApi(CallingApi):
    """Runs of programs that have a model loop of their own."""

    async def open(
        self, agent_entity_id: str, *, space_id: str | None = None, trigger: Any = None, id: str | None = None
    ) -> RunRecord:
        body = without_none(agentEntityId=agent_entity_id, spaceId=space_id, trigger=trigger, id=id)
        return await self._create(RunRecord, "/api/runs", body)

    async def list(
        self,
        *,
        agent_entity_id: str | None = None,
        space_id: str | None = None,
        status: RunStatus | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[RunRecord]:
        filters = {"agentEntityId": agent_entity_id, "spaceId": space_id, "status": status}
        return await self._get(Page[RunRecord], "/api/runs", limit=limit, cursor=cursor, **filters)

    async def get(self, run_id: str) -> RunRecord:
        """Returns a run. With a token its trigger, usage and error are not visible."""
        run = await self._get(dict[str, Any], api_path("runs", run_id))
        return decode_response(RunRecord, {"trigger": None, "usage": {}, "error": None, **run})

    async def call(
        self,
        run_id: str,
        name: str,
        args: Arguments = None,
        *,
        call_id: str | None = None,
        turn: int | None = None,
        timeout: float | None = None,
    ) -> CallResult:
        """Calls a tool in the run. It is retried after a lost connection: a call with the same id is executed once."""
        body = without_none(name=name, args=args, callId=call_id or new_id("call"), turn=turn)
        path = api_path("runs", run_id, "calls")
        return await self._call(path, body, is_repeatable=True, timeout=timeout)

    async def list_calls(self, run_id: str) -> Sequence[RunCall]:
        """Returns all calls of the run, in their order."""
        path = api_path("runs", run_id, "calls")
        return [call async for call in iterate_pages(lambda cursor: self._get(Page[RunCall], path, cursor=cursor))]

    async def close(
        self,
        run_id: str,
        status: Literal["completed", "failed"] = "completed",
        *,
        error: str | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        body = without_none(status=status, error=error, usage=usage)
        return await self._post(RunRecord, api_path("runs", run_id, "close"), body)

    async def cancel(self, run_id: str) -> RunRecord:
        return await self._post(RunRecord, api_path("runs", run_id, "cancel"))

    def subscribe(
        self,
        run_id: str,
        *,
        last_event_id: str | int | None = None,
        format: StreamFormat = "native",
        from_start: bool = False,
    ) -> EventSubscription:
        """Iterates over the events of a run."""
        return self._subscribe(api_path("runs", run_id, "events"), last_event_id, format, from_start)
