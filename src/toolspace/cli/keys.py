"""`toolspace keys`: the keys of a running gateway; makes one, revokes one."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import click
import msgspec

from toolspace.cli.gateway_connection import connect, gateway_options
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, first_line
from toolspace.cli.runner import run
from toolspace.client.responses import ApiKey
from toolspace.core.names import did_you_mean

_ACTIONS = ("list", "new", "revoke")
_KINDS = ("secret", "public", "tools")
_HEAD = ("ID", "KIND", "NAME", "KEY", "MADE", "LAST USED", "CALLS", "STATE")


@click.command("keys", cls=Command)
@click.argument("action", required=False, metavar="[list|new|revoke]", default="list")
@click.argument("key_id", required=False, metavar="[ID]")
@gateway_options
@click.option("--kind", type=click.Choice(_KINDS), help="With new: what the key is for; without it secret.")
@click.option("--name", help="With new: what to call it.")
@click.option("--allow", "allowed", multiple=True, metavar="TOOL", help="With new --kind tools: a tool, or a pattern.")
@click.option("--deny", "denied", multiple=True, metavar="TOOL", help="With new --kind tools: one that it may not use.")
@click.option("--agent", metavar="ID", help="With new --kind tools: the agent in whose name it calls.")
@click.pass_obj
def command(
    options: Options,
    action: str,
    key_id: str | None,
    url: str | None,
    key: str | None,
    kind: str | None,
    name: str | None,
    allowed: tuple[str, ...],
    denied: tuple[str, ...],
    agent: str | None,
) -> int:
    """List the keys of a running gateway; with new make one, which is shown once; with revoke ID end one.

    A secret key may do everything. A public key lets people in who bring a token. A tools key lists and calls the
    tools that it allows, over MCP and HTTP, and nothing else.
    """
    set_up_logs(options, os.environ)
    if action not in _ACTIONS:
        raise click.UsageError(f"there is no keys {action}{did_you_mean(action, _ACTIONS)}")
    if action != "new" and (kind or name or allowed or denied or agent):
        raise click.UsageError("--kind, --name, --allow, --deny and --agent are for keys new")
    if action == "revoke":
        if key_id is None:
            raise click.UsageError("which one? toolspace keys revoke ID; toolspace keys lists them")
        return run(lambda _: _revoke(options, url, key, key_id))
    if key_id is not None:
        raise click.UsageError(f"keys {action} takes no {key_id!r}")
    if action == "list":
        return run(lambda _: _list(options, url, key))
    wanted = cast("Literal['secret', 'public', 'tools']", kind or "secret")
    if wanted != "tools" and (allowed or denied or agent):
        raise click.UsageError("--allow, --deny and --agent are for keys of --kind tools")
    scope: dict[str, Any] = {
        "tools_allowed": list(allowed) or None,
        "tools_denied": list(denied) or None,
        "agent_entity_id": agent,
    }
    return run(lambda _: _new(options, url, key, wanted, name, scope))


async def _list(options: Options, url: str | None, key: str | None) -> int:
    async with connect(options, url, key) as client:
        keys = [one async for one in client.keys.all()]
    if options.json:
        options.output.document([_fact(one) for one in keys])
    else:
        _print(options.output, keys)
    return 0


async def _new(
    options: Options,
    url: str | None,
    key: str | None,
    kind: Literal["secret", "public", "tools"],
    name: str | None,
    scope: dict[str, Any],
) -> int:
    async with connect(options, url, key) as client:
        made = await client.keys.create(kind, name, **scope)
    if options.json:
        options.output.document(_fact(made))
        return 0
    options.output.note(f"The {kind} key {made.id}, shown this once:")
    options.output.text(made.key or "")
    return 0


async def _revoke(options: Options, url: str | None, key: str | None, key_id: str) -> int:
    async with connect(options, url, key) as client:
        await client.keys.revoke(key_id)
    if options.json:
        options.output.document({"id": key_id, "revoked": True})
    else:
        options.output.note(f"{key_id} opens nothing any more")
    return 0


def _fact(key: ApiKey) -> dict[str, Any]:
    fact: dict[str, Any] = msgspec.to_builtins(key)
    if fact["key"] is None:
        del fact["key"]
    return fact


def _print(output: CommandOutput, keys: Sequence[ApiKey]) -> None:
    rows = [_HEAD, *map(_cells, keys)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        output.line(output.style(line, dim=True) if number == 0 else line)


def _cells(key: ApiKey) -> tuple[str, ...]:
    return (
        first_line(key.id),
        key.kind,
        first_line(key.name) or "-",
        first_line(key.hint),
        _day(key.created_at),
        _day(key.last_used_at),
        str(key.calls),
        "good" if key.revoked_at is None else f"revoked {_day(key.revoked_at)}",
    )


def _day(at: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at / 1000)) if at else "-"
