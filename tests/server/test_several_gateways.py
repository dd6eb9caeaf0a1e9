"""Gateways that share a PostgreSQL: one takes over the workers' calls of a killed one, and says what is not shared."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.server.chaos.process_kills import KEY, KillableGateway
from tests.server.gateway_api import ApiClient, write_config
from tests.server.gateway_process import start_gateway_process
from toolspace import ToolWorker
from toolspace.server.process_limits import PROCESS_LIMITS, PROCESS_STATE


@pytest.mark.spec("6.7")
async def test_a_call_of_a_worker_of_a_killed_gateway_is_offered_to_a_worker_of_another(
    tmp_path: Path, postgres_url: str
) -> None:
    processes = [KillableGateway(tmp_path / name, url=postgres_url) for name in ("first", "second")]
    first_worker, second_worker = (ToolWorker(process.url, secret_key=KEY) for process in processes)
    is_executing = asyncio.Event()

    @first_worker.tool("race")
    async def never_ends() -> None:
        is_executing.set()
        await asyncio.Event().wait()

    @second_worker.tool("race")
    async def answer() -> str:
        return "from the second gateway"

    first_connection = asyncio.create_task(first_worker.run())  # Connects as soon as the gateway is ready.
    try:
        async with aiohttp.ClientSession() as session:
            for process in processes:
                process.start()
            for process in processes:
                await process.ready(session)
            api = ApiClient(processes[1].url, session, {"x-secret-key": KEY})
            agent = (await api.create("/api/entities", type="agent", name="Robot"))["id"]
            run = (await api.create("/api/runs", agentEntityId=agent))["id"]
            await api.post(f"/api/runs/{run}/calls", {"name": "race", "args": {}})  # It soon becomes pending.
            await is_executing.wait()
            async with second_worker:
                processes[0].kill()
                events = (await api.get(f"/api/agents/{agent}/inbox?wait=60")).data["items"]
            assert [event["data"]["result"] for event in events] == ["from the second gateway"]
    finally:
        first_connection.cancel()
        await asyncio.gather(first_connection, return_exceptions=True)
        for process in processes:
            process.end()


@pytest.mark.spec("15.1")
async def test_a_second_gateway_says_at_its_start_which_limits_hold_for_each_process(
    tmp_path: Path, postgres_url: str
) -> None:
    config = write_config(tmp_path, storage={"url": postgres_url, "dir": str(tmp_path / "state")})
    async with start_gateway_process(tmp_path, config) as first, start_gateway_process(tmp_path, config) as second:
        notice = await second.wait_for_line("another gateway uses this database")
        assert not [line for line in first.stderr_lines if "uses this database" in line]
    for words in (*PROCESS_LIMITS, *PROCESS_STATE):
        assert words in notice


@pytest.mark.spec("15.1")
def test_the_docs_page_lists_what_each_gateway_has_of_its_own() -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    section = page.partition("## Running several gateways")[2].partition("\n## ")[0]
    words_of_section = " ".join(section.replace("`", "").replace("- ", "").split())
    for words in (*PROCESS_LIMITS, *PROCESS_STATE):
        assert words in words_of_section
