"""`toolspace chat`: a conversation with an agent of a gateway, on a terminal or through pipes.

`setup` finds the gateway, the agent and the space. `conversation` connects the parts: `view` turns events into text,
`questions` asks what pending calls need, `run_tracker` follows the runs of the agent, and a screen (`screen`,
`terminal_screen`) shows it all. Used by the command line only; talks to the gateway through `toolspace.client`.
"""

from __future__ import annotations

import os

import click

from toolspace.cli.chat.conversation import Conversation
from toolspace.cli.chat.screen import open_screen
from toolspace.cli.chat.setup import open_chat
from toolspace.cli.event_loop import Interrupts, fast_loop_factory, run
from toolspace.cli.gateway_connection import gateway_options
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options

_CLOSE_SECONDS = 20.0
"""For a gateway that the chat started: to end its calls and close."""


@click.command("chat", cls=Command)
@click.argument("agent", required=False, metavar="[AGENT]")
@gateway_options
@click.option("--space", metavar="ID", help="Chat in this space of the agent. Default: a space for you and the agent.")
@click.pass_obj
def command(options: Options, agent: str | None, url: str | None, key: str | None, space: str | None) -> int:
    """Chat with an agent of a gateway: the gateway on this machine, else one that is started for the chat.

    AGENT is a name or an id, and may be omitted if there is only one agent. If standard input is not a terminal, each
    line of it is sent as a message, the answers are printed, and the command ends after the last answer. With --json
    each line of the output is an event.
    """
    set_up_logs(options, os.environ)
    return run(
        lambda interrupts: _chat(options, interrupts, url, key, agent=agent, space=space),
        loop_factory=fast_loop_factory(),
    )


async def _chat(
    options: Options, interrupts: Interrupts, url: str | None, key: str | None, *, agent: str | None, space: str | None
) -> int:
    interrupts.grace = _CLOSE_SECONDS
    async with (
        open_chat(options, url, key, agent=agent, space=space) as context,
        open_screen(options.output) as screen,
    ):
        return await Conversation(options, context, screen).run(interrupts)
