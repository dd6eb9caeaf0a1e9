"""The gateway's tools, calls and runs as methods: calling, and bringing the results of what was executed elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Literal

from toolspace.client.events import EventSubscription
from toolspace.client.resources import ApiResource, StreamFormat, iterate_pages, stream_query, without_none
from toolspace.client.responses import CallResult, Page, RunCall, ToolInfo, decode_response
from toolspace.client.transport import quote_segment
from toolspace.core.ids import new_id
from toolspace.core.records import CallRecord, CallStatus, ResultSource, RunRecord, RunStatus

Arguments = Mapping[str, Any] | str | None
"""An object, or the JSON text that a model sent."""


class ToolsApi(ApiResource):
    """The tools, and the results of those that someone else executes."""

    async def list(
        self,
        *,
        category: str | None = None,
        search: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> Page[ToolInfo]:
        """Those that the key may use, by name; with `search` the best matches for its words."""
        query = {"category": category, "search": search, "limit": limit, "cursor": cursor}
        return await self._get(Page[ToolInfo], "/api/tools", **query)

    def all(self) -> AsyncIterator[ToolInfo]:
        return iterate_pages(lambda cursor: self.list(cursor=cursor))

    async def get(self, name: str) -> ToolInfo:
        return await self._get(ToolInfo, f"/api/tools/{quote_segment(name)}")

    async def get_statistics(self) -> Any:
        return await self._get(dict[str, Any], "/api/tools/stats")

    async def call(
        self, name: str, args: Arguments = None, *, call_id: str | None = None, timeout: float | None = None
    ) -> CallResult:
        """Calls one tool outside a run. A failing tool is a result; `result.pending` says that the answer comes later.

        Where the connection is lost the call is not sent again: nobody knows whether it had its effect.
        """
        path = f"/api/tools/{quote_segment(name)}/call"
        body = without_none(args=args, callId=call_id)
        answer = await self._transport.request("POST", path, body=body, timeout=timeout, no_timeout=True)
        return decode_response(CallResult, answer)

    async def submit_result(
        self,
        space_id: str,
        run_id: str,
        tool_call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Brings the result of a call that is shown in a space. It may be sent twice, and counts once.

        `key`: under which it is sent, for a program that repeats it by itself.
        """
        body = {"runId": run_id, "toolCallId": tool_call_id, "result": result, "isError": is_error, "source": source}
        return await self._submit(f"/api/spaces/{quote_segment(space_id)}/tool-results", body, idempotency_key)

    async def submit_run_result(
        self,
        run_id: str,
        call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Brings the result of a call of a run. It may be sent twice, and counts once."""
        body = {"callId": call_id, "result": result, "isError": is_error, "source": source}
        return await self._submit(f"/api/runs/{quote_segment(run_id)}/tool-results", body, idempotency_key)

    async def submit_call_result(
        self,
        call_id: str,
        result: Any,
        *,
        is_error: bool = False,
        source: ResultSource = "client",
        idempotency_key: str | None = None,
    ) -> CallRecord:
        """Brings the result of a call by its id alone, also of one outside a run."""
        body = {"result": result, "isError": is_error, "source": source}
        return await self._submit(f"/api/calls/{quote_segment(call_id)}/result", body, idempotency_key)

    async def _submit(self, path: str, body: Mapping[str, Any], key: str | None) -> CallRecord:
        # Made once: a submission whose answer was lost is known again when it is repeated, and not refused.
        return decode_response(
            CallRecord, await self._transport.request("POST", path, body=body, idempotency_key=key or new_id("idk"))
        )


class CallsApi(ApiResource):
    """Calls as they are kept: those that wait for someone, and those of the past."""

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
        """Newest first."""
        return await self._get(
            Page[CallRecord],
            "/api/calls",
            status=[status] if isinstance(status, str) else status,
            runId=run_id,
            agentEntityId=agent_entity_id,
            spaceId=space_id,
            toolName=tool_name,
            limit=limit,
            cursor=cursor,
        )

    async def get(self, call_id: str) -> CallRecord:
        return await self._get(CallRecord, f"/api/calls/{quote_segment(call_id)}")

    async def cancel(self, call_id: str) -> None:
        await self._transport.request("POST", f"/api/calls/{quote_segment(call_id)}/cancel", is_repeatable=True)


class RunsApi(ApiResource):
    """Runs: for a program that has its own model loop."""

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
        return await self._get(
            Page[RunRecord],
            "/api/runs",
            agentEntityId=agent_entity_id,
            spaceId=space_id,
            status=status,
            limit=limit,
            cursor=cursor,
        )

    async def get(self, run_id: str) -> RunRecord:
        """With a token: without what began it, what it cost and why it failed."""
        answer = await self._get(dict[str, Any], _run(run_id))
        return decode_response(RunRecord, {"trigger": None, "usage": {}, "error": None, **answer})

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
        """Calls a tool in the run. It is sent again where the connection is lost: under its id it is made once."""
        call_id = call_id or new_id("call")
        body = without_none(name=name, args=args, callId=call_id, turn=turn)
        answer = await self._transport.request(
            "POST", f"{_run(run_id)}/calls", body=body, is_repeatable=True, timeout=timeout, no_timeout=True
        )
        return decode_response(CallResult, answer)

    async def list_calls(self, run_id: str) -> Sequence[RunCall]:
        """All of them, in their order."""
        return [call async for call in iterate_pages(lambda cursor: self._calls(run_id, cursor))]

    async def close(
        self,
        run_id: str,
        status: Literal["completed", "failed"] = "completed",
        *,
        error: str | None = None,
        usage: Mapping[str, Any] | None = None,
    ) -> RunRecord:
        body = without_none(status=status, error=error, usage=usage)
        return await self._do(RunRecord, f"{_run(run_id)}/close", body)

    async def cancel(self, run_id: str) -> RunRecord:
        return await self._do(RunRecord, f"{_run(run_id)}/cancel")

    def subscribe(
        self,
        run_id: str,
        *,
        last_event_id: str | int | None = None,
        format: StreamFormat = "native",
        from_start: bool = False,
    ) -> EventSubscription:
        """What happens in a run."""
        query = stream_query(format, from_start)
        return EventSubscription(self._transport, f"{_run(run_id)}/events", query=query, last_event_id=last_event_id)

    async def _calls(self, run_id: str, cursor: str | None) -> Page[RunCall]:
        return await self._get(Page[RunCall], f"{_run(run_id)}/calls", cursor=cursor)


def _run(run_id: str) -> str:
    return f"/api/runs/{quote_segment(run_id)}"
