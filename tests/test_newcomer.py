"""The getting-started pages: `make run`, and all commands that they tell the reader to paste."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient
from tests.server.gateway_process import GatewayProcess, open_process_api

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|json)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

pytestmark = [pytest.mark.spec("17.1"), pytest.mark.spec("13.1")]


def blocks(page: str, kind: str) -> list[str]:
    return [text for language, text in BLOCK.findall((ROOT / page).read_text()) if language == kind]


@asynccontextmanager
async def run_make(folder: Path) -> AsyncGenerator[GatewayProcess]:
    """Runs `make run` on a free port, in its own session as in a terminal."""
    process = await asyncio.create_subprocess_exec(
        # Set up it is already: these tests run in what it sets up, and must not fetch anything.
        *("make", "-s", "-o", ".venv/.installed", "run", "RUNARGS=--port 0", f"BIN={Path(sys.executable).parent}"),
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": "", "TOOLSPACE_STORAGE_DIR": str(folder / "state")},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    gateway = GatewayProcess(process, (await process.stdout.readline()).decode().strip())
    try:
        await gateway.wait_until_ready()
        yield gateway
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
        await gateway.wait_for_exit()


class Shell:
    """Runs pasted commands with the URL and the key that `make run` printed."""

    def __init__(self, folder: Path, gateway: GatewayProcess) -> None:
        self.folder = folder
        self._placeholders = {"http://127.0.0.1:8787": gateway.url, "sk_…": gateway.keys["secret"]}
        self._input_text = ""
        # What the commands name stands where they are run, as in the folder of the project.
        (folder / ".venv").symlink_to(Path(sys.executable).parent.parent)
        (folder / "examples").symlink_to(ROOT / "examples")

    def fill_placeholders(self, text: str) -> str:
        for placeholder, real in self._placeholders.items():
            text = text.replace(placeholder, real)
        return text

    def remember(self, text: str) -> None:
        """Runs the commands before all later ones."""
        self._input_text += self.fill_placeholders(text)

    async def paste(self, text: str) -> list[str]:
        """The output lines of a command."""
        process = await self.start(text)
        out, errors = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, errors.decode()
        return out.decode().splitlines()

    async def start(self, text: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("bash", "-c", self._input_text + self.fill_placeholders(text)),
            cwd=self.folder,
            env={**os.environ, "PYTHONWARNINGS": ""},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


async def test_the_commands_of_the_getting_started_pages_work(tmp_path: Path) -> None:
    (readme,) = blocks("README.md", "bash")
    settings, call, start_worker, call_worker, make_room, ask, answer, look, use_mcp = blocks("docs/gateway.md", "bash")
    (client,) = blocks("docs/gateway.md", "json")

    async with run_make(tmp_path) as gateway, open_process_api(gateway, gateway.keys["secret"]) as api:
        line = await gateway.wait_for_line("shown only once")
        more_keys = re.search(r"\((\S+) --config examples/gateway/toolspace.yaml keys new creates more\)", line)
        assert more_keys is not None
        assert shutil.which(more_keys[1]) is not None  # Where nobody put it on the path, it is named by its own.
        terminal = Shell(tmp_path, gateway)
        assert _data(await terminal.paste(readme))["result"]["timezone"] == "Asia/Tokyo"
        terminal.remember(settings)
        assert _data(await terminal.paste(call))["result"]["timezone"] == "Europe/Berlin"

        assert "no worker serves the tool" in _data(await terminal.paste(call_worker))["error"]
        async with _worker(terminal, start_worker, api):
            assert _data(await terminal.paste(call_worker))["ok"] is True

        records = [json.loads(line) for line in await terminal.paste(make_room)]
        assert [record["id"] for record in records] == ["ann", "robot", "workshop", "monday"]
        pending = _data(await terminal.paste(ask))
        assert (pending["status"], pending["pendingToolCallId"]) == ("pending", "ask-ann")
        assert _data(await terminal.paste(answer))["status"] == "resolved"
        assert _data(await terminal.paste(answer))["status"] == 409
        (event,) = _data(await terminal.paste(look))["items"]
        assert (event["type"], event["data"]["result"]) == ("tool_result", {"confirmed": True})

        (tmp_path / ".mcp.json").write_text(terminal.fill_placeholders(client))
        assert "Asia/Tokyo" in "\n".join(await terminal.paste(use_mcp))

        os.killpg(gateway.process.pid, signal.SIGINT)  # As Ctrl-C does, to all in the terminal.
        await gateway.wait_for_line("Stopping")
        await gateway.wait_for_exit()

    assert "Traceback" not in "\n".join(gateway.stderr_lines)
    assert "Error" not in "\n".join(gateway.stderr_lines)


@asynccontextmanager
async def _worker(terminal: Shell, command: str, api: ApiClient) -> AsyncGenerator[None]:
    process = await terminal.start("exec " + command.strip().removesuffix("&"))
    try:
        for _ in range(1_000):
            if (await api.get("/api/workers")).data["items"]:
                break
            await asyncio.sleep(0.02)
        yield
    finally:
        process.terminate()
        await process.communicate()


def _data(lines: list[str]) -> Any:
    (line,) = filter(None, lines)
    return json.loads(line)
