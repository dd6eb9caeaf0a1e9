"""`toolspace completion`: prints the script that makes a shell complete commands and tools."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout

import click
from click.shell_completion import CompletionItem, get_completion_class

from toolspace.cli.local_toolspace import create_toolspace
from toolspace.cli.options import Command, Options
from toolspace.cli.output import first_line


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> int:
    """Print the script that completes commands and tools in SHELL.

    \b
    bash  add to ~/.bashrc:  eval "$(toolspace completion bash)"
    zsh   add to ~/.zshrc:   eval "$(toolspace completion zsh)"
    fish  toolspace completion fish > ~/.config/fish/completions/toolspace.fish
    """
    found = get_completion_class(shell)
    assert found is not None  # `Choice` has let nothing else through.
    script = found(context.find_root().command, {}, "toolspace", "_TOOLSPACE_COMPLETE").source()
    options = context.ensure_object(Options)
    if options.json:
        options.output.document({"shell": shell, "script": script})
    else:
        options.output.line(script.strip())
    return 0


# MERGED from completing: Completes the names of tools in a shell. Never fails and never prints: a shell is waiting.


def tool_names(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The tools that begin with what was typed. Providers are not started for that."""
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        try:
            tools = create_toolspace(context.ensure_object(Options)).list_tools()
        except (Exception, SystemExit):
            return []
    return [
        CompletionItem(tool.name, help=first_line(tool.description))
        for tool in tools
        if tool.name.startswith(incomplete)
    ]
