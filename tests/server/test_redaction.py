"""Redaction: searches every response and stream of public callers for private data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.server.gateway_api import JWT_SECRET, SECRET
from tests.server.test_access_matrix import OTHERS, ROWS, fill_in, routes_of
from tests.server.two_spaces import IN_A, IN_B, OPERATOR, TwoSpaces, open_two_spaces
from toolspace.core.stored_records import NewEvent, run_stream, space_stream
from toolspace.server.authorization import Access
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import keys as key_rows

FORBIDDEN = {
    "member": (OPERATOR, IN_B),
    "member of another space": (OPERATOR, IN_A),
    "member of no space": (OPERATOR, IN_A, IN_B),
}
"""The marks that each caller must not receive. Eve's own mark is checked separately."""
KINDS = (
    "tool.started",
    "tool.streaming",
    "tool.ready",
    "tool.progress",
    "tool.done",
    "tool.error",
    "message.started",
    "message.delta",
    "message.done",
    "run.started",
    "run.done",
)
END = "THE-END"


def marks_in(text: bytes, caller: str) -> list[str]:
    return [mark for mark in FORBIDDEN[caller] if mark.encode() in text]


def _variants(path: str) -> Iterable[str]:
    """The same request with the ids of foreign records."""
    yield path
    for own_id, foreign in (("spc_a", "spc_b"), ("run_a", "run_b"), ("robot", "other"), ("run_a", "run_alone")):
        if own_id in path:
            yield path.replace(own_id, foreign)
    if path == "/api/calls":
        yield from (
            f"{path}?{query}" for query in ("spaceId=spc_b", "runId=run_b", "toolName=peek", "status=completed")
        )
    if path == "/api/agents":
        yield f"{path}?limit=500"


@pytest.mark.spec("8.1")
@pytest.mark.spec("8.2")
async def test_no_response_shows_private_data_to_a_public_caller(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaks: list[str] = []
    async with open_two_spaces(tmp_path, rateLimit=None) as setup:
        caplog.set_level(logging.DEBUG)
        caplog.clear()
        for route in routes_of(setup):
            if route.is_stream or route.access is Access.OPEN:
                continue
            row = ROWS[route.name]
            for space in ("spc_a", "spc_b"):
                ids = {
                    "made": setup.calls[f"confirm {space}"],
                    "confirm": setup.calls[f"move {space}"],
                    "message": setup.messages[space],
                    "output": setup.calls["output"],
                }
                for path in _variants(fill_in(row.path, ids)):
                    for caller in FORBIDDEN:
                        reply = await setup.ask(caller, route.method, path, fill_in(row.body, ids))
                        body = reply.body
                        if caller == "member of no space" and (path.startswith("/api/me") or "/entities/eve" in path):
                            body = body.replace(IN_A.encode(), b"")  # Eve's own mark.
                        if marks := marks_in(body, caller):
                            leaks.append(f"{caller}: {route.method} {path}: {marks} in {body[:300]!r}")
        for call in (setup.calls["peek"], setup.calls["quiet"]):
            reply = await setup.ask("member", "GET", f"/api/calls/{call}")
            assert (reply.status, marks_in(reply.body, "member")) == (403, [])
        if OPERATOR in caplog.text:
            leaks.append("the log of what they asked")
    assert not leaks, "\n".join(leaks)


@pytest.mark.spec("8.2")
async def test_a_member_sees_visible_calls_and_only_the_name_of_prebuilt_calls(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        calls = (await setup.ask("member", "GET", "/api/runs/run_a/calls")).data["items"]
        by_name = {call["toolName"]: call for call in calls}
        assert by_name["peek"] == {"toolCallId": setup.calls["peek"], "toolName": "peek"}
        assert set(by_name["stumble"]) == {"toolCallId", "toolName"}
        assert "lookup" not in by_name
        assert "quiet" not in by_name
        assert by_name["confirm"]["args"] == {"question": f"{IN_A} in a question"}
        run = (await setup.ask("member", "GET", "/api/runs/run_a")).data
        assert run["id"] == "run_a"
        assert "trigger" not in run


async def _create_events(setup: TwoSpaces) -> None:
    """Creates events of every type in both spaces and all runs, with marks on private data."""
    for run, space, mark in (("run_a", "spc_a", IN_A), ("run_b", "spc_b", IN_B)):
        for name in ("peek", "stumble", "lookup", "quiet"):
            await setup.call(run, name, {"look": f"{OPERATOR} in an argument"})
        await setup.call(run, "show", {"look": f"{mark} on a screen"})

        def more(effects: Effects, run: str = run, space: str = space, mark: str = mark) -> Program[None]:
            # Events that only a model's stream produces.
            data = {"toolCallId": "call_x", "toolName": "peek", "inputDelta": f"{OPERATOR} in a delta"}
            delta = {"messageId": "msg_x", "delta": f"{mark} in a delta"}
            for stream in (space_stream(space), run_stream(run)):
                effects.emit(stream, NewEvent("tool.streaming", data, "name"))
                effects.emit(stream, NewEvent("tool.streaming", {**data, "toolName": "lookup"}, "none"))
                effects.emit(stream, NewEvent("message.delta", delta))
            return
            yield

        await setup.gateway.ledger.commit(more)
        end = {"status": "failed", "usage": {"cost": f"{OPERATOR} usage"}, "error": f"{OPERATOR} reason"}
        assert (await setup.api.post(f"/api/runs/{run}/close", end)).status == 200
        message = {"entityId": "robot" if space == "spc_a" else "other", "content": END}
        assert (await setup.api.post(f"/api/spaces/{space}/messages", message)).status == 201


@asynccontextmanager
async def open_stream(setup: TwoSpaces, caller: str, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with setup.api.session.get(setup.api.url + path, headers=setup.callers[caller]) as response:
        yield response


async def _read(response: aiohttp.ClientResponse, until: str) -> bytes:
    """Reads a stream until it contains a text."""
    data = b""
    async with asyncio.timeout(10):
        while until.encode() not in data:
            piece = await response.content.readany()
            assert piece, data[-500:]
            data += piece
    return data


@pytest.mark.spec("8.2")
@pytest.mark.spec("7.5")
@pytest.mark.parametrize("format", ["native", "ui-message-stream", "ag-ui"])
async def test_no_stream_shows_private_data_to_a_public_subscriber(tmp_path: Path, format: str) -> None:
    async with open_two_spaces(tmp_path) as setup:
        query = f"?format={format}&from=start"
        readers = {"member": "spc_a", "member of another space": "spc_b", "secret": "spc_a"}
        async with AsyncExitStack() as stack:
            live = {
                caller: await stack.enter_async_context(
                    open_stream(setup, caller, f"/api/spaces/{space}/stream{query}")
                )
                for caller, space in readers.items()
            }
            await _create_events(setup)
            received_bytes = {caller: await _read(response, END) for caller, response in live.items()}
        for caller, space, run in (("member", "spc_a", "run_a"), ("member of another space", "spc_b", "run_b")):
            async with open_stream(setup, caller, f"/api/spaces/{space}/stream{query}") as response:
                replay = await _read(response, END)
            of_run = await _read_all(setup, caller, f"/api/runs/{run}/events{query}&until=run.done")
            for text in (received_bytes[caller], replay, of_run):
                assert marks_in(text, caller) == []
                assert b"peek" in text or format != "native"
            assert (IN_A if caller == "member" else IN_B).encode() in received_bytes[caller]
        if format == "native":
            all_bytes = received_bytes["secret"] + await _read_all(
                setup, "secret", f"/api/runs/run_a/events{query}&until=run.done"
            )
            missing = [kind for kind in KINDS if f"event: {kind}".encode() not in all_bytes]
            assert not missing, "no event of these kinds was looked at"
            assert OPERATOR.encode() in all_bytes
        for caller in OTHERS:
            for path in ("/api/spaces/spc_a/stream", "/api/runs/run_a/events", "/api/runs/run_alone/events"):
                async with open_stream(setup, caller, path) as response:
                    assert response.status == 403
                    assert marks_in(await response.read(), caller) == []


async def _read_all(setup: TwoSpaces, caller: str, path: str) -> bytes:
    async with open_stream(setup, caller, path) as response, asyncio.timeout(10):
        assert response.status == 200
        return await response.read()


@pytest.mark.spec("8.1")
async def test_a_removed_member_receives_no_more_events(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup, open_stream(setup, "member", "/api/spaces/spc_a/stream") as response:
        message = {"entityId": "robot", "content": "while she is there"}
        await setup.api.post("/api/spaces/spc_a/messages", message)
        await _read(response, "while she is there")
        assert (await setup.api.delete("/api/spaces/spc_a/members/ann")).status == 204
        await setup.api.post("/api/spaces/spc_a/messages", {**message, "content": "AFTER-SHE-LEFT"})
        async with asyncio.timeout(10):
            rest = await response.content.read()
        assert b"AFTER-SHE-LEFT" not in rest


@pytest.mark.spec("8.1")
async def test_subscribers_of_a_run_receive_nothing_from_a_space_that_is_not_theirs(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        await setup.api.put("/api/spaces/spc_b/members/robot")
        run = (await setup.api.create("/api/runs", agentEntityId="robot", spaceId="spc_a"))["id"]
        async with open_stream(setup, "member", f"/api/runs/{run}/events") as response:
            assert response.status == 200
            await setup.call(run, "show", {"look": "in her space"})
            await _read(response, "in her space")
            entry = await setup.call(run, "enter_space", {"spaceId": "spc_b"})
            assert entry["ok"], entry
            await setup.call(run, "show", {"look": "IN-ANOTHER-SPACE"})
            async with asyncio.timeout(10):
                rest = await response.content.read()
            assert b"IN-ANOTHER-SPACE" not in rest
        assert (await setup.ask("member", "GET", f"/api/runs/{run}/calls")).status == 403
        assert (await setup.ask("member of another space", "GET", f"/api/runs/{run}/calls")).status == 403
        # The run is back, but its calls in the other space stay hidden.
        await setup.call(run, "enter_space", {"spaceId": "spc_a"})
        assert (await setup.ask("member", "GET", f"/api/runs/{run}/calls")).status == 403


@pytest.mark.spec("8.1")
async def test_streams_end_with_the_credentials_that_opened_them(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        key_id, key = await setup.key("secret")
        public_id, public = await setup.key("public")
        setup.callers["ending"] = {"x-secret-key": key}
        setup.callers["ending public"] = {**setup.callers["member"], "x-public-key": public}
        paths = (
            ("ending", "/api/spaces/spc_a/stream"),
            ("ending", "/api/runs/run_a/events"),
            ("ending", "/api/events"),
            ("ending", "/api/tools/stream?tools=move"),
            ("ending public", "/api/spaces/spc_a/stream"),
        )
        responses = [
            await setup.api.session.get(setup.api.url + path, headers=setup.callers[caller]) for caller, path in paths
        ]
        assert [response.status for response in responses] == [200] * len(paths)
        for revoked_id in (key_id, public_id):
            assert (await setup.api.delete(f"/api/keys/{revoked_id}")).status == 204
        await setup.api.post("/api/spaces/spc_a/messages", {"entityId": "robot", "content": "AFTER-THE-KEY"})
        for (_, path), response in zip(paths, responses, strict=True):
            async with asyncio.timeout(10):
                assert b"AFTER-THE-KEY" not in await response.content.read(), path
            response.close()


@pytest.mark.spec("8.3")
async def test_no_key_and_no_token_is_ever_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with open_two_spaces(tmp_path) as setup:
        for caller in setup.callers:
            await setup.ask(caller, "GET", "/api/me")
            await setup.ask(caller, "POST", "/api/keys", {"kind": "secret", "wrong": 1})
        records = await setup.gateway.ledger.read(key_rows.list_keys)
        assert records
        secrets = [*setup.secrets, SECRET, JWT_SECRET]
    log_text = "\n".join(f"{record.getMessage()} {record.exc_text or ''}" for record in caplog.records)
    assert [secret for secret in secrets if secret in log_text] == []


@pytest.mark.spec("8.2")
async def test_the_mcp_endpoint_is_closed_to_public_readers(tmp_path: Path) -> None:
    async with open_two_spaces(tmp_path) as setup:
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "peek", "arguments": {}}}
        for caller in FORBIDDEN:
            reply = await setup.ask(caller, "POST", "/mcp", body)
            assert (reply.status, marks_in(reply.body, caller)) == (403, [])


@pytest.mark.spec("8.2")
async def test_calls_outside_a_space_are_not_shown_in_a_space_that_the_run_enters_later(
    tmp_path: Path,
) -> None:
    async with open_two_spaces(tmp_path) as setup:
        run = (await setup.api.create("/api/runs", agentEntityId="robot"))["id"]
        for name in ("show", "move", "confirm", "quiet", "peek"):
            await setup.call(run, name, {"look": f"{OPERATOR} before"})
        assert (await setup.call(run, "enter_space", {"spaceId": "spc_a"}))["ok"]
        assert (await setup.api.post(f"/api/runs/{run}/close")).status == 200
        response = await setup.ask("member", "GET", f"/api/runs/{run}/calls")
        assert response.status == 200
        assert marks_in(response.body, "member") == []
        replay = await _read_all(setup, "member", f"/api/runs/{run}/events?from=start&until=run.done")
        assert marks_in(replay, "member") == []


@pytest.mark.spec("8.2")
@pytest.mark.parametrize("format", ["native", "ui-message-stream", "ag-ui"])
async def test_a_hidden_event_does_not_end_a_stream(tmp_path: Path, format: str) -> None:
    """The end of a stream with `until` must not reveal a hidden event."""
    async with open_two_spaces(tmp_path) as setup:
        path = f"{setup.api.url}/api/runs/run_a/events?from=start&until=tool.progress&format={format}"
        async with setup.api.session.get(path, headers=setup.callers["member"]) as stream:
            await setup.call("run_a", "show", {"look": END})
            data = b""
            async with asyncio.timeout(30):
                while END.encode() not in data:
                    piece = await stream.content.readany()
                    assert piece, f"it ended after {data!r}"
                    data += piece
        async with setup.api.session.get(path, headers=setup.callers["secret"]) as stream:
            assert b"peek" in await stream.read()
