"""Serves a toolspace to one MCP client over a pair of pipes, usually standard input and output."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from toolspace.core import json_text
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.elicitation import STDIO_CLIENT, SuspendedCalls
from toolspace.server.mcp.first_answers import EarlyReader, ReceivedLine
from toolspace.server.mcp.request_handlers import ToolspaceMcpServer
from toolspace.server.mcp.stdio_pipes import ClaimedPipes, PipeWriter, read_lines
from toolspace.server.mcp.tool_service import McpService
from toolspace.toolspace import Toolspace

_LAST_RESPONSES_SECONDS = 1.0
"""How long running calls may still be answered after the client has closed its end."""
_Incoming = MemoryObjectSendStream[SessionMessage | Exception]
_Outgoing = MemoryObjectReceiveStream[SessionMessage]


async def serve_stdio(toolspace: Toolspace, pipes: ClaimedPipes, early_reader: EarlyReader) -> None:
    """Serves until the client closes its end. Cancelling it cancels the running calls.

    `early_reader` has read the first lines of the client, and answered some of them.
    """
    service = McpService(toolspace)
    suspended_calls = SuspendedCalls(service, client=STDIO_CLIENT)
    server = ToolspaceMcpServer(service, suspended_calls)
    requests, server_reader = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    server_writer, responses = anyio.create_memory_object_stream[SessionMessage](0)
    async with (
        service,
        suspended_calls,
        aclosing(server.changes),
        PipeWriter(pipes.output) as writer,
        anyio.create_task_group() as tasks,
    ):
        await asyncio.to_thread(early_reader.stop)
        bridge = _PipeBridge(writer, early_reader)
        tasks.start_soon(bridge.read, pipes.input, requests)
        tasks.start_soon(bridge.write, responses)
        await server.run(server_reader, server_writer, server.create_initialization_options())
        tasks.cancel_scope.cancel()


class _PipeBridge:
    """Moves messages between the pipes and the SDK, and knows which requests have no response yet."""

    def __init__(self, writer: PipeWriter, early_reader: EarlyReader) -> None:
        self._writer = writer
        self._early_reader = early_reader
        self._answered_requests: set[types.RequestId] = set()
        """Requests that have an answer already. The SDK gets them too, for its state, and its answer is dropped."""
        self._open_requests: set[types.RequestId] = set()
        self._response_sent = asyncio.Event()

    async def read(self, descriptor: int, messages: _Incoming) -> None:
        async with messages:
            for early_line in self._early_reader.lines:
                await self._forward(early_line, messages)
            async for line in read_lines(descriptor, self._early_reader.unfinished_line):
                received_line = self._early_reader.answers.receive(line)
                if received_line.response is not None:
                    await self._write_line(received_line.response)
                await self._forward(received_line, messages)
            await self._wait_for_responses()

    async def _forward(self, line: ReceivedLine, messages: _Incoming) -> None:
        """Hands a line to the SDK, if it is for the SDK and a message."""
        if not line.is_for_sdk or line.text.isspace():
            return
        try:
            message = types.jsonrpc_message_adapter.validate_json(line.text, by_name=False)
        except ValueError:
            await self._reject(line.text)
            return
        if isinstance(message, types.JSONRPCRequest):
            requests = self._open_requests if line.response is None else self._answered_requests
            requests.add(message.id)
        await messages.send(SessionMessage(message))

    async def write(self, messages: _Outgoing) -> None:
        async with messages:
            async for item in messages:
                message = item.message
                is_response = isinstance(message, types.JSONRPCResponse | types.JSONRPCError)
                if is_response and message.id in self._answered_requests:
                    self._answered_requests.discard(message.id)
                    continue
                await self._write_line(message.model_dump_json(by_alias=True, exclude_unset=True).encode())
                if is_response and message.id is not None:
                    self._open_requests.discard(message.id)
                    self._response_sent.set()

    async def _wait_for_responses(self) -> None:
        """Waits briefly for the open requests: the SDK drops them when the input ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_RESPONSES_SECONDS):
                while self._open_requests:
                    self._response_sent.clear()
                    await self._response_sent.wait()

    async def _reject(self, line: bytes) -> None:
        try:
            json_text.decode(line)
        except ValueError:
            error = json_rpc.encode_error(None, json_rpc.PARSE_ERROR, "Parse error")
        else:
            error = json_rpc.encode_error(None, json_rpc.INVALID_REQUEST, "Not a JSON-RPC message")
        await self._write_line(error)

    async def _write_line(self, message: bytes) -> None:
        with suppress(OSError):  # The client is gone: the end of the input ends the server.
            await self._writer.write(message + b"\n")
