"""`toolspace tail` and `toolspace keys` against a real gateway of this machine, as real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import environment
from tests.server.gateway_api import SECRET, write_config
from tests.server.gateway_process import start_gateway_process
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import Unauthorized

pytestmark = pytest.mark.spec("17.1")


class TailProcess:
    """A running `toolspace tail`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        assert process.stdout is not None
        assert process.stderr is not None
        self.out, self.err = process.stdout, process.stderr

    async def read_line(self) -> str:
        async with asyncio.timeout(30):
            return (await self.out.readline()).decode().rstrip("\n")

    async def wait_for(self, text: str) -> str:
        async with asyncio.timeout(30):
            while line := (await self.err.readline()).decode():
                if text in line:
                    return line
        raise AssertionError(f"it never said {text!r}")


@asynccontextmanager
async def running_tail(folder: Path, *words: str, **changes: str) -> AsyncIterator[TailProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "toolspace", "tail", "--config", str(folder / "toolspace.json"), *words),
        cwd=folder,
        env=environment(**changes),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield TailProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run_command(folder: Path, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "toolspace", *words, "--config", str(folder / "toolspace.json")],
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


async def test_tail_prints_events_and_exits_0(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway, ToolspaceClient(gateway.url, secret_key=SECRET) as client:
        ada = await client.entities.create("human", "Ada", id="ada")
        space = await client.spaces.create("Support", members=[ada.id], id="support")
        async with running_tail(tmp_path) as tail:
            await tail.wait_for("following all events")
            await client.spaces.send_message(space.id, "Hello\nworld", entity_id=ada.id)
            assert "message.started" in await tail.read_line()
            assert (await tail.read_line()).endswith("message.done      ada  Hello  space:support")
            tail.process.send_signal(signal.SIGINT)
            assert await tail.process.wait() == 0


async def test_tail_follows_one_space_as_json_over_a_restart(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway, ToolspaceClient(gateway.url, secret_key=SECRET) as client:
        await client.entities.create("human", "Ada", id="ada")
        await client.spaces.create("Support", members=["ada"], id="support")
        async with running_tail(tmp_path, "--space", "support", "--json") as tail:
            await tail.wait_for("following space:support")
            await client.spaces.send_message("support", "one", entity_id="ada")
            records = [json.loads(await tail.read_line()) for _ in range(2)]
            gateway.process.kill()
            await tail.wait_for("the gateway has ended")
            async with (
                start_gateway_process(tmp_path) as second_gateway,
                ToolspaceClient(second_gateway.url, secret_key=SECRET) as second_client,
            ):
                await second_client.spaces.send_message("support", "two", entity_id="ada")
                records += [json.loads(await tail.read_line()) for _ in range(2)]
                tail.process.send_signal(signal.SIGTERM)
                assert await tail.process.wait() == 0
    assert [(record["stream"], record["id"]) for record in records] == [
        ("space:support", str(number)) for number in range(1, 5)
    ]
    assert [record["data"]["message"]["content"] for record in records if record["type"] == "message.done"] == [
        "one",
        "two",
    ]


async def test_tail_of_a_run_prints_its_calls(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway, ToolspaceClient(gateway.url, secret_key=SECRET) as client:
        agent = await client.entities.create("agent", "Bot", id="bot")
        run = await client.runs.open(agent.id, id="run_1")
        changes = {"TOOLSPACE_URL": gateway.url, "TOOLSPACE_SECRET_KEY": SECRET}
        async with running_tail(tmp_path, "--run", run.id, **changes) as tail:
            await tail.wait_for("following run:run_1")
            await client.runs.call(run.id, "current_time", {"timezone": "Europe/Berlin"})
            started, ready, result = [await tail.read_line() for _ in range(3)]
    assert "tool.started" in started
    assert "tool.ready" in ready
    assert 'current_time  running  {"timezone":"Europe/Berlin"}' in ready
    assert "tool.done" in result
    assert " ms  " in result


async def test_tail_of_all_streams_prints_calls_of_a_run_once(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway, ToolspaceClient(gateway.url, secret_key=SECRET) as client:
        await client.entities.create("agent", "Bot", id="bot")
        await client.spaces.create("Support", members=["bot"], id="support")
        async with running_tail(tmp_path) as tail:
            await tail.wait_for("following all events")
            await client.runs.open("bot", space_id="support", id="run_1")
            await client.runs.call("run_1", "send_message", {"text": "Hello"})
            await client.runs.close("run_1")
            rows = [(await tail.read_line()).split() for _ in range(7)]
    assert [(words[1], words[-1]) for words in rows] == [
        ("run.started", "run:run_1"),
        ("tool.started", "run:run_1"),
        ("tool.ready", "run:run_1"),
        ("message.started", "space:support"),
        ("message.done", "space:support"),
        ("tool.done", "run:run_1"),
        ("run.done", "run:run_1"),
    ]


async def test_tail_without_a_gateway_reports_how_to_start_one(tmp_path: Path) -> None:
    (tmp_path / "toolspace.json").write_text("{}")
    none = await run_command(tmp_path, "tail")
    assert none.returncode == 1
    assert "toolspace serve" in none.stderr
    elsewhere = await run_command(tmp_path, "tail", "--url", "http://127.0.0.1:9")
    assert elsewhere.returncode == 1
    assert "http://127.0.0.1:9 needs a secret key" in elsewhere.stderr
    both = await run_command(tmp_path, "tail", "--space", "a", "--run", "b")
    assert both.returncode == 2
    wrong = await run_command(tmp_path, "tail", "--url", "localhost", "--key", "sk_a")
    assert wrong.returncode == 2


async def test_tail_with_a_wrong_key_or_of_an_unknown_space_ends(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway:
        wrong = await run_command(
            tmp_path, "tail", "--url", gateway.url, "--key", "sk_wrong_0123456789abcdef0123456789"
        )
        unknown = await run_command(tmp_path, "tail", "--space", "nowhere")
    assert wrong.returncode == 2
    assert "401" in wrong.stderr
    assert unknown.returncode == 2
    assert 'Space "nowhere" not found' in unknown.stderr


async def test_tail_into_a_closed_pipe_exits_0(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway, ToolspaceClient(gateway.url, secret_key=SECRET) as client:
        await client.entities.create("human", "Ada", id="ada")
        await client.spaces.create("Support", members=["ada"], id="support")
        script = f'"$0" -m toolspace tail --config {tmp_path / "toolspace.json"} | head -1'
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", f"set -o pipefail; {script}", sys.executable),
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        tail = TailProcess(process)
        await tail.wait_for("following all events")
        while process.returncode is None:
            await client.spaces.send_message("support", "hello", entity_id="ada")
        assert process.returncode == 0
        await process.communicate()


async def test_keys_are_created_listed_and_revoked(tmp_path: Path) -> None:
    write_config(tmp_path)
    async with start_gateway_process(tmp_path) as gateway:
        creation = await run_command(
            tmp_path, "keys", "new", "--kind", "tools", "--name", "friend", "--allow", "current_*"
        )
        assert creation.returncode == 0, creation.stderr
        key = creation.stdout.strip()
        assert key.startswith("tk_")
        key_list = await run_command(tmp_path, "keys", "--json")
        (record,) = [entry for entry in json.loads(key_list.stdout) if entry["name"] == "friend"]
        assert record["toolsAllowed"] == ["current_*"]
        assert key not in key_list.stdout
        table = await run_command(tmp_path, "keys", "list")
        assert record["hint"] in table.stdout
        async with ToolspaceClient(gateway.url, secret_key=key) as friend:
            assert {tool.name async for tool in friend.tools.all()} == {"current_time"}
            revocation = await run_command(tmp_path, "keys", "revoke", record["id"])
            assert revocation.returncode == 0, revocation.stderr
            with pytest.raises(Unauthorized):
                await friend.tools.list()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("revok", "key_a"), "did you mean"),
        (("revoke",), "the id is missing"),
        (("list", "--name", "x"), "are for keys new"),
        (("new", "--allow", "x"), "--kind tools"),
        (("new", "key_a"), "has no argument"),
    ],
)
async def test_wrong_usage_of_keys_is_reported(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "toolspace.json").write_text("{}")
    result = await run_command(tmp_path, "keys", *words)
    assert result.returncode == 2
    assert message in result.stderr
