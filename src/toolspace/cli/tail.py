"""`toolspace tail`: prints the events of a running gateway, one per line."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import click

from toolspace.cli.event_loop import Interrupts, run, wait_for_signal
from toolspace.cli.gateway_connection import GatewayAddress, create_client, find_gateway, gateway_options
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, first_line, one_line
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import GatewayUnreachable, Unauthorized
from toolspace.client.events import EventSubscription, StreamEvent
from toolspace.client.transport import quote_segment
from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.errors import ProviderError

FindGateway = Callable[[], Awaitable[GatewayAddress]]

_RECONNECT_SECONDS: Final = 0.5
_MAX_TEXT: Final = 120
"""Characters of a value that are printed."""
_PRINTED_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "tool.started": ("toolName", "toolCallId"),
    "tool.streaming": ("toolName", "inputDelta", "output", "toolCallId"),
    "tool.ready": ("toolName", "status", "input", "toolCallId"),
    "tool.progress": ("toolName", "progress", "total", "message", "toolCallId"),
    "tool.done": ("toolName", "durationMs", "output", "toolCallId"),
    "tool.error": ("toolName", "errorKind", "error", "toolCallId"),
    "message.started": ("senderId", "messageId"),
    "message.delta": ("delta", "messageId"),
    "run.started": ("agentEntityId", "runId"),
    "run.done": ("agentEntityId", "status", "error", "runId"),
}
"""Event type → the fields of its data that are printed."""
_COLOURS: Final = {"tool.error": "red", "tool.done": "green", "tool.ready": "cyan", "message.done": "blue"}


@click.command("tail", cls=Command)
@gateway_options
@click.option("--space", metavar="ID", help="Print the events of one space only.")
@click.option("--run", "run_id", metavar="ID", help="Print the events of one run only.")
@click.pass_obj
def command(options: Options, url: str | None, key: str | None, space: str | None, run_id: str | None) -> int:
    """Print the events of a running gateway as they happen, one per line. Ctrl-C ends it.

    Without --url and --key: the gateway of this configuration on this machine. When that gateway is restarted, tail
    reconnects. With --json each line is an object.
    """
    if space is not None and run_id is not None:
        raise click.UsageError("--space and --run cannot be used together; give one of them")
    set_up_logs(options, os.environ)
    return run(lambda interrupts: _tail(options, interrupts, url, key, space=space, run_id=run_id))


async def _tail(
    options: Options, interrupts: Interrupts, url: str | None, key: str | None, *, space: str | None, run_id: str | None
) -> int:
    address = await find_gateway(options, url, key)
    signal_task = asyncio.ensure_future(wait_for_signal(interrupts))
    interrupts.is_normal_end = True
    printer = _EventPrinter(options, space=space, run_id=run_id)
    event_task = asyncio.ensure_future(printer.follow(address, lambda: find_gateway(options, url, key)))
    try:
        await asyncio.wait((event_task, signal_task), return_when=asyncio.FIRST_COMPLETED)
        if event_task.done():
            await event_task
    finally:
        for task in (event_task, signal_task):
            task.cancel()
        await asyncio.gather(event_task, signal_task, return_exceptions=True)
    return 0


class _EventPrinter:
    """Prints the events of a gateway. Reconnects when a local gateway is restarted."""

    def __init__(self, options: Options, *, space: str | None, run_id: str | None) -> None:
        self._output = options.output
        self._json = options.json
        self._stream: str | None = None
        self._path = "/api/events"
        if space is not None:
            self._stream, self._path = f"space:{space}", f"/api/spaces/{quote_segment(space)}/stream"
        elif run_id is not None:
            self._stream, self._path = f"run:{run_id}", f"/api/runs/{quote_segment(run_id)}/events"
        self._last_event_id: str | None = None

    async def follow(self, address: GatewayAddress, find: FindGateway) -> None:
        while True:
            try:
                async with create_client(address) as client:
                    await self._print_events(client, retry_unreachable=not address.is_local)
                return
            except (Unauthorized, GatewayUnreachable):
                if not address.is_local:
                    raise
            # The process that issued the local key has ended; another one may start soon.
            self._output.note("the gateway has ended; waiting for it to restart")
            address = await _wait_for_gateway(find)
            self._output.note(f"the gateway is back: {address.url}")

    async def _print_events(self, client: ToolspaceClient, *, retry_unreachable: bool) -> None:
        # An agent may have another default format; `/api/events` has none.
        query = {"format": "native"} if self._stream else None
        events = client.stream(
            self._path, query=query, last_event_id=self._last_event_id, retry_unreachable=retry_unreachable
        )
        note_task = asyncio.ensure_future(self._note_connection(events, client.url))
        try:
            async for event in events:
                self._last_event_id = events.last_event_id
                self._print(event)
        finally:
            note_task.cancel()
            events.close()

    async def _note_connection(self, events: EventSubscription, url: str) -> None:
        await events.connected.wait()
        self._output.note(f"following {self._stream or 'all events'} at {url}; Ctrl-C ends it")

    def _print(self, event: StreamEvent) -> None:
        # The stream of all events has complete records; other streams have the data only.
        record: dict[str, Any] = event.data
        if self._stream is not None:
            record = {"stream": self._stream, "id": event.id, "type": event.type, "at": now_ms(), "data": event.data}
        if self._json:
            self._output.text(json_text.encode(record))
        elif self._stream is not None or not _is_repeated(record):
            self._output.line(_format_line(self._output, record))


async def _wait_for_gateway(find: FindGateway) -> GatewayAddress:
    while True:
        await asyncio.sleep(_RECONNECT_SECONDS)
        try:
            address = await find()
        except ProviderError:
            continue
        if address.is_local:
            return address


def _is_repeated(record: Mapping[str, Any]) -> bool:
    """Whether the stream of a space repeats an event that the stream of its run has."""
    return record["stream"].startswith("space:") and record["type"].startswith(("tool.", "run."))


def _format_line(output: CommandOutput, record: Mapping[str, Any]) -> str:
    at: int = record["at"]
    time_of_day = time.strftime("%H:%M:%S", time.localtime(at / 1000)) + f".{at % 1000:03}"
    event_type: str = record["type"]
    name = output.style(f"{first_line(event_type):<16}", fg=_COLOURS.get(event_type, "yellow"))
    stream = output.style(first_line(record["stream"]), dim=True)
    return f"{output.style(time_of_day, dim=True)}  {name}  {describe(event_type, record['data'])}  {stream}"


def describe(event_type: str, data: Mapping[str, Any]) -> str:
    """Returns the most important data of an event on one line."""
    if event_type == "message.done":
        message: dict[str, Any] = data.get("message", {})
        return "  ".join(one_line(message.get(key), _MAX_TEXT) for key in ("senderId", "content"))
    fields = _PRINTED_FIELDS.get(event_type)
    if fields is None:
        return one_line(data, _MAX_TEXT)
    values = [(field, data[field]) for field in fields if data.get(field) not in (None, "")]
    return "  ".join(f"{value} ms" if field == "durationMs" else one_line(value, _MAX_TEXT) for field, value in values)
