"""Elicitation: questions of MCP servers go to the people in the space of the call."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.providers.mcp.conftest import SERVERS
from tests.server.gateway_api import open_api, write_config
from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import ElicitationResult, Tool, ToolContext, tool
from toolspace.core.stored_records import CallRecord, space_stream
from toolspace.providers.mcp.server_spec import ElicitationRequest
from toolspace.server.gateway import Gateway
from toolspace.spaces.elicitation import ask_space
from toolspace.storage.database import Database

pytestmark = pytest.mark.spec("3.16")
COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


def paint(**options: Any) -> Tool:
    @tool(name="paint", visible=False, **options)
    async def asks(context: ToolContext, url: str | None = None) -> Any:
        schema = COLOUR if url is None else None
        question = ElicitationRequest(server="paints", message="Which colour?", schema=schema, url=url)
        answer = await ask_space(question, context)
        return {"action": answer.action, "content": answer.content}

    return asks


async def questions(harness: ServiceHarness, count: int = 1) -> list[CallRecord]:
    """Waits until `count` questions were asked in the space."""
    call_ids: list[str] = []
    async with await harness.ledger.hub.subscribe(space_stream(harness.space), after=0) as reader:
        async for batch in reader:
            call_ids += [event.data["toolCallId"] for event in batch if event.type == "tool.ready"]
            if len(call_ids) >= count:
                return [await harness.get_call(call_id) for call_id in call_ids]
    raise AssertionError("the stream ended")


async def test_question_is_a_visible_call_and_its_answer_is_returned(database: Database) -> None:
    async with service_harness(database, paint()) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint"))
        (call_id,) = await questions(harness)
        assert (call_id.tool_name, call_id.execution_type, call_id.visible) == ("elicitation", "space", True)
        assert (call_id.status, call_id.space_id, call_id.run_id) == ("waiting", harness.space, run)
        assert call_id.args == {"message": "Which colour?", "server": "paints", "requestedSchema": COLOUR}
        (message,) = await harness.messages()
        assert (message.status, message.call_id) == ("requires_action", call_id.call_id)
        await harness.submit(
            call_id.call_id, {"action": "accept", "content": {"colour": "red"}}, entity_id=harness.person
        )
        assert (await call_task).unwrap() == {"action": "accept", "content": {"colour": "red"}}
        (message,) = await harness.messages()
        assert message.status == "complete"
        assert await harness.inbox() == []


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_people_may_decline(database: Database, action: str) -> None:
    async with service_harness(database, paint()) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint"))
        (call_id,) = await questions(harness)
        await harness.submit(call_id.call_id, {"action": action, "content": {"colour": "not looked at"}})
        assert (await call_task).unwrap() == {"action": action, "content": None}


async def test_answer_that_does_not_match_the_form_is_asked_again(database: Database) -> None:
    async with service_harness(database, paint()) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint"))
        wrong: list[Any] = [{"action": "accept", "content": {"colour": "green"}}, "red"]
        for place, answer in enumerate(wrong, 1):
            call_id = (await questions(harness, place))[-1]
            await harness.submit(call_id.call_id, answer)
        call_id = (await questions(harness, 3))[-1]
        assert "the answer to a question is" in call_id.args["error"]
        await harness.submit(call_id.call_id, {"action": "accept", "content": {"colour": "blue"}})
        assert (await call_task).unwrap()["content"] == {"colour": "blue"}


async def test_question_is_asked_a_limited_number_of_times(database: Database) -> None:
    async with service_harness(database, paint()) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint"))
        for place in range(1, 4):
            await harness.submit((await questions(harness, place))[-1].call_id, None)
        result = await call_task
        assert "the answer to a question is" in (result.error or "")


async def test_question_with_a_url_shows_it(database: Database) -> None:
    async with service_harness(database, paint()) as harness:
        run = await harness.open_run(in_space=True)
        call_task = asyncio.create_task(harness.call(run, "paint", {"url": "https://example.org/in"}))
        (call_id,) = await questions(harness)
        assert call_id.args == {"message": "Which colour?", "server": "paints", "url": "https://example.org/in"}
        await harness.submit(call_id.call_id, {"action": "accept"})
        assert (await call_task).unwrap() == {"action": "accept", "content": None}


async def test_question_ends_with_the_timeout_of_its_call(database: Database) -> None:
    async with service_harness(database, paint(timeout=0.1)) as harness:
        run = await harness.open_run(in_space=True)
        result = await harness.call(run, "paint")
        assert result.error_kind == "timeout"
        (call_id,) = await questions(harness)
        async with asyncio.timeout(10):
            while call_id.status in ("waiting", "pending"):
                call_id = await harness.pending_calls.wait_for_result(call_id.call_id, 1.0)
        assert call_id.status in ("canceled", "expired")  # Whichever came first.
        assert await harness.inbox() == []


async def test_without_a_space_the_caller_is_asked(database: Database) -> None:
    class Client:
        async def elicit(self, message: str, **_: Any) -> ElicitationResult:
            return ElicitationResult(action="accept", content={"colour": message})

    async with service_harness(database, paint()) as harness:
        run = await harness.open_run()
        host, open_run = await harness.open_host(run)
        context = ToolContext(agent_entity_id=harness.agent, host=host, caller_client=Client())  # pyright: ignore
        result = await harness.ts.call("paint", context=context, run=open_run)
        assert result.unwrap()["content"] == {"colour": "Which colour?"}


async def test_error_says_if_nobody_can_be_asked(database: Database) -> None:
    async with service_harness(database, paint()) as harness:
        result = await harness.call(await harness.open_run(), "paint")
        assert 'the server "paints" has a question, and nobody can be asked' in (result.error or "")


async def test_member_answers_a_question_of_a_real_server_over_http(tmp_path: Path) -> None:
    server = {"command": sys.executable, "args": [str(SERVERS / "scripted.py"), str(tmp_path / "seen")]}
    path = write_config(tmp_path, mcpServers={"s": server})
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        agent = await api.create("/api/entities", type="agent", name="Ada")
        person = await api.create("/api/entities", type="human", name="Husam")
        space = await api.create("/api/spaces", name="Room", members=[agent["id"], person["id"]])
        run = await api.create("/api/runs", agentEntityId=agent["id"], spaceId=space["id"])
        body = {"name": "s__ask", "args": {"text": "Go on?"}}
        call_task = asyncio.create_task(api.post(f"/api/runs/{run['id']}/calls", body))
        member = await api.member(person["id"])
        call: dict[str, Any] = {}
        async with await gateway.ledger.hub.subscribe(space_stream(space["id"]), after=0) as reader:
            async for batch in reader:
                for event in batch:
                    if event.type == "tool.ready":
                        call = dict(event.data)
                if call:
                    break
        assert (call["toolName"], call["input"]["message"], call["input"]["server"]) == ("elicitation", "Go on?", "s")
        answer: dict[str, Any] = {
            "runId": run["id"],
            "toolCallId": call["toolCallId"],
            "result": {"action": "accept", "content": {}},
        }
        response = await member.post(f"/api/spaces/{space['id']}/tool-results", answer)
        assert response.status == 200, response
        reply = await call_task
        assert reply.data["ok"], reply
        assert '"action": "accept"' in reply.data["content"][0]["text"]
