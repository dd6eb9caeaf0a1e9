"""`toolspace completion`: prints the script that makes a shell complete commands and tools."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from toolspace.cli.options import Command, Options


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
