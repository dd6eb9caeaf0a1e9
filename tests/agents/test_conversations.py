"""Conversations of programs with agents: sessions, histories, and what happens to both when a run does not end well."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.model_server import (
    ModelTestServer,
    anthropic_message,
    chat_completion,
    stream_reply,
    text_block,
    text_completion,
    thinking_block,
    tool_call_delta,
    tool_use_block,
)
from toolspace import (
    Agent,
    AgentCallStarted,
    DiskConversations,
    Settings,
    ToolContext,
    Toolspace,
    ToolspaceError,
    UserTurn,
    decode_turns,
    encode_turns,
    tool,
)
from toolspace.config.agent_settings import AgentModelSettings
from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import Model, ModelCall, ModelRequest, ModelTurn, ResultsTurn
from toolspace.errors import ModelError, StorageError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.memory_conversations import MemoryConversations


@tool
async def temperature(city: str) -> int:
    """Returns the temperature of a city."""
    return {"Oslo": 9}[city]


def texts_of(model: ScriptedModel, request: int = -1) -> list[str]:
    """What the model read in a request, without calls and results."""
    return [turn.text for turn in model.requests[request].turns if not isinstance(turn, ResultsTurn)]


def toolspace_of(model: Model, **options: Any) -> Toolspace:
    return Toolspace([temperature], agents=[Agent("ada", model=model)], **options)


@pytest.fixture(params=["memory", "disk"])
def conversations(request: pytest.FixtureRequest, tmp_path: Path) -> ConversationStore:
    return MemoryConversations() if request.param == "memory" else DiskConversations(tmp_path / "conversations")


@pytest.mark.spec("19.4")
async def test_a_session_continues_its_conversation(conversations: ConversationStore) -> None:
    model = ScriptedModel([call("temperature", {"city": "Oslo"}), "9 degrees.", "You asked about Oslo."])
    async with toolspace_of(model, conversations=conversations) as ts:
        await ts.run_agent("ada", "How warm is Oslo?", session="chat-1")
        result = await ts.run_agent("ada", "What did I ask?", session="chat-1")
    assert texts_of(model) == ["How warm is Oslo?", "", "9 degrees.", "What did I ask?"]
    assert [type(turn).__name__ for turn in result.turns] == [
        "UserTurn", "ModelTurn", "ResultsTurn", "ModelTurn", "UserTurn", "ModelTurn",
    ]  # fmt: skip
    assert result.steps == 1


@pytest.mark.spec("19.4")
async def test_sessions_are_kept_apart_by_id_and_by_principal(conversations: ConversationStore) -> None:
    model = ScriptedModel.loop(["Yes."])
    carla, dave = ToolContext(user_id="carla"), ToolContext(user_id="dave")
    async with toolspace_of(model, conversations=conversations) as ts:
        await ts.run_agent("ada", "I am Carla.", session="s", context=carla)
        await ts.run_agent("ada", "I am Dave.", session="s", context=dave)
        assert texts_of(model) == ["I am Dave."]
        await ts.run_agent("ada", "Another one.", session="t", context=carla)
        assert texts_of(model) == ["Another one."]
        await ts.run_agent("ada", "Again.", session="s", context=carla)
        assert texts_of(model) == ["I am Carla.", "Yes.", "Again."]
        assert await conversations.delete("s", owner="carla")
        assert not await conversations.delete("s", owner="carla")
        await ts.run_agent("ada", "New.", session="s", context=carla)
        assert texts_of(model) == ["New."]


@pytest.mark.spec("19.4")
async def test_sessions_belong_to_the_user_of_the_toolspace() -> None:
    store, model = MemoryConversations(), ScriptedModel.loop(["Yes."])
    for user in ("carla", "dave"):
        async with toolspace_of(model, conversations=store, context=ToolContext(user_id=user)) as ts:
            await ts.run_agent("ada", f"I am {user}.", session="s")
            assert texts_of(model) == [f"I am {user}."]
    assert await store.load("s", owner="local") == ()


@pytest.mark.spec("19.4")
async def test_a_session_of_a_configured_toolspace_survives_a_restart(tmp_path: Path) -> None:
    config = tmp_path / "toolspace.yaml"
    config.write_text("storage: { dir: state }\n")
    program = (
        "import asyncio, sys\n"
        "from toolspace import Agent, Toolspace\n"
        "from toolspace.testing import ScriptedModel\n"
        "async def main():\n"
        "    async with Toolspace.open(sys.argv[1]) as ts:\n"
        "        ts.agents.add([Agent('ada', model=ScriptedModel(lambda request: str(len(request.turns))))])\n"
        "        print((await ts.run_agent('ada', 'Hello.', session='s')).text)\n"
        "asyncio.run(main())\n"
    )
    for expected_output in ("1\n", "3\n"):
        process = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", program, str(config)], capture_output=True, text=True, check=True
        )
        assert process.stdout == expected_output
    folder = tmp_path / "state" / "conversations"
    assert [path.stat().st_mode & 0o077 for path in (folder, *folder.iterdir())] == [0, 0, 0]


@pytest.mark.spec("19.4")
async def test_runs_of_one_session_wait_for_each_other(conversations: ConversationStore) -> None:
    is_first_under_way, may_end = asyncio.Event(), asyncio.Event()

    async def answer_slowly(request: ModelRequest) -> str:
        if len(request.turns) == 1:
            is_first_under_way.set()
            await may_end.wait()
        return f"answer {len(request.turns)}"

    async with toolspace_of(ScriptedModel(answer_slowly), conversations=conversations) as ts:
        first = asyncio.create_task(ts.run_agent("ada", "one", session="s"))
        await is_first_under_way.wait()
        later_runs = [asyncio.create_task(ts.run_agent("ada", "more", session="s")) for _ in range(3)]
        assert (await ts.run_agent("ada", "elsewhere", history=[UserTurn("x")])).text == "answer 2"
        may_end.set()
        results = await asyncio.gather(first, *later_runs)
    assert [result.text for result in results] == ["answer 1", "answer 3", "answer 5", "answer 7"]


async def test_two_toolspaces_never_write_one_session_at_once(tmp_path: Path) -> None:
    stores = [DiskConversations(tmp_path) for _ in range(2)]
    is_locked, may_release = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with stores[0].lock("s", owner="local"):
            is_locked.set()
            await may_release.wait()

    holder = asyncio.create_task(hold())
    await is_locked.wait()
    async with toolspace_of(ScriptedModel(["ok"]), conversations=stores[1]) as ts:
        run = asyncio.create_task(ts.run_agent("ada", "Hello.", session="s"))
        async with stores[1].lock("another", owner="local"):
            assert not run.done()
        may_release.set()
        assert (await run).ok
    await holder


async def test_a_run_below_a_session_cannot_wait_for_that_session() -> None:
    @tool
    async def ask_again(context: ToolContext) -> str:
        """Runs the agent in the same session."""
        return (await ts.run_agent("bob", "Again.", session="s")).text

    ada = Agent("ada", model=ScriptedModel([call("ask_again"), "It failed."]), tools=[ask_again])
    async with Toolspace(agents=[ada, Agent("bob", model=ScriptedModel(["never"]))]) as ts:
        result = await ts.run_agent("ada", "Go.", session="s")
    results = next(turn for turn in result.turns if isinstance(turn, ResultsTurn)).results
    assert 'session "s" is in use by the run of the agent "ada"' in results[0].text


@pytest.mark.spec("19.4")
async def test_the_turns_of_a_result_continue_the_conversation() -> None:
    model = ScriptedModel([call("temperature", {"city": "Oslo"}), "9 degrees.", "Oslo."])
    async with toolspace_of(model) as ts:
        first = await ts.run_agent("ada", "How warm is Oslo?")
        second = await ts.run_agent("ada", "Which city?", history=first.turns)
    assert second.turns[: len(first.turns)] == first.turns
    assert texts_of(model)[-1] == "Which city?"


@pytest.mark.spec("19.4")
async def test_turns_can_be_stored_as_json_and_given_back() -> None:
    model = ScriptedModel.loop([call("temperature", {"city": "Oslo"}), "9 degrees."])
    async with toolspace_of(model) as ts:
        first = await ts.run_agent("ada", "How warm is Oslo?")
        text = encode_turns(first.turns)
        assert decode_turns(text) == first.turns
        result = await ts.run_agent("ada", "Again?", history=json.loads(text))
    assert result.turns[: len(first.turns)] == first.turns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"session": "s", "history": ()}, "session and history are both given"),
        ({"session": ""}, "session is empty"),
        ({"history": [{"type": "person"}]}, "history: this is not a conversation"),
        ({"history": ["Hello."]}, "history: this is not a conversation"),
    ],
)
async def test_options_that_contradict_are_refused(options: dict[str, Any], message: str) -> None:
    async with toolspace_of(ScriptedModel(["never"])) as ts:
        with pytest.raises(ToolspaceError, match=message):
            await ts.run_agent("ada", "Hello.", **options)
        with pytest.raises(ToolspaceError, match=message):
            async for _ in ts.stream_agent("ada", "Hello.", **options):
                pass


@pytest.mark.spec("19.4")
async def test_a_failed_request_leaves_the_session_as_it_was(conversations: ConversationStore) -> None:
    model = ScriptedModel(["Hello.", ModelError("overloaded", "busy"), "Now."])
    async with toolspace_of(model, conversations=conversations) as ts:
        await ts.run_agent("ada", "one", session="s")
        assert not (await ts.run_agent("ada", "two", session="s")).ok
        await ts.run_agent("ada", "two", session="s")
    assert texts_of(model) == ["one", "Hello.", "two"]


@pytest.mark.spec("19.4")
async def test_a_cancelled_run_leaves_what_happened_in_the_session(conversations: ConversationStore) -> None:
    is_running = asyncio.Event()

    @tool
    async def send() -> None:
        """Sends something, and never returns."""
        is_running.set()
        await asyncio.Event().wait()

    model = ScriptedModel([call("send"), "It may have been sent."])
    async with Toolspace([send], agents=[Agent("ada", model=model)], conversations=conversations) as ts:
        run = asyncio.create_task(ts.run_agent("ada", "Send it.", session="s"))
        await is_running.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        await ts.run_agent("ada", "Was it sent?", session="s")
    results = [turn.results for turn in model.requests[-1].turns if isinstance(turn, ResultsTurn)]
    assert [(answer.name, answer.is_error) for answer in results[0]] == [("send", True)]
    assert texts_of(model) == ["Send it.", "", "Was it sent?"]


async def test_a_history_with_unanswered_calls_is_completed() -> None:
    model = ScriptedModel(["Done."])
    history = [UserTurn("Go."), ModelTurn(calls=(ModelCall("c1", "temperature", "{}"),))]
    async with toolspace_of(model) as ts:
        await ts.run_agent("ada", "And now?", history=history)
    results = model.requests[0].turns[2]
    assert isinstance(results, ResultsTurn)
    assert (results.results[0].id, results.results[0].is_error) == ("c1", True)


@pytest.mark.spec("19.4")
async def test_an_agent_that_gets_a_handoff_sees_the_conversation() -> None:
    expert_model = ScriptedModel(["Ask me.", "As I said."])
    desk_model = ScriptedModel.loop([call("router__handoff-to", {"agent": "expert", "message": "Be kind."})])
    desk = Agent("desk", model=desk_model, destinations=[Agent("expert", model=expert_model)])
    async with Toolspace(agents=[desk]) as ts:
        await ts.run_agent("desk", "one", session="s")
        result = await ts.run_agent("desk", "two", session="s")
    assert texts_of(expert_model) == [
        "one\n\nADVICE from router: Be kind.", "Ask me.", "two\n\nADVICE from router: Be kind.",
    ]  # fmt: skip
    assert result.path == ("desk", "expert")
    assert texts_of(desk_model)[:2] == ["one\n\nADVICE from router: Be kind.", "Ask me."]


@pytest.mark.spec("19.4")
async def test_a_conversation_that_is_too_long_for_the_model_is_shortened() -> None:
    def answer(request: ModelRequest) -> str:
        if sum(len(turn.text) for turn in request.turns if isinstance(turn, UserTurn)) > 50_000:
            raise ModelError("too_long", "too long")
        return "Short."

    model = ScriptedModel(answer)
    async with toolspace_of(model) as ts:
        for number in range(8):
            assert (await ts.run_agent("ada", f"{number} " + "x" * 20_000, session="s")).ok
    assert texts_of(model)[-1].startswith("7 xxx")


@pytest.mark.spec("19.4")
async def test_later_runs_of_a_session_can_read_what_its_tools_stored(tmp_path: Path) -> None:
    @tool
    async def dump() -> str:
        """Returns much."""
        return "needle\n" + "x\n" * 5_000

    def read_back(request: ModelRequest) -> ModelCall:
        results = [turn for turn in request.turns if isinstance(turn, ResultsTurn)]
        handle = json.loads(results[0].results[0].text)["tool_output"]["handle"]
        return call("agent__read_output", {"handle": handle, "pattern": "needle"})

    model = ScriptedModel([call("dump"), "Stored.", read_back, "Read."])
    settings = Settings(tool_response_max_bytes=1_000, state_dir=tmp_path)
    async with Toolspace([dump], agents=[Agent("ada", model=model)], settings=settings) as ts:
        await ts.run_agent("ada", "Dump.", session="s")
        result = await ts.run_agent("ada", "Find the needle.", session="s")
    last_results = [turn for turn in result.turns if isinstance(turn, ResultsTurn)][-1]
    assert '"text":"needle"' in last_results.results[0].text


async def test_a_session_that_cannot_be_read_or_written_is_an_error_of_the_result(tmp_path: Path) -> None:
    store = DiskConversations(tmp_path)
    async with toolspace_of(ScriptedModel.loop(["Hello."]), conversations=store) as ts:
        assert (await ts.run_agent("ada", "one", session="s")).ok
        (file,) = tmp_path.glob("*.json")
        file.write_text("{")
        result = await ts.run_agent("ada", "two", session="s")
        assert not result.ok
        assert str(file) in str(result.error)

    class FullDisk(MemoryConversations):
        async def save(self, *_: Any, **__: Any) -> None:
            raise StorageError("the disk is full")

    async with toolspace_of(ScriptedModel.loop(["Hello."]), conversations=FullDisk()) as ts:
        result = await ts.run_agent("ada", "one", session="s")
        assert (result.ok, result.text) == (False, "Hello.")
        assert result.error == "the answer is not part of the session: the disk is full"


# Model providers, over HTTP


@pytest.fixture
async def server() -> AsyncIterator[ModelTestServer]:
    async with ModelTestServer().serve() as loopback:
        yield loopback


def agents_of(server: ModelTestServer) -> list[Agent]:
    openai = AgentModelSettings(provider="openai", name="gpt-4.1", base_url=f"{server.url}/v1", api_key="k", retries=0)
    claude = AgentModelSettings(
        provider="anthropic", name="claude-sonnet-4-5", base_url=server.url, api_key="k", retries=0
    )
    return [Agent("openai", model=openai), Agent("claude", model=claude)]


@pytest.mark.spec("19.4")
async def test_a_conversation_continues_with_another_model_provider(server: ModelTestServer) -> None:
    tool_use = tool_use_block("toolu_1", "temperature", '{"city": "Oslo"}')
    text = text_block("9 ", "degrees.")
    server.reply(
        stream_reply(anthropic_message(thinking_block("Hm.", signature="signed"), tool_use, stop="tool_use")),
        stream_reply(anthropic_message(text)),
        stream_reply(
            chat_completion(
                tool_call_delta(0, id="call|1", name="temperature", arguments='{"city": "Oslo"}'), finish="tool_calls"
            )
        ),
        stream_reply(text_completion("Still ", "nine.")),
        stream_reply(anthropic_message(text)),
    )
    async with Toolspace([temperature], agents=agents_of(server)) as ts:
        first = await ts.run_agent("claude", "How warm is Oslo?", session="s")
        second = await ts.run_agent("openai", "And now?", session="s")
        third = await ts.run_agent("claude", "And later?", history=json.loads(encode_turns(second.turns)))
    assert [first.text, second.text, third.text] == ["9 degrees.", "Still nine.", "9 degrees."]
    messages = server.requests[2].json["messages"]
    assert [message["role"] for message in messages[-5:]] == ["user", "assistant", "tool", "assistant", "user"]
    assert "signed" not in server.requests[2].body.decode()  # The reasoning of another model is not sent on.
    roles = [message["role"] for message in server.requests[-1].json["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user", "assistant", "user", "assistant", "user"]


@pytest.mark.spec("19.4")
async def test_leaving_the_stream_closes_the_request_to_the_provider(server: ModelTestServer) -> None:
    call_of_tool = chat_completion(
        tool_call_delta(0, id="c1", name="temperature", arguments='{"city": "Oslo"}'), finish="tool_calls"
    )
    server.reply(stream_reply(call_of_tool), server.never_answer)
    async with Toolspace([temperature], agents=agents_of(server)) as ts:
        async for event in ts.stream_agent("openai", "How warm is Oslo?"):
            if isinstance(event, AgentCallStarted):
                server.request_arrived.clear()
            elif event.type == "step":
                await server.request_arrived.wait()
                break
        await server.client_closed.wait()
