"""The dialects, read by the official packages: the AI SDK's parser and AG-UI's verifier."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.peers.install import SETS, ensure, node
from toolspace.core.stored_records import StoredEvent, Visibility
from toolspace.server.dialects.base import NATIVE, Dialect, Translator
from toolspace.server.redaction import Viewer
from toolspace.server.sse_encoding import AG_UI, DIALECTS, UI_MESSAGE_STREAM, SharedFeed
from toolspace.storage.streams.hub import Hub

CHECK = Path(__file__).parent.parent / "peers" / "streams" / "check.mjs"
FORMATS = (UI_MESSAGE_STREAM, AG_UI)


def read_by_peers(*streams: tuple[Dialect, bytes]) -> list[Any]:
    """Reads streams with the official packages."""
    cases = json.dumps([{"format": dialect.name, "text": text.decode()} for dialect, text in streams])
    command = [str(node()), "--input-type=module", "--eval", CHECK.read_text()]
    process = subprocess.run(
        command, cwd=ensure(SETS["streams"]), input=cases, capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def read(dialect: Dialect, text: bytes) -> Any:
    (answer,) = read_by_peers((dialect, text))
    assert "error" not in answer, (answer, text.decode())
    assert answer.get("valid", True), (answer, text.decode())
    return answer


async def _load_nothing(*_: object) -> Any:
    raise AssertionError("the store is not asked")


def feed_of(dialect: Dialect, audience: Viewer = "secret", stream: str = "space:spc_1") -> SharedFeed:
    return SharedFeed(Hub(_load_nothing, _load_nothing), stream, dialect, audience)


def translator_of(feed: SharedFeed) -> Translator | None:
    return feed.dialect.translator(feed.stream) if feed.dialect.translator else None


def read_stream(dialect: Dialect, events: list[StoredEvent], *, audience: Viewer = "secret", joins: int = 0) -> bytes:
    """The frames of a subscriber that joined after this many events."""
    feed = feed_of(dialect, audience)
    translator = translator_of(feed)
    frames: list[bytes] = []
    for event in events[:joins]:
        feed.encode(event, translator)
    if joins and translator is not None:
        frames += [b"data: %b\n\n" % json.dumps(payload).encode() for payload in translator.opening_payloads()]
    for event in events[joins:]:
        frames += feed.encode(event, translator)
    return b"".join(frames)


def payloads_of(stream: bytes) -> list[Any]:
    """The JSON of each frame."""
    lines = stream.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


class Script:
    """Builds the events of a space."""

    def __init__(self) -> None:
        self.events: list[StoredEvent] = []

    def add(self, type: str, exposure: Visibility = "full", /, **data: Any) -> None:
        id = len(self.events) + 1
        self.events.append(StoredEvent("space:spc_1", id, type, data, visibility=exposure, at=1_700_000_000_000 + id))

    def run(self, run: str, agent: str = "ent_bot") -> None:
        self.add("run.started", runId=run, agentEntityId=agent, spaceId="spc_1")

    def run_done(self, run: str, status: str = "completed", **more: Any) -> None:
        self.add("run.done", runId=run, agentEntityId="ent_bot", status=status, **more)

    def message(self, id: str, run: str | None = None) -> None:
        self.add("message.started", messageId=id, spaceId="spc_1", senderId="ent_x", seq=1, runId=run)

    def delta(self, id: str, delta: str, **more: Any) -> None:
        self.add("message.delta", messageId=id, delta=delta, **more)

    def message_done(
        self,
        id: str,
        content: Any,
        run: str | None = None,
        status: str = "complete",
        metadata: dict[str, Any] | None = None,
    ) -> None:
        message = {"id": id, "spaceId": "spc_1", "seq": 1, "senderId": "ent_x", "kind": "message", "content": content}
        self.add("message.done", message={**message, "metadata": metadata or {}, "status": status, "runId": run})

    def withdrawn_message(self, id: str, text: str, run: str = "run_1") -> None:
        """Plain text that was not the answer."""
        self.add("message.started", messageId=id, spaceId="spc_1", senderId="ent_x", seq=1, runId=run, provisional=True)
        self.delta(id, text)
        self.message_done(id, "", run, status="error", metadata={"error": "a call followed", "withdrawn": True})

    def tool_start(self, id: str, exposure: Visibility = "full", /, **more: Any) -> None:
        """The model begins to write a call."""
        data = {"toolCallId": id, "toolName": "confirm", "runId": "run_1", "agentEntityId": "ent_bot"}
        rest = {"executionType": "space", "executionTarget": "client", "status": "running"}
        self.add("tool.started", exposure, **{**data, "spaceId": "spc_1", **rest, **more})

    def tool_ready(self, id: str, exposure: Visibility = "full", /, **more: Any) -> None:
        data = {"toolCallId": id, "toolName": "confirm", "runId": "run_1", "agentEntityId": "ent_bot"}
        rest = {"input": {"city": "Oslo"}, "executionType": "space", "executionTarget": "client", "status": "running"}
        schemas = {"inputSchema": {"type": "object"}, "outputSchema": {"type": "object"}}
        ids = {"spaceId": "spc_1", "messageId": f"msg_{id}"}
        self.add("tool.ready", exposure, **{**data, **ids, **rest, **schemas, **more})

    def tool(self, id: str, exposure: Visibility = "full", /, **more: Any) -> None:
        """A call whose input is known when it starts."""
        self.tool_start(id, exposure, **{"input": {"city": "Oslo"}, "messageId": f"msg_{id}", **more})
        self.tool_ready(id, exposure, **more)

    def tool_delta(self, id: str, delta: str) -> None:
        self.add("tool.streaming", toolCallId=id, toolName="confirm", inputDelta=delta)

    def tool_part(self, id: str, output: Any) -> None:
        self.add("tool.streaming", toolCallId=id, toolName="confirm", output=output, preliminary=True)

    def tool_done(self, id: str, output: Any, exposure: Visibility = "full") -> None:
        data = {"toolCallId": id, "toolName": "confirm", "messageId": f"msg_{id}", "output": output}
        self.add("tool.done", exposure, **data, source="client", durationMs=12)

    def tool_error(self, id: str, error: str, exposure: Visibility = "full") -> None:
        data = {"toolCallId": id, "toolName": "confirm", "messageId": f"msg_{id}", "error": error}
        self.add("tool.error", exposure, **data, errorKind="execution_error")


@pytest.fixture
def script() -> Script:
    return Script()


def part(message: Any, type: str) -> Any:
    """Returns the only part of this type in a UI message."""
    (match,) = [part for part in message["parts"] if part["type"] == type]
    return match


# The AI SDK


@pytest.mark.spec("7.5")
def test_the_ai_sdk_reads_a_run_with_streamed_input_partial_results_and_text(script: Script) -> None:
    script.run("run_1")
    script.tool_start("call_1", executionType="gateway", executionTarget="server")
    script.tool_delta("call_1", '{"city":')
    script.tool_delta("call_1", ' "Oslo"}')
    script.tool_ready("call_1", executionType="gateway", executionTarget="server")
    script.tool_part("call_1", {"rows": 1})
    script.add("tool.progress", toolCallId="call_1", toolName="confirm", progress=1, total=2, message="half")
    script.tool_done("call_1", {"rows": 2})
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It is ")
    script.delta("msg_1", "cold.")
    script.message_done("msg_1", "It is cold.", "run_1")
    script.run_done("run_1", usage={"inputTokens": 3})
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    assert answer["types"] == [
        "start",
        "tool-input-start", "tool-input-delta", "tool-input-delta", "tool-input-available",
        "tool-output-available", "data-tool-progress", "tool-output-available",
        "text-start", "text-delta", "text-delta", "text-end",
        "finish",
    ]  # fmt: skip
    message = answer["message"]
    assert message["id"] == "spc_1"
    assert message["metadata"]["usage"] == {"inputTokens": 3}
    call = part(message, "tool-confirm")
    assert (call["state"], call["input"], call["output"]) == ("output-available", {"city": "Oslo"}, {"rows": 2})
    assert call["providerExecuted"] is True
    assert part(message, "text")["text"] == "It is cold."


@pytest.mark.spec("7.5")
def test_the_ai_sdk_gets_approval_requests_and_their_outcome(script: Script) -> None:
    for id in ("yes", "no", "unconfirmed", "late", "open"):
        script.tool(id, status="requires_action")
    script.tool_done("yes", None)
    script.tool_done("no", {"approved": False})
    script.tool_done("unconfirmed", {"confirmed": False})
    script.tool_error("late", "Tool expired")
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    states = {part["toolCallId"]: part for part in answer["message"]["parts"]}
    assert {id: part["state"] for id, part in states.items()} == {
        "yes": "output-available",
        "no": "output-denied",
        "unconfirmed": "output-denied",
        "late": "output-error",
        "open": "approval-requested",
    }
    assert states["open"]["approval"] == {"id": "open"}
    assert states["open"]["input"] == {"city": "Oslo"}
    assert states["late"]["errorText"] == "Tool expired"
    assert "providerExecuted" not in states["open"]  # The client executes it.


@pytest.mark.spec("7.5")
def test_the_ai_sdk_gets_a_result_that_arrives_during_another_run(script: Script) -> None:
    script.run("run_1")
    script.tool("call_1", status="requires_action")
    script.run_done("run_1")
    script.run("run_2", "ent_other")
    script.message("msg_1")
    script.message_done("msg_1", "Hello")
    script.tool_done("call_1", True)
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    assert part(answer["message"], "tool-confirm")["output"] is True
    assert part(answer["message"], "text")["text"] == "Hello"


@pytest.mark.spec("7.5")
def test_a_subscriber_that_joins_late_gets_what_is_open(script: Script) -> None:
    script.run("run_1")
    script.tool("call_1", status="requires_action")
    script.tool_start("call_2", executionTarget="server")
    script.tool_delta("call_2", '{"city":')
    script.tool_start("call_3", executionTarget="server")
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It ")
    joins = len(script.events)
    script.delta("msg_1", "is.")
    script.tool_delta("call_2", ' "Oslo"}')
    script.tool_ready("call_2", executionTarget="server")
    script.tool_ready("call_3", executionTarget="server")
    script.tool_done("call_1", 1)
    script.tool_done("call_2", 2)
    script.tool_done("call_3", 3)
    script.tool_done("call_0", "of a call that nobody remembers")
    script.message_done("msg_1", "It is.", "run_1")
    script.run_done("run_1")
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events, joins=joins))
    outputs = {part["toolCallId"]: part["output"] for part in answer["message"]["parts"] if "toolCallId" in part}
    assert outputs == {"call_1": 1, "call_2": 2, "call_3": 3}
    assert part(answer["message"], "text")["text"] == "It is."
    assert part(answer["message"], "data-tool-done")["data"]["toolCallId"] == "call_0"
    answer = read(AG_UI, read_stream(AG_UI, script.events, joins=joins))
    assert answer["types"][:2] == ["RUN_STARTED", "TEXT_MESSAGE_START"]
    texts = [message["content"] for message in answer["messages"] if message["id"] == "msg_1"]
    assert texts == ["It is."]


@pytest.mark.spec("9.1")
@pytest.mark.spec("7.5")
def test_the_ai_sdk_gets_discarded_text_marked_as_void(script: Script) -> None:
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It is w")
    script.delta("msg_1", "", restart=True)
    script.delta("msg_1", "It is")
    script.message_done("msg_1", "It is cold.", "run_1")
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    void, text = answer["message"]["parts"]
    assert (void["text"], void["providerMetadata"]["toolspace"]["void"]) == ("It is w", True)
    assert (text["text"], text["state"]) == ("It is cold.", "done")  # With the text that no delta had.
    assert text["providerMetadata"]["toolspace"]["status"] == "complete"


@pytest.mark.spec("9.1")
def test_the_ai_sdk_reads_a_message_that_failed_and_was_written_again(script: Script) -> None:
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It i")
    script.message_done("msg_1", "", "run_1", status="error")
    script.message("msg_1", "run_1")
    script.delta("msg_1", "Snow.")
    script.message_done("msg_1", "Snow.", "run_1")
    script.message("msg_2", "run_1")
    script.delta("msg_2", "Rain")
    script.message_done("msg_2", "Hail.", "run_1")  # The stored text, not the streamed one.
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    parts = [(part["text"], part["providerMetadata"]["toolspace"]) for part in answer["message"]["parts"]]
    assert [text for text, _ in parts] == ["It i", "Snow.", "Rain", "Hail."]
    assert [metadata.get("void") or metadata["status"] for _, metadata in parts] == [True, "complete", True, "complete"]


@pytest.mark.spec("19.2")
def test_the_ai_sdk_gets_withdrawn_text_marked_as_void(script: Script) -> None:
    script.withdrawn_message("msg_1", "Let me look.")
    script.message("msg_2", "run_1")
    script.message_done("msg_2", "It is cold.", "run_1")
    answer = read(UI_MESSAGE_STREAM, read_stream(UI_MESSAGE_STREAM, script.events))
    parts = [(part["text"], part["providerMetadata"]["toolspace"]) for part in answer["message"]["parts"]]
    assert [(text, metadata.get("void")) for text, metadata in parts] == [("Let me look.", True), ("It is cold.", None)]
    assert payloads_of(read_stream(UI_MESSAGE_STREAM, script.events, joins=len(script.events))) == [
        {"type": "start", "messageId": "spc_1"}
    ]


# AG-UI


@pytest.mark.spec("9.1")
@pytest.mark.spec("7.5")
def test_ag_ui_gets_a_restarted_text_under_another_id(script: Script) -> None:
    script.run("run_1")
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It is w")
    script.delta("msg_1", "", restart=True)
    script.delta("msg_1", "It is")
    joins = len(script.events)
    script.message_done("msg_1", "It is cold.", "run_1")
    script.message("msg_2", "run_1")
    script.delta("msg_2", "Ra")
    script.message_done("msg_2", "", "run_1", status="error")
    script.message("msg_2", "run_1")
    script.delta("msg_2", "Snow.")
    script.message_done("msg_2", "Snow.", "run_1")
    script.run_done("run_1")
    answer = read(AG_UI, read_stream(AG_UI, script.events))
    texts = {
        message["id"]: message["content"] for message in answer["messages"] if isinstance(message.get("content"), str)
    }
    assert texts == {"msg_1": "It is w", "msg_1.2": "It is cold.", "msg_2": "Ra", "msg_2.2": "Snow."}
    assert answer["types"].count("TEXT_MESSAGE_START") == answer["types"].count("TEXT_MESSAGE_END") == 4
    answer = read(AG_UI, read_stream(AG_UI, script.events, joins=joins))
    texts = {
        message["id"]: message["content"] for message in answer["messages"] if isinstance(message.get("content"), str)
    }
    assert texts["msg_1.2"] == "It is cold."


@pytest.mark.spec("19.2")
def test_ag_ui_gets_the_end_of_withdrawn_text_and_its_record(script: Script) -> None:
    script.run("run_1")
    script.withdrawn_message("msg_1", "Let me look.")
    script.message("msg_2", "run_1")
    script.message_done("msg_2", "It is cold.", "run_1")
    script.run_done("run_1")
    answer = read(AG_UI, read_stream(AG_UI, script.events))
    assert answer["types"].count("TEXT_MESSAGE_START") == answer["types"].count("TEXT_MESSAGE_END") == 2
    records = [
        payload["value"]["message"]
        for payload in payloads_of(read_stream(AG_UI, script.events))
        if payload.get("name") == "message.done"
    ]
    assert [(record["id"], record["metadata"].get("withdrawn")) for record in records] == [
        ("msg_1", True),
        ("msg_2", None),
    ]


@pytest.mark.spec("7.5")
def test_ag_ui_reads_a_run(script: Script) -> None:
    script.run("run_1")
    script.tool_start("call_1")
    script.tool_delta("call_1", '{"city":')
    script.tool_delta("call_1", ' "Oslo"}')
    script.tool_ready("call_1", status="requires_action")
    script.tool_done("call_1", {"rows": 2})
    script.tool("call_2")
    script.tool_error("call_2", "it broke")
    script.message("msg_1", "run_1")
    script.delta("msg_1", "It is ")
    script.delta("msg_1", "cold.")
    script.message_done("msg_1", "It is cold.", "run_1")
    script.run_done("run_1")
    answer = read(AG_UI, read_stream(AG_UI, script.events))
    assert answer["types"] == [
        "RUN_STARTED",
        "TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_ARGS", "TOOL_CALL_END", "CUSTOM", "TOOL_CALL_RESULT",
        "TOOL_CALL_START", "TOOL_CALL_ARGS", "TOOL_CALL_END", "TOOL_CALL_RESULT",
        "TEXT_MESSAGE_START", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_CONTENT", "TEXT_MESSAGE_END", "CUSTOM",
        "RUN_FINISHED",
    ]  # fmt: skip
    calls = {call["id"]: call for message in answer["messages"] for call in message.get("toolCalls", ())}
    assert json.loads(calls["call_1"]["function"]["arguments"]) == {"city": "Oslo"}
    results = {
        result_message["toolCallId"]: result_message["content"]
        for result_message in answer["messages"]
        if result_message["role"] == "tool"
    }
    assert results == {"call_1": '{"rows":2}', "call_2": "it broke"}
    assert [message["content"] for message in answer["messages"] if message["id"] == "msg_1"] == ["It is cold."]


@pytest.mark.spec("7.5")
@pytest.mark.parametrize(
    ("status", "more", "last"),
    [("completed", {}, "RUN_FINISHED"), ("canceled", {}, "RUN_FINISHED"), ("failed", {"error": "no"}, "RUN_ERROR")],
)
def test_ag_ui_gets_the_outcome_of_a_run(script: Script, status: str, more: dict[str, str], last: str) -> None:
    script.run("run_1")
    script.message("msg_1", "run_1")
    script.run_done("run_1", status, **more)
    assert read(AG_UI, read_stream(AG_UI, script.events))["types"][-1] == last


@pytest.mark.spec("7.5")
def test_ag_ui_reads_a_space_with_several_runs_at_once(script: Script) -> None:
    script.message("msg_0")
    script.message_done("msg_0", "Hello, both of you")
    script.run("run_1")
    script.message("msg_1", "run_1")
    script.delta("msg_1", "I ")
    script.run("run_2", "ent_other")
    script.message("msg_2", "run_2")
    script.delta("msg_2", "So ")
    script.message("msg_3")
    script.message_done("msg_3", {"not": "text"})
    script.delta("msg_1", "am.")
    script.message_done("msg_1", "I am.", "run_1")
    script.run_done("run_1")
    script.delta("msg_2", "do I.")
    script.tool("call_1")
    script.message_done("msg_2", "So do I.", "run_2")
    script.run_done("run_2")
    script.tool_done("call_1", "long after")
    answer = read(AG_UI, read_stream(AG_UI, script.events))
    texts = {
        message["id"]: message["content"] for message in answer["messages"] if isinstance(message.get("content"), str)
    }
    assert (texts["msg_0"], texts["msg_1"], texts["msg_2"]) == ("Hello, both of you", "I am.", "So do I.")
    assert answer["types"].count("RUN_STARTED") == answer["types"].count("RUN_FINISHED")


# Any events


def random_events(seed: int) -> list[StoredEvent]:
    """Events in any order, also in one that the gateway never produces."""
    chance = random.Random(seed)
    script = Script()
    exposures: tuple[Visibility, ...] = ("full", "full", "name", "none")
    for _ in range(chance.randrange(1, 40)):
        n = chance.randrange(3)
        exposure = chance.choice(exposures)
        status = chance.choice(("running", "requires_action"))
        match chance.randrange(13):
            case 0:
                script.run(f"run_{n}")
            case 1:
                script.run_done(f"run_{n}", chance.choice(("completed", "failed", "canceled")))
            case 2:
                script.message(f"msg_{n}", chance.choice((None, f"run_{n}")))
            case 3:
                more = {"restart": True} if chance.random() < 0.3 else {}
                script.delta(f"msg_{n}", chance.choice(("", "a", "é\n\u2028")), **more)
            case 4:
                ends = chance.choice(("complete", "complete", "error"))
                script.message_done(f"msg_{n}", chance.choice(("text", "", None, {"a": [1]}, 2**60)), status=ends)
            case 5:
                script.tool(f"call_{n}", exposure, status=status, input=chance.choice(({}, None, [1], "x")))
            case 6:
                script.tool_delta(f"call_{n}", chance.choice(("", "{", '{"a":1}', "]]")))
            case 7:
                script.tool_part(f"call_{n}", chance.choice((None, 1, {"a": 1})))
            case 8:
                script.tool_done(f"call_{n}", chance.choice((None, False, {"approved": False}, "x")), exposure)
            case 9:
                script.tool_error(f"call_{n}", chance.choice(("", "broken")), exposure)
            case 10:
                script.tool_start(f"call_{n}", exposure)
            case 11:
                script.tool_ready(f"call_{n}", exposure, status=status)
            case _:
                script.add("tool.progress", exposure, toolCallId=f"call_{n}", progress=0.5)
    return script.events


@pytest.mark.spec("7.5")
def test_the_parsers_of_both_protocols_accept_any_events_from_any_start() -> None:
    streams: list[tuple[Dialect, bytes]] = []
    for seed in range(300):
        events = random_events(seed)
        joins = random.Random(-seed).randrange(len(events) + 1) if seed % 2 else 0
        audience: Viewer = "public" if seed % 3 else "secret"
        streams += [(dialect, read_stream(dialect, events, audience=audience, joins=joins)) for dialect in FORMATS]
    for (dialect, text), answer in zip(streams, read_by_peers(*streams), strict=True):
        assert "error" not in answer, (dialect.name, answer, text.decode())


# Resuming within an event


@pytest.mark.spec("7.4")
@pytest.mark.parametrize("dialect", FORMATS, ids=lambda dialect: dialect.name)
def test_frames_of_one_event_have_partial_ids_and_the_last_has_the_event_id(script: Script, dialect: Dialect) -> None:
    script.run("run_1")
    script.message_done("msg_1", "Hello", "run_1")
    feed = feed_of(dialect)
    translator = translator_of(feed)
    feed.encode(script.events[0], translator)
    frames = feed.encode(script.events[1], translator)
    ids = [frame.split(b"\n")[0].removeprefix(b"id: ").decode() for frame in frames]
    assert len(ids) > 2
    assert ids == [*(f"2.{n}" for n in range(len(ids) - 1)), "2"]


# Redaction


SECRET = "s3cr3t-of-a-prebuilt-tool"


@pytest.mark.spec("8.2")
@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("exposure", ["name", "none"])
@pytest.mark.parametrize("joins", [0, 3])
def test_a_public_subscriber_gets_no_byte_of_the_input_or_output_of_prebuilt_tools(
    script: Script, dialect: Dialect, exposure: Visibility, joins: int
) -> None:
    script.run("run_1")
    call_name = {"toolCallId": "call_1", "toolName": "set_memories"}
    script.add("tool.started", exposure, **call_name, runId="run_1")
    script.add("tool.streaming", exposure, **call_name, inputDelta=SECRET)
    script.add(
        "tool.ready", exposure, **call_name, input={"memories": SECRET}, runId="run_1", status="requires_action",
        inputSchema={"description": SECRET}, outputSchema={"description": SECRET},
    )  # fmt: skip
    script.add("tool.progress", exposure, **call_name, progress=1, message=SECRET)
    script.add("tool.streaming", exposure, **call_name, output=SECRET, preliminary=True)
    script.add("tool.done", exposure, **call_name, output={"stored": SECRET}, source="server")
    script.add("tool.error", exposure, **call_name, error=SECRET, errorKind=SECRET, output=SECRET)
    script.run_done("run_1", "failed", error=SECRET, usage={"model": SECRET})
    frames = read_stream(dialect, script.events, audience="public", joins=joins)
    assert SECRET.encode() not in frames
    assert (b"call_1" in frames) == (exposure == "name")
    assert SECRET.encode() in read_stream(dialect, script.events, joins=joins)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.just(SECRET) | st.text().map(lambda text: text + SECRET),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(("input", "output", "error", "errorKind", "inputDelta", "message", "progress", "messageId", "x")),
    values,
)
kinds = st.sampled_from(
    ("tool.started", "tool.streaming", "tool.ready", "tool.progress", "tool.done", "tool.error", "tool.new")
)


@pytest.mark.spec("8.2")
@given(st.lists(st.tuples(kinds, st.sampled_from(("name", "none")), fields), max_size=8), st.integers(0, 8))
def test_a_public_subscriber_gets_no_data_of_the_events_of_prebuilt_tools(
    event_plans: list[tuple[str, Visibility, dict[str, Any]]], joins: int
) -> None:
    script = Script()
    for type, exposure, data in event_plans:
        script.add(type, exposure, **{**data, "toolCallId": "call_1", "toolName": "set_goals"})
    for dialect in DIALECTS.values():
        assert SECRET.encode() not in read_stream(dialect, script.events, audience="public", joins=joins)


def test_a_public_subscriber_gets_only_the_id_and_the_name_of_a_prebuilt_call(script: Script) -> None:
    script.tool("call_1", "name")
    script.tool_done("call_1", 1, "name")
    frames = read_stream(NATIVE, script.events, audience="public").decode()
    assert frames == (
        'id: 1\nevent: tool.started\ndata: {"toolCallId":"call_1","toolName":"confirm"}\n\n'
        'id: 2\nevent: tool.ready\ndata: {"toolCallId":"call_1","toolName":"confirm"}\n\n'
        'id: 3\nevent: tool.done\ndata: {"toolCallId":"call_1","toolName":"confirm"}\n\n'
    )


@pytest.mark.spec("8.2")
def test_each_dialect_says_that_a_hidden_call_started_was_ready_and_ended_and_nothing_else(script: Script) -> None:
    script.tool_start("call_1", "name", executionType="prebuilt", executionTarget="server")
    script.add("tool.streaming", "name", toolCallId="call_1", toolName="confirm", inputDelta='{"goals"')
    script.tool_ready("call_1", "name", executionType="prebuilt", executionTarget="server")
    script.tool_done("call_1", {"stored": 1}, "name")
    script.tool("call_2", "name", executionType="prebuilt", executionTarget="server")
    script.tool_error("call_2", "it broke", "name")
    stream = read_stream(UI_MESSAGE_STREAM, script.events, audience="public")
    hidden = {"toolCallId": "call_1", "toolName": "confirm", "providerExecuted": True}
    assert payloads_of(stream)[1:] == [
        {"type": "tool-input-start", **hidden},
        {"type": "tool-input-available", **hidden, "input": None},  # The SDK refuses parts without an input.
        {"type": "tool-output-available", "toolCallId": "call_1", "toolName": "confirm", "output": None},
        {"type": "tool-input-start", **hidden, "toolCallId": "call_2"},
        {"type": "tool-input-available", **hidden, "toolCallId": "call_2", "input": None},
        {"type": "tool-output-error", "toolCallId": "call_2", "errorText": "the tool failed"},
    ]
    states = [part["state"] for part in read(UI_MESSAGE_STREAM, stream)["message"]["parts"]]
    assert states == ["output-available", "output-error"]
    stream = read_stream(AG_UI, script.events, audience="public")
    types = ["TOOL_CALL_START", "TOOL_CALL_END", "TOOL_CALL_RESULT"]
    calls = [payload for payload in payloads_of(stream) if payload["type"].startswith("TOOL_")]
    assert [call["type"] for call in calls] == [*types, *types]
    assert (calls[2]["content"], calls[5]["content"]) == ("", "the tool failed")
    read(AG_UI, stream)


@pytest.mark.spec("8.2")
def test_the_ai_sdk_may_execute_external_calls_and_gets_their_run(script: Script) -> None:
    script.tool("call_1", executionType="external", executionTarget="external", status="requires_action")
    script.tool("call_2", executionType="function", executionTarget="server")
    for viewer in ("secret", "public"):
        stream = read_stream(UI_MESSAGE_STREAM, script.events, audience=viewer)
        _, start, available, _, server_call = payloads_of(stream)
        assert "providerExecuted" not in {**start, **available}
        assert available["providerMetadata"] == {"toolspace": {"runId": "run_1"}}
        assert server_call["providerExecuted"] is True
        part = read(UI_MESSAGE_STREAM, stream)["message"]["parts"][0]
        assert (part["state"], part["input"]) == ("input-available", {"city": "Oslo"})


@pytest.mark.spec("8.2")
def test_members_see_the_input_and_the_output_of_the_tools_that_they_execute(script: Script) -> None:
    script.tool("call_1", status="requires_action")
    script.tool_done("call_1", {"answer": 42})
    for dialect in DIALECTS.values():
        assert read_stream(dialect, script.events, audience="public") == read_stream(dialect, script.events)


# Sharing a feed


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.name)
async def test_late_and_early_subscribers_read_the_same(dialect: Dialect) -> None:
    for seed in range(30):
        events = random_events(seed)

        async def load(_: str, after: int, limit: int, events: list[StoredEvent] = events) -> list[StoredEvent]:
            return events[after : after + limit]

        feed = SharedFeed(Hub(load, _load_nothing), "space:spc_1", dialect, "public")
        translator = translator_of(feed)
        for place, event in enumerate(events):
            replay_translator = await feed.replay_translator(place)
            assert feed.encode(event, replay_translator) == feed.encode(event, translator)
