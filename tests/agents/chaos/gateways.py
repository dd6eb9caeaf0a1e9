"""Gateways with one agent, which are killed while the agent works on jobs.

The agent's model, and the service on which its calls have effects, run in the test's process and survive.
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
from tests.agents.chaos.job_agent import KINDS, decide, read_effects
from tests.agents.chaos.process import ProcessSettings, open_database
from tests.models.model_server import chat_completion, text_completion, tool_call_delta
from tests.server.chaos.process_kills import KEY, KillableGateway
from toolspace.agents.agent import entity_id_for
from toolspace.core.ids import derived_id
from toolspace.core.language_model import ModelCall, ModelToolResult, ModelTurn, ResultsTurn, Turn, UserTurn

ROOM = derived_id("spc", "named", "Room")
PERSON = "ent_person"
_PACE = 0.01
"""The longest delay of a response, in seconds."""


class OutsideServer:
    """An HTTP server outside of the gateways: the agent's model, and a service that writes effects to a file."""

    def __init__(self, effects_file: Path, delays: random.Random) -> None:
        self._effects_file = effects_file
        self._delays = delays
        self.url = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=10**9)
        app.router.add_post("/v1/chat/completions", self._respond)
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

    def build_config(self, *, directory: Path, url: str | None) -> dict[str, Any]:
        """The configuration of a gateway with the agent."""
        schema = {"type": "object", "properties": {"n": {"type": "string"}}}
        http: dict[str, Any] = {"executionType": "gateway", "visible": False, "inputSchema": schema}
        return {
            "storage": {"dir": str(directory / "state"), **({"url": url} if url is not None else {})},
            "server": {"secretKey": KEY, "workerGrace": "500ms"},
            "tools": [
                {"name": "effect", **http, "execution": {"url": f"{self.url}/effect", "method": "POST"}},
                {"name": "look", **http, "execution": {"url": f"{self.url}/look", "method": "GET"}},
                {"name": "check", **http, "execution": {"url": f"{self.url}/check", "method": "GET"}},
                {"name": "askBoss", "executionType": "basic", "inputSchema": schema},
                {"name": "confirmAction", "executionType": "space", "isAsync": True, "inputSchema": schema},
                {"name": "fetchData", "executionType": "space", "timeout": 60_000, "inputSchema": schema},
            ],
            "agents": {
                "clerk": {
                    "model": {"provider": "openai", "name": "m", "baseUrl": f"{self.url}/v1", "apiKey": "sk-x"},
                    "spaces": ["Room"],
                    "loop": {"maxSteps": 1_000, "plainText": "private"},
                    "limits": {"cyclesPerMinute": 10_000},
                }
            },
        }

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        turn = decide(parse_turns((await request.json())["messages"]))
        deltas = [
            tool_call_delta(at, id=model_call.id, name=model_call.name, arguments=model_call.arguments)
            for at, model_call in enumerate(turn.calls)
        ]
        body = chat_completion(*deltas, finish="tool_calls") if deltas else text_completion(turn.text)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await self._pause()
        with suppress(ConnectionError):  # The gateway was killed.
            await response.prepare(request)
            for start in range(0, len(body), 200):
                await response.write(body[start : start + 200])
                await self._pause()
            await response.write_eof()
        return response

    async def _effect(self, request: web.Request) -> web.Response:
        n = (await request.json())["n"]
        await self._pause()
        with self._effects_file.open("a") as file:
            file.write(f"{len(read_effects(self._effects_file))} {n}\n")
        await self._pause()
        return web.json_response(True)

    async def _look(self, request: web.Request) -> web.Response:
        await self._pause()
        return web.json_response(f"looked at {request.query['n']}")

    async def _check(self, request: web.Request) -> web.Response:
        return web.json_response(request.query["n"] in read_effects(self._effects_file).values())

    async def _pause(self) -> None:
        await asyncio.sleep(self._delays.random() * _PACE)


def parse_turns(messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The conversation of a request to OpenAI."""
    turns: list[Turn] = []
    results: list[ModelToolResult] = []
    for message in messages:
        if message["role"] == "tool":
            text = message["content"]
            results.append(ModelToolResult(message["tool_call_id"], "", text, text.startswith("(tool failed")))
            continue
        if results:
            turns.append(ResultsTurn(tuple(results)))
            results = []
        if message["role"] == "user":
            turns.append(UserTurn(message["content"]))
        elif message["role"] == "assistant":
            functions = ((call["id"], call["function"]) for call in message.get("tool_calls") or ())
            calls = tuple(ModelCall(id, function["name"], function["arguments"]) for id, function in functions)
            turns.append(ModelTurn(text=message.get("content") or "", calls=calls))
    return [*turns, *([ResultsTurn(tuple(results))] if results else [])]


class GatewayStorm:
    """Sends jobs over HTTP to gateways that are killed repeatedly."""

    def __init__(
        self,
        directory: Path,
        *,
        url: str | None = None,
        processes: int = 1,
        jobs: int = 8,
        kills: int = 4,
        seed: int = 1,
    ) -> None:
        self._directory = directory
        self._url = url
        self._random = random.Random(seed)
        self._outside_server = OutsideServer(directory / "effects", self._random)
        self._processes = [KillableGateway(directory / str(number)) for number in range(processes)]
        self._kills = kills
        self._job_count = jobs
        self.jobs: dict[str, str] = {}
        self._session: aiohttp.ClientSession

    async def run(self) -> None:
        async with self._outside_server.serve(), aiohttp.ClientSession(headers={"x-secret-key": KEY}) as self._session:
            config = json.dumps(self._outside_server.build_config(directory=self._directory, url=self._url))
            try:
                for number, process in enumerate(self._processes):
                    (self._directory / str(number) / "toolspace.yaml").write_text(config)
                    process.start()
                    await process.ready(self._session)
                await self._create_members()
                submit_task = asyncio.create_task(self._submit_results())
                await asyncio.gather(self._send_jobs(), self._kill_repeatedly())
                while not await self._is_done():  # noqa: ASYNC110 - other processes are asked
                    await asyncio.sleep(0.1)
                submit_task.cancel()
                assert [process.stop() for process in self._processes] == [0] * len(self._processes)
            finally:
                for process in self._processes:
                    process.end()

    async def check(self) -> None:
        settings = ProcessSettings(
            directory=self._directory / "state", socket=self._directory, log=self._directory, url=self._url
        )
        database, wakeups = await open_database(settings)
        try:
            await checks.check(database, self.jobs, self._directory / "effects", entity_id_for("clerk"))
        finally:
            await database.aclose()
            if wakeups is not None:
                await wakeups.aclose()

    async def _request(self, method: str, path: str, body: Any = None, *, key: str | None = None) -> Any:
        """Sends a request to random processes until one answers."""
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
                        return None  # Another process was faster.
            await asyncio.sleep(0.05)

    async def _create_members(self) -> None:
        await self._request("POST", "/api/entities", {"id": PERSON, "type": "human", "name": "Husam"})
        await self._request("POST", f"/api/spaces/{ROOM}/members", {"entityId": PERSON})

    async def _send_jobs(self) -> None:
        for number in map(str, range(1, self._job_count + 1)):
            kind = self._random.choice(KINDS)
            body = {"entityId": PERSON, "content": f"job {number} {kind}"}
            # Sent again if the response was lost: the message is stored once all the same.
            await self._request("POST", f"/api/spaces/{ROOM}/messages", body, key=f"job-{number}")
            self.jobs[number] = kind
            await asyncio.sleep(self._random.random() * 0.2)

    async def _kill_repeatedly(self) -> None:
        for _ in range(self._kills):
            process = self._random.choice(self._processes)
            await asyncio.sleep(self._random.random() * 0.6)
            process.kill()
            process.start()
            await process.ready(self._session)

    async def _submit_results(self) -> None:
        while True:
            page = await self._request("GET", "/api/calls?status=waiting,pending&limit=100")
            for item in page["items"]:
                body = {"callId": item["callId"], "result": {"boss": item["args"]["n"]}}
                await self._request("POST", f"/api/runs/{item['runId']}/tool-results", body)
            await asyncio.sleep(0.05)

    async def _is_done(self) -> bool:
        agent = entity_id_for("clerk")
        page = await self._request("GET", f"/api/spaces/{ROOM}/messages?limit=500")
        texts = {item["content"] for item in page["items"] if isinstance(item["content"], str)}
        runs = await self._request("GET", f"/api/agents/{agent}/runs")
        return set(checks.expected_texts(self.jobs)) <= texts and all(
            item["status"] == "completed" for item in runs["items"]
        )
