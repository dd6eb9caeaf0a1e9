"""MCP servers as a table for people: one a line, and beneath it what went wrong."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from toolspace.cli.output import Output, neutral, one_line
from toolspace.config.model import McpServer
from toolspace.server.control import ServerReport

_COLOURS = {"ready": "green", "idle": "cyan", "failed": "red", "stopped": "red", "disabled": "bright_black"}
_HEAD = ("NAME", "STATE", "PROTOCOL", "TRANSPORT", "PROCESS", "TOOLS", "TOKENS", "RESTARTS")
_RIGHT = ("PROCESS", "TOOLS", "TOKENS", "RESTARTS")
_GAP = "  "
_INDENT = "    "
_WIDTH = 100
"""Of what stands beneath a server, where there is no terminal to say."""


class Group(NamedTuple):
    """The servers of one toolspace."""

    pid: int | None
    """None: it was started for this look only."""
    servers: Sequence[ServerReport]
    error: str
    """Why it could not answer, or do what it was asked to."""


def print_servers(output: Output, groups: Sequence[Group], off: Sequence[McpServer], *, verbose: bool) -> None:
    shown = [group for group in groups if group.servers or group.error]
    if not shown and off:
        shown = [Group(None, (), "")]
    for number, group in enumerate(shown):
        if group.pid is not None:
            output.line(f"{'' if number == 0 else chr(10)}{output.style(f'toolspace, process {group.pid}', bold=True)}")
        last = number == len(shown) - 1
        _print_group(output, group, off if last else (), verbose=verbose)


def _print_group(output: Output, group: Group, off: Sequence[McpServer], *, verbose: bool) -> None:
    rows = [_HEAD, *map(_cells, group.servers), *map(_off, off)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    notes = [[], *(list(_notes(server, verbose=verbose)) for server in group.servers), *([] for _ in off)]
    for index, (row, beneath) in enumerate(zip(rows, notes, strict=True)):
        if len(rows) == 1:
            break
        output.line(_line(output, row, widths, head=index == 0))
        for title, text in beneath:
            for line in _wrapped(output, f"{title}: {text}"):
                output.line(line)
    if group.error:
        output.error(group.error)


def _line(output: Output, row: Sequence[str], widths: Sequence[int], *, head: bool) -> str:
    cells = [
        cell.rjust(width) if title in _RIGHT else cell.ljust(width)
        for title, cell, width in zip(_HEAD, row, widths, strict=True)
    ]
    if head:
        return output.style(_GAP.join(cells).rstrip(), dim=True)
    cells[0] = output.style(cells[0], bold=True)
    cells[1] = output.style(cells[1], fg=_COLOURS.get(row[1], "yellow"))
    return _GAP.join(cells).rstrip()


def _cells(server: ServerReport) -> tuple[str, ...]:
    version = server.protocol_version or "-"
    return (
        one_line(server.name),
        server.state,
        f"{version} {server.era}" if server.era is not None else version,
        server.transport,
        str(server.pid) if server.pid is not None else "-",
        str(server.tools),
        f"{server.tokens:,}",
        str(server.restarts),
    )


def _off(server: McpServer) -> tuple[str, ...]:
    state = "disabled" if not server.enabled else "cannot start"
    return one_line(server.name), state, "-", server.transport or "-", "-", "-", "-", "-"


def _notes(server: ServerReport, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if server.last_error:
        when = f", {_ago(server.last_error_at)}" if server.last_error_at is not None else ""
        yield f"last error{when}", server.last_error
    if verbose and server.server:
        yield "server", server.server
    if verbose:
        for left in server.left_out:
            yield "left out", left
    elif server.left_out:
        count = len(server.left_out)
        yield "left out", f"{count} tool{'s' if count > 1 else ''}; --verbose says why"


def _ago(moment: float) -> str:
    seconds = max(0, int(time.time() - moment))
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"


def _wrapped(output: Output, text: str) -> list[str]:
    width = max(40, output.columns or _WIDTH)
    return textwrap.wrap(neutral(" ".join(text.split())), width, initial_indent=_INDENT, subsequent_indent=_INDENT)
