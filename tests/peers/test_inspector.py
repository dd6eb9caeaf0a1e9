"""The MCP Inspector, a third-party client, with `toolspace mcp`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peers.install import npm_program

TOOLSPACE = str(Path(sys.executable).with_name("toolspace"))
TOOLS = '''
from toolspace import tool
from toolspace.core.result import ImagePart

@tool
def add(a: int, b: int) -> dict[str, int]:
    """Adds two numbers."""
    print("this must not get between the messages")
    return {"sum": a + b}

@tool
def draw() -> ImagePart:
    """Draws a picture."""
    return ImagePart(data="aGk=")
'''


class Inspector:
    """Runs one method against a server that an editor's file names."""

    def __init__(self, folder: Path, entry: dict[str, Any]) -> None:
        self._file = folder / "editor.json"
        self._file.write_text(json.dumps({"mcpServers": {"toolspace": entry}}))
        self._env = {**os.environ, "HOME": str(folder), "MCP_INSPECTOR_SECRET_STORE": "memory"}

    def run(self, method: str, *options: str, era: str = "auto", code: int = 0) -> Any:
        server = ["--config", str(self._file), "--server", "toolspace", "--protocol-era", era]
        command = [*npm_program("@modelcontextprotocol/inspector"), "--cli", *server, "--method", method, *options]
        process = subprocess.run(command, env=self._env, capture_output=True, text=True, check=False, timeout=60)
        assert process.returncode == code, process.stderr
        assert "internal error" not in process.stderr  # It forwards the server's standard error.
        return json.loads(process.stdout)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspected")
    (folder / "tools.py").write_text(TOOLS)
    file = folder / "toolspace.yaml"
    file.write_text("functions: ./tools.py\nstorage: {dir: ./state}\n")
    return file


@pytest.fixture
def over_stdio(tmp_path: Path, config: Path) -> Inspector:
    return Inspector(tmp_path, {"command": TOOLSPACE, "args": ["mcp", "--config", str(config)]})


@pytest.fixture(scope="module")
def url(config: Path) -> Iterator[str]:
    """One server for all tests: it has no state."""
    command = [TOOLSPACE, "mcp", "--http", "0", "--config", str(config)]
    env = {**os.environ, "XDG_STATE_HOME": str(config.parent / "state")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.terminate()


@pytest.fixture
def over_http(tmp_path: Path, url: str) -> Inspector:
    return Inspector(tmp_path, {"type": "http", "url": url})


@pytest.mark.spec("12.3")
@pytest.mark.parametrize("transport", ["over_stdio", "over_http"])
@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_inspector_lists_and_calls_in_both_eras(request: pytest.FixtureRequest, transport: str, era: str) -> None:
    inspector: Inspector = request.getfixturevalue(transport)
    tools = {tool["name"]: tool for tool in inspector.run("tools/list", era=era)["tools"]}
    assert tools["add"]["description"] == "Adds two numbers."
    assert tools["add"]["inputSchema"]["required"] == ["a", "b"]
    result = inspector.run("tools/call", "--tool-name", "add", "--tool-arg", "a=2", "b=3", era=era)
    assert result["structuredContent"] == {"sum": 5}
    assert json.loads(result["content"][0]["text"]) == {"sum": 5}


@pytest.mark.spec("12.3")
def test_inspector_shows_failures_and_images(over_http: Inspector) -> None:
    wrong = over_http.run("tools/call", "--tool-name", "add", "--tool-args-json", '{"a": "two"}', code=5)
    assert wrong["isError"] is True
    assert "a: expected integer" in wrong["content"][0]["text"]
    result = over_http.run("tools/call", "--tool-name", "draw")
    assert result["content"] == [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]


@pytest.mark.spec("12.3")
def test_clients_accept_the_schemas_of_all_built_in_tools(over_http: Inspector) -> None:
    # It exits with 6 if a tool has an error of this kind.
    assert over_http.run("tools/list", "--strict")["tools"]
