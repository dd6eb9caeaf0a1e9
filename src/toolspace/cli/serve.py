"""`toolspace serve`: runs the gateway, and prints how to connect to it."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from toolspace import __version__
from toolspace.cli.config_file import config_environment, config_path
from toolspace.cli.event_loop import Interrupts, fast_loop_factory, is_loopback, run, tune_process, wait_for_signal
from toolspace.cli.gateway_connection import KEY_VARIABLE
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, show_status
from toolspace.config.configuration import Config
from toolspace.config.find_and_watch import find_config
from toolspace.config.load import load_config
from toolspace.config.secret_references import resolve_secrets
from toolspace.config.server_settings import ServerSettings
from toolspace.core.json_text import encode
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ConfigError, ModelError
from toolspace.models.registry import PROVIDERS, open_model
from toolspace.server.control_socket import LocalGateway, serve_control_socket
from toolspace.server.demo_setup import uses_model
from toolspace.storage.database import describe_database

if TYPE_CHECKING:
    from toolspace.server.api_keys import InitialKeys
    from toolspace.server.gateway import Gateway

_CLOSE_SECONDS = 10.0
"""For sending responses and closing servers and the database, after the calls have ended."""
_SUGGESTED_PROVIDERS = ("openai", "anthropic", "google")
_MAX_NAMES = 10
_EXAMPLE_CALL = ("current_time", {"timezone": "Europe/Berlin"})


@click.command("serve", cls=Command)
@click.option("--host", metavar="ADDRESS", help="Address to listen on. Default: server.host.")
@click.option("--port", type=click.IntRange(0, 65535), help="Port; 0: a free one. Default: server.port.")
@click.pass_obj
def command(options: Options, host: str | None, port: int | None) -> int:
    """Run the gateway: an HTTP API, event streams, workers and an MCP endpoint for the tools.

    It listens on this machine only, unless --host or server.host is set. The first start creates API keys and shows
    them once. Changes of the configuration apply at once, except for server and storage, which need a restart.
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
    from toolspace.server.gateway import Gateway  # Takes most of a second to import.
    from toolspace.server.uvicorn_server import serve_gateway

    output = options.output
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_bound_socket(config.server))
        async with show_status(output, "starting"):
            gateway = await stack.enter_async_context(Gateway.open(config.path, environ=environ))
        for warning in (*gateway.toolspace.warnings, *_list_warnings(config)):
            output.warning(warning)
        for warning in await _list_shared_conversations(gateway):
            output.warning(warning)
        if gateway.process_limits_notice is not None:
            output.warning(gateway.process_limits_notice)
        try:
            url = await stack.enter_async_context(serve_gateway(gateway, listener))
        except OSError as error:
            raise _listen_error(config.server, error) from error
        local = LocalGateway(_local_url(url), gateway.authenticator.create_local_key())
        await stack.enter_async_context(serve_control_socket(gateway.toolspace, local))
        gateway.toolspace.watch()
        tune_process()
        # From now on a signal is the normal end, and running calls get time to finish.
        interrupts.is_normal_end = True
        interrupts.grace = config.server.stop_timeout + _CLOSE_SECONDS
        print_startup_message(options, gateway, url)
        await wait_for_signal(interrupts)
        output.note("Stopping: running calls may finish, pending calls stay stored. Ctrl-C again stops it at once.")
    return 0


@contextmanager
def _bound_socket(server: ServerSettings) -> Generator[socket.socket]:
    """Yields a socket on the address. Bound before anything starts, so that a used port is reported at once."""
    from toolspace.server.uvicorn_server import bind_socket

    try:
        listener = bind_socket(server.host, server.port)
    except OSError as error:
        raise _listen_error(server, error) from error
    with listener:
        yield listener


def _listen_error(server: ServerSettings, error: OSError) -> click.UsageError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        fix = "another program uses it, perhaps a gateway; set server.port (or --port) to another one, 0 for a free one"
    elif error.errno == errno.EACCES:
        fix = "ports below 1024 need more rights; set server.port (or --port) to a higher one"
    else:
        fix = "set server.host (or --host) to an address of this machine, such as 127.0.0.1"
    return click.UsageError(f"cannot listen on {server.host} port {server.port}: {reason}; {fix}")


def _list_warnings(config: Config) -> Iterator[str]:
    server = config.server
    if not is_loopback(server.host) and not (server.public_url or "").startswith("https://"):
        yield (
            f"server.host: the network can reach {server.host} without encryption, and could read keys; "
            "put a proxy with TLS in front of it, and set server.publicUrl to its https:// address"
        )


async def _list_shared_conversations(gateway: Gateway) -> list[str]:
    """A warning for each agent with one session that shares spaces with different people."""
    from toolspace.agents.agent import entity_id_for
    from toolspace.cli.agent_checks import describe_shared_conversation
    from toolspace.storage.queries.entities_and_spaces import list_agents_of_several_people

    agent_ids = set(await gateway.ledger.read(list_agents_of_several_people))
    return [
        "; ".join(describe_shared_conversation(agent.name))
        for agent in gateway.toolspace.agents
        if agent.scope.scope == "agent" and entity_id_for(agent.name) in agent_ids
    ]


def _local_url(url: str) -> str:
    """Returns the URL for commands on this machine: they cannot connect to 0.0.0.0 or ::."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


# Startup message


def print_startup_message(options: Options, gateway: Gateway, url: str) -> None:
    """Prints the URL, the keys of the first start, and commands to try.

    Keys go to standard output even with `--quiet`, because they are never shown again.
    """
    url = (gateway.config.server.public_url or url).rstrip("/")
    database = describe_database(gateway.config.storage.url, gateway.config.state_dir)
    keys = gateway.first_keys
    if options.json:
        options.output.document(_startup_document(url, database, gateway.config.state_dir, keys))
        return
    output, command = options.output, command_name(gateway.config.path)
    output.line(url)
    output.note("")
    output.note(f"Toolspace gateway {__version__} with {len(gateway.toolspace.list_tools())} tools; Ctrl-C stops it.")
    starting_names = [server.name for server in gateway.toolspace.list_servers() if server.state == "starting"]
    if starting_names:
        more = f" and {len(starting_names) - _MAX_NAMES} more" if len(starting_names) > _MAX_NAMES else ""
        output.note(f"  MCP servers still start, and add their tools: {', '.join(starting_names[:_MAX_NAMES])}{more}")
    output.note(f"  data   {database}")
    output.note(f"  state  {gateway.config.state_dir}")
    output.note(f"  MCP    {url}/mcp")
    output.note(f"  API    {url}/openapi.json; docs/gateway.md has a tutorial")
    output.note("")
    if keys is not None:
        print_keys(output, keys, command=command)
    elif gateway.config.server.secret_key is not None:
        output.note(f"The secret key is the value of server.secretKey. To create another: {command} keys new")
    else:
        output.note(f"The keys were shown at the first start. To create another: {command} keys new")
    output.note("")
    for line in _agent_lines(gateway, command):
        output.note(line)
    output.note("Try it:")
    output.note(f"  {example_command(url, keys.secret if keys is not None else None)}")


def example_command(url: str, key: str | None) -> str:
    """Returns a shell command that calls a tool."""
    name, args = _EXAMPLE_CALL
    # Without a key the header is in double quotes, so that the shell fills in the variable.
    header = f"'x-secret-key: {key}'" if key is not None else f'"x-secret-key: ${KEY_VARIABLE}"'
    body = shlex.quote(encode({"args": args}))
    return f"curl -s {url}/api/tools/{name}/call -H {header} -H 'content-type: application/json' -d {body}"


def print_keys(output: CommandOutput, keys: InitialKeys, *, command: str, as_results: bool = True) -> None:
    """Prints new keys: to standard output, or with `as_results=False` to standard error."""
    output.note(f"Keys, shown only once ({command} keys new creates more):")
    for label, value in (("secret", keys.secret), ("public", keys.public), ("JWT", keys.jwt_secret)):
        if value is not None:
            (output.line if as_results else output.err)(f"  {label:<6} {value}")
    if keys.jwt_secret is not None:
        output.note("The JWT secret is not a token: it signs the tokens of users (docs/access.md).")


def _agent_lines(gateway: Gateway, command: str) -> Iterator[str]:
    """Yields which agents there are, which model they use, and how to chat with them."""
    demo = gateway.demo_agent
    names = sorted(gateway.config.agents)
    if demo is None and not names:
        return
    if demo is None:
        if (error := _find_model_error(gateway, names[:_MAX_NAMES])) is not None:
            yield f"Agents without a usable model ({command} doctor says more):"
            yield f"  {error}"
            yield ""
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        yield f"Agents: {', '.join(names[:_MAX_NAMES])}{more}. To chat with one, in another terminal:"
    elif uses_model(demo):
        yield f'The agent Demo is in the space "Lobby", and uses {demo.model.provider}:{demo.model.name}.'
        yield "To chat with it, in another terminal:"
    else:
        yield 'The agent Demo is in the space "Lobby". It follows a few fixed rules: no API key of a model is set.'
        yield "To give it a model, set one of these variables and restart:"
        for provider in _SUGGESTED_PROVIDERS:
            yield f"  {PROVIDERS[provider].key_variables[0]:<18} {provider}:{PROVIDERS[provider].default_model}"
        yield "To chat with it without a model, in another terminal:"
    name = f" {shlex.quote(names[0])}" if len(names) > 1 else ""
    yield f"  {command} chat{name}"
    yield ""


def _find_model_error(gateway: Gateway, names: Sequence[str]) -> str | None:
    """Returns the agents whose models are not usable, and why the first is not; None if all are. Calls no model."""
    errors: dict[str, str] = {}
    for name in names:
        try:
            model = resolve_secrets(gateway.config.agents[name].model)
            open_model(
                model.provider,
                model.name,
                environ=gateway.environ,
                base_url=model.base_url,
                api_key=model.api_key,
                headers=model.headers,
            )
        except (ConfigError, ModelError) as error:
            errors[name] = str(error)
    return f"{', '.join(errors)}: {next(iter(errors.values()))}" if errors else None


def command_name(config: Path | None) -> str:
    """Returns how to start this program from the same folder, for this configuration.

    After `make run` it is not on the PATH.
    """
    script = sys.argv[0]
    is_on_path = shutil.which("toolspace") is not None or os.path.basename(script) != "toolspace"
    name = "toolspace" if is_on_path else shlex.quote(script)
    if config is None or find_config(Path.cwd()) == config:
        return name
    with contextlib.suppress(ValueError):
        config = config.relative_to(Path.cwd())
    return f"{name} --config {shlex.quote(str(config))}"


def _startup_document(url: str, database: str, state_dir: Path, keys: InitialKeys | None) -> dict[str, Any]:
    document: dict[str, Any] = {"url": url, "mcp": f"{url}/mcp", "data": database, "state": str(state_dir)}
    if keys is not None:
        values = {"secretKey": keys.secret, "publicKey": keys.public, "jwtSecret": keys.jwt_secret}
        document["keys"] = {name: value for name, value in values.items() if value is not None}
    return document
