"""Agents that have one conversation with different people are warned of; what we write uses `session: space`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.cli.conftest import Toolspace
from tests.server.gateway_process import start_gateway_process
from toolspace.agents.agent import entity_id_for
from toolspace.config.documentation import render_starter_file
from toolspace.config.load import load_config
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = pytest.mark.spec("19.1")

AGENTS = """
agents:
  shared: {model: demo}
  separate: {model: demo, session: user}
  lonely: {model: demo}
"""


async def create_people(database: Database) -> None:
    """Two people are in one space each with all agents but one, which knows only one of them."""
    ledger = Ledger(database)
    for name in ("shared", "separate", "lonely"):
        await ledger.write(entities_and_spaces.create_entity, entity_id_for(name), "agent", name, {})
    for person in ("ent_carla", "ent_dave"):
        await ledger.write(entities_and_spaces.create_entity, person, "human", person, {})
        await ledger.write(entities_and_spaces.create_space, f"spc_{person}", person, {})
        names = ("shared", "separate", "lonely") if person == "ent_carla" else ("shared", "separate")
        for member in (person, *map(entity_id_for, names)):
            await ledger.write(entities_and_spaces.add_member, f"spc_{person}", member)
    await database.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_doctor_warns_of_an_agent_with_one_conversation_with_different_people(
    toolspace: Toolspace, project: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = str(project / "gateway.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")

    async def make() -> None:
        await create_people(await (SqliteDatabase.open(Path(url)) if kind == "sqlite" else PostgresDatabase.open(url)))

    asyncio.run(make())
    (project / "toolspace.yaml").write_text(AGENTS)
    result = toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=url)
    checks = json.loads(result.stdout)["checks"]
    (warning,) = [check for check in checks if check["state"] == "warning" and "different people" in check["found"]]
    assert warning["found"].startswith("shared: ")
    assert "session: space" in warning["fix"]


async def test_serve_warns_of_an_agent_with_one_conversation_with_different_people(tmp_path: Path) -> None:
    config, database_file = tmp_path / "toolspace.yaml", tmp_path / "gateway.db"
    config.write_text(f"storage: {{url: {database_file}}}\n{AGENTS}")
    await create_people(await SqliteDatabase.open(database_file))
    async with start_gateway_process(tmp_path, config) as gateway:
        warning = await gateway.wait_for_line("warning:")
    assert "shared: it shares spaces with different people" in warning
    assert len([line for line in gateway.stderr_lines if "different people" in line]) == 1


def test_the_starter_file_and_the_examples_use_a_session_for_each_space(tmp_path: Path) -> None:
    starter_file = tmp_path / "toolspace.yaml"
    text = render_starter_file()
    start = text.index("#agents:")
    starter_file.write_text(text[start : text.index("\n\n", start)].replace("\n#", "\n").removeprefix("#"))
    examples = Path(__file__).parents[2] / "examples"
    for path in (starter_file, examples / "agents" / "toolspace.yaml"):
        agents = load_config(path, environ={}).agents
        assert {agent.session for agent in agents.values()} == {"space"}, path
