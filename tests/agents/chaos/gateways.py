"""Gateways as they are served, with one clerk, which are killed while it works: its model and the world that it has an
effect on are a server of the test's own, and outlive them.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import KINDS, decide, effects_in
from tests.agents.chaos.process import Place, open_database
from tests.models.servers import called, completion, said
from tests.server.chaos.storm import KEY, Process
from toolspace.agents.host import entity_id_for
from toolspace.core.ids import derived_id
from toolspace.core.model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn

ROOM = derived_id("spc", "named", "Room")
PERSON = "ent_person"
_PACE = 0.01
"""Seconds that each answer takes, at most."""


class World:
    """What is outside of the gateways: a model that thinks as the clerk does, and a book that it writes into."""

    def __init__(self, book: Path, chance: random.Random) -> None:
        self._book = book
        self._chance = chance
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=10**9)
        app.router.add_post("/v1/chat/completions", self._think)
        app.router.add_post("/effect", self._effect)
        app.router.add_get("/look", self._look)
        app.router.add_get("/check", self._check)
        runner = web.AppRunner(app, handler_cancellation=False)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def config(self, *, folder: Path, url: str | None) -> dict[str, Any]:
        """A gateway with the clerk."""
        takes = {"type": "object", "properties": {"n": {"type": "string"}}}
        http: dict[str, Any] = {"executionType": "gateway", "visible": False, "inputSchema": takes}
        return {
            "storage": {"dir": str(folder / "state"), **({"url": url} if url is not None else {})},
            "server": {"secretKey": KEY, "workerGrace": "500ms"},
            "tools": [
                {"name": "effect", **http, "execution": {"url": f"{self.url}/effect", "method": "POST"}},
                {"name": "look", **http, "execution": {"url": f"{self.url}/look", "method": "GET"}},
                {"name": "check", **http, "execution": {"url": f"{self.url}/check", "method": "GET"}},
                {"name": "askBoss", "executionType": "basic", "inputSchema": takes},
                {"name": "confirmAction", "executionType": "space", "isAsync": True, "inputSchema": takes},
                {"name": "fetchData", "executionType": "space", "timeout": 60_000, "inputSchema": takes},
            ],
            "agents": {
                "clerk": {
                    "model": {"provider": "openai", "name": "m", "baseUrl": f"{self.url}/v1", "apiKey": "sk-x"},
                    "spaces": ["Room"],
                    "loop": {"maxSteps": 1_000},
                    "limits": {"cyclesPerMinute": 10_000},
                }
            },
        }

    async def _think(self, request: web.Request) -> web.StreamResponse:
        turn = decide(turns_of((await request.json())["messages"]))
        deltas = [called(at, id=one.id, name=one.name, arguments=one.arguments) for at, one in enumerate(turn.calls)]
        body = completion(*deltas, finish="tool_calls") if deltas else said(turn.text)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await self._pause()
        with suppress(ConnectionError):  # Whoever asked was killed.
            await response.prepare(request)
            for start in range(0, len(body), 200):
                await response.write(body[start : start + 200])
                await self._pause()
            await response.write_eof()
        return response

    async def _effect(self, request: web.Request) -> web.Response:
        n = (await request.json())["n"]
        await self._pause()
        with self._book.open("a") as book:
            book.write(f"{len(effects_in(self._book))} {n}\n")
        await self._pause()
        return web.json_response(True)

    async def _look(self, request: web.Request) -> web.Response:
        await self._pause()
        return web.json_response(f"looked at {request.query['n']}")

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response(request.query["n"] in effects_in(self._book).values())

    async def _pause(self) -> None:
        await asyncio.sleep(self._chance.random() * _PACE)


def turns_of(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The conversation, read back from what OpenAI is told of it."""
    turns: list[Turn] = []
    answers: list[ModelToolResult] = []
    for one in messages:
        if one["role"] == "tool":
            text = one["content"]
            answers.append(ModelToolResult(one["tool_call_id"], "", text, text.startswith("(tool failed")))
            continue
        if answers:
            turns.append(ResultsTurn(tuple(answers)))
            answers = []
        if one["role"] == "user":
            turns.append(UserTurn(one["content"]))
        elif one["role"] == "assistant":
            functions = ((call["id"], call["function"]) for call in one.get("tool_calls") or ())
            calls = tuple(ModelCall(id, function["name"], function["arguments"]) for id, function in functions)
            turns.append(ModelTurn(text=one.get("content") or "", calls=calls))
    return [*turns, *([ResultsTurn(tuple(answers))] if answers else [])]


class GatewayStorm:
    """Jobs over HTTP, for gateways that are killed again and again."""

    def __init__(
        self, folder: Path, *, url: str | None = None, processes: int = 1, jobs: int = 8, kills: int = 4, seed: int = 1
    ) -> None:
        self._folder = folder
        self._url = url
        self._random = random.Random(seed)
        self._world = World(folder / "book", self._random)
        self._processes = [Process(folder / str(number)) for number in range(processes)]
        self._kills = kills
        self._number = jobs
        self.jobs: dict[str, str] = {}
        self._session: aiohttp.ClientSession

    async def run(self) -> None:
        async with self._world.serve(), aiohttp.ClientSession(headers={"x-secret-key": KEY}) as self._session:
            config = json.dumps(self._world.config(folder=self._folder, url=self._url))
            try:
                for number, process in enumerate(self._processes):
                    (self._folder / str(number) / "toolspace.yaml").write_text(config)
                    process.start()
                    await process.ready(self._session)
                await self._settle_in()
                boss = asyncio.create_task(self._answer_as_boss())
                await asyncio.gather(self._give_jobs(), self._kill_now_and_then())
                while not await self._settled():  # noqa: ASYNC110 - other processes are asked
                    await asyncio.sleep(0.1)
                boss.cancel()
                assert [process.stop() for process in self._processes] == [0] * len(self._processes)
            finally:
                for process in self._processes:
                    process.end()

    async def check(self) -> None:
        place = Place(folder=self._folder / "state", socket=self._folder, log=self._folder, url=self._url)
        database, wakeups = await open_database(place)
        try:
            await checks.check(database, self.jobs, self._folder / "book", entity_id_for("clerk"))
        finally:
            await database.aclose()
            if wakeups is not None:
                await wakeups.aclose()

    async def _ask(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """Asks whichever process answers, until one does."""
        headers = {"idempotency-key": key} if key is not None else None
        while True:
            url = self._random.choice(self._processes).url
            with suppress(aiohttp.ClientError, OSError):
                async with self._session.request(method, url + path, json=body, headers=headers) as answer:
                    data = await answer.json()
                    if answer.status not in (409, 503):
                        assert answer.status < 400, data
                        return data
                    if answer.status == 409 and key is None:
                        return None  # Another was faster.
            await asyncio.sleep(0.05)

    async def _settle_in(self) -> None:
        await self._ask("POST", "/api/entities", {"id": PERSON, "type": "human", "name": "Husam"})
        await self._ask("POST", f"/api/spaces/{ROOM}/members", {"entityId": PERSON})

    async def _give_jobs(self) -> None:
        for number in map(str, range(1, self._number + 1)):
            kind = self._random.choice(KINDS)
            body = {"entityId": PERSON, "content": f"job {number} {kind}"}
            # Asked again where the answer was lost: it is said once all the same.
            await self._ask("POST", f"/api/spaces/{ROOM}/messages", body, key=f"job-{number}")
            self.jobs[number] = kind
            await asyncio.sleep(self._random.random() * 0.2)

    async def _kill_now_and_then(self) -> None:
        for _ in range(self._kills):
            process = self._random.choice(self._processes)
            await asyncio.sleep(self._random.random() * 0.6)
            process.kill()
            process.start()
            await process.ready(self._session)

    async def _answer_as_boss(self) -> None:
        while True:
            found = await self._ask("GET", "/api/calls?status=waiting,pending&limit=100")
            for one in found["items"]:
                body = {"callId": one["callId"], "result": {"boss": one["args"]["n"]}}
                await self._ask("POST", f"/api/runs/{one['runId']}/tool-results", body)
            await asyncio.sleep(0.05)

    async def _settled(self) -> bool:
        agent = entity_id_for("clerk")
        page = await self._ask("GET", f"/api/spaces/{ROOM}/messages?limit=500")
        texts = {one["content"] for one in page["items"] if isinstance(one["content"], str)}
        runs = await self._ask("GET", f"/api/agents/{agent}/runs")
        return set(checks.wanted(self.jobs)) <= texts and all(one["status"] == "completed" for one in runs["items"])
