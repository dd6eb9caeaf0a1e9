"""`toolspace completion`: prints the completion script of a shell. Also completes tool names for other commands."""

from __future__ import annotations

import os
from contextlib import redirect_stderr, redirect_stdout

import click
from click.shell_completion import CompletionItem, get_completion_class

from toolspace.cli.options import Command, Options
from toolspace.cli.output import first_line


@click.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> int:
    """Print the script that completes commands and tool names in SHELL.

    \b
    bash  add to ~/.bashrc:  eval "$(toolspace completion bash)"
    zsh   add to ~/.zshrc:   eval "$(toolspace completion zsh)"
    fish  toolspace completion fish > ~/.config/fish/completions/toolspace.fish
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None  # `Choice` allows only shells that click knows.
    script = completion_class(context.find_root().command, {}, "toolspace", "_TOOLSPACE_COMPLETE").source()
    options = context.ensure_object(Options)
    if options.json:
        options.output.document({"shell": shell, "script": script})
    else:
        options.output.line(script.strip())
    return 0


def complete_tool_name(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Returns the tools whose names begin with the text. Starts no provider, never fails and never prints."""
    from toolspace.cli.local_toolspace import create_toolspace  # Here: the script itself does not need it.

    with open(os.devnull, "w") as devnull, redirect_stdout(devnull), redirect_stderr(devnull):
        try:
            tools = create_toolspace(context.ensure_object(Options)).list_tools()
        except (Exception, SystemExit):
            return []
    return [
        CompletionItem(tool.name, help=first_line(tool.description))
        for tool in tools
        if tool.name.startswith(incomplete)
    ]
