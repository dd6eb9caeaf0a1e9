"""`toolspace chat` as a real process, in a terminal and through pipes, against a real gateway.

The agent is a task of the test that claims its inbox over HTTP, so that each test decides what the agent does.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import environment
from tests.cli.terminal import TOOLSPACE, Terminal
from tests.models.model_server import text_completion
from tests.server.gateway_api import SECRET, write_config
from tests.server.gateway_process import start_gateway_process
from tests.server.scripted_agents import HeldMiddle, agent_config, message_turns, open_model_server, tool_calls_turn
from toolspace.agents.agent import entity_id_for
from toolspace.client.client import ToolspaceClient
from toolspace.core.ids import derived_id
from toolspace.core.stored_records import InboxEvent
from toolspace.models.registry import PROVIDERS
from toolspace.server.control_socket import LocalGateway, serve_control_socket
from toolspace.server.gateway import Gateway
from toolspace.server.uvicorn_server import bind_socket, serve_gateway

pytestmark = pytest.mark.spec("17.1")

CONFIRM = {"name": "confirmAction", "executionType": "space", "isAsync": True, "inputSchema": {"type": "object"}}
BOOK = {
    "name": "bookHotel",
    "executionType": "space",
    "timeout": "60s",
    "inputSchema": {"type": "object"},
    "outputSchema": {
        "type": "object",
        "properties": {"nights": {"type": "integer"}, "breakfast": {"type": "boolean"}},
        "required": ["nights", "breakfast"],
    },
}
RATE = {
    "name": "rateHotel",
    "executionType": "space",
    "timeout": "60s",
    "inputSchema": {"type": "object"},
    "outputSchema": {
        "type": "object",
        "properties": {"stars": {"type": "integer", "maximum": 5}},
        "required": ["stars"],
    },
}
CHART = {"name": "displayChart", "executionType": "internal", "visible": True, "inputSchema": {"type": "object"}}
TOOLS = """
import asyncio
from toolspace import ToolContext, tool

@tool
async def waits(context: ToolContext) -> None:
    \"\"\"Waits until it is stopped.\"\"\"
    context.report_progress(1, 4, "still here")
    await asyncio.Event().wait()

@tool
def fails() -> None:
    \"\"\"Fails.\"\"\"
    raise ValueError("it broke\\x1b[31m")
"""
NO_KEYS = {variable: "" for provider in PROVIDERS.values() for variable in provider.key_variables}
RunHandler = Callable[["GatewayRun", InboxEvent], Awaitable[None]]


class GatewayRun:
    """One run of the agent, in the space of the event that triggered it."""

    def __init__(self, client: ToolspaceClient, id: str) -> None:
        self.client = client
        self.id = id

    async def call(self, name: str, **args: Any) -> Any:
        return (await self.client.runs.call(self.id, name, args)).result

    async def send_message(self, text: str) -> None:
        await self.call("send_message", text=text)


class ScriptedAgent:
    """An agent whose behaviour is a function of the test."""

    def __init__(self, client: ToolspaceClient, act: RunHandler) -> None:
        self.client = client
        self.events: list[Any] = []
        self._act = act

    async def run(self) -> None:
        while True:
            claim = await self.client.agents.claim("robot", count=1, lease_seconds=60, wait=30)
            for event in claim.items:
                self.events.append(event.data.get("content", event.data.get("result")))
                run = await self.client.runs.open("robot", space_id=event.data["spaceId"])
                try:
                    await self._act(GatewayRun(self.client, run.id), event)
                except RuntimeError as error:
                    await self.client.runs.close(run.id, "failed", error=str(error))
                else:
                    if (await self.client.runs.get(run.id)).status == "running":
                        await self.client.runs.close(run.id)
                await self.client.agents.acknowledge("robot", [event.event_id], claim=claim.claim)


@asynccontextmanager
async def running_gateway(folder: Path, act: RunHandler) -> AsyncIterator[ScriptedAgent]:
    """Runs a gateway and an agent named Robot."""
    (folder / "tools.py").write_text(TOOLS)
    storage = {"dir": str(folder / "state")}
    path = write_config(folder, functions="./tools.py", tools=[CONFIRM, BOOK, RATE, CHART], demo=False, storage=storage)
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(Gateway.open(path))
        url = await stack.enter_async_context(serve_gateway(gateway, bind_socket("127.0.0.1", 0)))
        door = LocalGateway(url, gateway.authenticator.create_local_key())
        await stack.enter_async_context(serve_control_socket(gateway.toolspace, door))
        client = await stack.enter_async_context(ToolspaceClient(url, secret_key=SECRET))
        await client.entities.create("agent", "Robot", id="robot")
        robot = ScriptedAgent(client, act)
        task = asyncio.create_task(robot.run())
        try:
            yield robot
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def echo_message(run: GatewayRun, event: InboxEvent) -> None:
    await run.send_message(f"You said: {event.data['content']}")


async def confirm_action(run: GatewayRun, event: InboxEvent) -> None:
    """Asks for a confirmation, and reports the answer."""
    if event.type == "tool_result":
        await run.send_message(f"So {json.dumps(event.data['result'])}.")
    else:
        await run.call("confirmAction", action="Delete it")


def chat_environment(folder: Path, **changes: str) -> dict[str, str]:
    state = str(folder / "state")
    return {**environment(), "XDG_STATE_HOME": state, "TERM": "xterm-256color", "NO_COLOR": "1", **changes}


async def run_chat(folder: Path, *words: str, stdin: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs `toolspace chat` with these lines as its input."""
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "toolspace", "chat", "--config", str(folder / "toolspace.json"), *words],
        cwd=folder,
        env=chat_environment(folder, **changes),
        input=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


@asynccontextmanager
async def chat_terminal(folder: Path, *words: str) -> AsyncIterator[Terminal]:
    """Runs `toolspace chat` in a terminal, until its prompt is shown."""
    config = str(folder / "toolspace.json")
    with Terminal("chat", "--config", config, *words, cwd=folder, environ=chat_environment(folder)) as terminal:
        await wait_for(terminal, "you> ")
        yield terminal


async def wait_for(terminal: Terminal, text: str) -> None:
    await asyncio.to_thread(terminal.wait_for, text)


async def wait_for_exit(terminal: Terminal) -> int:
    return await asyncio.to_thread(terminal.end)


async def test_lines_of_a_pipe_are_sent_and_answered_one_by_one(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message) as robot:
        result = await run_chat(tmp_path, "robot", "--quiet", stdin="one\n\ntwo \N{SNOWMAN}\n")
    assert (result.stdout, result.stderr, result.returncode) == ("You said: one\nYou said: two \N{SNOWMAN}\n", "", 0)
    assert robot.events == ["one", "two \N{SNOWMAN}"]


async def test_calls_of_the_agent_are_shown_with_their_outcome(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.call("current_time", timezone="UTC")
        await run.call("fails")
        await run.call("displayChart", title="Sales", labels=["May", "June"], values=[10, 5])
        await run.send_message("done")

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="work\n")
    assert result.stdout == "done\n"
    assert "  ✓ current_time" in result.stderr
    assert '{"timezone":"UTC"}' in result.stderr
    assert "  ✗ fails" in result.stderr
    assert "it broke" in result.stderr
    assert "May  ██████████████████████████████ 10" in result.stderr
    assert "send_message" not in result.stderr


async def test_a_line_answers_the_open_question(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, confirm_action):
        result = await run_chat(tmp_path, stdin="delete it\nperhaps\nyes\n")
    assert result.stdout == 'So {"confirmed": true}.\n'
    assert "? confirmAction\n" in result.stderr
    assert "action: Delete it" in result.stderr
    assert "error: y or n; /say TEXT sends a message" in result.stderr
    assert result.returncode == 0


async def test_a_form_is_asked_property_by_property(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.send_message(json.dumps(await run.call("bookHotel", city="Tokyo")))

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="book\ntwo\n2\ny\n")
    assert json.loads(result.stdout) == {"nights": 2, "breakfast": True}


@pytest.mark.spec("19.5")
async def test_an_answer_that_does_not_match_the_schema_is_asked_again(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.send_message(json.dumps(await run.call("rateHotel")))

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="rate\n9\n3\n")
    assert json.loads(result.stdout) == {"stars": 3}
    assert "stars" in result.stderr
    assert 'does not match the output schema of "rateHotel"' in result.stderr


async def test_a_question_that_is_left_open_is_asked_again_next_time(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, confirm_action):
        first_chat = await run_chat(tmp_path, stdin="delete it\n")
        second_chat = await run_chat(tmp_path, stdin="n\n")
    assert "left open" in first_chat.stderr
    assert second_chat.stdout == 'So {"confirmed": false}.\n'


async def test_talk_is_sent_while_a_question_is_open(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        if event.type == "tool_result" or event.data["content"] == "delete it":
            await confirm_action(run, event)
        else:
            await run.send_message(f"You said: {event.data['content']}")

    async with running_gateway(tmp_path, act) as robot:
        result = await run_chat(tmp_path, stdin="delete it\nWhat will be deleted?\nwhy?\n/say yes\nyes\n")
    assert robot.events == ["delete it", "What will be deleted?", "why?", "yes", {"confirmed": True}]
    assert result.stderr.count("sent as a message; the question is still open") == 2
    assert result.stdout.endswith('So {"confirmed": true}.\n')
    assert "You said: What will be deleted?" in result.stdout


@pytest.mark.spec("19.2")
async def test_a_run_without_a_message_is_reported(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        if event.data["content"] == "hello":
            await run.call("skip")
        else:
            await run.send_message("Here.")

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="hello\nagain\n")
    assert result.stdout == "Here.\n"
    assert result.stderr.count("Robot has ended its run without a message") == 1


async def test_the_only_agent_that_runs_is_chosen(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message) as robot:
        await robot.client.entities.create("agent", "Painter", id="painter")
        agents: dict[str, bool] = {}
        while not agents.get("robot"):  # Between two reads of its inbox, nobody waits for its events.
            agents = {agent.id: agent.is_running async for agent in robot.client.agents.all()}
        chat = await run_chat(tmp_path, "--quiet", stdin="one\n")
        idle = await run_chat(tmp_path, "painter")
    assert agents == {"robot": True, "painter": False}
    assert chat.stdout == "You said: one\n"
    assert "nobody runs Painter now: messages wait in its inbox; toolspace serve runs the agents" in idle.stderr


async def test_a_failed_run_is_reported_and_exits_1(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        raise RuntimeError("openai:gpt-5: no key is set; set OPENAI_API_KEY in the environment")

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="hello\n")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "error: Robot failed: openai:gpt-5: no key is set; set OPENAI_API_KEY in the environment" in result.stderr


async def test_a_run_without_a_message_ends_the_wait(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.call("skip")

    async with running_gateway(tmp_path, act):
        result = await run_chat(tmp_path, stdin="hello\n")
    assert (result.stdout, result.returncode) == ("", 0)


@pytest.mark.spec("17.2")
async def test_json_is_an_event_in_each_line_and_nothing_else(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message):
        result = await run_chat(tmp_path, "--json", stdin="one\n")
    records = [json.loads(line) for line in result.stdout.splitlines()]
    contents = [record["data"]["message"]["content"] for record in records if record["type"] == "message.done"]
    assert contents == ["one", "You said: one"]
    assert {record["stream"].partition(":")[0] for record in records} == {"space", "run"}
    assert result.stderr == ""


@pytest.mark.spec("17.2")
async def test_an_unknown_agent_or_space_is_wrong_usage_with_the_nearest(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message) as robot:
        await robot.client.entities.create("agent", "Painter", id="painter")
        await robot.client.spaces.create("Elsewhere", id="elsewhere")
        waiting_claim = asyncio.create_task(robot.client.agents.claim("painter", count=1, lease_seconds=60, wait=60))
        near_name = await run_chat(tmp_path, "robott")
        no_name = await run_chat(tmp_path)
        space = await run_chat(tmp_path, "robot", "--space", "nowhere")
        apart = await run_chat(tmp_path, "robot", "--space", "elsewhere")
        waiting_claim.cancel()
    assert [result.returncode for result in (near_name, no_name, space, apart)] == [2, 2, 2, 2]
    assert "there is no agent 'robott'; did you mean \"Robot\"?" in near_name.stderr
    assert "there are 2 agents; choose one: toolspace chat NAME; there are Painter, Robot" in no_name.stderr
    assert "there is no space 'nowhere'" in space.stderr
    assert "the agent 'Robot' is not a member of the space 'elsewhere'" in apart.stderr


async def test_a_message_that_the_space_refuses_is_reported_and_the_next_lines_are_sent(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message):
        result = await run_chat(tmp_path, "--quiet", stdin=f"{'x' * 100_001}\na\x00b\n{chr(0xFFFD)}\n")
    assert result.stdout == f"You said: {chr(0xFFFD)}\n"
    assert result.stderr.count("error: ") == 2


async def test_the_next_chat_continues_the_conversation(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message) as robot:
        await run_chat(tmp_path, stdin="one\n")
        await run_chat(tmp_path, stdin="two\n")
        spaces = [space async for space in robot.client.spaces.all()]
        assert len(spaces) == 1
        assert len((await robot.client.spaces.list_messages(spaces[0].id)).items) == 4


async def test_an_unreachable_gateway_ends_the_chat(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message):
        unreachable = await run_chat(tmp_path, "--url", "http://127.0.0.1:9", "--key", SECRET, stdin="hello\n")
    assert unreachable.returncode == 1
    assert "http://127.0.0.1:9" in unreachable.stderr


# At a terminal


@pytest.mark.spec("17.2")
async def test_a_terminal_shows_messages_and_calls(tmp_path: Path) -> None:
    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.call("current_time", timezone="UTC")
        await run.send_message("It is late.\x1b]0;title\x07")

    async with running_gateway(tmp_path, act), chat_terminal(tmp_path) as terminal:
        terminal.type("what tiem\x7f\x7f\x7fime?\n")
        await wait_for(terminal, "Robot: It is late.\\x1b]0;title\\x07")
        terminal.type("/quit\n")
        assert await wait_for_exit(terminal) == 0
    assert "you> what time?\r\n" in terminal.output
    assert "✓ current_time" in terminal.output


async def test_a_question_changes_the_prompt(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, confirm_action), chat_terminal(tmp_path) as terminal:
        terminal.type("delete it\n")
        await wait_for(terminal, "[y/n]> ")
        terminal.type("y\n")
        await wait_for(terminal, 'Robot: So {"confirmed": true}.')
        terminal.type("\x04")
        assert await wait_for_exit(terminal) == 0


async def test_a_question_that_someone_else_answers_disappears(tmp_path: Path) -> None:
    calls: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def act(run: GatewayRun, event: InboxEvent) -> None:
        if event.type == "tool_result":
            await run.send_message("Thanks.")
        else:
            await run.client.runs.call(run.id, "confirmAction", {"action": "x"}, call_id="call_1")
            calls.put_nowait((run.id, event.data["spaceId"]))

    async with running_gateway(tmp_path, act) as robot, chat_terminal(tmp_path) as terminal:
        terminal.type("delete it\n")
        await wait_for(terminal, "[y/n]> ")
        run_id, space_id = await calls.get()
        await robot.client.tools.submit_result(space_id, run_id, "call_1", {"confirmed": True})
        await wait_for(terminal, "Robot: Thanks.")
        terminal.type("/quit\n")
        assert await wait_for_exit(terminal) == 0


async def test_ctrl_c_cancels_the_run_and_pressed_twice_it_leaves(tmp_path: Path) -> None:
    ended_runs: asyncio.Queue[str] = asyncio.Queue()

    async def act(run: GatewayRun, event: InboxEvent) -> None:
        await run.call("waits")
        ended_runs.put_nowait((await run.client.runs.get(run.id)).status)

    async with running_gateway(tmp_path, act), chat_terminal(tmp_path) as terminal:
        terminal.type("wait\n")
        await wait_for(terminal, "waits 1/4 still here")
        terminal.type("\x03")
        await wait_for(terminal, "canceled")
        async with asyncio.timeout(30):
            assert await ended_runs.get() == "canceled"
        terminal.type("/help\n")
        await wait_for(terminal, "pressed twice it leaves")
        terminal.type("\x03")
        await wait_for(terminal, "Ctrl-C again leaves")
        terminal.type("\x03")
        assert await wait_for_exit(terminal) == 0


async def test_commands_show_history_and_agents(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, echo_message), chat_terminal(tmp_path) as terminal:
        terminal.type("hello\n")
        await wait_for(terminal, "You said: hello")
        terminal.type("/history\n")
        await wait_for(terminal, "Robot: You said: hello\r\n")
        terminal.type("/agents\n")
        await wait_for(terminal, "Robot (here)  robot")
        terminal.type("/hisotry\n")
        await wait_for(terminal, 'there is no /hisotry; did you mean "/history"?')
        terminal.type("\x1b[200~two\nlines\x1b[201~\n")
        await asyncio.to_thread(terminal.wait_for_screen, "Robot: You said: two", "lines", "you>")
        terminal.type("\x04")
        assert await wait_for_exit(terminal) == 0


async def test_a_signal_restores_the_terminal_settings(tmp_path: Path) -> None:
    script = """
        stty -g > before
        bash -c 'echo $$ > pid; exec "$0" "$@"' "$@"
        echo "code $?"
        stty -g > after
    """
    words = (*TOOLSPACE, "chat", "--config", str(tmp_path / "toolspace.json"))
    shell = ("/bin/bash", "-c", script, "shell")
    async with running_gateway(tmp_path, echo_message):
        with Terminal(*words, cwd=tmp_path, environ=chat_environment(tmp_path), program=shell) as terminal:
            await wait_for(terminal, "you> ")
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
            await wait_for(terminal, f"code {128 + signal.SIGTERM}")
            assert await wait_for_exit(terminal) == 0
    assert (tmp_path / "before").read_text() == (tmp_path / "after").read_text()


# With agents of the gateway's own


async def test_without_a_gateway_one_is_started_with_the_demo_agent(tmp_path: Path) -> None:
    (tmp_path / "toolspace.json").write_text("{}")
    result = await run_chat(tmp_path, stdin="what time is it in Tokyo?\ndelete welcome.txt\nn\n", **NO_KEYS)
    assert result.returncode == 0, result.stderr
    time, question, answer = result.stdout.splitlines()
    assert time.endswith("in Asia/Tokyo.")
    assert "Shall I delete welcome.txt?" in question
    assert answer == "All right, I keep welcome.txt."
    assert "  secret sk_" in result.stderr
    assert "so this one runs until you leave" in result.stderr
    assert (tmp_path / ".toolspace" / "demo" / "welcome.txt").exists()


async def test_an_agent_without_a_key_says_which_variable_to_set(tmp_path: Path) -> None:
    agents = {"researcher": {"system": "You find things out.", "model": "openai:gpt-5"}}
    write_config(tmp_path, agents=agents)
    result = await run_chat(tmp_path, stdin="hello\n", **NO_KEYS)
    assert result.returncode == 1
    assert "researcher failed: " in result.stderr
    assert "OPENAI_API_KEY" in result.stderr


@pytest.mark.spec("10.6")
async def test_after_a_handoff_the_answer_of_the_receiving_agent_is_shown(tmp_path: Path) -> None:
    async with open_model_server() as brain:
        brain.script(tool_calls_turn(("router__handoff-to", {"agent": "clerk"})), model="of-desk")
        space = derived_id("spc", "chat", derived_id("ent", "chat", getpass.getuser()), entity_id_for("desk"))
        brain.script(*message_turns("It sails at noon.", space), model="of-clerk")
        agents = {
            "desk": agent_config(brain, model={"name": "of-desk"}, router={"destinations": ["clerk"]}),
            "clerk": agent_config(brain, model={"name": "of-clerk"}),
        }
        write_config(tmp_path, agents=agents)
        async with chat_terminal(tmp_path, "desk") as terminal:
            terminal.type("When does it sail?\r")
            await wait_for(terminal, "clerk: It sails at noon.")
            terminal.type("/quit\r")
            assert await wait_for_exit(terminal) == 0
        assert len(brain.list_requests("of-desk")) == 1  # It does not get the answer of the other agent as a request.


# Plain text


@pytest.mark.spec("19.2")
async def test_plain_text_appears_while_the_model_writes_it_and_disappears_if_a_call_follows(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        first_turn = HeldMiddle(tool_calls_turn(("get_goals", {}), text="Let me look."), before=b"tool_calls")
        last_turn = HeldMiddle(text_completion("You have", " no goals."), before=b" no goals.")
        model_server.script(first_turn, last_turn)
        agents = {"ada": {**agent_config(model_server), "loop": {"plainText": "deliver"}}}
        write_config(tmp_path, agents=agents)
        async with chat_terminal(tmp_path) as terminal:
            terminal.type("What are my goals?\n")
            await wait_for(terminal, "ada: Let me look.")
            first_turn.open()
            await wait_for(terminal, "ada: You have")
            last_turn.open()
            await wait_for(terminal, "ada: You have no goals.")
            assert not [row for row in terminal.screen if "Let me look." in row]
            terminal.type("/quit\n")
            assert await wait_for_exit(terminal) == 0


@pytest.mark.spec("19.2")
async def test_a_pipe_gets_no_text_that_was_withdrawn(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        model_server.script(tool_calls_turn(("get_goals", {}), text="Let me look."), "You have no goals.")
        agents = {"ada": {**agent_config(model_server), "loop": {"plainText": "deliver"}}}
        write_config(tmp_path, agents=agents)
        result = await run_chat(tmp_path, stdin="What are my goals?\n")
        assert (result.returncode, result.stdout) == (0, "You have no goals.\n")


# While the gateway restarts


@pytest.mark.spec("7.4")
async def test_a_chat_continues_after_the_gateway_has_restarted(tmp_path: Path) -> None:
    """The new process has another port and key. What is typed meanwhile is sent once; no message is lost or doubled."""
    async with open_model_server() as model_server:
        model_server.script("First answer.", "Second answer.")
        agents = {"ada": {**agent_config(model_server), "loop": {"plainText": "deliver"}}}
        config = write_config(tmp_path, agents=agents, storage={"dir": str(tmp_path / "state")})
        async with start_gateway_process(tmp_path, config) as first_process, chat_terminal(tmp_path) as terminal:
            terminal.type("one\n")
            await wait_for(terminal, "ada: First answer.")
            await first_process.kill()
            await wait_for(terminal, "the connection to the gateway is lost; reconnecting")
            terminal.type("two\n")
            async with start_gateway_process(tmp_path, config):
                await wait_for(terminal, "reconnected to the gateway")
                await wait_for(terminal, "ada: Second answer.")
                terminal.type("/history\n")
                await wait_for(terminal, "you: two")
                terminal.type("\x04")
                assert await wait_for_exit(terminal) == 0
        assert terminal.output.count("ada: Second answer.") <= 3  # Redrawn rows count, too.
        assert len(model_server.list_requests()) == 2
