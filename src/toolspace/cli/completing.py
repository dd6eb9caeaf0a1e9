"""Completes the names of tools in a shell. Never fails and never prints: a shell is waiting."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout

import click
from click.shell_completion import CompletionItem

from toolspace.cli.options import Options
from toolspace.cli.output import one_line
from toolspace.cli.session import open_toolspace


def tool_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The tools that begin with what was typed. Providers are not started for that."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            tools = open_toolspace(context.ensure_object(Options)).list_tools()
        except (Exception, SystemExit):
            return []
    return [
        CompletionItem(tool.name, help=one_line(tool.description)) for tool in tools if tool.name.startswith(incomplete)
    ]
