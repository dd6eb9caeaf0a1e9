"""SPEC 21.1 and 8.3: one caller cannot take the room of all, use another's ids and cursors, or learn our addresses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, ApiResponse, open_api, write_config
from tests.test_principals import connect
from toolspace import QueueSpec, Settings, ToolContext, Toolspace, tool
from toolspace.server.gateway import Gateway


class Gate:
    """A tool that waits until the test opens it."""

    def __init__(self) -> None:
        self.waiting_count = 0
        self.change_event = asyncio.Event()
        self.open = asyncio.Event()

        @tool
        async def hold() -> str:
            """Waits."""
            self.waiting_count += 1
            self.change_event.set()
            await self.open.wait()
            return "done"

        self.tool = hold

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.waiting_count < count:
                self.change_event.clear()
                await self.change_event.wait()


@asynccontextmanager
async def serve(folder: Path, *tools: Any, **config: Any) -> AsyncIterator[tuple[Gateway, ApiClient]]:
    async with Gateway.open(write_config(folder, **config)) as gateway:
        for definition in tools:
            gateway.toolspace.add_tool(definition)
        async with open_api(gateway) as api:
            yield gateway, api


async def create_key(api: ApiClient, name: str = "program") -> ApiClient:
    key = await api.create("/api/keys", kind="tools", name=name)
    return api.with_headers(authorization=f"Bearer {key['key']}")


@pytest.mark.spec("21.1")
async def test_a_tool_key_has_a_share_of_the_requests_and_secret_keys_have_a_reserve(tmp_path: Path) -> None:
    gate = Gate()
    async with serve(tmp_path, gate.tool, server={"maxConcurrentRequests": 20}) as (_, api):
        keys = [await create_key(api, f"key {number}") for number in range(10)]

        def start(key: ApiClient) -> asyncio.Task[ApiResponse]:
            return asyncio.create_task(key.post("/api/tools/hold/call", {}))

        running_calls = [start(key) for key in keys[:9] for _ in range(2)]
        await gate.wait_for(18)
        refusal = await keys[0].post("/api/tools/hold/call", {})
        assert (refusal.status, "with these credentials" in refusal.detail) == (429, True)
        assert (await keys[9].post("/api/tools/hold/call", {})).status == 503  # All tool keys together.
        running_calls.append(start(api))
        await gate.wait_for(19)
        gate.open.set()
        assert [(await call).status for call in running_calls] == [200] * 19
        assert (await keys[0].post("/api/tools/hold/call", {})).status == 200


@pytest.mark.spec("8.3")
async def test_one_address_has_a_limited_number_of_connections(tmp_path: Path) -> None:
    async with serve(tmp_path, server={"maxConnectionsPerAddress": 3}) as (_, api):
        port = int(api.url.rpartition(":")[2])
        request = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            return reader, writer, await reader.readline()

        connections = [await connect() for _ in range(3)]
        assert [line.split()[1] for _, _, line in connections] == [b"200"] * 3
        reader, writer, line = await connect()
        assert line.split()[1] == b"503"
        await reader.read()  # The server closes the connection.
        writer.close()
        connections[0][1].close()
        async with asyncio.timeout(20):
            status = b""
            while status != b"200":  # Until the server notices that the first connection has ended.
                _, writer, line = await connect()
                status = line.split()[1]
                writer.close()
        for _, writer, _ in connections[1:]:
            writer.close()


async def create_space(api: ApiClient, *names: str) -> tuple[str, list[ApiClient]]:
    people = [(await api.create("/api/entities", type="human", name=name))["id"] for name in names]
    space = (await api.create("/api/spaces", name="talk"))["id"]
    for person in people:
        assert (await api.put(f"/api/spaces/{space}/members/{person}")).status in (200, 201, 204)
    return space, [await api.member(person) for person in people]


@pytest.mark.spec("21.1")
async def test_message_ids_of_public_callers_are_their_own(tmp_path: Path) -> None:
    async with serve(tmp_path) as (_, api):
        space, (ann, bob) = await create_space(api, "Ann", "Bob")
        path = f"/api/spaces/{space}/messages"
        messages = [await member.create(path, content="hello", id="m1") for member in (ann, bob)]
        sender = (await api.create("/api/entities", type="service", name="backend"))["id"]
        await api.put(f"/api/spaces/{space}/members/{sender}")
        messages.append(await api.create(path, content="hello", id="m1", entityId=sender))
        ids = [message["id"] for message in messages]
        assert len(set(ids)) == 3
        assert ids[2] == "m1"  # Secret keys choose ids as they are.
        second_reply = await ann.post(path, {"content": "something else", "id": "m1"})
        assert second_reply.status == 409  # In its own namespace an id is used once.
        assert (await ann.get(f"{path}/{ids[0]}")).data["content"] == "hello"


@pytest.mark.spec("21.1")
async def test_a_cursor_works_only_for_its_caller_and_its_list(tmp_path: Path) -> None:
    async with serve(tmp_path) as (_, api):
        space, (ann, bob) = await create_space(api, "Ann", "Bob")
        other_space, _ = await create_space(api, "Carla")
        for number in range(3):
            await ann.create(f"/api/spaces/{space}/messages", content=f"{number}")
        path = f"/api/spaces/{space}/messages?limit=1"
        cursor = (await ann.get(path)).data["next"]
        assert [item["content"] for item in (await ann.get(f"{path}&cursor={cursor}")).data["items"]] == ["1"]
        for reply in (
            await bob.get(f"{path}&cursor={cursor}"),
            await api.get(f"{path}&cursor={cursor}"),
            await api.get(f"/api/spaces/{other_space}/messages?cursor={cursor}"),
            await ann.get(f"{path}&cursor=before.2"),
            await ann.get(f"{path}&cursor="),
        ):
            assert (reply.status, "cursor" in reply.detail) == (400, True)
        seen_ids: list[str] = []
        next_cursor = ""
        while True:  # A whole list, page by page.
            page = (await api.get(f"/api/entities?limit=1{next_cursor}")).data
            seen_ids += [item["id"] for item in page["items"]]
            if page["next"] is None:
                break
            next_cursor = f"&cursor={page['next']}"
        assert len(seen_ids) == len(set(seen_ids)) >= 3
        program, other_program = [await create_key(api, name) for name in ("one", "two")]
        cursor = (await program.get("/api/tools?limit=1")).data["next"]
        assert (await program.get(f"/api/tools?limit=1&cursor={cursor}")).status == 200
        assert (await other_program.get(f"/api/tools?limit=1&cursor={cursor}")).status == 400


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.spec("21.1")
async def test_tool_keys_do_not_learn_internal_addresses(tmp_path: Path) -> None:
    port = find_free_port()
    address = f"127.0.0.1:{port}"
    config = {
        "restTools": {"inner": {"url": f"http://{address}/secret"}},
        "mcpServers": {"notes": {"url": f"http://{address}/mcp"}},
        "tools": {"allowedPaths": [str(tmp_path / "data")]},
    }
    async with serve(tmp_path, **config) as (_, api):
        program = await create_key(api)
        batch = {"calls": [{"id": "1", "tool": "rest__inner"}]}
        requests = (
            ("rest__inner", {}),
            ("notes__read", {}),
            ("read_file", {"path": "/srv/other/file.txt"}),
            ("agent__batch", batch),
        )
        for name, args in requests:
            operator_reply = await api.post(f"/api/tools/{name}/call", {"args": args})
            reply = await program.post(f"/api/tools/{name}/call", {"args": args})
            assert reply.status == operator_reply.status, name
            for secret in (str(port), "127.0.0.1", str(tmp_path)):
                assert secret not in reply.body.decode(), (name, reply)
        assert str(port) in (await api.post("/api/tools/rest__inner/call", {})).body.decode()
        refusal = (await program.post("/api/tools/read_file/call", {"args": {"path": "/srv/other/file.txt"}})).data
        assert "/srv/other/file.txt" in refusal["error"]  # The caller's own path stays.
        async with AsyncExitStack() as stack:
            key = program.headers["authorization"].removeprefix("Bearer ")
            client = await connect(stack, f"{api.url}/mcp", key, "auto")
            result = await client.call_tool("rest__inner", {})
        assert result.is_error
        assert str(port) not in result.content[0].text  # type: ignore[union-attr]


@pytest.mark.spec("21.1")
async def test_one_tool_key_has_a_limited_number_of_pending_calls(tmp_path: Path) -> None:
    definition = {"name": "ask", "executionType": "external", "isAsync": True, "inputSchema": {"type": "object"}}
    async with serve(tmp_path, tools=[definition], server={"maxPendingCallsPerCaller": 3}) as (_, api):
        program, other_program = [await create_key(api, name) for name in ("one", "two")]
        replies = [await program.post("/api/tools/ask/call", {"args": {}}) for _ in range(4)]
        assert [reply.status for reply in replies] == [202, 202, 202, 200]
        assert replies[3].data["errorKind"] == "limit_exceeded"
        assert "maxPendingCallsPerCaller" in replies[3].data["error"]
        for caller in (other_program, api, api, api, api):
            assert (await caller.post("/api/tools/ask/call", {"args": {}})).status == 202
        pending_id = replies[0].data["pendingToolCallId"]
        assert (await api.post(f"/api/calls/{pending_id}/result", {"result": 1})).status == 200
        assert (await program.post("/api/tools/ask/call", {"args": {}})).status == 202
        # Operators see whose calls they are.
        principal = f"tools/{(await program.get('/api/me')).data['keyId']}"
        calls = (await api.get(f"/api/calls?principal={principal}&status=pending")).data["items"]
        assert len(calls) == 3


@pytest.mark.spec("21.1")
async def test_pending_calls_of_one_key_are_counted_over_all_gateways_and_restarts(
    tmp_path: Path, postgres_url: str
) -> None:
    definition = {"name": "ask", "executionType": "external", "isAsync": True, "inputSchema": {"type": "object"}}
    config = {"storage": {"url": postgres_url}, "tools": [definition], "server": {"maxPendingCallsPerCaller": 20}}

    async def open_calls(program: ApiClient, count: int) -> int:
        """How many of so many calls at once are accepted."""
        replies = await asyncio.gather(*(program.post("/api/tools/ask/call", {"args": {}}) for _ in range(count)))
        return [reply.status for reply in replies].count(202)

    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    async with serve(folders[0], **config) as (_, api):
        program = await create_key(api)
        async with serve(folders[1], **config) as (_, other_api):
            other_program = other_api.with_headers(authorization=program.headers["authorization"])
            counts = await asyncio.gather(open_calls(program, 15), open_calls(other_program, 15))
            # Both may have counted at the same moment, just before the last call.
            assert 20 <= sum(counts) <= 21
            assert await open_calls(program, 2) == await open_calls(other_program, 2) == 0
    # A restart does not begin anew.
    async with serve(folders[0], **config) as (_, api):
        assert await open_calls(api.with_headers(authorization=program.headers["authorization"]), 2) == 0


@pytest.mark.spec("21.1")
async def test_operators_filter_statistics_by_principal_which_is_no_label_of_a_metric(tmp_path: Path) -> None:
    async with serve(tmp_path) as (_, api):
        program = await create_key(api)
        key_id = (await program.get("/api/me")).data["keyId"]
        for caller in (program, program, api):
            assert (await caller.post("/api/tools/current_time/call", {})).data["ok"]
        stats = (await api.get(f"/api/tools/stats?principal=tools/{key_id}")).data
        assert (stats["calls"], stats["callStats"]["current_time"]["count"]) == (2, 2)
        assert (await api.get("/api/tools/stats")).data["calls"] == 3
        metrics = (await api.get("/metrics")).body.decode()
        assert "current_time" in metrics
        assert key_id not in metrics


@pytest.mark.spec("21.1")
async def test_one_principal_cannot_take_all_places_of_a_queue() -> None:
    gate = Gate()
    held_tool = gate.tool.replace(queue="q")
    settings = Settings(queues={"q": QueueSpec(concurrent=1, max_waiting=10)})
    async with Toolspace(tools=[held_tool], settings=settings) as ts:
        tasks: list[asyncio.Task[Any]] = []

        async def start(user: str | None, count: int) -> None:
            tasks.extend(asyncio.create_task(ts.call("hold", context=ToolContext(user_id=user))) for _ in range(count))
            for _ in range(5):
                await asyncio.sleep(0)

        await start("tools/a", 1)
        await gate.wait_for(1)
        await start("tools/a", 5)
        refusal = await ts.call("hold", context=ToolContext(user_id="tools/a"))
        assert refusal.error_kind == "limit_exceeded"
        assert "half of maxWaiting" in (refusal.error or "")
        await start("ent_b", 4)
        refusal = await ts.call("hold", context=ToolContext(user_id="ent_b"))
        assert "secret keys" in (refusal.error or "")
        await start("key/operator", 1)
        assert ts.orchestrator.queues["q"].waiting_count == 10
        gate.open.set()
        assert [(await task).ok for task in tasks] == [True] * 11
