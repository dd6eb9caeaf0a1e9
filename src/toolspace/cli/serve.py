"""`toolspace serve`: runs the gateway, and tells whoever started it how to talk to it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Generator, Iterator
from contextlib import AsyncExitStack, contextmanager

import click

from toolspace.cli.greeting import greet
from toolspace.cli.interrupts import Interrupts, run
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.serving import fast_loop, is_loopback, stopped, tune
from toolspace.cli.session import config_path, environment
from toolspace.cli.status import waiting
from toolspace.config.load import Config, load_config
from toolspace.config.model import Server
from toolspace.core.secret_masking import remember_secrets
from toolspace.server.control import GatewayDoor, listening

_CLOSE_SECONDS = 10.0
"""For what comes after the calls have ended: answers, servers, the database."""


@click.command("serve", cls=Command)
@click.option("--host", metavar="ADDRESS", help="The address to listen on; without it server.host.")
@click.option("--port", type=click.IntRange(0, 65535), help="The port; 0: a free one; without it server.port.")
@click.pass_obj
def command(options: Options, host: str | None, port: int | None) -> int:
    """Run the gateway: an HTTP API, event streams, workers and an MCP endpoint over the tools.

    On this machine only, unless --host or server.host says otherwise. Keys are made on the first start and shown once.
    Changes of the configuration are taken in at once, those of server and storage on the next start.
    """
    environ = environment(options)
    if host is not None:
        environ["TOOLSPACE_SERVER_HOST"] = host
    if port is not None:
        environ["TOOLSPACE_SERVER_PORT"] = str(port)
    set_up_logs(options, os.environ)
    config = load_config(config_path(options), environ=environ)
    remember_secrets(config.secret_values)
    return run(lambda interrupts: _serve(options, config, environ, interrupts), loop_factory=fast_loop())


async def _serve(options: Options, config: Config, environ: dict[str, str], interrupts: Interrupts) -> int:
    from toolspace.server.gateway import Gateway  # With all that it needs: most of a second to import.
    from toolspace.server.listener import serving

    output = options.output
    async with AsyncExitStack() as stack:
        door = stack.enter_context(_bound(config.server))
        async with waiting(output, "starting"):
            gateway = await stack.enter_async_context(Gateway.open(config.path, environ=environ))
        for warning in (*gateway.toolspace.warnings, *_warnings(config)):
            output.warning(warning)
        try:
            url = await stack.enter_async_context(serving(gateway, door))
        except OSError as error:
            raise _cannot_listen(config.server, error) from error
        local = GatewayDoor(_from_here(url), gateway.authenticator.issue_local())
        await stack.enter_async_context(listening(gateway.toolspace, local))
        gateway.toolspace.watch()
        tune()
        # From here on a signal is how it ends, and there is time for what runs.
        interrupts.ends_well = True
        interrupts.grace = config.server.stop_timeout + _CLOSE_SECONDS
        greet(options, gateway, url)
        await stopped(interrupts)
        output.note("Stopping: what runs may end, what waits for an answer is kept. Ctrl-C again ends it at once.")
    return 0


@contextmanager
def _bound(server: Server) -> Generator[socket.socket]:
    """The address, taken before anything is started: that it is in use should be known at once."""
    from toolspace.server.mcp.http_server import listen

    try:
        door = listen(server.host, server.port)
    except OSError as error:
        raise _cannot_listen(server, error) from error
    with door:
        yield door


def _cannot_listen(server: Server, error: OSError) -> click.UsageError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        way_out = "another program has it, perhaps a gateway; set server.port (or --port) to another, 0 for a free one"
    elif error.errno == errno.EACCES:
        way_out = "ports below 1024 need more rights; set server.port (or --port) to a higher one"
    else:
        way_out = "set server.host (or --host) to an address of this machine, 127.0.0.1 for itself alone"
    return click.UsageError(f"cannot listen on {server.host} port {server.port}: {reason}; {way_out}")


def _warnings(config: Config) -> Iterator[str]:
    server = config.server
    if not is_loopback(server.host) and not (server.public_url or "").startswith("https://"):
        yield (
            f"server.host: others on the network reach {server.host} without encryption, and could read keys; "
            "put a proxy with TLS before it, and set server.publicUrl to its https:// address"
        )


def _from_here(url: str) -> str:
    """How a command on this machine reaches it: all addresses are no address to connect to."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
