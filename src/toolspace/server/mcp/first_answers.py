"""Answers the first requests of an MCP client on stdio, before the toolspace and the MCP SDK are there.

Clients wait only a second or a few for their first answer. `server/discover` and `initialize` do not depend on the
tools, so that `FirstAnswers` answers them by itself. It also lets a client ask both on one pipe, which the SDK refuses:
there the first request decides the era. `EarlyReader` is a thread, because importing the SDK blocks the event loop.

Does not import the MCP SDK. `tests/server/mcp/test_first_answers.py` compares the answers with those of the SDK.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from toolspace import __version__
from toolspace.core import json_text
from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.stdio_pipes import ClaimedPipes, is_regular_file

HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
STATELESS_VERSIONS = ("2026-07-28",)
SERVER_INFO = {"name": "toolspace", "title": "Toolspace", "version": __version__}
MAX_EARLY_BYTES = 1024 * 1024
"""How much the thread reads. What a client sends beyond it waits in the pipe."""
_META = "io.modelcontextprotocol/"
_UNSUPPORTED_PROTOCOL_VERSION = -32022


class ReceivedLine(NamedTuple):
    """A line of the client, and what is done with it."""

    text: bytes
    response: bytes | None = None
    """The answer, which is to be written at once; None if the SDK answers."""
    is_for_sdk: bool = True
    """Whether the SDK gets the message. If there is a `response`, that of the SDK is dropped."""


class FirstAnswers:
    """Decides for each line of one client who answers it. Knows nothing of pipes."""

    def __init__(self, instructions: str = "") -> None:
        """`instructions`: those of the servers, as far as they are known from earlier starts."""
        self._instructions = {"instructions": instructions} if instructions else {}
        self._is_era_decided = False

    def receive(self, line: bytes) -> ReceivedLine:
        if self._is_era_decided:
            return ReceivedLine(line)
        try:
            request = _as_mapping(json_text.decode(line))
        except (ValueError, RecursionError):
            return ReceivedLine(line)
        request_id: Any = request.get("id")
        method: object = request.get("method")
        is_request = isinstance(request_id, int | str) and not isinstance(request_id, bool)
        if request.get("jsonrpc") != "2.0" or not is_request or not isinstance(method, str):
            return ReceivedLine(line)
        fields = _as_mapping(request.get("params"))
        if method == "server/discover" and f"{_META}protocolVersion" in _as_mapping(fields.get("_meta")):
            return ReceivedLine(line, self._discover(request_id, _as_mapping(fields["_meta"])), is_for_sdk=False)
        if method == "ping" and "_meta" not in fields:
            return ReceivedLine(line, json_rpc.encode_result(request_id, b"{}"), is_for_sdk=False)
        self._is_era_decided = True
        if method == "initialize" and _is_valid_handshake(fields):
            return ReceivedLine(line, self._initialize(request_id, fields["protocolVersion"]))
        return ReceivedLine(line)

    def _discover(self, request_id: Any, meta: Mapping[str, Any]) -> bytes:
        version = meta[f"{_META}protocolVersion"]
        if not isinstance(meta.get(f"{_META}clientCapabilities"), dict) or not isinstance(version, str):
            reason = f"params._meta needs {_META}protocolVersion (a string) and {_META}clientCapabilities (an object)"
            return json_rpc.encode_error(request_id, json_rpc.INVALID_PARAMS, reason)
        if version not in STATELESS_VERSIONS:
            data = {"supported": list(STATELESS_VERSIONS), "requested": version}
            return json_rpc.encode_error(
                request_id, _UNSUPPORTED_PROTOCOL_VERSION, "Unsupported protocol version", data
            )
        result = {
            "supportedVersions": list(STATELESS_VERSIONS),
            "capabilities": _capabilities(subscribe=True),
            **self._instructions,
            "resultType": "complete",
            "ttlMs": 0,
            "cacheScope": "private",
            "_meta": {f"{_META}serverInfo": SERVER_INFO},
        }
        return json_rpc.encode_result(request_id, json_text.encode_bytes(result))

    def _initialize(self, request_id: Any, version: str) -> bytes:
        result = {
            "protocolVersion": version if version in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1],
            "capabilities": _capabilities(subscribe=False),
            "serverInfo": SERVER_INFO,
            **self._instructions,
        }
        return json_rpc.encode_result(request_id, json_text.encode_bytes(result))


class EarlyReader:
    """Reads the client's first lines in a thread, and writes the first answers. Use it with `with`.

    `stop` ends the thread, and returns what it has read. Then the event loop reads the pipe.
    """

    def __init__(self, pipes: ClaimedPipes, answers: FirstAnswers) -> None:
        self.answers = answers
        self.lines: list[ReceivedLine] = []
        """What was read, in order. Complete after `stop`."""
        self.unfinished_line = b""
        self._pipes = pipes
        self._thread: threading.Thread | None = None
        self._wake_reader, self._wake_writer = -1, -1

    def __enter__(self) -> EarlyReader:
        # Files have no client that waits, and not every system can wait for a pipe and an event at once.
        if hasattr(select, "poll") and not is_regular_file(self._pipes.input):
            self._wake_reader, self._wake_writer = os.pipe()
            self._thread = threading.Thread(target=self._read, name="toolspace-first-answers", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the thread. Blocks while it writes an answer, which a client reads at once."""
        if self._thread is not None:
            os.close(self._wake_writer)
            self._thread.join()
            os.close(self._wake_reader)
            self._thread = None

    def _read(self) -> None:
        poll = select.poll()
        poll.register(self._pipes.input, select.POLLIN)
        poll.register(self._wake_reader, 0)  # Only the hang-up, when `stop` closes the other end.
        byte_count = 0
        try:
            while byte_count < MAX_EARLY_BYTES:
                if any(descriptor == self._wake_reader for descriptor, _ in poll.poll()):
                    return
                data = os.read(self._pipes.input, 65_536)
                if not data:
                    return  # The event loop notices the end of the input itself.
                byte_count += len(data)
                *lines, self.unfinished_line = (self.unfinished_line + data).split(b"\n")
                for line in lines:
                    self._receive(line + b"\n")
        except OSError:
            return  # The client is gone, which the event loop notices too.

    def _receive(self, line: bytes) -> None:
        received_line = self.answers.receive(line)
        self.lines.append(received_line)
        if received_line.response is not None:
            data = received_line.response + b"\n"
            while data:
                data = data[os.write(self._pipes.output, data) :]


def _capabilities(*, subscribe: bool) -> dict[str, Any]:
    return {
        "logging": {},
        "resources": {"listChanged": True, "subscribe": subscribe},
        "tools": {"listChanged": True},
    }


def _is_valid_handshake(params: Mapping[str, Any]) -> bool:
    """Whether the SDK accepts these parameters. If not, it answers with its own error."""
    client = _as_mapping(params.get("clientInfo"))
    texts = (params.get("protocolVersion"), client.get("name"), client.get("version"))
    return isinstance(params.get("capabilities"), dict) and all(isinstance(text, str) for text in texts)


def _as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
