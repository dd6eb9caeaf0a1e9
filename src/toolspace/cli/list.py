"""`toolspace list`: the tools, one a line."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import click

from toolspace.cli.local_toolspace import started_toolspace
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, first_line
from toolspace.cli.runner import run
from toolspace.core.names import did_you_mean
from toolspace.core.tool import Tool, ToolCategory
from toolspace.toolspace import Toolspace

_GAP = "  "
_LEAST_ROOM = 20
"""A narrower column of descriptions says nothing: then the lines may wrap."""


@click.command("list", cls=Command)
@click.option("--tokens", is_flag=True, help="Show what each definition costs a model, and all together.")
@click.option("--category", metavar="NAME", help=f"Only the tools of one category: {', '.join(ToolCategory)}.")
@click.pass_obj
def command(options: Options, tokens: bool, category: str | None) -> int:
    """List the tools: name, category, and what each one does."""
    wanted = _category(category)
    return run(lambda _: _list(options, tokens, wanted))


async def _list(options: Options, tokens: bool, category: ToolCategory | None) -> int:
    output = options.output
    mute_provider_warnings(options)
    async with started_toolspace(options) as ts:
        order = list(ToolCategory)
        tools = [tool for tool in ts.list_tools() if category in (None, tool.category)]
        tools.sort(key=lambda tool: (order.index(tool.category), tool.name))
        costs = [ts.orchestrator.token_cost(tool) for tool in tools] if tokens else None
        unavailable = ts.orchestrator.unavailable_providers()
        searched = _searched(ts) if tokens else ""
    if options.json:
        output.document(_entries(tools, costs))
    else:
        _print(output, tools, costs)
        if searched:
            output.note(searched)
    for namespace, reason in unavailable.items():
        output.warning(f"the tools of {namespace} are missing: {reason}")
    return 0


def _entries(tools: Sequence[Tool], costs: Sequence[int] | None) -> list[dict[str, object]]:
    if costs is None:
        return [tool.to_dict() for tool in tools]
    return [{**tool.to_dict(), "tokens": cost} for tool, cost in zip(tools, costs, strict=True)]


def _print(output: CommandOutput, tools: Sequence[Tool], costs: Sequence[int] | None) -> None:
    columns = [_aligned([tool.name for tool in tools]), _aligned([str(tool.category) for tool in tools])]
    styles = [{"bold": True}, {"fg": "cyan"}]
    if costs is not None:
        columns.append(_aligned([f"{cost:,}" for cost in costs], right=True))
        styles.append({"fg": "yellow"})
    room = None if output.columns is None else output.columns - sum(len(one[0]) + len(_GAP) for one in columns if one)
    for tool, *cells in zip(tools, *columns, strict=True):
        styled = [output.style(cell, **style) for cell, style in zip(cells, styles, strict=True)]
        output.line(_GAP.join([*styled, shorten(first_line(tool.description), room)]).rstrip())
    if costs is not None:
        output.line(f"\n{len(tools)} tools, {sum(costs):,} tokens in all")
    elif not tools:
        output.note("there are no tools here")


def _aligned(cells: Sequence[str], *, right: bool = False) -> list[str]:
    width = max(map(len, cells), default=0)
    return [cell.rjust(width) if right else cell.ljust(width) for cell in cells]


def shorten(text: str, room: int | None) -> str:
    """The text, cut to so many columns of a terminal; all of it where there is no saying, or no room at all."""
    if room is None or room < _LEAST_ROOM or sum(map(_width, text)) <= room:
        return text
    kept, used = "", len("…")
    for character in text:
        used += _width(character)
        if used > room:
            break
        kept += character
    return kept.rstrip() + "…"


def _width(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _searched(ts: Toolspace) -> str:
    """What to know where models are not shown all tools."""
    total, shown = len(ts.list_tools()), len(ts.orchestrator.tools_for_model())
    if shown >= total - 1:  # The search tool itself is only shown where it is needed.
        return ""
    return (
        f"That is above defaults.toolSearchThreshold: models are shown {shown} tools, and agent__find_tools "
        "finds the others."
    )


def _category(name: str | None) -> ToolCategory | None:
    if name is None:
        return None
    try:
        return ToolCategory(name.lower())
    except ValueError:
        hint = did_you_mean(name, ToolCategory)
        raise click.UsageError(f"there is no category {name!r}{hint}; they are {', '.join(ToolCategory)}") from None
