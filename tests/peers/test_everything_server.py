"""The reference server `everything`: content, progress, list changes, elicitation, sampling."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.peers.servers import editor_file, everything_server, with_tap
from tests.peers.tap import tap
from toolspace import ToolContext, Toolspace
from toolspace.core.events import CallProgress, ToolsChanged
from toolspace.core.result import ImagePart, ResourcePart, TextPart
from toolspace.providers.mcp.server_spec import ElicitationRequest, ElicitationResult, McpCallbacks, SamplingRequest
from toolspace.testing import EventRecorder


@pytest.fixture
async def ts(tmp_path: Path) -> AsyncIterator[Toolspace]:
    async with Toolspace.open(editor_file(tmp_path, everything=everything_server())) as ts:
        yield ts


@pytest.mark.spec("3.15")
async def test_image_is_kept_with_a_text_line(ts: Toolspace) -> None:
    result = await ts.call("everything__get_tiny_image")
    before, image, after = result.content
    assert isinstance(before, TextPart)
    assert isinstance(after, TextPart)
    assert isinstance(image, ImagePart)
    assert image.mime_type == "image/png"
    assert base64.b64decode(image.data).startswith(b"\x89PNG")
    assert result.text.splitlines()[1] == image.placeholder


@pytest.mark.spec("3.15")
async def test_embedded_text_and_binary_resources_are_kept(ts: Toolspace) -> None:
    text = await ts.call("everything__get_resource_reference", {"resourceType": "Text", "resourceId": 1})
    binary = await ts.call("everything__get_resource_reference", {"resourceType": "Blob", "resourceId": 2})
    resources = [part for result in (text, binary) for part in result.content if isinstance(part, ResourcePart)]
    assert [part.uri.split("/")[-1] for part in resources] == ["1", "2"]
    assert resources[0].text
    assert resources[1].blob
    assert base64.b64decode(resources[1].blob)


@pytest.mark.spec("3.15")
async def test_resource_links_are_kept(ts: Toolspace) -> None:
    result = await ts.call("everything__get_resource_links", {"count": 2})
    links = [part for part in result.content if isinstance(part, ResourcePart)]
    assert len(links) == 2
    assert all(transport.uri and transport.name and transport.text is None for transport in links)


@pytest.mark.spec("3.15")
async def test_structured_content_is_the_result(ts: Toolspace) -> None:
    result = await ts.call("everything__get_structured_content", {"location": "Chicago"})
    assert result.result == {"temperature": 36, "conditions": "Light rain / drizzle", "humidity": 82}
    tool = ts.find_tool("everything__get_structured_content")
    assert tool is not None
    assert tool.output_schema is not None


@pytest.mark.spec("3.15")
async def test_reported_failure_is_never_cached(tmp_path: Path) -> None:
    async with tap(tmp_path / "door") as wire:
        entry = {**with_tap(everything_server(), tmp_path / "door"), "cache": "1m"}
        async with Toolspace.open(editor_file(tmp_path, everything=entry)) as ts:
            failed = [await ts.call("everything__get_resource_reference", {"resourceId": -1}) for _ in range(2)]
            assert len(wire.of("tools/call")) == 2
            cached = [await ts.call("everything__echo", {"message": "once"}) for _ in range(2)]
            assert len(wire.of("tools/call")) == 3
    assert [(result.ok, result.error_kind, result.executed) for result in failed] == [
        (False, "execution_error", True)
    ] * 2
    assert "Invalid resourceId: -1" in (failed[0].error or "")
    assert [result.text for result in cached] == ["Echo: once"] * 2


@pytest.mark.spec("3.15")
async def test_arguments_are_validated_and_coerced(ts: Toolspace) -> None:
    assert (await ts.call("everything__get_sum", {"a": "2", "b": 3})).text == "The sum of 2 and 3 is 5."
    wrong = await ts.call("everything__get_sum", {"a": "two", "b": 3})
    assert wrong.error_kind == "invalid_parameters"
    assert not wrong.executed


@pytest.mark.spec("3.15")
async def test_instructions_reach_the_system_prompt(ts: Toolspace) -> None:
    assert "Everything Server" in ts.orchestrator.instructions()


@pytest.mark.spec("3.17")
async def test_tool_that_needs_tasks_is_left_out_of_the_list(ts: Toolspace) -> None:
    recorder = EventRecorder(ts)
    # It is part of the change that the server makes after its start.
    left_out = [server.left_out for server in ts.list_servers()]
    if left_out == [()]:
        await recorder.wait_for(lambda event: isinstance(event, ToolsChanged))
        left_out = [server.left_out for server in ts.list_servers()]
    assert "simulate-research-query" in left_out[0][0]
    assert ts.find_tool("everything__simulate_research_query") is None


@pytest.mark.spec("3.14")
async def test_tools_added_later_reach_models_without_a_restart(tmp_path: Path) -> None:
    # It adds tools when it knows the capabilities of its client, which is after the first list.
    file = editor_file(tmp_path, everything=everything_server())
    async with Toolspace.open(file, callbacks=McpCallbacks(roots=lambda: (tmp_path,))) as ts:
        await _wait_for_tool(ts, "everything__get_roots_list")
        tool_names = {entry["function"]["name"] for entry in ts.to_llm_tools("openai")}
        assert "everything__get_roots_list" in tool_names
        assert ts.list_servers()[0].restarts == 0


@pytest.mark.spec("3.14")
async def test_progress_becomes_events(ts: Toolspace) -> None:
    recorder = EventRecorder(ts)
    result = await ts.call("everything__trigger_long_running_operation", {"duration": 0.2, "steps": 4})
    assert result.ok
    steps = [event for event in recorder.events if isinstance(event, CallProgress)]
    assert [(step.progress, step.total) for step in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {step.call_id for step in steps} == {result.call_id}


@pytest.mark.spec("3.14")
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_abandoned_call_is_cancelled_on_the_server(tmp_path: Path, how: str) -> None:
    async with tap(tmp_path / "door") as wire:
        entry = with_tap(everything_server(), tmp_path / "door")
        if how == "timeout":
            entry["requestTimeoutMs"] = 1000
        async with Toolspace.open(editor_file(tmp_path, everything=entry)) as ts:
            pid = ts.list_servers()[0].pid
            call = asyncio.create_task(
                ts.call("everything__trigger_long_running_operation", {"duration": 30, "steps": 1}, call_id="mine")
            )
            request = await wire.saw("tools/call")
            if how == "cancel":
                assert ts.cancel("mine")
            result = await call
            cancellation = await wire.saw("notifications/cancelled")
            assert result.error_kind == ("canceled" if how == "cancel" else "timeout")
            assert cancellation["params"]["requestId"] == request["id"]
            # All calls share one connection: the others continue.
            assert (await ts.call("everything__echo", {"message": "still here"})).ok
            assert ts.list_servers()[0].pid == pid
            assert ts.list_servers()[0].restarts == 0


# Questions that a server asks


class ScriptedUser:
    """Answers the questions of servers, and records them."""

    def __init__(self, answer: ElicitationResult) -> None:
        self.answer = answer
        self.questions: list[ElicitationRequest] = []
        self.wishes: list[SamplingRequest] = []

    async def ask(self, question: ElicitationRequest, _: ToolContext | None) -> ElicitationResult:
        self.questions.append(question)
        return self.answer

    async def sample(self, wish: SamplingRequest, _: ToolContext | None) -> Mapping[str, Any]:
        self.wishes.append(wish)
        return {"role": "assistant", "content": {"type": "text", "text": "forty-two"}, "model": "scripted"}


async def _wait_for_tool(ts: Toolspace, name: str) -> None:
    """Waits for a tool that the server adds when it knows the capabilities of its client."""
    recorder = EventRecorder(ts)
    if ts.find_tool(name) is None:
        await recorder.wait_for(lambda _: ts.find_tool(name) is not None)


@pytest.mark.spec("3.14")
@pytest.mark.spec("3.16")
async def test_elicitation_round_trip(tmp_path: Path) -> None:
    person = ScriptedUser(ElicitationResult(action="accept", content={"name": "Ada Lovelace", "check": True}))
    file = editor_file(tmp_path, everything=everything_server())
    async with Toolspace.open(file, callbacks=McpCallbacks(elicit=person.ask)) as ts:
        await _wait_for_tool(ts, "everything__trigger_elicitation_request")
        result = await ts.call("everything__trigger_elicitation_request")
    assert "Name: Ada Lovelace" in result.text
    (question,) = person.questions
    assert question.server == "everything"
    assert question.schema is not None
    assert question.schema["required"] == ["name"]


@pytest.mark.spec("3.16")
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_user_may_decline(tmp_path: Path, action: Any) -> None:
    person = ScriptedUser(ElicitationResult(action=action))
    file = editor_file(tmp_path, everything=everything_server())
    async with Toolspace.open(file, callbacks=McpCallbacks(elicit=person.ask)) as ts:
        await _wait_for_tool(ts, "everything__trigger_elicitation_request")
        result = await ts.call("everything__trigger_elicitation_request")
    assert result.ok
    assert f'"action": "{action}"' in result.text


@pytest.mark.spec("3.16")
async def test_sampling_round_trip(tmp_path: Path) -> None:
    person = ScriptedUser(ElicitationResult(action="cancel"))
    file = editor_file(tmp_path, everything=everything_server())
    async with Toolspace.open(file, callbacks=McpCallbacks(sample=person.sample)) as ts:
        await _wait_for_tool(ts, "everything__trigger_sampling_request")
        result = await ts.call("everything__trigger_sampling_request", {"prompt": "the answer?", "maxTokens": 7})
    assert "forty-two" in result.text
    (wish,) = person.wishes
    assert wish.server == "everything"
    assert wish.params["maxTokens"] == 7
    assert "the answer?" in json.dumps(wish.params["messages"])


@pytest.mark.spec("3.16")
async def test_roots_reach_the_server(tmp_path: Path) -> None:
    file = editor_file(tmp_path, everything=everything_server())
    async with Toolspace.open(file, callbacks=McpCallbacks(roots=lambda: (tmp_path,))) as ts:
        await _wait_for_tool(ts, "everything__get_roots_list")
        result = await ts.call("everything__get_roots_list")
    assert tmp_path.as_uri() in result.text


@pytest.mark.spec("3.16")
async def test_capabilities_are_declared_only_with_callbacks(tmp_path: Path) -> None:
    async with tap(tmp_path / "door") as wire:
        file = editor_file(tmp_path, everything=with_tap(everything_server(), tmp_path / "door"))
        async with Toolspace.open(file):
            request = await wire.saw("initialize")
    assert request["params"]["capabilities"] == {}
