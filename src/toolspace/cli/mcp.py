"""`toolspace mcp`: serves the tools over MCP, on standard input and output or over HTTP."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from toolspace.cli.event_loop import Interrupts, fast_loop_factory, is_loopback, run, tune_process, wait_for_signal
from toolspace.cli.options import Command, Options

if TYPE_CHECKING:  # Heavy imports delay the first answer to a client on stdio.
    from toolspace.core.approvals import ApprovalCallback, ApprovalDecision, ApprovalRequest
    from toolspace.server.mcp.first_answers import EarlyReader
    from toolspace.server.mcp.stdio_pipes import ClaimedPipes

TOKEN_VARIABLE = "TOOLSPACE_MCP_TOKEN"


@click.command("mcp", cls=Command)
@click.option("--http", "port", type=click.IntRange(0, 65535), metavar="PORT", help="Serve over HTTP; 0: a free port.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--path", default="/mcp", show_default=True, help="Path of the endpoint.")
@click.option("--allow-host", "hosts", multiple=True, metavar="NAME", help="Accept this host name. Repeatable.")
@click.option("--allow-origin", "origins", multiple=True, metavar="URL", help="Accept this origin. Repeatable.")
@click.option("--token", envvar=TOKEN_VARIABLE, metavar="TOKEN", help=f"Require this bearer token; ${TOKEN_VARIABLE}.")
@click.pass_obj
def command(
    options: Options,
    port: int | None,
    host: str,
    path: str,
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    token: str | None,
) -> int:
    """Serve the tools to an editor or agent that supports MCP.

    By default on standard input and output, as editors start it. With --http over streamable HTTP, on this machine
    only unless --host is set. Clients are notified when the configuration changes.
    """
    os.environ.pop(TOKEN_VARIABLE, None)  # Hidden from tools and child processes.
    if port is None:
        _refuse_http_options()
        return run(lambda _: _serve_stdio(options))
    address = _HttpAddress(port, host, path, hosts, origins, token)
    address.check()
    return run(lambda interrupts: _serve_http(options, address, interrupts), loop_factory=fast_loop_factory())


def _refuse_http_options() -> None:
    """Raises `click.UsageError` for options that have no effect on stdio. The variable of the token is ignored."""
    context = click.get_current_context()
    for parameter in context.command.params:
        is_on_command_line = context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        if is_on_command_line and parameter.name in _HttpAddress._fields:
            raise click.UsageError(f"{parameter.opts[0]} is for HTTP only; add the port: --http 8000")


class _HttpAddress(NamedTuple):
    """Where to serve over HTTP, and which clients to accept."""

    port: int
    host: str
    path: str
    hosts: tuple[str, ...]
    origins: tuple[str, ...]
    token: str | None

    def check(self) -> None:
        if not self.path.startswith("/"):
            raise click.UsageError(f"--path {self.path}: it must begin with /")
        if self.token is not None and not self.token.strip():
            raise click.UsageError("--token: it is empty; give a token, or leave the option out")
        if not is_loopback(self.host) and self.token is None:
            raise click.UsageError(
                f"--host {self.host}: anyone who can connect could call the tools; "
                f"set {TOKEN_VARIABLE} (or --token), so that clients need it"
            )


async def _serve_stdio(options: Options) -> int:
    # Only what the first answer needs is imported before it. Clients wait a second for it, or a few.
    from toolspace.cli.config_file import read_config
    from toolspace.composition.mcp_servers import read_last_instructions
    from toolspace.server.mcp.first_answers import EarlyReader, FirstAnswers
    from toolspace.server.mcp.stdio_pipes import claim_stdio, exit_after_disconnect

    # First, so that nothing else can write to the client.
    with claim_stdio() as pipes, exit_after_disconnect(pipes.input):
        if os.isatty(pipes.input):
            options.output.note("Serving MCP on standard input and output; Ctrl-C ends it.")
        instructions = read_last_instructions(read_config(options))
        with EarlyReader(pipes, FirstAnswers(instructions)) as early_reader:
            await _serve_toolspace(options, pipes, early_reader)
    return 0


async def _serve_toolspace(options: Options, pipes: ClaimedPipes, early_reader: EarlyReader) -> None:
    """Serves the toolspace until the client closes its end. Raises if a required provider does not start."""
    from toolspace.cli.local_toolspace import starting_toolspace
    from toolspace.providers.mcp.server_spec import FORWARD_TO_CALLER
    from toolspace.server.control_socket import serve_control_socket
    from toolspace.server.mcp.stdio import serve_stdio  # The MCP library takes almost a second to import.

    toolspace_start = starting_toolspace(options, callbacks=FORWARD_TO_CALLER, on_approval=_refuse_approvals(options))
    async with toolspace_start as (ts, start), serve_control_socket(ts):
        ts.watch()
        server_task = asyncio.create_task(serve_stdio(ts, pipes, early_reader))
        try:
            await asyncio.wait((start, server_task), return_when=asyncio.FIRST_COMPLETED)
            if not server_task.done():
                await start
            await server_task
        finally:
            server_task.cancel()
            await asyncio.gather(server_task, return_exceptions=True)


async def _serve_http(options: Options, address: _HttpAddress, interrupts: Interrupts) -> int:
    from toolspace.cli.local_toolspace import ONLY_REQUIRED, started_toolspace
    from toolspace.providers.mcp.server_spec import FORWARD_TO_CALLER
    from toolspace.server.control_socket import serve_control_socket

    async with (
        started_toolspace(
            options,
            startup_wait=ONLY_REQUIRED,
            callbacks=FORWARD_TO_CALLER,
            on_approval=_refuse_approvals(options),
        ) as ts,
        serve_control_socket(ts),
        AsyncExitStack() as stack,
    ):
        # Imported here: the MCP library takes almost a second to import.
        from toolspace.server.authentication import require_bearer_token
        from toolspace.server.mcp.http_endpoint import McpEndpoint, serve_mcp

        host = address.host
        endpoint = McpEndpoint(
            ts,
            allowed_hosts=(*address.hosts, *_host_names(host)),
            allowed_origins=address.origins,
            authorize=require_bearer_token(address.token) if address.token else None,
        )
        server = serve_mcp(endpoint, host=host, port=address.port, path=address.path)
        try:
            url = await stack.enter_async_context(server)
        except OSError as error:
            reason = error.strerror or error
            raise click.UsageError(f"cannot listen on {host} port {address.port}: {reason}") from error
        # Entered last, so that it closes first: the server waits for its streams, which never end by themselves.
        await stack.enter_async_context(endpoint)
        ts.watch()
        tune_process()
        options.output.line(url)
        options.output.note("Serving MCP at this URL; Ctrl-C ends it.")
        await wait_for_signal(interrupts)
    return 0


def _refuse_approvals(options: Options) -> ApprovalCallback:
    """Returns the callback that refuses each call that needs approval, and says where it can be approved."""
    from toolspace.core.approvals import ApprovalDecision

    async def refuse(request: ApprovalRequest) -> ApprovalDecision:
        return ApprovalDecision(False, await _explain_refusal(options, request))

    return refuse


async def _explain_refusal(options: Options, request: ApprovalRequest) -> str:
    """Says why a call that needs approval is refused here, and where it can be approved.

    This process stores nothing, so a call cannot wait for a decision. A gateway can; the client has to call it there,
    because its calls are made with a key of their own.
    """
    from toolspace.cli.config_file import read_config
    from toolspace.cli.gateway_connection import find_local_gateway
    from toolspace.core.approvals import CALLER

    source = f" ({request.source})" if request.source else ""
    reason = f'the tool "{request.tool.name}" needs approval by {", ".join(request.approvers)}{source}'
    if CALLER in request.approvers:
        return f"{reason}, and this client cannot be asked; use a client that supports elicitation"
    gateway = await find_local_gateway(read_config(options))
    place = (
        f"connect this client to {gateway.url}/mcp, the gateway of this configuration"
        if gateway is not None
        else "start toolspace serve with this configuration, and connect this client to the /mcp of that gateway"
    )
    return (
        f"{reason}, and toolspace mcp cannot wait for it; {place}: it keeps the call until somebody decides at "
        "POST /api/approvals/{id}. If the user of this client may decide, set approvers: caller in the rule"
    )


def _host_names(host: str) -> tuple[str, ...]:
    """Returns the address as a host name to accept. Not 0.0.0.0 and ::, which web pages could use to connect."""
    if host in ("0.0.0.0", "::"):
        return ()
    return (f"[{host}]" if ":" in host else host,)
