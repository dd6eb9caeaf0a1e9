"""`list`, `servers`, `doctor` and `call` with many real MCP servers: slow, failing and hanging ones among them."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Toolspace, environment
from tests.cli.terminal import Terminal
from tests.providers.mcp.conftest import SERVERS

pytestmark = pytest.mark.spec("3.19")
WAVES = 14
"""Servers, of which two start at once."""
LATE = """
import runpy, sys, time
time.sleep(float(sys.argv.pop(1)))
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


def _write_config(project: Path, servers: dict[str, Any], **defaults: Any) -> None:
    config = {"mcpServers": servers, "defaults": defaults, "storage": {"dir": str(project / "state")}}
    (project / "toolspace.yaml").write_text(json.dumps(config))


def _good(*tools: str) -> dict[str, Any]:
    return {"command": sys.executable, "args": [str(SERVERS / "gated.py"), "-", *tools]}


FAILING = {"command": sys.executable, "args": ["-c", "raise SystemExit('no database')"]}
HANGING = {"command": sys.executable, "args": ["-c", "import time; time.sleep(3600)"]}


def _expire_soon(project: Path) -> dict[str, str]:
    """Returns variables that shorten the time limit of a server's start, which is a minute, in the started command."""
    folder = project / "shortened"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import toolspace.providers.mcp.connection as connection\nconnection.CONNECT_SECONDS = 10.0\n"
    )
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def test_servers_that_wait_for_their_turn_are_not_late(toolspace: Toolspace, project: Path) -> None:
    """Fourteen servers of a second and a half take longer in waves of two than one of them may take."""
    slow = {"command": sys.executable, "args": ["-c", LATE, "1.5", str(SERVERS / "gated.py"), "-", "work"]}
    _write_config(project, {f"s{number}": slow for number in range(WAVES)}, mcpInitConcurrency=2)
    result = toolspace("list", "--json", **_expire_soon(project))
    assert result.returncode == 0, result.stderr
    names = {entry["name"] for entry in json.loads(result.stdout)}
    assert {f"s{number}__work" for number in range(WAVES)} <= names


def test_list_shows_every_other_tool_and_exits_with_1_if_a_server_fails(toolspace: Toolspace, project: Path) -> None:
    servers = {"hangs": HANGING, "fails": FAILING, **{f"s{number}": _good("work") for number in range(3)}}
    _write_config(project, servers, mcpInitConcurrency=1)
    result = toolspace("list", "--json", **_expire_soon(project))
    names = {entry["name"] for entry in json.loads(result.stdout)}
    assert {f"s{number}__work" for number in range(3)} <= names
    assert result.returncode == 1
    assert "the tools of fails are missing" in result.stderr
    assert "no database" in result.stderr
    assert "the tools of hangs are missing: the server was not ready within 10000ms" in result.stderr


def test_servers_and_doctor_exit_with_1_if_a_server_fails(toolspace: Toolspace, project: Path) -> None:
    _write_config(project, {"good": _good("work"), "fails": FAILING})
    result = toolspace("servers", "--json")
    states = {entry["name"]: entry["state"] for entry in json.loads(result.stdout)}
    assert states == {"good": "ready", "fails": "failed"}
    assert result.returncode == 1
    assert re.search(r"fails has failed: .*no database", result.stderr)
    assert toolspace("doctor").returncode == 1
    _write_config(project, {"good": _good("work")})
    assert toolspace("servers").returncode == 0


def test_progress_is_shown_on_a_terminal_only(toolspace: Toolspace, project: Path) -> None:
    slow = {"command": sys.executable, "args": ["-c", LATE, "2", str(SERVERS / "gated.py"), "-", "work"]}
    _write_config(project, {"good": _good("work"), "slow": slow})
    assert "of 2 servers" not in toolspace("list").stderr
    with Terminal("list", cwd=project, environ=environment(TERM="xterm")) as terminal:
        terminal.wait_for("1 of 2 servers; waiting for slow")


def test_a_call_waits_only_for_its_own_server(toolspace: Toolspace, project: Path) -> None:
    started = project / "started"
    marker = {"command": sys.executable, "args": ["-c", f"open({str(started)!r}, 'w')"]}
    _write_config(project, {"hangs": HANGING, "marker": marker, "good": _good("work")})
    result = toolspace("call", "good__work")
    assert (result.returncode, result.stdout) == (0, "work\n")
    assert not started.exists()
