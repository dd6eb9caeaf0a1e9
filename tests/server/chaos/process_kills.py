"""Many calls on one or more gateway processes, with results that race timeouts, duplicates, and kills.

Each caller makes a call under an id of its own and repeats it until it gets an answer; posters bring results, most of
them twice, to any of the processes; a killer ends processes with SIGKILL and starts them again. Then everything is
counted: each result that was taken in reached its agent once, inline or by inbox, and nothing is left open.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp

KEY = "sk_storm" + "0" * 32
_CONFIG = """
storage: {{dir: {state}{url}}}
server: {{secretKey: {key}, workerGrace: 500ms}}
tools:
  - {{name: race, executionType: external, visible: false, timeout: 120, inputSchema: {{type: object}}}}
  - {{name: confirm, executionType: space, visible: true, timeout: 120, inputSchema: {{type: object}}}}
"""


class KillableGateway:
    """A gateway process that can be killed and restarted at the same port."""

    def __init__(self, folder: Path, *, url: str | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._config = folder / "toolspace.yaml"
        storage = f", url: {url}" if url is not None else ""
        self._config.write_text(_CONFIG.format(state=folder / "state", url=storage, key=KEY))
        self._log = folder / "log.txt"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolspace", "--config", self._config, "serve", "--port", str(self.port)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONWARNINGS": "default"},
            )

    async def ready(self, session: aiohttp.ClientSession) -> None:
        while True:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()
            with suppress(aiohttp.ClientError):
                async with session.get(f"{self.url}/ready") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(30)

    def end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()


class KillTest:
    """Makes calls, submits results, kills processes, and records what happened."""

    def __init__(
        self, processes: list[KillableGateway], *, calls: int, kills: int = 0, at_once: int = 64, seed: int = 1
    ) -> None:
        self.processes = processes
        self.calls = calls
        self.kills = kills
        self.at_once = at_once
        self.inline: Counter[str] = Counter()
        self.by_inbox: Counter[str] = Counter()
        self.accepted_counts: Counter[str] = Counter()
        self.unsure: set[str] = set()
        """Submissions whose response was lost with the process."""
        self.refused_counts: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._slots = asyncio.Semaphore(at_once)
        self._is_over = False
        self._ready_event = asyncio.Event()
        self._session: aiohttp.ClientSession
        self._run = self._agent = self._space = ""

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0)
            self._session = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, headers={"x-secret-key": KEY})
            )
            await asyncio.gather(*(process.ready(self._session) for process in self.processes))
            await self._prepare()
            workers = [asyncio.create_task(self._be_there(process)) for process in self.processes]
            killer = asyncio.create_task(self._kill_now_and_then())
            try:
                await self._ready_event.wait()
                await asyncio.gather(*(self._make_call(number) for number in range(self.calls)))
                await killer
                await self._finish()
                await self._empty_inbox()
            finally:
                self._is_over = True
                for task in (*workers, killer):
                    task.cancel()
                await asyncio.gather(*workers, killer, return_exceptions=True)

    def check(self) -> None:
        """Checks that every result was delivered once."""
        ids = {f"call_{number}" for number in range(self.calls)} - set(self.refused_counts)
        accepted_ids = {call_id for call_id in ids if self.accepted_counts[call_id]}
        assert all(count == 1 for count in self.accepted_counts.values()), self.accepted_counts.most_common(3)
        delivered = self.inline + self.by_inbox
        assert not accepted_ids - set(delivered), f"lost: {sorted(accepted_ids - set(delivered))[:5]}"
        assert all(count == 1 for count in self.by_inbox.values()), self.by_inbox.most_common(3)
        twice = [call_id for call_id, count in delivered.items() if count != 1]
        # A process that is killed after its response, but before it stored the delivery, looks like one that was killed
        # before it. So its last results also go to the inbox, under the same ids.
        assert len(twice) <= self.kills * self.at_once, f"{len(twice)} delivered more than once: {twice[:5]}"
        assert ids == set(delivered), f"never delivered: {sorted(ids - set(delivered))[:5]}"

    async def _prepare(self) -> None:
        self._agent = (await self._ask("POST", "/api/entities", {"type": "agent", "name": "Ada"}))["id"]
        self._space = (await self._ask("POST", "/api/spaces", {"name": "Room"}))["id"]
        await self._ask("POST", f"/api/spaces/{self._space}/members", {"entityId": self._agent})
        run = await self._ask("POST", "/api/runs", {"agentEntityId": self._agent, "spaceId": self._space})
        self._run = run["id"]

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        """Repeats a request until it gets a response."""
        while True:
            try:
                async with self._session.request(method, self._any() + path, json=body) as answer:
                    data = await answer.json()
                    assert answer.status < 400 or answer.status == 503, data
                    if answer.status != 503:
                        return data
            except (aiohttp.ClientError, OSError):
                pass
            await asyncio.sleep(0.05)

    def _any(self) -> str:
        return self._random.choice(self.processes).url

    async def _be_there(self, process: KillableGateway) -> None:
        """Connects a worker that serves the tool but submits no results."""
        query = {"tools": "race", "workerId": f"wrk_{process.port}", "concurrency": "1"}
        while not self._is_over:
            with suppress(aiohttp.ClientError, OSError):
                async with self._session.get(f"{process.url}/api/tools/stream", params=query) as answer:
                    async for line in answer.content:
                        if b"worker.ready" in line:
                            self._ready_event.set()
            await asyncio.sleep(0.02)

    async def _make_call(self, number: int) -> None:
        async with self._slots:
            call_id = f"call_{number}"
            delay = self._random.random() * 0.25
            call_task = asyncio.create_task(self._call(number, call_id))
            if number % 10 == 0:
                await call_task  # On a slow machine, too, the results of some calls come after the timeout.
            post_tasks = [asyncio.create_task(self._post(call_id, number, delay))]
            if number % 3:
                post_tasks.append(asyncio.create_task(self._post(call_id, number, delay)))
            await asyncio.gather(call_task, *post_tasks)

    async def _call(self, number: int, call_id: str) -> None:
        body = {"name": "race" if number % 4 else "confirm", "args": {"n": number}, "callId": call_id}
        while True:
            try:
                url = f"{self._any()}/api/runs/{self._run}/calls"
                async with self._session.post(url, json=body) as answer:
                    data = await answer.json()
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)
                continue
            if answer.status == 503:
                await asyncio.sleep(0.05)
                continue
            assert answer.status in (200, 202), data
            if answer.status == 200 and data["ok"]:
                assert data["result"] == {"n": number}
                self.inline[call_id] += 1
            elif "no worker" in (data.get("error") or ""):
                self.refused_counts[call_id] += 1  # The worker was killed with its gateway: the call fails at once.
            elif "interrupted" in (data.get("error") or ""):
                raise AssertionError(data)
            return

    async def _post(self, call_id: str, number: int, delay: float) -> None:
        await asyncio.sleep(delay)
        body = {"callId": call_id, "result": {"n": number}}
        for _ in range(2000):
            if call_id in self.refused_counts:
                return
            try:
                url = f"{self._any()}/api/runs/{self._run}/tool-results"
                async with self._session.post(url, json=body) as answer:
                    status = answer.status
                    await answer.read()
            except (aiohttp.ClientError, OSError):
                self.unsure.add(call_id)
                await asyncio.sleep(0.03)
                continue
            if status == 200:
                self.accepted_counts[call_id] += 1
                return
            if status == 409:
                return
            assert status in (404, 503), await answer.text()
            await asyncio.sleep(0.03)  # Not started yet, or the database is unavailable.

    async def _kill_now_and_then(self) -> None:
        for _ in range(self.kills):
            await asyncio.sleep(0.3 + self._random.random() * 1.5)
            process = self._random.choice(self.processes)
            process.kill()
            await asyncio.sleep(self._random.random() * 0.3)
            process.start()
            await process.ready(self._session)

    async def _finish(self) -> None:
        """Waits until every result is delivered; dead processes have to be noticed first."""
        while True:
            rest = await self._ask("GET", "/api/calls?status=running,waiting,pending&limit=500")
            open_calls = [call["callId"] for call in rest["items"]]
            if not open_calls:
                break
            for call_id in open_calls:
                await self._post(call_id, int(call_id.removeprefix("call_")), 0)
        # A result for a caller in a killed process goes to the inbox when the kill is noticed.
        expected = {f"call_{number}" for number in range(self.calls)} - set(self.refused_counts)
        for _ in range(300):
            await self._empty_inbox()
            if expected <= set(self.inline) | set(self.by_inbox):
                return
            await asyncio.sleep(0.1)

    async def _empty_inbox(self) -> None:
        path = f"/api/agents/{self._agent}/inbox"
        while True:
            events = (await self._ask("POST", f"{path}/claim", {"count": 100}))["items"]
            if not events:
                return
            ids = [event["eventId"] for event in events]
            for event in events:
                self.by_inbox[event["data"]["callId"]] += 1
            await self._ask("POST", f"{path}/done", {"eventIds": ids})

    async def messages(self) -> Counter[str]:
        """Counts the final statuses of the visible calls."""
        async with aiohttp.ClientSession(headers={"x-secret-key": KEY}) as self._session:
            states: Counter[str] = Counter()
            after = 0
            while True:
                page = await self._ask("GET", f"/api/spaces/{self._space}/messages?after={after}&limit=500")
                if not page["items"]:
                    return states
                for message in page["items"]:
                    states[message["status"]] += 1
                after = page["items"][-1]["seq"]
