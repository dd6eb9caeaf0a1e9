"""`toolspace tail`: what happens in a running gateway, a line for each event."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import click

from toolspace.cli.gateway_connection import GatewayAddress, create_client, find_gateway, gateway_options
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, first_line
from toolspace.cli.runner import Interrupts, run, wait_for_signal
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import GatewayUnreachable, Unauthorized
from toolspace.client.events import EventSubscription, StreamEvent
from toolspace.client.transport import quote_segment
from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.errors import ProviderError

Find = Callable[[], Awaitable[GatewayAddress]]

_AGAIN_SECONDS: Final = 0.5
_TEXT: Final = 120
"""How much of a text that someone said or a tool gave is shown."""
_SHOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "tool.started": ("toolName", "status", "input", "toolCallId"),
    "tool.streaming": ("toolName", "inputDelta", "output", "toolCallId"),
    "tool.progress": ("toolName", "progress", "total", "message", "toolCallId"),
    "tool.done": ("toolName", "durationMs", "output", "toolCallId"),
    "tool.error": ("toolName", "errorKind", "error", "toolCallId"),
    "message.started": ("senderId", "messageId"),
    "message.delta": ("delta", "messageId"),
    "run.started": ("agentEntityId", "runId"),
    "run.done": ("agentEntityId", "status", "error", "runId"),
}
"""What of each event is for people."""
_COLOURS: Final = {"tool.error": "red", "tool.done": "green", "tool.started": "cyan", "message.done": "blue"}


@click.command("tail", cls=Command)
@gateway_options
@click.option("--space", metavar="ID", help="Only what happens in one space.")
@click.option("--run", "run_id", metavar="ID", help="Only what happens in one run.")
@click.pass_obj
def command(options: Options, url: str | None, key: str | None, space: str | None, run_id: str | None) -> int:
    """Show what happens in a running gateway, as it happens: a line for each event. Ctrl-C ends it.

    Without --url and --key it is the gateway of this configuration that runs on this machine. Where that is started
    anew, it goes on. With --json each line is an object.
    """
    if space is not None and run_id is not None:
        raise click.UsageError("--space and --run contradict each other; give one of them")
    set_up_logs(options, os.environ)
    return run(lambda interrupts: _tail(options, interrupts, url, key, space=space, run_id=run_id))


async def _tail(
    options: Options, interrupts: Interrupts, url: str | None, key: str | None, *, space: str | None, run_id: str | None
) -> int:
    door = await find_gateway(options, url, key)
    stopping = asyncio.ensure_future(wait_for_signal(interrupts))
    interrupts.ends_well = True  # It has no other end.
    tail = _Tail(options, space=space, run_id=run_id)
    following = asyncio.ensure_future(tail.follow(door, lambda: find_gateway(options, url, key)))
    try:
        await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
        if following.done():
            await following
    finally:
        for task in (following, stopping):
            task.cancel()
        await asyncio.gather(following, stopping, return_exceptions=True)
    return 0


class _Tail:
    """Follows events, over one gateway after another where it is started anew."""

    def __init__(self, options: Options, *, space: str | None, run_id: str | None) -> None:
        self._output = options.output
        self._json = options.json
        self._stream = f"space:{space}" if space is not None else f"run:{run_id}" if run_id is not None else None
        self._path = "/api/events"
        if space is not None:
            self._path = f"/api/spaces/{quote_segment(space)}/stream"
        if run_id is not None:
            self._path = f"/api/runs/{quote_segment(run_id)}/events"
        self._last_event_id: str | None = None

    async def follow(self, door: GatewayAddress, find: Find) -> None:
        while True:
            try:
                async with create_client(door) as client:
                    await self._follow(client, patient=not door.is_local)
                return
            except (Unauthorized, GatewayUnreachable):
                if not door.is_local:
                    raise
            # The process whose key this was has ended: there may be another one soon.
            self._output.note("the gateway is gone; waiting for it to come back")
            door = await _found_again(find)
            self._output.note(f"it is back: {door.url}")

    async def _follow(self, client: ToolspaceClient, *, patient: bool) -> None:
        events = client.stream(self._path, last_event_id=self._last_event_id, retry_unreachable=patient)
        note = asyncio.ensure_future(self._say_when_connected(events, client.url))
        try:
            async for event in events:
                self._last_event_id = events.last_event_id
                self._show(event)
        finally:
            note.cancel()
            events.close()

    async def _say_when_connected(self, events: EventSubscription, url: str) -> None:
        await events.connected.wait()
        self._output.note(f"following {self._stream or 'everything'} at {url}; Ctrl-C ends it")

    def _show(self, event: StreamEvent) -> None:
        fact = _fact(event, self._stream)
        if self._json:
            self._output.text(json_text.encode(fact))
        elif self._stream is not None or not _is_told_twice(fact):
            self._output.line(_line(self._output, fact))


async def _found_again(find: Find) -> GatewayAddress:
    while True:
        await asyncio.sleep(_AGAIN_SECONDS)
        try:
            door = await find()
        except ProviderError:
            continue
        if door.is_local:
            return door


def _fact(event: StreamEvent, stream: str | None) -> dict[str, Any]:
    if stream is not None:
        return {"stream": stream, "id": event.id, "type": event.type, "at": now_ms(), "data": event.data}
    return event.data


def _is_told_twice(fact: Mapping[str, Any]) -> bool:
    """Whether this is what a space shows of a run, whose own stream has it too."""
    return fact["stream"].startswith("space:") and fact["type"].startswith(("tool.", "run."))


def _line(output: CommandOutput, fact: Mapping[str, Any]) -> str:
    at: int = fact["at"]
    clock = time.strftime("%H:%M:%S", time.localtime(at / 1000)) + f".{at % 1000:03}"
    kind: str = fact["type"]
    name = output.style(f"{first_line(kind):<16}", fg=_COLOURS.get(kind, "yellow"))
    stream = output.style(first_line(fact["stream"]), dim=True)
    return f"{output.style(clock, dim=True)}  {name}  {describe(kind, fact['data'])}  {stream}"


def describe(type: str, data: Mapping[str, Any]) -> str:
    """What an event says, in some words."""
    if type == "message.done":
        message: dict[str, Any] = data.get("message", {})
        return "  ".join(map(_short, (message.get("senderId"), message.get("content"))))
    members = _SHOWN.get(type)
    if members is None:
        return _short(data)
    told = [(member, data[member]) for member in members if data.get(member) not in (None, "")]
    return "  ".join(f"{value} ms" if member == "durationMs" else _short(value) for member, value in told)


def _short(value: Any) -> str:
    text = first_line(value if isinstance(value, str) else json_text.encode(value))
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}…"
