"""Gateways with agents whose model is a local server that plays a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tests.models.model_server import (
    ModelTestServer,
    Reply,
    chat_completion,
    stream_reply,
    text_completion,
    tool_call_delta,
)
from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.agents.agent import entity_id_for
from toolspace.core.ids import derived_id
from toolspace.core.stored_records import ENDED_RUN
from toolspace.server.gateway import Gateway

MODEL = "m"
ROOM = derived_id("spc", "named", "Room")
"""The space that `spaces: [Room]` means."""
PERSON = "ent_husam"

Turn = str | bytes | Reply
"""A response of the model: a text, the bytes that OpenAI would stream, or another reply."""


def tool_calls_turn(*calls: tuple[str, Mapping[str, Any]], text: str = "") -> bytes:
    """A turn that calls tools."""
    deltas: list[dict[str, Any]] = [{"content": text}] if text else []
    for index, (name, arguments) in enumerate(calls):
        deltas.append(tool_call_delta(index, id=f"call_{index}", name=name, arguments=json.dumps(arguments)))
    return chat_completion(*deltas, finish="tool_calls")


def message_turns(text: str, space: str = ROOM) -> list[bytes]:
    """The turns of an agent that posts a message to a space and ends."""
    return [
        tool_calls_turn(("enter_space", {"spaceId": space}), ("send_message", {"text": text})),
        text_completion("Done."),
    ]


class ScriptedModelServer(ModelTestServer):
    """Serves models over OpenAI's chat completions. Each has its own script; after its end it says `Done.`"""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: dict[str, list[Turn]] = {}
        self.reply(self._respond)

    def script(self, *turns: Turn, model: str = MODEL) -> None:
        self.scripts[model] = list(turns)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def list_requests(self, model: str = MODEL) -> list[Any]:
        """The requests to a model."""
        return [request.json for request in self.requests if request.json["model"] == model]

    async def wait_for_requests(self, count: int = 1, model: str = MODEL) -> Any:
        """Waits for this many requests to a model; returns the last one."""
        while len(requests := self.list_requests(model)) < count:
            self.request_arrived.clear()
            await asyncio.wait_for(self.request_arrived.wait(), 20)
        return requests[count - 1]

    async def _respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        turns = self.scripts.get(self.requests[-1].json["model"])
        await _reply(turns.pop(0) if turns else "Done.")(reader, writer)


@asynccontextmanager
async def open_model_server() -> AsyncIterator[ScriptedModelServer]:
    """Runs a model server."""
    model_server = ScriptedModelServer()
    async with model_server.serve():
        yield model_server


class HeldTurn:
    """A turn that the model sends only after `open()`."""

    def __init__(self, turn: Turn = "Done.") -> None:
        self._turn = turn
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        await _reply(self._turn)(reader, writer)


class HeldMiddle:
    """A turn whose first part is sent at once, and the rest, from the event with these bytes on, after `open()`."""

    def __init__(self, turn: bytes, *, before: bytes) -> None:
        start = turn.rindex(b"data:", 0, turn.index(before))
        self._pieces = turn[:start], turn[start:]
        self._open = asyncio.Event()

    def open(self) -> None:
        self._open.set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index, piece in enumerate(self._pieces):
            if index:
                await self._open.wait()
            writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _reply(turn: Turn) -> Reply:
    if isinstance(turn, str):
        turn = text_completion(turn)
    return stream_reply(turn) if isinstance(turn, bytes) else turn


def list_input_texts(request: Any) -> list[str]:
    """The instructions and inbox texts in a request to a model."""
    return [message["content"] for message in request["messages"] if message["role"] in ("system", "user")]


def list_result_texts(request: Any) -> list[str]:
    """The results of tools in a request to a model."""
    return [message["content"] for message in request["messages"] if message["role"] == "tool"]


def offered_tools(request: Any) -> dict[str, Any]:
    """The tools that a request offers, by name."""
    return {tool["function"]["name"]: tool["function"] for tool in request.get("tools", ())}


class AgentGateway:
    """A gateway with agents, and a person in the same space."""

    def __init__(
        self, gateway: Gateway, api: ApiClient, model_server: ScriptedModelServer, write: Callable[..., Path]
    ) -> None:
        self.gateway = gateway
        self.api = api
        self.model_server = model_server
        self.write_config = write
        """Writes the configuration file again, with other agents or settings."""

    async def create_room(self) -> None:
        await self.api.create("/api/entities", id=PERSON, type="human", name="Husam")
        if (await self.api.get(f"/api/spaces/{ROOM}")).status == 404:
            await self.api.create("/api/spaces", id=ROOM, name="Room")
        await self.api.create(f"/api/spaces/{ROOM}/members", entityId=PERSON)

    async def say(self, text: str, *, sender: str = PERSON, space: str = ROOM) -> Any:
        return await self.api.create(f"/api/spaces/{space}/messages", entityId=sender, content=text)

    async def push_event(self, data: Any, *, agent: str = "ada") -> Any:
        """Pushes an event to an agent's inbox."""
        return await self.api.create(f"/api/agents/{entity_id_for(agent)}/inbox", data=data)

    async def list_runs(self, agent: str = "ada") -> list[Any]:
        """Returns the runs of an agent, oldest first."""
        reply = await self.api.get(f"/api/agents/{entity_id_for(agent)}/runs")
        return reply.data["items"][::-1]

    async def wait_for_run_end(self, count: int = 1, agent: str = "ada") -> Any:
        """Waits until this many runs of an agent have ended; returns the last one."""
        async with asyncio.timeout(20):
            while True:
                runs = await self.list_runs(agent)
                ended_runs = [run for run in runs if run["status"] in ENDED_RUN]
                if len(ended_runs) >= count:
                    return ended_runs[count - 1]
                if len(runs) == len(ended_runs):
                    await self._wait_for_new_run(len(runs), agent)
                    continue
                last = next(run for run in runs if run["status"] not in ENDED_RUN)
                await self.wait_for_event(f"/api/runs/{last['id']}/events", "run.done")

    async def wait_for_event(self, path: str, type: str) -> list[Any]:
        """Waits for an event of a stream; returns all events up to it."""
        reply = await self.api.get(f"{path}?from=start&until={type}&format=native")
        blocks = (block.partition(b"data: ")[2] for block in reply.body.split(b"\n\n"))
        return [json.loads(data) for data in blocks if data]

    async def list_messages(self, space: str = ROOM) -> list[Any]:
        return (await self.api.get(f"/api/spaces/{space}/messages")).data["items"]

    async def list_agent_messages(self, agent: str = "ada", space: str = ROOM) -> list[str]:
        """Returns the texts that an agent posted to a space."""
        return [
            message["content"]
            for message in await self.list_messages(space)
            if message["senderId"] == entity_id_for(agent)
            and message["kind"] == "message"
            and message["status"] == "complete"
        ]

    async def list_calls(self, run: Any) -> list[Any]:
        return (await self.api.get(f"/api/runs/{run['id']}/calls")).data["items"]

    async def wait_for_documents(self, count: int = 1, agent: str = "ada") -> None:
        """Waits until an agent has this many documents; its folders are read in the background."""
        async with asyncio.timeout(20):
            path = f"/api/agents/{entity_id_for(agent)}/documents"
            while len((await self.api.get(path)).data["items"]) != count:  # noqa: ASYNC110 - nobody tells of it
                await asyncio.sleep(0.01)

    async def _wait_for_new_run(self, count: int, agent: str) -> None:
        """Waits for another run."""
        while len(await self.list_runs(agent)) <= count:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.01)


def agent_config(
    model_server: ScriptedModelServer, *, model: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """Returns the configuration of an agent with the scripted model in the room. Its text is private."""
    model_settings = {"name": MODEL, "baseUrl": model_server.base_url, "retries": 0, **(model or {})}
    loop = {"plainText": "private"}
    return {"system": "You are helpful.", "model": model_settings, "spaces": ["Room"], "loop": loop, **more}


@asynccontextmanager
async def open_agent_gateway(
    folder: Path,
    model_server: ScriptedModelServer,
    *,
    agents: Mapping[str, Any] | Sequence[Any] | None = None,
    environ: Mapping[str, str] | None = None,
    **config: Any,
) -> AsyncIterator[AgentGateway]:
    """A gateway with these agents, or with one agent `ada`."""
    agents = {"ada": agent_config(model_server)} if agents is None else agents
    write = partial(write_config, folder, **{"storage": {"dir": str(folder / "kept")}, **config})
    async with Gateway.open(write(agents=agents), environ=environ or {}) as gateway, open_api(gateway) as api:
        setup = AgentGateway(gateway, api, model_server, write)
        await setup.create_room()
        yield setup


@asynccontextmanager
async def open_single_agent_gateway(
    folder: Path, *, ada: Mapping[str, Any] | None = None, **config: Any
) -> AsyncIterator[AgentGateway]:
    """A gateway with its own model server and one agent `ada` with these settings."""
    async with (
        open_model_server() as model_server,
        open_agent_gateway(
            folder, model_server, agents={"ada": agent_config(model_server, **(ada or {}))}, **config
        ) as setup,
    ):
        yield setup
