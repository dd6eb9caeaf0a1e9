"""The MCP client of the AI SDK with `toolspace mcp`: it gives `server/discover` one second, then sends `initialize`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers.install import SETS, ensure, node

SCRIPT = Path(__file__).parent / "clients" / "ai_sdk.mjs"


@pytest.mark.spec("12.3")
@pytest.mark.spec("3.19")
def test_the_client_of_the_ai_sdk_connects_while_a_server_hangs(tmp_path: Path) -> None:
    hanging_server = {"command": sys.executable, "args": ["-c", "import time; time.sleep(3600)"]}
    config = {"mcpServers": {"slow": hanging_server}, "storage": {"dir": str(tmp_path / "state")}}
    (tmp_path / "toolspace.json").write_text(json.dumps(config))
    process = subprocess.run(
        [str(node()), "--input-type=module"],
        input=SCRIPT.read_text(),
        cwd=ensure(SETS["clients"]),
        env={**os.environ, "PYTHON": sys.executable, "PROJECT": str(tmp_path), "TOOL": "current_time"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    output = json.loads(process.stdout)
    assert "read_file" in output["names"]
    assert "timestamp" in output["result"]["content"][0]["text"]
