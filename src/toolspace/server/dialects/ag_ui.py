"""AG-UI: events as its clients verify them. Everything is said within a run, one run at a time.

A space has more than that: several agents at once, people who speak while none works, results that come when the run
is long over. So a run of its own is opened around what belongs to none, and what a second agent does meanwhile is
said within the first one's. What has no event of its own is a CUSTOM one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from toolspace.core import json_text
from toolspace.core.records import StoredEvent
from toolspace.server.dialects.interface import OpenParts, Payload, stream_id
from toolspace.storage.streams.subscriptions import encode_data

Data = Mapping[str, Any]


class _Text:
    """A message that is being said."""

    __slots__ = ("deltas", "start", "tries")

    def __init__(self, start: Data) -> None:
        self.start = start
        """Its opening, to be said again where it goes on in another run."""
        self.deltas: list[str] = []
        self.tries = 1

    @property
    def id(self) -> str:
        return str(self.start["messageId"])

    def begin_anew(self) -> None:
        """Its text cannot be taken back, so that the rest of it is a message of another id: `msg_1`, then `msg_1.2`."""
        first = self.id if self.tries == 1 else self.id.rpartition(".")[0]
        self.tries += 1
        self.start = {**self.start, "messageId": f"{first}.{self.tries}"}
        self.deltas.clear()


class AgUiTranslator:
    def __init__(self, stream: str) -> None:
        self._thread_id = stream_id(stream)
        self._run_id: str | None = None
        """The run that is open for readers."""
        self._is_ours = False
        """Whether that run was opened around what belongs to none."""
        self._others: dict[str, None] = {}
        """Runs that began while another was open."""
        self._texts: OpenParts[_Text] = OpenParts()
        self._calls: OpenParts[list[str]] = OpenParts()
        """Calls whose input is being written, with what there is of it."""
        self._said_texts: set[str] = set()
        """Messages that are open for readers, within the run, by the ids that readers know."""
        self._said_calls: set[str] = set()
        self._say: Mapping[str, Callable[[StoredEvent, Data], list[Payload]]] = {
            "message.started": self._message_started,
            "message.delta": self._message_delta,
            "message.done": self._message_done,
            "tool.started": self._tool_started,
            "tool.streaming": self._tool_streaming,
            "tool.done": self._tool_done,
            "tool.error": self._tool_error,
        }

    def translate(self, event: StoredEvent) -> list[Payload]:
        if event.type == "run.started":
            said = self._run_started(event)
        elif event.type == "run.done":
            said = self._run_done(event)
        else:
            say = self._say.get(event.type)
            inner = [_custom(event)] if say is None else say(event, event.data)
            said = self._within_a_run(event, inner) if inner else []
        return [{**payload, "timestamp": event.at} for payload in said]

    def opening(self) -> list[Payload]:
        if self._run_id is None:
            return []
        said: list[Payload] = [self._started(self._run_id)]
        for _, text in self._texts:
            if text.id in self._said_texts:
                said.append(text.start)
                if text.deltas:
                    said.append(_text(text.id, "".join(text.deltas)))
        for id, deltas in self._calls:
            if id in self._said_calls:
                said += [{"type": "TOOL_CALL_START", "toolCallId": id, "toolCallName": deltas[0]}]
                if deltas[1:]:
                    said.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": "".join(deltas[1:])})
        return said

    # Runs

    def _run_started(self, event: StoredEvent) -> list[Payload]:
        run_id = str(event.data.get("runId"))
        if run_id == self._run_id:
            return []
        if self._run_id is not None and not self._is_ours:
            self._others[run_id] = None
            return [_custom(event)]
        closing = self._leave_run()
        self._run_id, self._is_ours = run_id, False
        return [*closing, self._started(run_id)]

    def _run_done(self, event: StoredEvent) -> list[Payload]:
        data, run_id = event.data, str(event.data.get("runId"))
        self._others.pop(run_id, None)
        if run_id != self._run_id:
            return self._within_a_run(event, [_custom(event)])
        status = data.get("status")
        if status == "failed":
            reason = data.get("error")
            ended: dict[str, Any] = {"type": "RUN_ERROR", "message": str(reason or "the run failed"), "code": "failed"}
        else:
            ended = self._finished(run_id)
            if status == "canceled":
                ended["outcome"] = {"type": "cancelled"}
        return self._leave_run(ended)

    def _within_a_run(self, event: StoredEvent, inner: list[Payload]) -> list[Payload]:
        """What is said, in a run that is open: one that goes on if there is one, else one around it alone."""
        said = inner
        if self._run_id is None:
            other = next(iter(self._others), None)
            if other is not None:
                del self._others[other]
            self._run_id = other or f"{self._thread_id}#{event.id}"
            self._is_ours = other is None
            said = [self._started(self._run_id), *inner]
        if self._is_ours and not self._said_texts and not self._said_calls:
            said = [*said, *self._leave_run()]
        return said

    def _leave_run(self, ended: Payload | None = None) -> list[Payload]:
        if self._run_id is None:
            return []
        said: list[Payload] = [{"type": "TEXT_MESSAGE_END", "messageId": id} for id in sorted(self._said_texts)]
        said += [{"type": "TOOL_CALL_END", "toolCallId": id} for id in sorted(self._said_calls)]
        said.append(ended or self._finished(self._run_id))
        self._said_texts.clear()
        self._said_calls.clear()
        self._run_id = None
        return said

    def _started(self, run_id: str) -> Payload:
        return {"type": "RUN_STARTED", "threadId": self._thread_id, "runId": run_id}

    def _finished(self, run_id: str) -> dict[str, Any]:
        return {"type": "RUN_FINISHED", "threadId": self._thread_id, "runId": run_id}

    # Messages

    def _message_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("messageId"))
        text = self._texts.get(id) or _Text(_text_start(id, data))
        self._texts.put(id, text, len(encode_data(event)))
        return self._opened(text)

    def _message_delta(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("messageId")), str(data.get("delta") or "")
        text = self._texts.get(id)
        if text is None:
            return []  # Its beginning is not known any more; the whole text comes at its end.
        said: list[Payload] = [*self._void(text), _custom(event)] if data.get("restart") else []
        if delta:
            said += [*self._opened(text), _text(text.id, delta)]
            text.deltas.append(delta)
            self._texts.put(id, text, len(delta))
        return said

    def _message_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        message = cast("Data", data.get("message") or {})
        id, content = str(message.get("id")), message.get("content")
        text = self._texts.pop(id) or _Text(_text_start(id, message))
        whole = content if isinstance(content, str) else json_text.encode(content) if content else ""
        custom: Payload = {"type": "CUSTOM", "name": "message.done", "value": data}
        if message.get("status") == "error":  # What there is of it was never said, but may be yet, from its beginning.
            said = self._ended(text)
            if text.deltas:
                text.begin_anew()
                self._texts.put(id, text, len(id))
            return [*said, custom]
        said = [] if whole.startswith("".join(text.deltas)) else self._void(text)
        rest = whole[sum(map(len, text.deltas)) :]
        if rest or not text.deltas:
            said += self._opened(text)
        if rest:
            said.append(_text(text.id, rest))
        return [*said, *self._ended(text), custom]

    def _opened(self, text: _Text) -> list[Payload]:
        if text.id in self._said_texts:
            return []
        self._said_texts.add(text.id)
        return [text.start]

    def _ended(self, text: _Text) -> list[Payload]:
        if text.id not in self._said_texts:
            return []
        self._said_texts.discard(text.id)
        return [{"type": "TEXT_MESSAGE_END", "messageId": text.id}]

    def _void(self, text: _Text) -> list[Payload]:
        """What was written so far does not count."""
        if not text.deltas:
            return []
        ended = self._ended(text)
        text.begin_anew()
        return ended

    # Calls

    def _tool_started(self, event: StoredEvent, data: Data) -> list[Payload]:
        id = str(data.get("toolCallId"))
        streamed = self._calls.pop(id) is not None
        said: list[Payload] = []
        if id not in self._said_calls and not streamed:
            said.append(_call_start(id, data))
            if "input" in data:
                said.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": json_text.encode(data["input"])})
            said.append({"type": "TOOL_CALL_END", "toolCallId": id})
        elif id in self._said_calls:
            self._said_calls.discard(id)
            said.append({"type": "TOOL_CALL_END", "toolCallId": id})
        if data.get("status") == "requires_action":
            said.append(_custom(event))  # Who executes it, and that someone must.
        return said

    def _tool_streaming(self, event: StoredEvent, data: Data) -> list[Payload]:
        id, delta = str(data.get("toolCallId")), data.get("inputDelta")
        if not isinstance(delta, str):
            return [_custom(event)]
        deltas = self._calls.get(id) or [str(data.get("toolName"))]
        said: list[Payload] = []
        if id not in self._said_calls:
            said.append(_call_start(id, data))
            self._said_calls.add(id)
        if delta:
            said.append({"type": "TOOL_CALL_ARGS", "toolCallId": id, "delta": delta})
        deltas.append(delta)
        self._calls.put(id, deltas, len(delta))
        return said

    def _tool_done(self, event: StoredEvent, data: Data) -> list[Payload]:
        output = data.get("output")
        return self._result(data, output if isinstance(output, str) else json_text.encode(output))

    def _tool_error(self, event: StoredEvent, data: Data) -> list[Payload]:
        metadata = {"isError": True, "errorKind": str(data.get("errorKind", "execution_error"))}
        return self._result(data, str(data.get("error", "the tool failed")), metadata=metadata)

    def _result(self, data: Data, content: str, **more: Any) -> list[Payload]:
        id = str(data.get("toolCallId"))
        self._calls.pop(id)
        said: list[Payload] = []
        if id in self._said_calls:
            self._said_calls.discard(id)
            said.append({"type": "TOOL_CALL_END", "toolCallId": id})
        message_id = str(data.get("messageId") or f"{id}-result")
        result = {"type": "TOOL_CALL_RESULT", "messageId": message_id, "toolCallId": id, "content": content}
        return [*said, {**result, "role": "tool", **more}]


def _text_start(id: str, data: Data) -> Payload:
    # People speak without a run; the type of the sender is not in the event.
    role = "user" if data.get("runId") is None else "assistant"
    return {"type": "TEXT_MESSAGE_START", "messageId": id, "role": role, "name": str(data.get("senderId"))}


def _text(id: str, delta: str) -> Payload:
    return {"type": "TEXT_MESSAGE_CONTENT", "messageId": id, "delta": delta}


def _call_start(id: str, data: Data) -> Payload:
    return {"type": "TOOL_CALL_START", "toolCallId": id, "toolCallName": str(data.get("toolName"))}


def _custom(event: StoredEvent) -> Payload:
    return {"type": "CUSTOM", "name": event.type, "value": event.data}
