"""The entry of the command line: finds the command, runs it, and turns what goes wrong into a line and a code.

A new command is a module here with a `command` in it, and its line in `COMMANDS`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

import click

from toolspace import __version__
from toolspace.cli.options import Options, shared_options
from toolspace.cli.output import WriteError, fill_standard_streams
from toolspace.errors import ProviderError, ToolspaceError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "list": "List the tools.",
    "call": "Call a tool.",
    "explain": "Show what holds for a tool, and which line of configuration says so.",
    "servers": "Show the MCP servers; restart one, or log in to it.",
    "install": "Add this toolspace to an editor's MCP servers.",
    "serve": "Run the gateway: HTTP API, event streams, workers, MCP endpoint.",
    "chat": "Talk to an agent of a gateway.",
    "tail": "Show what happens in a running gateway, as it happens.",
    "keys": "List the keys of a running gateway; make one, or revoke one.",
    "mcp": "Serve the tools over MCP, on standard input and output or over HTTP.",
    "init": "Write a commented toolspace.yaml, with the servers that your editors have.",
    "doctor": "Check the installation and the configuration, and say how to fix them.",
    "completion": "Print the script that completes commands in your shell.",
}
"""Name → what it does. The help needs no more, so that it need not import the commands."""

SUCCESS, TOOL_FAILED, WRONG_USAGE = 0, 1, 2
INTERRUPTED = 130


class CommandGroup(click.Group):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return import_module(f"toolspace.cli.{cmd_name}").command if cmd_name in COMMANDS else None

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

        fitting = [name for name in COMMANDS if name.startswith(incomplete)]
        # The options come from the class above the group, which would import every command.
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name]) for name in fitting), *options]


cli = CommandGroup(
    "toolspace",
    params=shared_options(),
    help="The tools of your agents, on the command line.",
    epilog="Exit codes: 0 success, 1 the tool failed, 2 wrong usage or configuration.",
    context_settings={"help_option_names": ["--help", "-h"]},
)
cli = click.version_option(__version__, message="toolspace %(version)s")(cli)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and ends the process with its exit code."""
    fill_standard_streams()
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: list[str]) -> int:
    """Runs one command; its exit code. Raises nothing: what goes wrong has been said."""
    options = Options()
    try:
        code = cli.main(
            arguments,
            prog_name="toolspace",
            complete_var="_TOOLSPACE_COMPLETE",
            standalone_mode=False,
            obj=options,
        )
        if not options.claimed:
            sys.stdout.flush()
    except SystemExit as end:
        # Completion ends so; and help that nobody reads to its end, which click calls a failure.
        return SUCCESS if type(sys.stdout).__name__ == "_PacifyFlushWrapper" else _code(end.code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return WRONG_USAGE
    except click.ClickException as error:
        return _fail(options, arguments, "usage", _usage(error), WRONG_USAGE)
    except ProviderError as error:
        return _fail(options, arguments, "provider", str(error), TOOL_FAILED)
    except ToolspaceError as error:
        return _fail(options, arguments, "config", str(error), WRONG_USAGE)
    except WriteError as error:
        options.output.error(str(error))
        return TOOL_FAILED
    except Exception as error:
        return _internal(options, arguments, error)
    return _code(code)


def _code(code: object) -> int:
    return code if isinstance(code, int) else SUCCESS


def _fail(options: Options, arguments: Sequence[str], kind: str, message: str, code: int) -> int:
    # Where parsing itself failed, the flag may not have been read.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    options.json = options.json or "--json" in own
    try:
        if options.json:
            options.output.document({"error": {"kind": kind, "message": message}})
            return code
    except (BrokenPipeError, WriteError):
        pass  # Then at least people shall know.
    for line in message.splitlines():
        options.output.error(line)
    return code


def _usage(error: click.ClickException) -> str:
    message = error.format_message().rstrip(".")
    context = error.ctx if isinstance(error, click.UsageError) else None
    if isinstance(error, click.NoSuchOption) and context is not None and context.info_name == "call":
        return f"{message}; the arguments of a tool are written key=value"
    # What is plainly a usage error was raised by a command, and says itself what to do.
    if context is None or type(error) is click.UsageError:
        return message
    return f"{message} (see {context.command_path} --help)"


def _internal(options: Options, arguments: Sequence[str], error: Exception) -> int:
    verbose = options.verbose or "--verbose" in arguments or "-v" in arguments
    if verbose:
        import traceback

        options.output.err("".join(traceback.format_exception(error)).rstrip())
    hint = "" if verbose else "; --verbose shows where"
    message = f"internal error: {type(error).__name__}: {error}{hint}"
    return _fail(options, arguments, "internal", message, TOOL_FAILED)
