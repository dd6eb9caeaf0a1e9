"""`toolspace serve`: runs the gateway, and tells whoever started it how to talk to it."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from toolspace import __version__
from toolspace.cli.local_toolspace import config_environment, config_path
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, show_status
from toolspace.cli.runner import Interrupts, fast_loop_factory, is_loopback, run, tune_process, wait_for_signal
from toolspace.config.load import Config, load_config
from toolspace.config.server_settings import ServerSettings
from toolspace.core.json_text import encode
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ModelError
from toolspace.models.registry import PROVIDERS, open_model
from toolspace.server.control_socket import LocalGateway, serve_control_socket
from toolspace.server.demo import uses_model
from toolspace.storage.database import describe_database

# MERGED from greeting: What a gateway prints when it is up: where it is, its keys on the first start, and a comman…

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway
    from toolspace.server.keys import InitialKeys

KEY_VARIABLE = "TOOLSPACE_SECRET_KEY"
_OFFERED = ("openai", "anthropic", "google")
_MOST_NAMES = 10
_EXAMPLE = ("current_time", {"timezone": "Europe/Berlin"})


def greet(options: Options, gateway: Gateway, url: str) -> None:
    """Tells it all. Keys go to standard output even where people asked for quiet: they are never shown again."""
    url = (gateway.config.server.public_url or url).rstrip("/")
    data = describe_database(gateway.config.storage.url, gateway.config.state_dir)
    keys = gateway.first_keys
    if options.json:
        options.output.document(_document(url, data, keys))
        return
    output = options.output
    output.line(url)
    output.note("")
    output.note(f"Toolspace gateway {__version__} with {len(gateway.toolspace.list_tools())} tools; Ctrl-C ends it.")
    output.note(f"  data   {data}")
    output.note(f"  MCP    {url}/mcp")
    output.note(f"  API    {url}/openapi.json; docs/gateway.md has a first walk through it")
    output.note("")
    if keys is not None:
        show_keys(output, keys)
        output.note("")
    elif gateway.config.server.secret_key is not None:
        output.note(f"The secret key is the one that server.secretKey says. For others: {_program()} keys new")
        output.note("")
    else:
        output.note(f"The keys were shown on the first start. For another one: {_program()} keys new")
        output.note("")
    for line in _about_agents(gateway):
        output.note(line)
    output.note("Try it:")
    output.note(f"  {example(url, keys.secret if keys is not None else None)}")


def example(url: str, key: str | None) -> str:
    """A command that calls a tool."""
    name, args = _EXAMPLE
    # Quoted so that a shell fills the variable in where the key is not known here.
    header = f"'x-secret-key: {key}'" if key is not None else f'"x-secret-key: ${KEY_VARIABLE}"'
    body = shlex.quote(encode({"args": args}))
    return f"curl -s {url}/api/tools/{name}/call -H {header} -H 'content-type: application/json' -d {body}"


def show_keys(output: CommandOutput, keys: InitialKeys, *, as_results: bool = True) -> None:
    """Shows the keys that were just made, on standard output unless that is for something else."""
    output.note(f"Keys, shown this once ({_program()} keys new makes more):")
    for label, value in (("secret", keys.secret), ("public", keys.public), ("JWT", keys.jwt_secret)):
        if value is not None:
            (output.line if as_results else output.err)(f"  {label:<6} {value}")
    if keys.jwt_secret is not None:
        output.note("The last one is no token: it signs those that name people (docs/access.md).")


def _about_agents(gateway: Gateway) -> Iterator[str]:
    """Who is there to talk to, with what model, and how."""
    demo = gateway.demo_agent
    names = sorted(gateway.config.agents)
    if demo is None and not names:
        return
    if demo is None:
        if (fault := _cannot_think(gateway, names[:_MOST_NAMES])) is not None:
            yield f"Agents that cannot think yet ({_program()} doctor says more):"
            yield f"  {fault}"
            yield ""
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"Agents: {', '.join(names[:_MOST_NAMES])}{more}. To talk to one, in another terminal:"
    elif uses_model(demo):
        yield f'The agent Demo is in the space "Lobby", and thinks with {demo.model.provider}:{demo.model.name}.'
        yield "To talk to it, in another terminal:"
    else:
        yield 'The agent Demo is in the space "Lobby". It goes by a few rules: no key of a model is set.'
        yield "To have it think, set one of these and start again:"
        for provider in _OFFERED:
            yield f"  {PROVIDERS[provider].key_variables[0]:<18} {provider}:{PROVIDERS[provider].default_model}"
        yield "To talk to it as it is, in another terminal:"
    name = f" {shlex.quote(names[0])}" if len(names) > 1 else ""
    yield f"  {_program()} chat{name}"
    yield ""


def _cannot_think(gateway: Gateway, names: Sequence[str]) -> str | None:
    """Those of the agents whose model cannot be asked, and why the first cannot. Asks none."""
    faults: dict[str, str] = {}
    for name in names:
        said = gateway.config.agents[name].model
        try:
            open_model(
                said.provider,
                said.name,
                environ=gateway.environ,
                base_url=said.base_url,
                api_key=said.api_key,
                headers=said.headers,
            )
        except ModelError as error:
            faults[name] = str(error)
    return f"{', '.join(faults)}: {next(iter(faults.values()))}" if faults else None


def _program() -> str:
    """How to start this program from the same terminal: `make run` does not put it on the path."""
    given = sys.argv[0]
    if shutil.which("toolspace") is not None or os.path.basename(given) != "toolspace":
        return "toolspace"
    return shlex.quote(given)


def _document(url: str, data: str, keys: InitialKeys | None) -> dict[str, Any]:
    made = {} if keys is None else {"secretKey": keys.secret, "publicKey": keys.public, "jwtSecret": keys.jwt_secret}
    shown = {name: value for name, value in made.items() if value is not None}
    return {"url": url, "mcp": f"{url}/mcp", "data": data, **({"keys": shown} if shown else {})}


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
    environ = config_environment(options)
    if host is not None:
        environ["TOOLSPACE_SERVER_HOST"] = host
    if port is not None:
        environ["TOOLSPACE_SERVER_PORT"] = str(port)
    set_up_logs(options, os.environ)
    config = load_config(config_path(options), environ=environ)
    register_secrets(config.secret_values)
    return run(lambda interrupts: _serve(options, config, environ, interrupts), loop_factory=fast_loop_factory())


async def _serve(options: Options, config: Config, environ: dict[str, str], interrupts: Interrupts) -> int:
    from toolspace.server.gateway import Gateway  # With all that it needs: most of a second to import.
    from toolspace.server.web_server import serve_gateway

    output = options.output
    async with AsyncExitStack() as stack:
        door = stack.enter_context(_bound(config.server))
        async with show_status(output, "starting"):
            gateway = await stack.enter_async_context(Gateway.open(config.path, environ=environ))
        for warning in (*gateway.toolspace.warnings, *_warnings(config)):
            output.warning(warning)
        try:
            url = await stack.enter_async_context(serve_gateway(gateway, door))
        except OSError as error:
            raise _cannot_listen(config.server, error) from error
        local = LocalGateway(_from_here(url), gateway.authenticator.create_local_key())
        await stack.enter_async_context(serve_control_socket(gateway.toolspace, local))
        gateway.toolspace.watch()
        tune_process()
        # From here on a signal is how it ends, and there is time for what runs.
        interrupts.ends_well = True
        interrupts.grace = config.server.stop_timeout + _CLOSE_SECONDS
        greet(options, gateway, url)
        await wait_for_signal(interrupts)
        output.note("Stopping: what runs may end, what waits for an answer is kept. Ctrl-C again ends it at once.")
    return 0


@contextmanager
def _bound(server: ServerSettings) -> Generator[socket.socket]:
    """The address, taken before anything is started: that it is in use should be known at once."""
    from toolspace.server.web_server import bind_socket

    try:
        door = bind_socket(server.host, server.port)
    except OSError as error:
        raise _cannot_listen(server, error) from error
    with door:
        yield door


def _cannot_listen(server: ServerSettings, error: OSError) -> click.UsageError:
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
