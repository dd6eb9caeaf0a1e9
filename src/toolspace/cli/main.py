"""The entry point of the command line: finds the command, runs it, and turns errors into a message and an exit code.

A command is a module of this package with a click command named `command`, and a line in `COMMANDS`. Shell completion
is here, as it knows all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from toolspace import __version__
from toolspace.cli.options import Command, Options, shared_options
from toolspace.cli.output import WriteError, open_closed_streams
from toolspace.errors import ProviderError, ToolspaceError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "list": "List the tools.",
    "call": "Call a tool and print its result.",
    "explain": "Show the settings of a tool and where each one is set.",
    "servers": "List MCP servers and their status; restart one, log in to one.",
    "install": "Add this toolspace to the MCP servers of an editor.",
    "serve": "Run the gateway: HTTP API, event streams, workers, MCP endpoint.",
    "chat": "Chat with an agent of a gateway.",
    "tail": "Print the events of a running gateway as they happen.",
    "keys": "List the API keys of a running gateway; create or revoke one.",
    "mcp": "Serve the tools over MCP, on stdio or over HTTP.",
    "init": "Write a commented toolspace.yaml; import servers of editors.",
    "backup": "Write a backup of the gateway's data to a file.",
    "restore": "Load a backup into the database of this configuration.",
    "doctor": "Check installation and configuration; say how to fix problems.",
    "completion": "Print the shell completion script.",
}
"""Name → summary. `toolspace --help` prints it without importing the commands."""

SUCCESS, TOOL_FAILED, WRONG_USAGE = 0, 1, 2
INTERRUPTED = 130


class CommandGroup(click.Group):
    """Imports a command only when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in COMMANDS:
            return self.commands.get(cmd_name)
        module = "chat.command" if cmd_name == "chat" else cmd_name
        return import_module(f"toolspace.cli.{module}").command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-") and not ctx.resilient_parsing:
            from toolspace.core.names import did_you_mean

            hint = did_you_mean(name, COMMANDS) or f"; to call a tool of that name: toolspace call {name}"
            raise click.UsageError(f"there is no command {name!r}{hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        # Options come from click.Command: the method of click.Group would import every command.
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in names), *options]


cli = CommandGroup(
    "toolspace",
    params=shared_options(),
    help="Tools for AI agents, on the command line.",
    epilog="Exit codes: 0 success, 1 the tool failed, 2 wrong usage or configuration.",
    context_settings={"help_option_names": ["--help", "-h"]},
)
cli = click.version_option(__version__, message="toolspace %(version)s")(cli)


@cli.command("completion", cls=Command)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the script that completes commands and tool names in SHELL.

    \b
    bash  add to ~/.bashrc:  eval "$(toolspace completion bash)"
    zsh   add to ~/.zshrc:   eval "$(toolspace completion zsh)"
    fish  toolspace completion fish > ~/.config/fish/completions/toolspace.fish
    """
    from click.shell_completion import get_completion_class

    completion_class = get_completion_class(shell)
    assert completion_class is not None  # `Choice` allows only shells that click knows.
    script = completion_class(context.find_root().command, {}, "toolspace", "_TOOLSPACE_COMPLETE").source()
    options = context.ensure_object(Options)
    if options.json:
        options.output.document({"shell": shell, "script": script})
    else:
        options.output.line(script.strip())
    return 0


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and ends the process with its exit code."""
    open_closed_streams()
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code. Raises nothing: errors are printed."""
    options = Options()
    try:
        code = cli.main(
            arguments,
            prog_name="toolspace",
            complete_var="_TOOLSPACE_COMPLETE",
            standalone_mode=False,
            obj=options,
        )
        if not options.has_output:
            sys.stdout.flush()
    except SystemExit as exit:
        # Raised by shell completion, and by click when nobody reads the help to its end (not a failure here).
        return SUCCESS if type(sys.stdout).__name__ == "_PacifyFlushWrapper" else _exit_code(exit.code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG_USAGE
    except click.ClickException as error:
        return _report(options, arguments, "usage", _usage_message(error), WRONG_USAGE)
    except ProviderError as error:
        return _report(options, arguments, "provider", str(error), TOOL_FAILED)
    except ToolspaceError as error:
        return _report(options, arguments, "config", str(error), WRONG_USAGE)
    except WriteError as error:
        options.output.error(str(error))
        return TOOL_FAILED
    except Exception as error:
        return _report_internal(options, arguments, error)
    return _exit_code(code)


def _exit_code(code: object) -> int:
    return code if isinstance(code, int) else SUCCESS


def _report(options: Options, arguments: Sequence[str], kind: str, message: str, code: int) -> int:
    """Prints an error, as JSON with `--json`, and returns the exit code."""
    # If parsing failed, click may not have seen --json.
    own_arguments = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options.json = options.json or "--json" in own_arguments
    try:
        if options.json:
            options.output.document({"error": {"kind": kind, "message": message}})
            return code
    except (BrokenPipeError, WriteError):
        pass  # Print it to standard error instead.
    for line in message.splitlines():
        options.output.error(line)
    return code


def _usage_message(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None and context.info_name == "call":
        return f"{message}; the arguments of a tool are written key=value"
    # A plain UsageError was raised by a command, and its message says what to do.
    if context is None or type(error) is click.UsageError:
        return message
    return f"{message} (see {context.command_path} --help)"


def _report_internal(options: Options, arguments: Sequence[str], error: Exception) -> int:
    is_verbose = options.verbose or "--verbose" in arguments or "-v" in arguments
    if is_verbose:
        import traceback

        options.output.err("".join(traceback.format_exception(error)).rstrip())
    hint = "" if is_verbose else "; --verbose shows where"
    message = f"internal error: {type(error).__name__}: {error}{hint}"
    return _report(options, arguments, "internal", message, TOOL_FAILED)
