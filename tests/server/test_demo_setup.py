"""The demo agent of a gateway without configured agents, with real tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import SECRET, write_config
from toolspace.client.client import ToolspaceClient
from toolspace.config.load import load_config
from toolspace.core.stored_records import Message
from toolspace.models.demo_rules import GREETING
from toolspace.server.demo_setup import (
    DEMO_AGENT_ID,
    LOBBY_SPACE_ID,
    YOU_ENTITY_ID,
    demo_agent,
    set_up_demo,
    uses_model,
)
from toolspace.server.gateway import Gateway
from toolspace.server.uvicorn_server import bind_socket, serve_gateway
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces

pytestmark = pytest.mark.spec("11.7")


@asynccontextmanager
async def lobby_client(folder: Path, environ: Mapping[str, str] | None = None) -> AsyncIterator[ToolspaceClient]:
    """A client of a gateway without configured agents."""
    path = write_config(folder, demo=True, storage={"dir": str(folder / "state")})
    async with (
        Gateway.open(path, environ=environ or {}) as gateway,
        serve_gateway(gateway, bind_socket("127.0.0.1", 0)) as url,
        ToolspaceClient(url, secret_key=SECRET) as client,
    ):
        yield client


async def answer(client: ToolspaceClient, text: str) -> Message:
    """Posts a message and returns the demo agent's next message."""
    message = await client.spaces.send_message(LOBBY_SPACE_ID, text, entity_id=YOU_ENTITY_ID)
    return await next_message(client, message.seq)


async def next_message(client: ToolspaceClient, after: int) -> Message:
    """The demo agent's first message after a number."""
    async with asyncio.timeout(30), client.spaces.subscribe(LOBBY_SPACE_ID, from_start=True) as events:
        async for event in events:
            if event.type == "message.done":
                message = event.data["message"]
                if message["senderId"] == DEMO_AGENT_ID and message["seq"] > after:
                    return await client.spaces.get_message(LOBBY_SPACE_ID, message["id"])
    raise AssertionError("it said nothing")


async def pending(client: ToolspaceClient) -> Any:
    return (await client.calls.list(status="pending")).items[0]


async def test_the_demo_agent_greets_in_the_lobby_and_streams_its_text(tmp_path: Path) -> None:
    async with lobby_client(tmp_path) as client:
        assert (await answer(client, "hello")).content == GREETING
        deltas = ""
        async with asyncio.timeout(30), client.spaces.subscribe(LOBBY_SPACE_ID, from_start=True) as events:
            count = 0
            async for event in events:
                if event.type == "message.delta":
                    count += 1
                    deltas += event.data["delta"]
                elif event.type == "message.done" and event.data["message"]["senderId"] == DEMO_AGENT_ID:
                    break
    assert count > 1
    assert GREETING.startswith(deltas)


async def test_the_demo_agent_uses_real_tools_in_its_own_folder_only(tmp_path: Path) -> None:
    async with lobby_client(tmp_path) as client:
        assert "Ann orders the signs" in (await answer(client, "read meeting.md")).content
        assert (await answer(client, "what time is it in Tokyo?")).content.endswith("in Asia/Tokyo.")
        runs = await client.agents.list_runs(DEMO_AGENT_ID)
        calls = [call for run in runs.items for call in await client.runs.list_calls(run.id)]
    folder = str(tmp_path / "state" / "demo")
    assert {call.args["path"].startswith(folder) for call in calls if call.tool_name == "read_file"} == {True}


@pytest.mark.spec("6.1")
async def test_a_chart_is_shown_in_the_space(tmp_path: Path) -> None:
    async with lobby_client(tmp_path) as client:
        await answer(client, "chart the sales")
        calls = [
            message for message in (await client.spaces.list_messages(LOBBY_SPACE_ID)).items if message.kind == "tool"
        ]
    assert [call.content["toolName"] for call in calls] == ["displayChart"]
    assert calls[0].content["input"]["values"] == [120, 98, 143, 160, 151, 187]


@pytest.mark.spec("6.3")
@pytest.mark.parametrize("is_confirmed", [True, False])
async def test_the_demo_agent_asks_before_it_deletes_and_continues_in_a_later_cycle(
    tmp_path: Path, is_confirmed: bool
) -> None:
    draft = tmp_path / "state" / "demo" / "drafts" / "old-plan.txt"
    async with lobby_client(tmp_path) as client:
        question = await answer(client, "clean up the drafts")
        call = await pending(client)
        assert draft.exists()
    async with lobby_client(tmp_path) as client:  # The result may be submitted after any number of restarts.
        await client.tools.submit_result(LOBBY_SPACE_ID, call.run_id, call.call_id, {"confirmed": is_confirmed})
        texts = await next_message(client, question.seq)
    assert texts.content.startswith("Deleted drafts/old-plan.txt" if is_confirmed else "All right, I keep")
    assert draft.exists() is not is_confirmed


@pytest.mark.spec("9.2")
@pytest.mark.spec("9.4")
async def test_the_demo_agent_remembers_after_a_restart_and_reminds_at_the_time(tmp_path: Path) -> None:
    async with lobby_client(tmp_path) as client:
        await answer(client, "remember that I like tea")
        reply = await answer(client, "remind me in 1 second to stretch")
    async with lobby_client(tmp_path) as client:
        assert (await next_message(client, reply.seq)).content == "A reminder: stretch"
        assert "I like tea" in (await answer(client, "what do you remember?")).content


async def test_a_second_start_changes_no_demo_file(tmp_path: Path) -> None:
    async with lobby_client(tmp_path) as client:
        await client.entities.update(YOU_ENTITY_ID, name="Ann")
        (tmp_path / "state" / "demo" / "welcome.txt").unlink()
    async with lobby_client(tmp_path) as client:
        assert (await client.entities.get(YOU_ENTITY_ID)).name == "Ann"
        assert {member.entity_id for member in await client.spaces.list_members(LOBBY_SPACE_ID)} == {
            YOU_ENTITY_ID,
            DEMO_AGENT_ID,
        }
        assert "welcome.txt" not in (await answer(client, "list the files")).content


async def test_the_lobby_is_created_once_on_every_database(database: Database) -> None:
    ledger = Ledger(database)
    await asyncio.gather(*(set_up_demo(ledger) for _ in range(3)))
    members = await ledger.read(entities_and_spaces.list_members, LOBBY_SPACE_ID)
    assert sorted((member.type, member.name) for member in members) == [("agent", "Demo"), ("human", "You")]


def test_the_demo_agent_uses_the_model_whose_key_is_set(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, demo=True, storage={"dir": str(tmp_path / "state")}), environ={})
    rules = demo_agent(config, {})
    assert rules is not None
    assert not uses_model(rules)
    for variable, provider in (("OPENAI_API_KEY", "openai"), ("ANTHROPIC_API_KEY", "anthropic")):
        spec = demo_agent(config, {variable: "a key"})
        assert spec is not None
        assert uses_model(spec)
        assert spec.model.provider == provider
        assert spec.model.name
        assert f"Your folder: {tmp_path / 'state' / 'demo'}" in spec.system


def test_there_is_no_demo_agent_if_agents_are_configured_or_the_demo_is_disabled(tmp_path: Path) -> None:
    none = load_config(write_config(tmp_path, demo=False), environ={})
    assert demo_agent(none, {}) is None
    own_config = load_config(
        write_config(tmp_path, demo=True, agents={"mine": {"system": "You help.", "model": "demo"}}), environ={}
    )
    assert demo_agent(own_config, {}) is None
    assert not (tmp_path / "state").exists()
