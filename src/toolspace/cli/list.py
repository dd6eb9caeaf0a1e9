"""`toolspace list`: prints the tools, one per line."""

from __future__ import annotations

from collections.abc import Sequence

import click

from toolspace.cli.local_toolspace import started_toolspace
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import COLUMN_GAP, CommandOutput, align_columns, first_line, join_columns, shorten
from toolspace.core.names import did_you_mean
from toolspace.core.tool import Tool, ToolCategory
from toolspace.toolspace import Toolspace

_TOKENS_COLUMN = 2
_STYLES = ({"bold": True}, {"fg": "cyan"}, {"fg": "yellow"})


@click.command("list", cls=Command)
@click.option("--tokens", is_flag=True, help="Show how many tokens each definition costs a model, and the sum.")
@click.option("--category", metavar="NAME", help=f"List one category only: {', '.join(ToolCategory)}.")
@click.pass_obj
async def command(options: Options, tokens: bool, category: str | None) -> int:
    """List the tools: name, category and description.

    Waits until every MCP server is ready or has failed. Exits with 1 if one failed.
    """
    tool_category = _parse_category(category)
    output = options.output
    mute_provider_warnings(options)
    async with started_toolspace(options) as ts:
        order = list(ToolCategory)
        tools = [tool for tool in ts.list_tools() if tool_category in (None, tool.category)]
        tools.sort(key=lambda tool: (order.index(tool.category), tool.name))
        costs = [ts.orchestrator.token_cost(tool) for tool in tools] if tokens else None
        unavailable = ts.orchestrator.unavailable_providers()
        search_note = _search_note(ts) if tokens else ""
    if options.json:
        output.document(_documents(tools, costs))
    else:
        _print(output, tools, costs)
        if search_note:
            output.note(search_note)
    for namespace, reason in unavailable.items():
        output.error(f"the tools of {namespace} are missing: {reason}")
    return 1 if unavailable else 0


def _documents(tools: Sequence[Tool], costs: Sequence[int] | None) -> list[dict[str, object]]:
    if costs is None:
        return [tool.to_dict() for tool in tools]
    return [{**tool.to_dict(), "tokens": cost} for tool, cost in zip(tools, costs, strict=True)]


def _print(output: CommandOutput, tools: Sequence[Tool], costs: Sequence[int] | None) -> None:
    rows = [[tool.name, str(tool.category)] for tool in tools]
    if costs is not None:
        rows = [[*row, f"{cost:,}"] for row, cost in zip(rows, costs, strict=True)]
    for tool, cells in zip(tools, align_columns(rows, right=[_TOKENS_COLUMN]), strict=True):
        used = sum(len(cell) + len(COLUMN_GAP) for cell in cells)
        room = None if output.columns is None else output.columns - used
        styled_cells = [output.style(cell, **style) for cell, style in zip(cells, _STYLES, strict=False)]
        output.line(join_columns([*styled_cells, shorten(first_line(tool.description), room)]))
    if costs is not None:
        output.line(f"\n{len(tools)} tools, {sum(costs):,} tokens in all")
    elif not tools:
        output.note("there are no tools")


def _search_note(ts: Toolspace) -> str:
    """Returns a note if models see a search tool instead of all tools; else an empty text."""
    total, visible = len(ts.list_tools()), len(ts.orchestrator.tools_for_model())
    if visible >= total - 1:  # The search tool itself is only listed when it is needed.
        return ""
    return (
        f"That is above defaults.toolSearchThreshold: models see {visible} tools, and agent__find_tools "
        "finds the others."
    )


def _parse_category(name: str | None) -> ToolCategory | None:
    if name is None:
        return None
    try:
        return ToolCategory(name.lower())
    except ValueError:
        hint = did_you_mean(name, ToolCategory)
        categories = ", ".join(ToolCategory)
        raise click.UsageError(f"there is no category {name!r}{hint}; the categories are {categories}") from None
