"""Gateways that are killed while an agent works: every message is answered once, and nothing happens twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.chaos.gateways import GatewayStorm


@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
async def test_a_killed_gateway_resumes_its_agent_after_a_restart(tmp_path: Path) -> None:
    storm = GatewayStorm(tmp_path, jobs=6, kills=3)
    await storm.run()
    await storm.check()


@pytest.mark.spec("11.1")
@pytest.mark.spec("15.1")
async def test_another_gateway_resumes_the_agent_of_a_killed_one(tmp_path: Path, postgres_url: str) -> None:
    storm = GatewayStorm(tmp_path, url=postgres_url, processes=2, jobs=6, kills=2)
    await storm.run()
    await storm.check()
