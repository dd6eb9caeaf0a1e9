"""The options that every command accepts, before its name or after it. Imports nothing heavy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from toolspace.cli.output import CommandOutput


class Options:
    """The values of the shared options, and the output that follows from them."""

    def __init__(self) -> None:
        self.config: str | None = None
        self.json = False
        self.quiet = False
        self.verbose = False
        self.trace_mcp = False

    @functools.cached_property
    def output(self) -> CommandOutput:
        """Where results and messages go. Its first use reserves standard output for results."""
        from toolspace.cli.output import CommandOutput

        return CommandOutput(json=self.json, quiet=self.quiet)

    @property
    def has_output(self) -> bool:
        """Whether `output` was used already."""
        return "output" in self.__dict__


class SharedOption(click.Option):
    """An option that sets an attribute of `Options`, wherever it stands on the command line."""

    def __init__(self, *names: str, **settings: Any) -> None:
        super().__init__(names, expose_value=False, callback=_set_option, **settings)


def _set_option(context: click.Context, option: click.Parameter, value: object) -> object:
    if value and option.name:
        setattr(context.ensure_object(Options), option.name, value)
    return value


def shared_options() -> list[click.Parameter]:
    return [
        SharedOption(
            "--config",
            metavar="FILE",
            type=click.Path(),
            help="Configuration file. Default: $TOOLSPACE_CONFIG, else the nearest toolspace.yaml upwards.",
        ),
        SharedOption("--json", is_flag=True, help="Print the whole result as JSON."),
        SharedOption("--quiet", "-q", is_flag=True, help="Print results and errors only."),
        SharedOption("--verbose", "-v", is_flag=True, help="Log every call to standard error."),
        SharedOption("--trace-mcp", is_flag=True, help="Log every message to and from MCP servers."),
    ]


class Command(click.Command):
    """A command with the shared options, which its help lists in a section of their own. It may be a coroutine."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.params += shared_options()

    def invoke(self, ctx: click.Context) -> Any:
        options = ctx.ensure_object(Options)
        if options.quiet and options.verbose:
            raise click.UsageError("--quiet and --verbose contradict each other; give one of them", ctx)
        try:
            result = super().invoke(ctx)
            return _run(result) if inspect.iscoroutine(result) else result
        except BrokenPipeError:
            # `toolspace list | head -1` is a success. Caught here, before click reports a failure.
            return 0

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        own_options = [option for option in options if not isinstance(option, SharedOption)]
        _format_section(ctx, formatter, "Options", own_options)
        shared = [option for option in options if isinstance(option, SharedOption)]
        _format_section(ctx, formatter, "Options of every command", shared)


def _run(work: Coroutine[Any, Any, int]) -> int:
    from toolspace.cli.event_loop import run  # Here: with asyncio, which the help does not need.

    return run(lambda _: work)


def _format_section(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: Sequence[click.Option]
) -> None:
    rows = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
