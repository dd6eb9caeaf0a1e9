"""Agents whose processes are killed while they work: every job is done, and none twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agents.chaos.storm import ProcessStorm


@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
@pytest.mark.spec("9.4")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize("session", ["agent", "space", "user"])
async def test_jobs_are_done_once_though_the_process_is_killed_repeatedly_on_sqlite(
    tmp_path: Path, session: str
) -> None:
    storm = ProcessStorm(tmp_path, jobs=16, kills=8, session=session)
    await storm.run()
    await storm.check()


@pytest.mark.spec("11.1")
@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
@pytest.mark.spec("19.1")
@pytest.mark.parametrize("session", ["agent", "space", "user"])
async def test_jobs_are_done_once_though_two_processes_are_killed_repeatedly_on_postgres(
    tmp_path: Path, postgres_url: str, session: str
) -> None:
    storm = ProcessStorm(tmp_path, url=postgres_url, processes=2, jobs=16, kills=8, lease_ms=1_000, session=session)
    await storm.run()
    await storm.check()
