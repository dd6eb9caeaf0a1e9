"""What a gateway prints when it is up: where it is, its keys on the first start, and a command to paste."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from toolspace import __version__
from toolspace.cli.options import Options
from toolspace.cli.output import Output
from toolspace.core.json_text import encode
from toolspace.errors import ModelError
from toolspace.models.registry import PROVIDERS, open_model
from toolspace.server.demo import is_thinking
from toolspace.storage.queries.locations import database_place

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway
    from toolspace.server.keys import FirstKeys

KEY_VARIABLE = "TOOLSPACE_SECRET_KEY"
_OFFERED = ("openai", "anthropic", "google")
_MOST_NAMES = 10
_EXAMPLE = ("current_time", {"timezone": "Europe/Berlin"})


def greet(options: Options, gateway: Gateway, url: str) -> None:
    """Tells it all. Keys go to standard output even where people asked for quiet: they are never shown again."""
    url = (gateway.config.server.public_url or url).rstrip("/")
    data = database_place(gateway.config.storage.url, gateway.config.state_dir)
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


def show_keys(output: Output, keys: FirstKeys, *, as_results: bool = True) -> None:
    """Shows the keys that were just made, on standard output unless that is for something else."""
    output.note(f"Keys, shown this once ({_program()} keys new makes more):")
    for label, value in (("secret", keys.secret), ("public", keys.public), ("JWT", keys.jwt_secret)):
        if value is not None:
            (output.line if as_results else output.err)(f"  {label:<6} {value}")
    if keys.jwt_secret is not None:
        output.note("The last one is no token: it signs those that name people (docs/access.md).")


def _about_agents(gateway: Gateway) -> Iterator[str]:
    """Who is there to talk to, with what model, and how."""
    demo = gateway.demo
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
    elif is_thinking(demo):
        yield f'The agent Demo is in the space "Lobby", and thinks with {demo.model.provider}:{demo.model.name}.'
        yield "To talk to it, in another terminal:"
    else:
        yield 'The agent Demo is in the space "Lobby". It goes by a few rules: no key of a model is set.'
        yield "To have it think, set one of these and start again:"
        for provider in _OFFERED:
            yield f"  {PROVIDERS[provider].keys[0]:<18} {provider}:{PROVIDERS[provider].model}"
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


def _document(url: str, data: str, keys: FirstKeys | None) -> dict[str, Any]:
    made = {} if keys is None else {"secretKey": keys.secret, "publicKey": keys.public, "jwtSecret": keys.jwt_secret}
    shown = {name: value for name, value in made.items() if value is not None}
    return {"url": url, "mcp": f"{url}/mcp", "data": data, **({"keys": shown} if shown else {})}
