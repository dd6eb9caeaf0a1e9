from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import tracemalloc

import anyio
import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCRequest

from tests.providers.mcp.processes import lives, plain
from toolspace.providers.mcp.open_connection import open_transport
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import OpenTransport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc")


def client(transport: OpenTransport) -> Client:
    return Client(transport, cache=None, mode="legacy")


async def text(transport: OpenTransport, tool: str = "echo", **arguments: object) -> str:
    async with client(transport) as session:
        result = await session.call_tool(tool, arguments)
    return result.content[0].text  # type: ignore[union-attr]


@pytest.mark.spec("3.10")
async def test_call_over_stdio() -> None:
    async with open_transport("plain", plain()) as transport:
        assert transport.transport == "stdio"
        assert transport.pid is not None
        assert lives(transport.pid)
        assert await text(transport, text="grüße 😀") == "grüße 😀"
        assert not transport.lost_event.is_set()
    assert not lives(transport.pid)


@pytest.mark.spec("3.10")
async def test_sdk_server_works() -> None:
    code = (
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('library')\n"
        "@server.tool()\n"
        "def double(x: int) -> int: return 2 * x\n"
        "server.run('stdio')\n"
    )
    async with (
        open_transport("library", ServerSpec(command=sys.executable, args=("-c", code))) as transport,
        Client(transport, cache=None) as session,
    ):
        assert [tool.name for tool in (await session.list_tools()).tools] == ["double"]
        assert (await session.call_tool("double", {"x": 21})).structured_content == {"result": 42}


@pytest.mark.spec("3.10")
async def test_invalid_lines_are_skipped_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with open_transport("plain", plain("garbage")) as transport:
        assert await text(transport, text="still here") == "still here"
        assert not transport.lost_event.is_set()
    messages = [record.getMessage() for record in caplog.records if record.name == "toolspace.mcp.plain"]
    assert messages == ["the server wrote something that is not a message (logged only once): 'Starting up...'"]


@pytest.mark.spec("3.13")
async def test_death_of_a_server_is_noticed_without_a_call() -> None:
    async with open_transport("plain", plain("dies")) as transport:
        await transport.lost_event.wait()
        assert transport.loss_reason == "the server ended with exit code 1: Error: no such file: /nowhere"


@pytest.mark.spec("3.13")
async def test_call_fails_without_secrets_if_the_server_dies() -> None:
    async with open_transport("plain", plain(SOME_TOKEN="hunter2-hunter2")) as transport, client(transport) as session:
        with pytest.raises(MCPError) as error_info:
            await session.call_tool("die", {})
        assert error_info.value.code == -32000
        assert transport.loss_reason == "the server ended with exit code 3: OSError: the disk is full, key=[hidden]"
        with pytest.raises(MCPError):
            await session.call_tool("echo", {})


@pytest.mark.spec("3.13")
async def test_closed_output_loses_the_connection() -> None:
    async with open_transport("plain", plain("closes")) as transport:
        await transport.lost_event.wait()
        assert transport.loss_reason == "the server closed its output"
        assert transport.pid is not None
    assert not lives(transport.pid)


@pytest.mark.spec("3.13")
async def test_write_to_a_dead_server_reports_the_exit_reason() -> None:
    async with open_transport("plain", plain("dies")) as transport:
        request = SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping"))

        async def insist() -> None:
            while True:
                await transport.streams[1].send(request)

        with pytest.raises(anyio.BrokenResourceError):
            await insist()
        assert transport.loss_reason is not None
        assert transport.loss_reason.startswith("the server ended with exit code 1")


@pytest.mark.spec("3.10")
async def test_large_messages_arrive() -> None:
    async with open_transport("plain", plain()) as transport, client(transport) as session:
        result = await session.call_tool("big", {"size": 5_000_000})
        assert len(result.content[0].text) == 5_000_000  # type: ignore[union-attr]
        assert (await session.call_tool("echo", {"text": "x" * 2_000_000})).content[0].text == "x" * 2_000_000  # type: ignore[union-attr]


@pytest.mark.spec("3.10")
async def test_endless_line_loses_the_connection() -> None:
    async with open_transport("plain", plain("endless"), max_message_bytes=1_000_000) as transport:
        await transport.lost_event.wait()
        assert transport.loss_reason == "the server wrote a line of more than 1,000,000 bytes"
        assert [item async for item in transport.streams[0]] == []


@pytest.mark.spec("3.10")
async def test_flood_of_output_blocks_only_the_server() -> None:
    async with (
        open_transport("floods", plain("floods")) as flooding_transport,
        open_transport("plain", plain()) as transport,
        client(transport) as session,
    ):
        read = flooding_transport.streams[0]
        await read.receive()
        tracemalloc.start()
        try:  # Meanwhile nothing reads the flood.
            for _ in range(20):
                await session.call_tool("echo", {"text": "x"})
            assert tracemalloc.get_traced_memory()[1] < 20_000_000
        finally:
            tracemalloc.stop()
        received_count = 0

        async def listen() -> None:
            nonlocal received_count
            async for _ in read:
                received_count += 1

        listen_task = asyncio.create_task(listen())
        for _ in range(20):  # Now it is read continuously.
            await session.call_tool("echo", {"text": "x"})
        assert received_count > 100
        listen_task.cancel()
        await asyncio.wait((listen_task,))


@pytest.mark.spec("3.14")
async def test_2000_tools_are_listed() -> None:
    async with open_transport("plain", plain(TOOLS="2000")) as transport, client(transport) as session:
        assert len((await session.list_tools()).tools) == 2_000


@pytest.mark.parametrize(
    ("mode", "expected"), [("latin", {"t": "caf\ufffd"}), ("surrogate", {"t": "half ?"})], ids=["latin", "surrogate"]
)
async def test_message_with_invalid_utf8_is_repaired(mode: str, expected: dict[str, str]) -> None:
    async with open_transport("plain", plain(mode)) as transport:
        read, write = transport.streams
        await write.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=1, method="ping")))
        item = await read.receive()
        assert isinstance(item, SessionMessage)
        assert json.loads(item.message.model_dump_json())["result"] == expected


async def test_malformed_response_fails_its_call_at_once() -> None:
    async with open_transport("plain", plain("malformed")) as transport:
        read, write = transport.streams
        await write.send(SessionMessage(JSONRPCRequest(jsonrpc="2.0", id=7, method="ping")))
        item = await read.receive()
        assert isinstance(item, SessionMessage)
        assert json.loads(item.message.model_dump_json())["id"] == 7
        assert "not a JSON-RPC message" in item.message.model_dump_json()


@pytest.mark.spec("3.12")
async def test_cancelled_block_leaves_no_process() -> None:
    pids: list[int] = []

    async def hold() -> None:
        async with open_transport("plain", plain("children")) as transport:
            pids.append(transport.pid or 0)
            await transport.streams[0].receive()
            started.set()
            await asyncio.Event().wait()

    started = asyncio.Event()
    task = asyncio.create_task(hold())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not lives(pids[0])


async def test_standard_error_goes_to_the_servers_logger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, "toolspace.mcp.plain")
    async with open_transport("plain", plain("dies")) as transport:
        await transport.lost_event.wait()
    messages = [record.getMessage() for record in caplog.records if record.name == "toolspace.mcp.plain"]
    assert "Error: no such file: /nowhere" in messages
    assert os.sep + "nowhere" in messages[0]
