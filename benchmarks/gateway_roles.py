"""What runs in the processes of the gateway's measures: a gateway with some routes more, and a bare fan-out of events.

The routes more do what only the process itself can: nothing, append events, and say what is open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from toolspace.cli.event_loop import tune_process
from toolspace.core.stored_records import NewEvent, space_stream
from toolspace.server import gateway as composition
from toolspace.server.authorization import Access
from toolspace.server.gateway import Gateway
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.server.uvicorn_server import bind_socket, serve_gateway
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program

BURST = 16
MARK = "~"
"""Once in each event and nowhere else: readers count the events by it."""
DATA = {"messageId": "msg_01m7h8yc1kmdxes61x6h336h5j", "delta": f"some words of a message{MARK}"}


class Bursts(msgspec.Struct):
    count: int
    space_id: str = ""


async def run_gateway(config: str) -> None:
    """As `toolspace serve` does it."""
    composition.ROUTES = (*composition.ROUTES, *_ROUTES)  # pyright: ignore
    async with Gateway.open(config) as gateway, serve_gateway(gateway, bind_socket("127.0.0.1", 0)) as url:
        tune_process()
        print(url, flush=True)
        await asyncio.Event().wait()


async def _do_nothing(request: Request) -> Any:
    await request.body()
    return {}


async def _append(request: Request) -> Any:
    """Each burst is one durable transaction, and the next begins when it is on the disk."""
    bursts = await request.json(Bursts)
    stream = space_stream(bursts.space_id)

    def burst(effects: Effects) -> Program[None]:
        for _ in range(BURST):
            effects.emit(stream, NewEvent("message.delta", DATA))
        yield "SELECT 1", ()

    for _ in range(bursts.count):
        await request.gateway.ledger.commit(burst)
    return {}


async def _say_what_is_open(request: Request) -> Any:
    gateway = request.gateway
    return {"calls": gateway.pending_calls.waiting_count, "readers": len(gateway.streams)}


_ROUTES = (
    Route(method="POST", path="/bench/nothing", handler=_do_nothing, access=Access.SECRET, tag="bench", summary=""),
    Route(method="POST", path="/bench/bursts", handler=_append, access=Access.SECRET, tag="bench", summary=""),
    Route(method="POST", path="/bench/open", handler=_say_what_is_open, access=Access.SECRET, tag="bench", summary=""),
)


def fan_out(*, joins: bool) -> Any:
    """Events to all who read, on Starlette, as one writes it by hand: a queue for each reader, nothing stored, nobody
    checked. A frame is written for each event, or for all that wait in the queue together."""
    from starlette.applications import Starlette
    from starlette.requests import Request as Asked
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route as Path

    queues: set[asyncio.Queue[bytes]] = set()
    encode: Callable[[Any], bytes] = msgspec.json.encode
    last_id = 0

    async def frames() -> AsyncGenerator[bytes]:
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        queues.add(queue)
        yield b"retry: 1000\n\n"
        try:
            while True:
                frame = await queue.get()
                if joins and not queue.empty():
                    some = [frame]
                    while not queue.empty():
                        some.append(queue.get_nowait())
                    frame = b"".join(some)
                yield frame
        finally:
            queues.discard(queue)

    async def stream(_: Asked) -> StreamingResponse:
        return StreamingResponse(frames(), media_type="text/event-stream")

    async def append(request: Asked) -> JSONResponse:
        nonlocal last_id
        bursts = msgspec.json.decode(await request.body(), type=Bursts)
        for _ in range(bursts.count):
            for _ in range(BURST):
                last_id += 1
                # Encoded once for all of them, which is the cheapest way.
                frame = b"id: %d\nevent: message.delta\ndata: %b\n\n" % (last_id, encode(DATA))
                for queue in queues:
                    queue.put_nowait(frame)
            await asyncio.sleep(0)  # The readers have their turns.
        return JSONResponse({})

    return Starlette(routes=[Path("/stream", stream), Path("/bench/bursts", append, methods=["POST"])])
