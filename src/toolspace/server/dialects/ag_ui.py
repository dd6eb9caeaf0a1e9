"""Translates events to AG-UI. Its clients require that everything happens within a run, one run at a time.

A space is less strict: several agents run at once, people write while no agent runs, and results arrive after their
run has ended. So events outside any run get a synthetic run, and the events of a second agent are sent within the run
of the first. An event without an AG-UI equivalent becomes a CUSTOM event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from toolspace.core import json_text
from toolspace.core.stored_records import StoredEvent
from toolspace.server.dialects.base import OpenParts, Payload, stream_id
from toolspace.storage.streams.subscriptions import encode_data

Data = Mapping[str, Any]


@dataclass(slots=True)
class _Text:
    """A message that is being written."""

    start: Data
    """The TEXT_MESSAGE_START payload, sent again if the message continues in another run."""
    deltas: list[str] = field(default_factory=list[str])
    attempts: int = 1

    @property
    def id(self) -> str:
        return str(self.start["messageId"])

    def restart(self) -> None:
        """Gives the message a new id, `msg_1.2` after `msg_1`, because text that was sent cannot be withdrawn."""
        base_id = self.id if self.attempts == 1 else self.id.rpartition(".")[0]
        self.attempts += 1
        self.start = {**self.start, "messageId": f"{base_id}.{self.attempts}"}
        self.deltas.clear()


class AgUiTranslator:
    """A `Translator` to AG-UI events."""

    def __init__(self, stream: str) -> None:
        self._thread_id = stream_id(stream)
        self._run_id: str | None = None
        """The run that is open for the client."""
        self._is_synthetic = False
        """Whether that run exists only for events outside any run."""
        self._waiting_runs: dict[str, None] = {}
        """Runs that started while another run was open."""
        self._texts: OpenParts[_Text] = OpenParts()
        self._calls: OpenParts[list[str]] = OpenParts()
        """Call id → the tool name, then the parts of the input that the model has written."""
        self._open_text_ids: set[str] = set()
        """Messages that are open for the client in this run, by the ids that it knows."""
        self._open_call_ids: set[str] = set()
        self._handlers: Mapping[str, Callable[[StoredEvent, Data], list[Payload]]] = {
            "message.started": self._message_started,
            "message.delta": self._message_delta,
            "message.done": self._message_done,
            "tool.started": self._tool_started,
            "tool.ready": self._tool_ready,
            "tool.streaming": self._tool_streaming,
            "tool.done": self._tool_done,
            "tool.error": self._tool_error,
        }

    def translate(self, event: StoredEvent) -> list[Payload]:
        if event.type == "run.started":
            payloads = self._run_started(event)
        elif event.type == "run.done":
            payloads = self._run_done(event)
        else:
            handler = self._handlers.get(event.type)
            inner = [_custom(event)] if handler is None else handler(event, event.data)
            payloads = self._wrap_in_run(event, inner) if inner else []
        return [{**payload, "timestamp": event.at} for payload in payloads]

    def opening_payloads(self) -> list[Payload]:
        if self._run_id is None:
            return []
        payloads: list[Payload] = [self._started(self._run_id)]
        for _, text in self._texts:
            if text.id in self._open_text_ids:
                payloads.append(text.start)
                if text.deltas:
                    payloads.append(_text(text.id, "".join(text.deltas)))
        for id, deltas in self._calls:
            if id in self._open_call_ids:
                payloads += [{"type": "TOOL_CALL_START", "toolCallId": id, "toolCallName": deltas[0]}]
                if deltas[1:]:
                    payloads.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": "".join(deltas[1:])})
        return payloads

    # Runs

    def _run_started(self, event: StoredEvent) -> list[Payload]:
        run_id = str(event.data.get("runId"))
        if run_id == self._run_id:
            return []
        if self._run_id is not None and not self._is_synthetic:
            self._waiting_runs[run_id] = None
            return [_custom(event)]
        end_payloads = self._end_run()
        self._run_id, self._is_synthetic = run_id, False
        return [*end_payloads, self._started(run_id)]

    def _run_done(self, event: StoredEvent) -> list[Payload]:
        data, run_id = event.data, str(event.data.get("runId"))
        self._waiting_runs.pop(run_id, None)
        if run_id != self._run_id:
            return self._wrap_in_run(event, [_custom(event)])
        status = data.get("status")
        if status == "failed":
            reason = data.get("error")
            end: dict[str, Any] = {"type": "RUN_ERROR", "message": str(reason or "the run failed"), "code": "failed"}
        else:
            end = self._finished(run_id)
            if status == "canceled":
                end["outcome"] = {"type": "cancelled"}
        return self._end_run(end)

    def _wrap_in_run(self, event: StoredEvent, inner: list[Payload]) -> list[Payload]:
        """Puts payloads into a run: the open one, else one that waits, else a synthetic one."""
        payloads = inner
        if self._run_id is None:
            waiting_run = next(iter(self._waiting_runs), None)
            if waiting_run is not None:
                del self._waiting_runs[waiting_run]
            self._run_id = waiting_run or f"{self._thread_id}#{event.id}"
            self._is_synthetic = waiting_run is None
            payloads = [self._started(self._run_id), *inner]
        if self._is_synthetic and not self._open_text_ids and not self._open_call_ids:
            payloads = [*payloads, *self._end_run()]
        return payloads

    def _end_run(self, end: Payload | None = None) -> list[Payload]:
        if self._run_id is None:
            return []
        payloads: list[Payload] = [{"type": "TEXT_MESSAGE_END", "messageId": id} for id in sorted(self._open_text_ids)]
        payloads += [{"type": "TOOL_CALL_END", "toolCallId": id} for id in sorted(self._open_call_ids)]
        payloads.append(end or self._finished(self._run_id))
        self._open_text_ids.clear()
        self._open_call_ids.clear()
        self._run_id = None
        return payloads

    def _started(self, run_id: str) -> Payload:
        return {"type": "RUN_STARTED", "threadId": self._thread_id, "runId": run_id}

    def _finished(self, run_id: str) -> dict[str, Any]:
        return {"type": "RUN_FINISHED", "threadId": self._thread_id, "runId": run_id}

    # Messages

    def _message_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("messageId"))
        text = self._texts.get(id) or _Text(_text_start(id, data))
        self._texts.put(id, text, len(encode_data(event)))
        return self._open_text(text)

    def _message_delta(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("messageId")), str(data.get("delta") or "")
        text = self._texts.get(id)
        if text is None:
            return []  # The start of the message is not cached; the whole text comes with message.done.
        payloads: list[Payload] = [*self._discard_text(text), _custom(event)] if data.get("restart") else []
        if delta:
            payloads += [*self._open_text(text), _text(text.id, delta)]
            text.deltas.append(delta)
            self._texts.put(id, text, len(delta))
        return payloads

    def _message_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        message = cast("Data", data.get("message") or {})
        id, content = str(message.get("id")), message.get("content")
        text = self._texts.pop(id) or _Text(_text_start(id, message))
        full_text = content if isinstance(content, str) else json_text.encode(content) if content else ""
        custom: Payload = {"type": "CUSTOM", "name": "message.done", "value": data}
        if message.get("status") == "error":  # The text was not posted; the agent may write it again from the start.
            payloads = self._close_text(text)
            is_withdrawn = cast("Data", message.get("metadata") or {}).get("withdrawn") is True
            if text.deltas and not is_withdrawn:
                text.restart()
                self._texts.put(id, text, len(id))
            return [*payloads, custom]
        payloads = [] if full_text.startswith("".join(text.deltas)) else self._discard_text(text)
        rest = full_text[sum(map(len, text.deltas)) :]
        if rest or not text.deltas:
            payloads += self._open_text(text)
        if rest:
            payloads.append(_text(text.id, rest))
        return [*payloads, *self._close_text(text), custom]

    def _open_text(self, text: _Text) -> list[Payload]:
        if text.id in self._open_text_ids:
            return []
        self._open_text_ids.add(text.id)
        return [text.start]

    def _close_text(self, text: _Text) -> list[Payload]:
        if text.id not in self._open_text_ids:
            return []
        self._open_text_ids.discard(text.id)
        return [{"type": "TEXT_MESSAGE_END", "messageId": text.id}]

    def _discard_text(self, text: _Text) -> list[Payload]:
        """Ends a message whose text so far is invalid."""
        if not text.deltas:
            return []
        payloads = self._close_text(text)
        text.restart()
        return payloads

    # Calls

    def _tool_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        if id in self._calls:
            return []
        return self._open_call(id, data)

    def _open_call(self, id: str, data: Data) -> list[Payload]:
        """Opens a call for the client; also one that was open in an earlier run."""
        if id not in self._calls:
            name = str(data.get("toolName"))
            self._calls.put(id, [name], len(id) + len(name))
        if id in self._open_call_ids:
            return []
        self._open_call_ids.add(id)
        return [_call_start(id, data)]

    def _tool_ready(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        deltas = self._calls.pop(id) or []
        payloads: list[Payload] = []
        if not deltas[1:]:
            payloads += self._open_call(id, data)
            self._calls.pop(id)
            if "input" in data:
                payloads.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": json_text.encode(data["input"])})
        if id in self._open_call_ids:
            self._open_call_ids.discard(id)
            payloads.append({"type": "TOOL_CALL_END", "toolCallId": id})
        if data.get("status") == "requires_action":
            payloads.append(_custom(event))  # Tells the client who has to execute it.
        return payloads

    def _tool_streaming(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("toolCallId")), data.get("inputDelta")
        if not isinstance(delta, str):
            return [_custom(event)]
        payloads = self._open_call(id, data)
        deltas = self._calls.get(id)
        assert deltas is not None
        if delta:
            payloads.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": delta})
        deltas.append(delta)
        self._calls.put(id, deltas, len(delta))
        return payloads

    def _tool_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        output = data.get("output", "")  # Without an output if the tool is hidden.
        return self._result(data, output if isinstance(output, str) else json_text.encode(output))

    def _tool_error(self, event: StoredEvent, data: Data) -> list[Payload]:
        metadata = {"isError": True, "errorKind": str(data.get("errorKind", "execution_error"))}
        return self._result(data, str(data.get("error", "the tool failed")), metadata=metadata)

    def _result(self, data: Data, content: str, **more: Any) -> list[Payload]:
        id = str(data.get("toolCallId"))
        self._calls.pop(id)
        payloads: list[Payload] = []
        if id in self._open_call_ids:
            self._open_call_ids.discard(id)
            payloads.append({"type": "TOOL_CALL_END", "toolCallId": id})
        message_id = str(data.get("messageId") or f"{id}-result")
        result = {"type": "TOOL_CALL_RESULT", "messageId": message_id, "toolCallId": id, "content": content}
        return [*payloads, {**result, "role": "tool", **more}]


def _text_start(id: str, data: Data) -> Payload:
    # Messages of people belong to no run; the event does not have the type of the sender.
    role = "user" if data.get("runId") is None else "assistant"
    return {"type": "TEXT_MESSAGE_START", "messageId": id, "role": role, "name": str(data.get("senderId"))}


def _text(id: str, delta: str) -> Payload:
    return {"type": "TEXT_MESSAGE_CONTENT", "messageId": id, "delta": delta}


def _call_start(id: str, data: Data) -> Payload:
    return {"type": "TOOL_CALL_START", "toolCallId": id, "toolCallName": str(data.get("toolName"))}


def _custom(event: StoredEvent) -> Payload:
    return {"type": "CUSTOM", "name": event.type, "value": event.data}
