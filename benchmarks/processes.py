"""Servers in processes of their own: started, awaited, measured and stopped. Which server it is, `serving` knows."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FUNCTIONS = '''\
from toolspace import tool


@tool
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''


@dataclass(frozen=True)
class Server:
    url: str
    pid: int

    def cpu(self) -> float:
        """Seconds that it has worked for so far. Other processes disturb this less than they disturb the clock."""
        return sum(
            int(path.read_text().split()[0]) / 1e9 for path in Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        )


@contextmanager
def start_server(role: str, *arguments: str) -> Generator[Server]:
    """One of the servers in `benchmarks.server_roles`, until the block ends."""
    with _start_process("-m", "benchmarks.server_roles", role, *arguments) as server:
        yield server


@contextmanager
def start_toolspace(config: str = "functions: ./tools.py") -> Generator[Server]:
    """`toolspace mcp --http`, as a user starts it, with the function `add` at hand for the configuration."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tools.py").write_text(FUNCTIONS)
        Path(folder, "toolspace.yaml").write_text(f"{config}\nstorage: {{dir: {folder}/state}}\n")
        with _start_process("-m", "toolspace", "--config", f"{folder}/toolspace.yaml", "mcp", "--http", "0") as server:
            yield server


@contextmanager
def _start_process(*arguments: str) -> Generator[Server]:
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        try:
            url = process.stdout.readline().strip()  # All of them say where they are once they are there.
            if not url.startswith("http://"):
                process.kill()
                process.wait()
                errors.seek(0)
                raise RuntimeError(f"python {' '.join(arguments)} does not serve: {url}\n{errors.read()}")
            yield Server(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
