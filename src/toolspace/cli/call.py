"""`toolspace call`: calls one tool and prints its result."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Any, cast

import click
import msgspec

from toolspace.cli.completion import tool_names
from toolspace.cli.local_toolspace import find_tool, started_toolspace
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, StatusLine, WriteError, show_status
from toolspace.cli.runner import Interrupts, run
from toolspace.cli.tool_arguments import combine, read_args
from toolspace.core import json_text
from toolspace.core.events import CallPartial, CallProgress
from toolspace.core.result import JsonPart, ToolResult
from toolspace.core.times import parse_duration
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.settings import ToolRules
from toolspace.orchestrator.stages.announce import VERBOSE
from toolspace.toolspace import Toolspace

# MERGED from partials: Prints what a call gives out while it runs, as it comes, and knows whether that was the who…


class PartialPrinter:
    """Keeps sums of what was printed, not the text: a stream may be larger than memory."""

    def __init__(
        self, output: CommandOutput, call_id: str, *, on_first: Callable[[], None], on_gone: Callable[[], object]
    ) -> None:
        self._output = output
        self._call_id = call_id
        self._on_first = on_first
        self._on_gone = on_gone
        self.fault: Exception | None = None
        """Why nothing can be printed any more: nobody reads, or there is no room."""
        self._count = 0
        self._all_text = True
        self._text = _Sum()
        self._values = _Sum()
        self._mid_line = False

    def __call__(self, event: CallPartial) -> None:
        if event.call_id != self._call_id or self.fault is not None:
            return
        if not self._count:
            self._on_first()
        self._count += 1
        try:
            self._print(event.value)
        except (BrokenPipeError, WriteError) as error:
            self.fault = error
            self._on_gone()

    def end_line(self) -> None:
        if self._mid_line and self.fault is None:
            self._output.text("")
        self._mid_line = False

    def is_whole_result(self, result: ToolResult) -> bool:
        """Whether what was printed is the whole result already."""
        value: Any = result.result
        if not self._count or not result.ok:
            return False
        if isinstance(value, str):
            return self._all_text and self._text.same(_Sum(value.encode("utf-8", "surrogatepass")))
        if isinstance(value, list):
            return self._values.same(_Sum(*(_item(one) for one in cast("list[object]", value))))
        if result.extras.get("stored"):
            # The brackets around the values are one byte more than the commas after them.
            size = self._text.size if self._all_text else self._values.size + 1
            return value["tool_output"]["bytes"] == size
        return False

    def _print(self, value: object) -> None:
        self._values.add(_item(value))
        if isinstance(value, str):
            self._text.add(value.encode("utf-8", "surrogatepass"))
            self._mid_line = not value.endswith("\n") if value else self._mid_line
            self._output.text(value, end="")
            return
        self._all_text = False
        self.end_line()
        self._output.text(json_text.encode(value))


class _Sum:
    def __init__(self, *pieces: bytes) -> None:
        self.size = 0
        self._hash = hashlib.sha256()
        for piece in pieces:
            self.add(piece)

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self._hash.update(piece)

    def same(self, other: _Sum) -> bool:
        return self._hash.digest() == other._hash.digest()


def _item(value: object) -> bytes:
    return json_text.encode_bytes(value) + b","


_log = logging.getLogger("toolspace.cli")
_WRONG_USAGE = ("unknown_tool", "invalid_parameters")
"""The failures that the caller mends by calling differently."""


@click.command("call", cls=Command)
@click.argument("name", shell_complete=tool_names)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--args", metavar="JSON", help="Arguments as a JSON object; @FILE reads a file, - standard input.")
@click.option("--timeout", metavar="DURATION", help='Give the call so long: "250ms", "5s", "2m".')
@click.pass_obj
def command(options: Options, name: str, words: tuple[str, ...], args: str | None, timeout: str | None) -> int:
    """Call the tool NAME and print its result.

    A value gets the type that the tool's schema asks for: n=5 is a number where it wants one. Repeat a key to
    give a list; key:=JSON is taken as it is.
    """
    seconds = _seconds(timeout)
    given = read_args(args)
    return run(lambda interrupts: _call(options, name, words, given, seconds, interrupts))


async def _call(
    options: Options,
    name: str,
    words: tuple[str, ...],
    given: Mapping[str, Any],
    seconds: float | None,
    interrupts: Interrupts,
) -> int:
    mute_provider_warnings(options, of_tool=name)
    async with started_toolspace(options, show_warnings=False, only_for=name) as ts:
        found = find_tool(ts, name)
        schema: Mapping[str, Any] = found[0].tool.input_schema if found is not None else {}
        arguments = combine(given, words, schema)
        if seconds is not None and found is not None:
            _limit(ts, found[0], seconds)
        streams = found is not None and getattr(found[0].tool, "style", "") == "stream"
        result, printed = await _run(ts, options.output, name, arguments, interrupts, streams=streams)
        whole = await _whole(ts, options, result) if not printed.is_whole_result(result) else None
    if printed.fault is not None:
        raise printed.fault
    if options.json:
        options.output.document(result.to_dict())
    elif not result.ok:
        kind = result.error_kind if result.error_kind != "canceled" else None  # The message says no less.
        options.output.error(result.error or "unknown error", kind)
    elif whole is not None:
        options.output.text(whole, end="" if whole.endswith("\n") else "\n")
    elif not printed.is_whole_result(result):
        show(options.output, result)
    if result.ok:
        return 0
    return 2 if result.error_kind in _WRONG_USAGE else 1


async def _run(
    ts: Toolspace,
    output: CommandOutput,
    name: str,
    arguments: Mapping[str, Any],
    interrupts: Interrupts,
    *,
    streams: bool,
) -> tuple[ToolResult, PartialPrinter]:
    call_id = f"call_{secrets.token_hex(9)}"

    def stop() -> bool:
        return ts.cancel(call_id)

    interrupts.stop = stop
    async with show_status(output, name) as status:
        printed = PartialPrinter(output, call_id, on_first=status.hide, on_gone=stop)
        if streams and not output.json:  # Of other tools the result alone is what they give.
            ts.bus.subscribe(printed, CallPartial)
        ts.bus.subscribe(lambda event: _show_progress(event, call_id, status), CallProgress)
        result = await ts.call(name, arguments, call_id=call_id)
    interrupts.stop = None
    printed.end_line()
    return result, printed


async def _whole(ts: Toolspace, options: Options, result: ToolResult) -> str | None:
    """A stored result in full, for a file or a pipe: only people and models are better served by a preview."""
    stored = _stored(result) if result.ok else None
    if stored is None or options.json or options.output.terminal:
        return None
    found = await ts.outputs.find(stored["handle"], session=ts.orchestrator.session, owner=None)
    return await ts.outputs.text(found, limit=found.bytes) if found is not None else None


def show(output: CommandOutput, result: ToolResult) -> None:
    """A success, for people: text as it is, data as readable JSON, a stored output as its preview."""
    stored = _stored(result)
    if stored is not None:
        output.text(stored["preview"])
        output.note(
            f"The whole result is stored: {stored['bytes']:,} bytes, {stored['tokens']:,} tokens. Read it with:\n"
            f"  toolspace call agent__read_output handle={stored['handle']}"
        )
        return
    structured = len(result.parts) == 1 and isinstance(result.parts[0], JsonPart)
    if isinstance(result.result, str) or (result.parts and not structured):
        text = result.text
        output.text(text, end="" if text.endswith("\n") else "\n")
    else:
        output.value(result.result)


def _stored(result: ToolResult) -> Mapping[str, Any] | None:
    value: Any = result.result
    return value["tool_output"] if result.extras.get("stored") and "tool_output" in value else None


def _show_progress(event: CallProgress, call_id: str, status: StatusLine) -> None:
    share = f"{event.progress:g}/{event.total:g}" if event.total else f"{event.progress:g}"
    said = f"{share} {event.message or ''}".rstrip()
    _log.log(VERBOSE, "tool progress … %s\n    %s", event.tool_name, said)
    if event.call_id == call_id:
        status.detail = said


def _limit(ts: Toolspace, entry: CatalogEntry, seconds: float) -> None:
    """Lets `--timeout` win over everything that configuration says of the tool."""
    rules = entry.rules.overrides.get(entry.local_name, ToolRules())
    own = {entry.local_name: msgspec.structs.replace(rules, timeout=seconds, source="--timeout")}
    changed = msgspec.structs.replace(entry.rules, overrides={**entry.rules.overrides, **own})
    ts.orchestrator.configure(rules={entry.provider: changed})


def _seconds(timeout: str | None) -> float | None:
    if timeout is None:
        return None
    if timeout.strip().isdecimal():
        raise click.UsageError(f"--timeout {timeout}: say the unit: {timeout}s or {timeout}ms")
    try:
        seconds = parse_duration(timeout)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from None
    if seconds <= 0:
        raise click.UsageError("--timeout: it must be more than nothing")
    return seconds
