from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Toolspace
from tests.shifted_clock import set_database_ahead
from toolspace.core.extension_points import CachedResult
from toolspace.spaces.ledger import Ledger
from toolspace.storage.postgres.database import PostgresDatabase
from toolspace.storage.queries import inbox
from toolspace.storage.sqlite.database import SqliteDatabase
from toolspace.storage.sqlite_cache import SqliteCache

pytestmark = pytest.mark.spec("17.1")


def list_checks(result: Run, state: str) -> list[dict[str, Any]]:
    return [check for check in json.loads(result.stdout)["checks"] if check["state"] == state]


def test_a_healthy_project_has_no_problem(toolspace: Toolspace) -> None:
    result = toolspace("doctor")

    assert result.returncode == 0, result.stdout
    assert "✓ Python: 3." in result.stdout
    assert "✓ functions: ./tools.py: echo, " in result.stdout
    assert "✗" not in result.stdout


def test_every_error_of_the_configuration_is_reported_with_its_fix(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text("defalts: {}\nqueues: {slow: {concurrent: 0}}\n")

    result = toolspace("doctor", "--json")

    problems = list_checks(result, "problem")
    assert result.returncode == 1
    assert json.loads(result.stdout)["ok"] is False
    assert [problem["fix"] for problem in problems] == ["correct toolspace.yaml:1", "correct toolspace.yaml:2"]
    assert "defaults" in problems[0]["found"]


def test_functions_that_do_not_import_and_queues_that_do_not_exist_are_problems(
    toolspace: Toolspace, project: Path
) -> None:
    (project / "broken.py").write_text("import no_such_module\n")
    (project / "toolspace.yaml").write_text("functions: [./tools.py, ./broken.py]\n")

    problems = list_checks(toolspace("doctor", "--json"), "problem")

    assert [problem["what"] for problem in problems] == ["queues", "functions"]
    assert 'lines uses the queue "slow"' in problems[0]["found"]
    assert "No module named 'no_such_module'" in problems[1]["found"]
    assert all(problem["fix"] for problem in problems)


def test_storage_that_cannot_be_used_is_a_problem(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    result = toolspace("doctor", TOOLSPACE_STORAGE_DIR=str(tmp_path / "file" / "state"))

    assert result.returncode == 1
    assert f"✗ storage: {tmp_path / 'file'} is not a folder" in result.stdout
    assert "to fix: " in result.stdout


def test_a_folder_that_others_may_write_and_a_disk_cache_are_checked(toolspace: Toolspace, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    result = toolspace("doctor", "--json", TOOLSPACE_STORAGE_DIR=str(tmp_path / "open"), TOOLSPACE_STORAGE_CACHE="disk")

    assert result.returncode == 0
    assert list_checks(result, "warning")[0]["fix"] == f"chmod 700 {tmp_path / 'open'}"
    file = tmp_path / "open" / "cache.db"
    (check,) = (check for check in list_checks(result, "ok") if check["what"] == "cache")
    assert check["found"] == f"{file}: created with the first cached result"
    assert not file.exists()


def test_an_existing_disk_cache_is_opened(toolspace: Toolspace, tmp_path: Path) -> None:
    file = tmp_path / "state" / "cache.db"
    file.parent.mkdir(mode=0o700)
    variables = {"TOOLSPACE_STORAGE_DIR": str(file.parent), "TOOLSPACE_STORAGE_CACHE": "disk"}
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE other (id INTEGER)")

    (problem,) = list_checks(toolspace("doctor", "--json", **variables), "problem")
    file.unlink()
    asyncio.run(_store(SqliteCache(file)))

    assert "is a database of another program" in problem["found"]
    assert {"state": "ok", "what": "cache", "found": str(file)} in list_checks(
        toolspace("doctor", "--json", **variables), "ok"
    )


async def _store(cache: SqliteCache) -> None:
    await cache.set("key", CachedResult(text=b"{}", parts=b""), 60)
    await cache.aclose()


AGENTS = """\
agents:
  ready: {model: "openai:gpt-5"}
  demo: {model: demo}
  own: {model: {provider: anthropic, name: claude, apiKey: hunter2}}
  poor: {model: "google:gemini", knowledge: ./nowhere}
  lost: {model: "opnai:gpt-5"}
"""


@pytest.mark.spec("11.7")
def test_each_agent_is_listed_with_its_model_or_its_missing_key(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text(AGENTS)

    result = toolspace("doctor", "--json", OPENAI_API_KEY="hunter2", GEMINI_API_KEY="", GOOGLE_API_KEY="")

    checks = [check for check in json.loads(result.stdout)["checks"] if check["what"] == "agents"]
    assert [check["found"] for check in checks if check["state"] == "ok"] == [
        "ready: openai:gpt-5",
        "demo: demo",
        "own: anthropic:claude",
    ]
    poor, lost_check = [check for check in checks if check["state"] == "problem"]
    assert (poor["found"], "GEMINI_API_KEY" in poor["fix"]) == ("poor: google:gemini: no key is set", True)
    assert (lost_check["found"], "openai" in lost_check["fix"]) == ("lost: unknown model provider 'opnai'", True)
    (warning,) = [check for check in checks if check["state"] == "warning"]
    assert warning["found"] == f"poor: its knowledge {project / 'nowhere'} does not exist"
    assert "hunter2" not in result.stdout


def test_an_agent_without_a_model_needs_a_key_of_some_provider(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text("agents: {any: {system: Help.}}\n")
    keys = {"OPENAI_API_KEY": "", "GEMINI_API_KEY": "", "GOOGLE_API_KEY": "", "ANTHROPIC_API_KEY": "k"}

    assert "✓ agents: any: anthropic:" in toolspace("doctor", **keys).stdout

    result = toolspace("doctor", **{**keys, "ANTHROPIC_API_KEY": ""})
    assert "✗ agents: any: has no model, and no key is set" in result.stdout
    assert result.returncode == 1


def test_the_demo_agent_is_listed_with_its_model(toolspace: Toolspace) -> None:
    keys = {"OPENAI_API_KEY": "", "GEMINI_API_KEY": "", "GOOGLE_API_KEY": "", "ANTHROPIC_API_KEY": "k"}
    assert "uses anthropic:" in toolspace("doctor", **keys).stdout
    assert "follows a few fixed rules" in toolspace("doctor", **{**keys, "ANTHROPIC_API_KEY": ""}).stdout


def test_a_model_with_a_base_url_needs_no_key(toolspace: Toolspace, project: Path) -> None:
    model = "{name: qwen, baseUrl: 'http://localhost:1/v1?code=hunter2'}"
    (project / "toolspace.yaml").write_text(f"agents: {{own: {{model: {model}}}}}\n")
    result = toolspace("doctor", OPENAI_API_KEY="")
    assert "✓ agents: own: openai-compatible:qwen at http://localhost:1/v1\n" in result.stdout
    assert "hunter2" not in result.stdout


def test_embeddings_are_checked_for_their_key(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text("embeddings: openai:small\n")
    result = toolspace("doctor", OPENAI_API_KEY="")
    assert "✗ embeddings: openai:small: no key is set" in result.stdout
    assert "set OPENAI_API_KEY in the environment, or embeddings.apiKey" in result.stdout
    assert "✓ embeddings: openai:small" in toolspace("doctor", OPENAI_API_KEY="k").stdout


SERVERS = f"""\
tools: {{builtins: false}}
mcpServers:
  small: {{command: "{sys.executable}", args: ["{Path(__file__).parent}/programs/small_server.py"]}}
  npx: {{command: npx, args: [-y, x], env: {{PATH: /nowhere}}}}
  path: {{command: ./gone}}
  script: {{command: "{sys.executable}", args: [gone.py]}}
  folder: {{command: "{sys.executable}", cwd: ./gone}}
  dying: {{command: sh, args: ["-c", "echo the database refused the connection >&2; exit 3"]}}
  refusing: {{url: "http://user:secretword@127.0.0.1:9/mcp"}}
  off: {{command: x, enabled: false}}
openapi:
  pets: {{spec: ./gone.yaml}}
  placeless: {{spec: ./placeless.yaml}}
  filtered: {{spec: ./placeless.yaml, baseUrl: "http://127.0.0.1:9", operations: [gone]}}
"""
NO_SERVER_URL = """\
openapi: 3.1.0
info: {title: Placeless, version: "1"}
paths: {/pets: {get: {operationId: listPets, responses: {"200": {description: fine}}}}}
"""


def test_every_server_is_started_and_each_failure_has_a_fix(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text(SERVERS)
    (project / "placeless.yaml").write_text(NO_SERVER_URL)

    result = toolspace("doctor", "--json")

    fixes = {problem["found"].partition(":")[0]: problem.get("fix", "") for problem in list_checks(result, "problem")}
    warnings = {warning["found"].partition(":")[0]: warning["fix"] for warning in list_checks(result, "warning")}
    fine = [check["found"] for check in list_checks(result, "ok") if check["what"] == "servers"]
    assert result.returncode == 1
    assert fixes == {
        "npx": "install Node.js 20 or newer, which includes npx",
        "path": "there is no program ./gone: correct its command",
        "script": "there is no file gone.py: correct its args, or set its cwd",
        "folder": f"create the folder {project / 'gone'}, or correct its cwd",
        "dying": "start sh by hand with its args to see more, or correct toolspace.yaml:8 (mcpServers.dying)",
        "refusing": "is it running at http://127.0.0.1:9? Start it, or correct its url",
        "pets": f"there is no file {project / 'gone.yaml'}: correct its spec",
    }
    assert warnings["placeless"] == "set its baseUrl to the URL of the service"
    assert warnings["filtered"] == "correct its tags, methods, paths and operations"
    assert sum(warning["found"].startswith("filtered") for warning in list_checks(result, "warning")) == 1
    assert fine[0].startswith("small: 2 tools, stdio, 2026-07-28 stateless, ready after ")
    assert fine[1] == "off: disabled"
    assert "secretword" not in result.stdout + result.stderr
    assert result.stderr == ""


async def test_a_server_that_needs_a_login_gets_the_login_command_as_fix(toolspace: Toolspace, project: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        (project / "toolspace.yaml").write_text(f"mcpServers: {{remote: {{url: 'http://127.0.0.1:{port}/mcp'}}}}\n")
        result = await asyncio.to_thread(toolspace, "doctor", "--json")

    [problem] = list_checks(result, "problem")
    assert problem["fix"] == "toolspace servers login remote, or set its headers"


def test_a_file_that_init_wrote_from_an_editors_servers_is_healthy(toolspace: Toolspace, tmp_path: Path) -> None:
    new, home = tmp_path / "new", tmp_path / "home"
    (home / ".cursor").mkdir(parents=True)
    new.mkdir()
    servers = {
        "small": {"command": sys.executable, "args": [str(Path(__file__).parent / "programs" / "small_server.py")]},
        "later": {"command": "no-such-program", "env": {"LATER_TOKEN": "abc"}},
    }
    (home / ".cursor" / "mcp.json").write_text(json.dumps({"mcpServers": servers}))

    toolspace("init", cwd=new, HOME=str(home))
    result = toolspace("doctor", cwd=new, HOME=str(home))

    assert result.returncode == 0, result.stdout
    assert "✓ servers: small: 2 tools, stdio" in result.stdout
    assert "✓ servers: later: disabled" in result.stdout


def get_database_check(result: Run) -> dict[str, Any]:
    (check,) = [check for check in json.loads(result.stdout)["checks"] if check["what"] == "database"]
    return check


@pytest.mark.spec("15.2")
def test_a_database_is_listed_with_its_version_and_not_changed(toolspace: Toolspace, project: Path) -> None:
    from toolspace.storage.migrations import MIGRATIONS
    from toolspace.storage.sqlite.database import SqliteDatabase

    file = project / "data" / "gateway.db"
    before = get_database_check(toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=str(file)))
    is_untouched = not file.exists()

    async def make() -> None:
        await (await SqliteDatabase.open(file)).aclose()

    asyncio.run(make())
    after = get_database_check(toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=str(file)))

    assert before == {
        "state": "ok",
        "what": "database",
        "found": f"{file}: created when the gateway first starts (toolspace serve)",
    }
    assert is_untouched
    assert after["state"] == "ok"
    assert after["found"].startswith(f"{file}, SQLite 3.")
    assert after["found"].endswith(f", version {len(MIGRATIONS)}")


def test_a_database_of_another_program_or_a_newer_version_is_a_problem(toolspace: Toolspace, project: Path) -> None:
    import sqlite3

    with sqlite3.connect(project / "other.db") as connection:
        connection.execute("CREATE TABLE songs (name TEXT)")
    with sqlite3.connect(project / "newer.db") as connection:
        connection.execute("CREATE TABLE migrations (version BIGINT, applied_at BIGINT)")
        connection.execute("INSERT INTO migrations VALUES (900, 0)")
    (project / "broken.db").write_bytes(b"this is no database at all" * 100)

    checks = {
        name: get_database_check(toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=str(project / f"{name}.db")))
        for name in ("other", "newer", "broken")
    }

    assert {check["state"] for check in checks.values()} == {"problem"}
    assert all(check["fix"] for check in checks.values())
    assert "another program" in checks["other"]["found"]
    assert "version 900" in checks["newer"]["found"]
    assert "cannot be read" in checks["broken"]["found"]


@pytest.mark.spec("15.1")
def test_postgresql_is_listed_with_its_version_or_the_connection_error(toolspace: Toolspace, postgres_url: str) -> None:
    check = get_database_check(toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=postgres_url))
    missing_check = toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL="postgresql://me:hunter22@127.0.0.1:1/none")

    assert check["state"] == "ok", check
    assert "PostgreSQL " in check["found"]
    assert "the gateway creates its tables" in check["found"]
    assert get_database_check(missing_check)["state"] == "problem"
    assert "127.0.0.1:1/none cannot be reached" in get_database_check(missing_check)["found"]
    assert get_database_check(missing_check)["fix"] == "start it, or correct TOOLSPACE_STORAGE_URL (environment)"
    assert "hunter22" not in missing_check.stdout + missing_check.stderr


@pytest.mark.spec("15.1")
async def test_a_clock_that_differs_from_the_database_is_a_warning(toolspace: Toolspace, postgres_url: str) -> None:
    await set_database_ahead(postgres_url, "1 hour")
    result = await asyncio.to_thread(toolspace, "doctor", "--json", TOOLSPACE_STORAGE_URL=postgres_url)
    check = get_database_check(result)
    assert check["state"] == "warning"
    assert "the clock of this machine is 3600 s behind the database" in check["found"]
    assert check["fix"] == "synchronize the clocks of both machines"


@pytest.mark.spec("21.3")
def test_a_secret_file_that_others_may_read_is_a_warning_without_its_content(
    toolspace: Toolspace, project: Path
) -> None:
    (project / "key").write_text("doctor-secret-1")
    (project / "key").chmod(0o644)
    (project / "toolspace.yaml").write_text("tools: {webSearch: {provider: tavily, apiKey: '${file:key}'}}\n")

    result = toolspace("doctor", "--json")

    (warning,) = list_checks(result, "warning")
    assert warning["found"] == f"other users may read {project / 'key'} (mode 644)"
    assert warning["fix"] == f"chmod 600 {project / 'key'}"
    assert "doctor-secret" not in result.stdout + result.stderr


@pytest.mark.spec("19.3")
def test_doctor_says_what_an_agent_is_not_offered(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text(
        "agents:\n"
        "  ada: {model: demo}\n"
        "  bob: {model: demo, tools: [mainAgentTools]}\n"
        "  eve: {model: demo, tools: {builtins: [read_file, write_file]}}\n"
        "  joe: {model: demo, tools: [write_file, edit_file]}\n"
    )
    checks = list_checks(toolspace("doctor", "--json"), "ok")
    notes = [check["found"] for check in checks if "not offered" in check["found"]]
    assert notes == [
        "ada: built-in tools that change something are not offered: set_env, write_file, delete_file, move_file, "
        "edit_file, http_post, http_request, memory_write, memory_patch, memory_append, spawn_task, reply",
        "eve: built-in tools that change something are not offered: spawn_task, reply",
        "joe: built-in tools that change something are not offered: set_env, delete_file, move_file, http_post, "
        "http_request, memory_write, memory_patch, memory_append, spawn_task, reply",
    ]


@pytest.mark.spec("20.1")
def test_destructive_tools_that_no_policy_covers_are_a_warning(toolspace: Toolspace, project: Path) -> None:
    (project / "wipe.py").write_text(
        "from toolspace import tool\nfrom toolspace.core.tool import Annotations\n\n"
        "@tool(annotations=Annotations(destructive=True))\ndef wipe() -> str:\n    return 'gone'\n\n"
        "@tool(annotations=Annotations(destructive=True), approval='required')\ndef burn() -> str:\n    return 'gone'\n"
    )
    config = "functions: [./wipe.py]\nagents: {ada: {system: Help.}, bob: {system: Help.}}\n"
    policies = ("", "policies: [{agent: ada, tool: wipe, decision: ask}]\n", "policies: cautious\n")
    messages = []
    for policy in policies:
        (project / "toolspace.yaml").write_text(config + policy)
        checks = list_checks(toolspace("doctor", "--json"), "warning")
        messages.append([check["found"] for check in checks if check["what"] == "policies"])
    assert messages == [
        ["ada, bob: no policy covers these destructive tools: wipe"],
        ["bob: no policy covers these destructive tools: wipe"],
        [],
    ]


@pytest.mark.spec("20.1")
def test_destructive_tools_that_only_one_agent_has_are_a_warning_too(toolspace: Toolspace, project: Path) -> None:
    (project / "server.py").write_text(
        "from mcp.server import MCPServer\n\nserver = MCPServer('disk')\n\n\n"
        "@server.tool()\ndef erase() -> str:\n    return 'gone'\n\n\nserver.run()\n"
    )
    (project / "wipe.py").write_text(
        "from toolspace import tool\nfrom toolspace.core.tool import Annotations\n\n"
        "@tool(annotations=Annotations(destructive=True))\ndef wipe() -> str:\n    return 'gone'\n"
    )
    config = {
        "agents": {
            "ada": {
                "system": "Help.",
                "mcp": {"servers": {"disk": {"command": sys.executable, "args": ["server.py"]}}},
            },
            "bob": {"system": "Help.", "functions": ["./wipe.py"]},
            "eve": {"system": "Help.", "mcp": {"servers": {"gone": {"command": "no-such-program"}}}},
        }
    }
    messages = []
    for policies in ([], [{"tool": "disk__*", "decision": "ask"}]):
        (project / "toolspace.yaml").write_text(json.dumps({**config, "policies": policies}))
        result = toolspace("doctor", "--json")
        messages.append([check["found"] for check in list_checks(result, "warning") if check["what"] == "policies"])
        [problem] = [check["found"] for check in list_checks(result, "problem") if check["what"] == "providers"]
        assert problem.startswith("eve: gone: ")
    message = "no policy covers these destructive tools"
    assert messages == [[f"ada: {message}: disk__erase", f"bob: {message}: wipe"], [f"bob: {message}: wipe"]]


@pytest.mark.spec("7.3")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_doctor_warns_of_inbox_events_that_wait_for_an_operator(
    toolspace: Toolspace, project: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    url = str(project / "gateway.db") if kind == "sqlite" else request.getfixturevalue("postgres_url")

    async def set_event_aside() -> None:
        database = await (SqliteDatabase.open(Path(url)) if kind == "sqlite" else PostgresDatabase.open(url))
        ledger = Ledger(database)
        await ledger.write(inbox.add, "ent_bot", "evt_1", "service", {}, priority=2)
        await ledger.write(inbox.add, "ent_other", "evt_1", "service", {}, priority=2)
        await ledger.write(inbox.claim, "ent_bot", "clm_1", count=1, lease_ms=1000)
        await ledger.write(inbox.set_aside, "ent_bot", "clm_1", ["evt_1"], error="internal error")
        await database.aclose()

    asyncio.run(set_event_aside())
    result = toolspace("doctor", "--json", TOOLSPACE_STORAGE_URL=url)
    (warning,) = [check for check in json.loads(result.stdout)["checks"] if check["what"] == "inbox"]
    assert (warning["state"], warning["found"]) == ("warning", "ent_bot: 1 event of its inbox failed")
    assert "/api/agents/ent_bot/inbox" in warning["fix"]
