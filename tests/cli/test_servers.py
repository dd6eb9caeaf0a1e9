from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run, Toolspace, environment
from tests.providers.mcp.oauth.protected_server import Browser, protected_server

pytestmark = pytest.mark.spec("17.1")

PROGRAMS = Path(__file__).parent / "programs"
CONFIG = f"""\
tools: {{builtins: false}}
mcpServers:
  small: {{command: "{sys.executable}", args: ["{PROGRAMS}/small_server.py"]}}
  broken: {{command: no-such-program}}
  refusing: {{url: "http://127.0.0.1:9/mcp"}}
  off: {{command: no-such-program, enabled: false}}
  dying: {{command: sh, args: ["-c", "echo connection refused >&2; exit 3"]}}
  empty: {{args: [x]}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "toolspace.yaml").write_text(CONFIG)
    return folder


@pytest.fixture
def running_toolspace(project: Path) -> Iterator[subprocess.Popen[str]]:
    """A toolspace of the project that goes on."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAMS / "long_running.py"), str(project / "toolspace.yaml")],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 0


def by_name(result: Run) -> dict[str, dict[str, Any]]:
    return {server["name"]: server for server in json.loads(result.stdout)}


@pytest.mark.spec("17.2")
def test_the_table_shows_the_status_of_each_server(toolspace: Toolspace) -> None:
    result = toolspace("servers")

    lines = {line.split()[0]: line.split() for line in result.stdout.splitlines() if not line.startswith(" ")}
    assert result.returncode == 1  # Some have failed.
    assert lines["NAME"] == ["NAME", "STATE", "PROTOCOL", "TRANSPORT", "PROCESS", "TOOLS", "TOKENS", "RESTARTS"]
    assert lines["small"][1:5] == ["ready", "2026-07-28", "stateless", "stdio"]
    assert lines["small"][6] == "2"
    assert int(lines["small"][7]) > 20
    assert (lines["broken"][1], lines["dying"][1], lines["refusing"][1]) == ("failed", "failed", "failed")
    assert (lines["off"][1], lines["empty"][1:3]) == ("disabled", ["cannot", "start"])
    assert "the command 'no-such-program' of server 'broken' is not on the PATH" in " ".join(result.stdout.split())
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["broken", "refusing", "dying"]


@pytest.mark.spec("17.2")
def test_json_has_every_field(toolspace: Toolspace) -> None:
    result = toolspace("servers", "--json")

    servers = by_name(result)
    assert servers["small"]["state"] == "ready"
    assert servers["small"]["toolspace"] is None
    assert servers["small"]["tokens"] > 20
    assert servers["broken"]["lastError"].startswith("the command 'no-such-program'")
    assert servers["off"] == {"name": "off", "state": "disabled", "transport": "stdio", "required": False}


def test_a_required_server_that_does_not_start_exits_1_and_is_shown(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text(CONFIG.replace("no-such-program}", "no-such-program, required: true}"))

    result = toolspace("servers", "--json")

    assert result.returncode == 1
    assert (by_name(result)["broken"]["state"], by_name(result)["broken"]["required"]) == ("failed", True)


def test_the_servers_of_a_running_toolspace_are_shown_and_restarted_there(
    toolspace: Toolspace, running_toolspace: subprocess.Popen[str]
) -> None:
    assert running_toolspace.stdin is not None
    assert running_toolspace.stdout is not None
    before = by_name(toolspace("servers", "--json"))["small"]
    restart = toolspace("servers", "restart", "small", "--json")
    after = by_name(toolspace("servers", "--json"))["small"]
    status = toolspace("servers")
    failed = toolspace("servers", "restart", "broken")
    running_toolspace.stdin.write("small__end\n")
    running_toolspace.stdin.flush()
    answer = running_toolspace.stdout.readline()
    died = by_name(toolspace("servers", "--json"))["small"]

    assert (before["toolspace"], before["restarts"]) == (running_toolspace.pid, 0)
    assert restart.returncode == 0
    assert [server["name"] for server in json.loads(restart.stdout)] == ["small"]
    assert (after["state"], after["restarts"]) == ("ready", 1)
    assert after["pid"] != before["pid"]
    assert status.stdout.startswith(f"toolspace, process {running_toolspace.pid}\n")
    assert failed.returncode == 1
    assert "no-such-program" in failed.stderr
    assert "done" not in answer
    assert "exit code 3" in died["lastError"]


def test_a_restart_without_a_running_toolspace_starts_the_server_as_a_test(toolspace: Toolspace) -> None:
    good, bad = toolspace("servers", "restart", "small"), toolspace("servers", "restart", "broken")

    assert (good.returncode, bad.returncode) == (0, 1)
    assert "no toolspace of this configuration runs" in good.stderr
    assert "ready" in good.stdout


@pytest.mark.spec("17.2")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("restart",), "the name is missing: toolspace servers restart NAME"),
        (("restart", "smal"), 'there is no MCP server "smal"; did you mean "small"?'),
        (("restart", "off"), "off is disabled: toolspace.yaml:6"),
        (("restart", "empty"), 'empty has neither "command" nor "url": toolspace.yaml:8'),
        (("restert", "small"), 'did you mean "restart"?'),
        (("login", "small"), "which has no login"),
    ],
    ids=["no-name", "typo", "disabled", "empty", "action", "login"],
)
def test_wrong_usage_is_reported_with_a_hint(toolspace: Toolspace, words: tuple[str, ...], message: str) -> None:
    result = toolspace("servers", *words)

    assert result.returncode == 2
    assert message in result.stderr


def test_without_servers_a_note_is_printed(toolspace: Toolspace, project: Path) -> None:
    (project / "toolspace.yaml").write_text("")

    result = toolspace("servers")

    assert (result.returncode, result.stdout) == (0, "")
    assert result.stderr == "there are no MCP servers in the configuration\n"


def test_logging_out_without_a_login_is_not_a_failure(toolspace: Toolspace) -> None:
    result = toolspace("servers", "logout", "refusing")

    assert (result.returncode, result.stdout) == (0, "There was no login to refusing.\n")


@pytest.mark.spec("3.16")
async def test_a_person_logs_in_on_the_printed_page_and_logs_out(toolspace: Toolspace, project: Path) -> None:
    async with protected_server() as peer:
        (project / "toolspace.yaml").write_text(f"mcpServers: {{guarded: {{url: '{peer.url}'}}}}\n")
        before = by_name(await asyncio.to_thread(toolspace, "servers", "--json"))["guarded"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "toolspace", "servers", "login", "guarded", "--no-browser"),
            cwd=project,
            env=environment(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        assert await process.stderr.readline() == b"Log in to guarded on this page:\n"
        await Browser()("guarded", (await process.stderr.readline()).decode().strip())
        out, err = await process.communicate()
        report = by_name(await asyncio.to_thread(toolspace, "servers", "--json"))["guarded"]
        logout = await asyncio.to_thread(toolspace, "servers", "logout", "guarded")
        after = by_name(await asyncio.to_thread(toolspace, "servers", "--json"))["guarded"]

    assert (process.returncode, out, err) == (0, b"Logged in to guarded.\n", b"")
    assert [server["state"] == "ready" for server in (before, report, after)] == [False, True, False]
    assert "toolspace servers login guarded" in before["lastError"]
    assert logout.stdout == "Logged out of guarded.\n"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("call", "dying__x"), 1, 'error: provider "dying" is not available: {} (transport_error)'),
        (("explain", "dying__x"), 2, 'error: provider "dying" is not available: {}'),
        (("list",), 1, "error: the tools of dying are missing: {}"),
    ],
    ids=["call", "explain", "list"],
)
def test_the_reason_why_a_server_does_not_start_is_printed_once(
    toolspace: Toolspace, words: tuple[str, ...], code: int, message: str
) -> None:
    result = toolspace(*words)

    reason = "the server ended with exit code 3: connection refused"
    assert result.returncode == code
    assert [line for line in result.stderr.splitlines() if reason in line] == [message.format(reason)]


def test_log_lines_of_a_server_have_its_name(toolspace: Toolspace, project: Path) -> None:
    chatty = f"echo Welcome; exec {sys.executable} {PROGRAMS}/small_server.py"
    (project / "toolspace.yaml").write_text(f"mcpServers: {{chatty: {{command: sh, args: ['-c', '{chatty}']}}}}\n")

    result = toolspace("list", "--category", "mcp")

    assert result.returncode == 0
    assert (
        result.stderr
        == "[WRN] chatty: the server wrote something that is not a message (logged only once): 'Welcome'\n"
    )


@pytest.mark.parametrize(
    ("words", "starts_others"),
    [
        (("call", "small__add", "a=1", "b=2"), False),
        (("call", "plus", "a=1", "b=2"), False),
        (("explain", "small__add"), False),
        (("call", "base64_encode", "text=a"), False),
        (("call", "add", "a=1", "b=2"), True),
        (("call", "agent__batch", "calls=[]"), True),
    ],
    ids=["server", "alias", "explain", "builtin", "bare name", "batch"],
)
def test_a_call_starts_only_the_servers_that_it_may_need(
    toolspace: Toolspace, project: Path, words: tuple[str, ...], starts_others: bool
) -> None:
    (project / "toolspace.yaml").write_text(
        f"""\
mcpServers:
  small: {{command: "{sys.executable}", args: ["{PROGRAMS}/small_server.py"]}}
  other: {{command: sh, args: ["-c", "touch {project}/started; exit 3"]}}
tools:
  builtins: [base64_encode]
  aliases: {{sum: small__add, plus: sum}}
"""
    )

    result = toolspace(*words)

    assert (project / "started").exists() == starts_others
    assert ("other" in result.stderr) == starts_others
    if not starts_others:
        assert result.returncode == 0, result.stderr
