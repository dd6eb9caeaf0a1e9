"""Serves a toolspace to one client on a pair of pipes, by default standard input and output."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

import anyio
import mcp_types as types
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage

from toolspace.core import json_text
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.elicitation import STDIO_CLIENT
from toolspace.server.mcp.sdk_server import ChangeNotifier, ToolspaceMcpServer
from toolspace.server.mcp.service import McpService
from toolspace.server.mcp.stdio_pipes import ClaimedPipes, PipeWriter, read_lines
from toolspace.server.mcp.suspended_calls import SuspendedCalls
from toolspace.toolspace import Toolspace

_LAST_ANSWERS_SECONDS = 1.0
"""How long calls under way may still be answered once the client has said its last word."""
_In = MemoryObjectSendStream[SessionMessage | Exception]
_Out = MemoryObjectReceiveStream[SessionMessage]


async def serve_stdio(toolspace: Toolspace, pipes: ClaimedPipes) -> None:
    """Serves until the client closes its end. Being cancelled stops it, with the calls that are under way."""
    service = McpService(toolspace)
    changes = ChangeNotifier()
    parking = SuspendedCalls(service, client=STDIO_CLIENT)
    server = ToolspaceMcpServer(service, changes, parking)

    def tools_changed() -> None:
        server.refresh()
        changes.notify_tools_changed()

    service.on_tools_changed = tools_changed
    service.on_outputs_changed = changes.notify_resources_changed
    messages_in, to_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    from_server, messages_out = anyio.create_memory_object_stream[SessionMessage](0)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service)
        await stack.enter_async_context(parking)
        stack.push_async_callback(changes.aclose)
        writer = await stack.enter_async_context(PipeWriter(pipes.output))
        conversation = _Conversation(writer)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(conversation.hear, pipes.input, messages_in)
            tasks.start_soon(conversation.speak, messages_out)
            await server.run(to_server, from_server, server.create_initialization_options())
            tasks.cancel_scope.cancel()


class _Conversation:
    """Carries messages between the pipes and the library, and knows which requests still wait for an answer."""

    def __init__(self, writer: PipeWriter) -> None:
        self._writer = writer
        self._open: set[types.RequestId] = set()
        self._answered = asyncio.Event()

    async def hear(self, descriptor: int, messages: _In) -> None:
        async with messages:
            async for line in read_lines(descriptor):
                if line.isspace():
                    continue
                try:
                    message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
                except ValueError:
                    await self._reject(line)
                    continue
                if isinstance(message, types.JSONRPCRequest):
                    self._open.add(message.id)
                await messages.send(SessionMessage(message))
            await self._finish()

    async def speak(self, messages: _Out) -> None:
        async with messages:
            async for item in messages:
                message = item.message
                await self._write(message.model_dump_json(by_alias=True, exclude_unset=True).encode())
                if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id is not None:
                    self._open.discard(message.id)
                    self._answered.set()

    async def _finish(self) -> None:
        """Lets what was asked be answered, for a while: the library drops it once there is nothing more to hear."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_SECONDS):
                while self._open:
                    self._answered.clear()
                    await self._answered.wait()

    async def _reject(self, line: bytes) -> None:
        try:
            json_text.decode(line)
        except ValueError:
            await self._write(json_rpc.encode_error(None, json_rpc.PARSE_ERROR, "Parse error"))
        else:
            await self._write(json_rpc.encode_error(None, json_rpc.INVALID_REQUEST, "Not a JSON-RPC message"))

    async def _write(self, message: bytes) -> None:
        with suppress(OSError):  # Nobody reads: the end of the input says the same, and ends us.
            await self._writer.write(message + b"\n")
