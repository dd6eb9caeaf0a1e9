"""Translates events to the AI SDK's UI message stream, for `readUIMessageStream` and `useChat`.

A whole stream is one UI message with the id of its space or run: a new message for each run would lose the tool parts
whose results come later. An event without an equivalent becomes a `data-…` part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from toolspace.core.stored_records import StoredEvent
from toolspace.server.dialects.base import OpenParts, Payload, stream_id
from toolspace.storage.streams.subscriptions import encode_data

Data = Mapping[str, Any]
_FINISH_REASONS = {"completed": "stop", "failed": "error"}


@dataclass(slots=True)
class _Call:
    """A tool call without output."""

    name: str
    is_provider_executed: bool = True
    """Whether someone else than the client executes it."""
    ready_data: Data | None = None
    """The data of `tool.ready`."""
    deltas: list[str] = field(default_factory=list[str])
    needs_approval: bool = False
    """Whether a person has to approve it."""
    is_denied: bool = False


@dataclass(slots=True)
class _Text:
    """A message that is being written."""

    metadata: Data
    deltas: list[str] = field(default_factory=list[str])


class UiMessageStreamTranslator:
    """A `Translator` to AI SDK parts."""

    def __init__(self, stream: str) -> None:
        self._message_id = stream_id(stream)
        self._is_started = False
        self._calls: OpenParts[_Call] = OpenParts()
        self._texts: OpenParts[_Text] = OpenParts()
        self._handlers: Mapping[str, Callable[[StoredEvent, Data], list[Payload]]] = {
            "run.started": self._run_started,
            "run.done": self._run_done,
            "message.started": self._message_started,
            "message.delta": self._message_delta,
            "message.done": self._message_done,
            "tool.started": self._tool_started,
            "tool.ready": self._tool_ready,
            "tool.streaming": self._tool_streaming,
            "tool.done": self._tool_done,
            "tool.error": self._tool_error,
            "approval.requested": self._approval_requested,
            "approval.decided": self._approval_decided,
        }

    def translate(self, event: StoredEvent) -> list[Payload]:
        handler = self._handlers.get(event.type)
        parts = [_data_part(event)] if handler is None else handler(event, event.data)
        if parts and not self._is_started:
            self._is_started = True
            if parts[0]["type"] != "start":
                parts.insert(0, self._start())
        return parts

    def opening_payloads(self) -> list[Payload]:
        parts: list[Payload] = [self._start()] if self._is_started else []
        for id, text in self._texts:
            parts.append(_text_start(id, text.metadata))
            if text.deltas:
                parts.append({"type": "text-delta", "id": id, "delta": "".join(text.deltas)})
        for id, call in self._calls:
            parts.append(_input_start(id, call))
            if call.ready_data is not None:
                parts += _input_available(id, call, call.ready_data)
            elif call.deltas:
                parts.append({"type": "tool-input-delta", "toolCallId": id, "inputTextDelta": "".join(call.deltas)})
        return parts

    def _start(self, metadata: Data | None = None) -> Payload:
        start: dict[str, Any] = {"type": "start", "messageId": self._message_id}
        return {**start, "messageMetadata": metadata} if metadata else start

    def _run_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        return [self._start(_pick(data, "runId", "agentEntityId", "spaceId"))]

    def _run_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        reason = _FINISH_REASONS.get(str(data.get("status")), "other")
        metadata = _pick(data, "runId", "agentEntityId", "status", "usage", "error")
        return [{"type": "finish", "finishReason": reason, "messageMetadata": metadata}]

    def _message_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, metadata = str(data.get("messageId")), _pick(data, "spaceId", "senderId", "seq", "runId", "provisional")
        if id in self._texts:
            return []
        self._texts.put(id, _Text(metadata), len(encode_data(event)))
        return [_text_start(id, metadata)]

    def _message_delta(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("messageId")), str(data.get("delta") or "")
        text = self._texts.get(id)
        if text is None:
            return []  # The start of the message is not cached; the whole text comes with message.done.
        parts = self._discard_text(id, text) if data.get("restart") else []
        if delta:
            text.deltas.append(delta)
            self._texts.put(id, text, len(delta))
            parts.append({"type": "text-delta", "id": id, "delta": delta})
        return parts

    def _message_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        message = _mapping(data.get("message"))
        id, content = str(message.get("id")), message.get("content")
        text = self._texts.pop(id)
        metadata = _omit(message, "content")
        if message.get("status") == "error":
            metadata["void"] = True  # The text was not posted, and parts cannot be withdrawn.
        end = {"type": "text-end", "id": id, "providerMetadata": _toolspace_metadata(metadata)}
        if not isinstance(content, str):
            return [*([end] if text else []), {"type": "data-message", "id": id, "data": message}]
        if message.get("status") == "error":
            return [end] if text else []
        parts: list[Payload] = []
        if text is None:
            parts.append(_text_start(id, _pick(message, "spaceId", "senderId", "seq", "runId")))
        text_so_far = "".join(text.deltas) if text else ""
        if text and not content.startswith(text_so_far):
            parts += self._discard_text(id, text)
            text_so_far = ""
        if rest := content[len(text_so_far) :]:
            parts.append({"type": "text-delta", "id": id, "delta": rest})
        return [*parts, end]

    def _discard_text(self, id: str, text: _Text) -> list[Payload]:
        """Marks a text part whose text so far is invalid, and starts another: parts cannot be withdrawn."""
        if not text.deltas:
            return []
        text.deltas.clear()
        end = {"type": "text-end", "id": id, "providerMetadata": _toolspace_metadata({"messageId": id, "void": True})}
        return [end, _text_start(id, text.metadata)]

    def _tool_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        if id in self._calls:
            return []
        return [self._start_call(id, data)]

    def _start_call(self, id: str, data: Data) -> Payload:
        # Of calls whose tool is hidden, the event has no target: the gateway executes them.
        is_provider_executed = data.get("executionTarget") not in ("client", "external")
        call = _Call(str(data.get("toolName")), is_provider_executed)
        self._calls.put(id, call, len(id) + len(call.name))
        return _input_start(id, call)

    def _tool_ready(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        parts: list[Payload] = [] if id in self._calls else [self._start_call(id, data)]
        call = self._calls.get(id)
        assert call is not None
        call.ready_data = _omit(data, "inputSchema", "outputSchema")
        call.needs_approval = data.get("executionType") == "space" and data.get("status") == "requires_action"
        self._calls.put(id, call, len(encode_data(event)))
        return [*parts, *_input_available(id, call, data)]

    def _tool_streaming(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("toolCallId")), data.get("inputDelta")
        call = self._calls.get(id)
        if not isinstance(delta, str):
            if call is None or call.ready_data is None or call.needs_approval or "output" not in data:
                return [_data_part(event)]
            return [{**_output_available(id, call, data), "preliminary": True}]
        if call is not None and call.ready_data is not None:
            return []  # The whole input was sent.
        parts: list[Payload] = []
        if call is None:
            parts.append(self._start_call(id, data))
            call = self._calls.get(id)
            assert call is not None
        call.deltas.append(delta)
        self._calls.put(id, call, len(delta))
        return [*parts, {"type": "tool-input-delta", "toolCallId": id, "inputTextDelta": delta}]

    def _tool_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        call = self._calls.pop(id)
        if call is None:
            return [_data_part(event)]
        if call.needs_approval and _is_denial(data.get("output")):
            return [_approval_response(id, is_approved=False), {"type": "tool-output-denied", "toolCallId": id}]
        part = _output_available(id, call, data)
        return [_approval_response(id), part] if call.needs_approval else [part]

    def _approval_requested(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        parts: list[Payload] = [] if id in self._calls else [self._start_call(id, data)]
        call = self._calls.get(id)
        assert call is not None
        call.needs_approval = True
        if call.ready_data is not None:
            return [_approval_request(id)]
        call.ready_data = _pick(data, "toolCallId", "toolName", "runId", "input")
        self._calls.put(id, call, len(encode_data(event)))
        return [*parts, *_input_available(id, call, data)]

    def _approval_decided(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        call = self._calls.get(id)
        if call is None or not call.needs_approval:
            return [_data_part(event)]
        call.needs_approval = False
        if data.get("decision") == "approved":
            return [_approval_response(id)]
        call.is_denied = True
        return [_approval_response(id, is_approved=False), {"type": "tool-output-denied", "toolCallId": id}]

    def _tool_error(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        call = self._calls.pop(id)
        if call is None:
            return [_data_part(event)]
        if call.is_denied:
            return []  # The denial was its output.
        part = {"type": "tool-output-error", "toolCallId": id, "errorText": str(data.get("error", "the tool failed"))}
        return [_approval_response(id), part] if call.needs_approval else [part]


def _input_start(id: str, call: _Call) -> Payload:
    return {"type": "tool-input-start", **_call_header(id, call)}


def _input_available(id: str, call: _Call, data: Data) -> list[Payload]:
    """Returns the parts for the input of a call and for the approval that it may need."""
    # The SDK requires an input and an output; of a hidden call the event has none.
    part: dict[str, Any] = {"type": "tool-input-available", **_call_header(id, call), "input": data.get("input")}
    if metadata := _pick(data, "runId"):
        part["providerMetadata"] = _toolspace_metadata(metadata)  # A client that executes it submits the result there.
    if not call.needs_approval:
        return [part]
    return [part, _approval_request(id)]


def _output_available(id: str, call: _Call, data: Data) -> Payload:
    return {"type": "tool-output-available", "toolCallId": id, "toolName": call.name, "output": data.get("output")}


def _call_header(id: str, call: _Call) -> dict[str, Any]:
    header: dict[str, Any] = {"toolCallId": id, "toolName": call.name}
    # Without the mark, the client's own tool handlers execute it.
    return {**header, "providerExecuted": True} if call.is_provider_executed else header


def _is_denial(output: Any) -> bool:
    answer = _mapping(output)
    return answer.get("approved") is False or answer.get("confirmed") is False


def _approval_request(id: str) -> Payload:
    return {"type": "tool-approval-request", "approvalId": id, "toolCallId": id}


def _approval_response(id: str, *, is_approved: bool = True) -> Payload:
    """Returns the part that the SDK requires before the output of a call with approval."""
    return {"type": "tool-approval-response", "approvalId": id, "approved": is_approved}


def _text_start(id: str, metadata: Data) -> Payload:
    return {"type": "text-start", "id": id, "providerMetadata": _toolspace_metadata(metadata)}


def _data_part(event: StoredEvent) -> Payload:
    part: dict[str, Any] = {"type": f"data-{event.type.replace('.', '-')}", "data": event.data}
    id = event.data.get("toolCallId") or event.data.get("messageId")
    return {**part, "id": id} if isinstance(id, str) else part  # The next part with the same id replaces it.


def _toolspace_metadata(metadata: Data) -> Data:
    return {"toolspace": metadata}


def _pick(data: Data, *names: str) -> dict[str, Any]:
    return {name: data[name] for name in names if data.get(name) is not None}


def _omit(data: Data, *names: str) -> dict[str, Any]:
    return {name: value for name, value in data.items() if name not in names}


def _mapping(value: object) -> Data:
    return cast("Data", value) if isinstance(value, Mapping) else {}
