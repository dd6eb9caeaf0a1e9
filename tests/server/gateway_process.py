"""`toolspace serve` as a real process, for tests that stop, kill and start it again."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from tests.server.gateway_api import SECRET, ApiClient


class GatewayProcess:
    """A gateway in its own process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.stdout_lines: list[str] = []
        """Lines of standard output."""
        self.stderr_lines: list[str] = []
        """Lines of standard error."""
        self._output_changed = asyncio.Condition()
        self._reader_threads = [
            asyncio.create_task(self._read(process.stdout, self.stdout_lines)),
            asyncio.create_task(self._read(process.stderr, self.stderr_lines)),
        ]

    @property
    def keys(self) -> dict[str, str]:
        """The keys that it printed, by their labels."""
        matches = (re.fullmatch(r"  (secret|public|JWT) +(\S+)", line) for line in self.stdout_lines)
        return {match[1]: match[2] for match in matches if match is not None}

    async def wait_for_line(self, text: str) -> str:
        """Waits for a line with this text on standard output or error."""
        async with self._output_changed, asyncio.timeout(30):
            while True:
                for line in (*self.stdout_lines, *self.stderr_lines):
                    if text in line:
                        return line
                await self._output_changed.wait()

    async def wait_until_ready(self) -> None:
        """Waits for the last line of its greeting, and for the last key."""
        await self.wait_for_line("curl ")
        if any("shown only once" in line for line in self.stderr_lines):
            await self.wait_for_line("  JWT ")

    async def wait_for_exit(self) -> int:
        """Waits for the exit and reads all output; returns the exit code."""
        async with asyncio.timeout(60):
            code = await self.process.wait()
            await asyncio.gather(*self._reader_threads)
        return code

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.wait_for_exit()

    async def _read(self, stream: asyncio.StreamReader | None, into: list[str]) -> None:
        assert stream is not None
        while line := await stream.readline():
            async with self._output_changed:
                into.append(line.decode().rstrip("\n"))
                self._output_changed.notify_all()


@asynccontextmanager
async def start_gateway_process(
    folder: Path,
    config: Path | None = None,
    *words: str,
    port: int | None = 0,
    environ: Mapping[str, str] | None = None,
) -> AsyncGenerator[GatewayProcess]:
    """Starts a gateway with its state in the folder, on a free port. It is ready when the block starts.

    Without a `port`, the configuration names it.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "toolspace", *(("--config", str(config)) if config is not None else ()), "serve"),
        *(("--port", str(port)) if port is not None else ()),
        *words,
        cwd=folder,
        env={**os.environ, "PYTHONWARNINGS": "", "XDG_STATE_HOME": str(folder / "state"), **(environ or {})},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(60):
        first = (await process.stdout.readline()).decode().strip()
    if not first.startswith("http"):
        raise AssertionError(f"it did not start: {first}{(await process.stderr.read()).decode()}")
    gateway = GatewayProcess(process, first)
    try:
        await gateway.wait_until_ready()
        yield gateway
    finally:
        await gateway.kill()


@asynccontextmanager
async def open_process_api(gateway: GatewayProcess, key: str = SECRET) -> AsyncGenerator[ApiClient]:
    """Yields a client of a gateway process, with a secret key."""
    async with aiohttp.ClientSession() as session:
        yield ApiClient(gateway.url, session, {"x-secret-key": key})
