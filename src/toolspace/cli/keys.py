"""`toolspace keys`: lists the API keys of a running gateway, creates one, revokes one."""

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
from toolspace.cli.output import align_columns, first_line, join_columns
from toolspace.client.resources import ApiKey
from toolspace.core.names import did_you_mean

KeyKind = Literal["secret", "public", "tools"]
_ACTIONS = ("list", "new", "revoke")
_KINDS = ("secret", "public", "tools")
_HEADER = ("ID", "KIND", "NAME", "KEY", "CREATED", "LAST USED", "CALLS", "STATE")


@click.command("keys", cls=Command)
@click.argument("action", required=False, metavar="[list|new|revoke]", default="list")
@click.argument("key_id", required=False, metavar="[ID]")
@gateway_options
@click.option("--kind", type=click.Choice(_KINDS), help="With new: the kind of the key. Default: secret.")
@click.option("--name", help="With new: a name for the key.")
@click.option(
    "--allow",
    "allowed",
    multiple=True,
    metavar="TOOL",
    help="With new --kind tools: a tool or pattern to allow. Repeatable.",
)
@click.option(
    "--deny",
    "denied",
    multiple=True,
    metavar="TOOL",
    help="With new --kind tools: a tool or pattern to deny. Repeatable.",
)
@click.option("--agent", metavar="ID", help="With new --kind tools: the agent on whose behalf it calls.")
@click.pass_obj
async def command(
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
    """List the API keys of a running gateway. new creates one and shows it once; revoke ID revokes one.

    A secret key may do everything. A public key identifies an application whose users bring a token. A tool key may
    list and call the tools that it allows, over MCP and HTTP, and nothing else.
    """
    set_up_logs(options, os.environ)
    if action not in _ACTIONS:
        raise click.UsageError(f"there is no action keys {action}{did_you_mean(action, _ACTIONS)}")
    if action != "new" and (kind or name or allowed or denied or agent):
        raise click.UsageError("--kind, --name, --allow, --deny and --agent are for keys new")
    if action == "revoke" and key_id is None:
        raise click.UsageError("the id is missing: toolspace keys revoke ID; toolspace keys lists the ids")
    if action != "revoke" and key_id is not None:
        raise click.UsageError(f"keys {action} has no argument {key_id!r}")
    key_kind = cast("KeyKind", kind or "secret")
    if key_kind != "tools" and (allowed or denied or agent):
        raise click.UsageError("--allow, --deny and --agent are for keys of --kind tools")
    async with connect(options, url, key) as client:
        if action == "list":
            _print_keys(options, [api_key async for api_key in client.keys.all()])
        elif action == "new":
            api_key = await client.keys.create(
                key_kind,
                name,
                tools_allowed=list(allowed) or None,
                tools_denied=list(denied) or None,
                agent_entity_id=agent,
            )
            _print_new_key(options, api_key)
        elif key_id is not None:
            await client.keys.revoke(key_id)
            _print_revoked_key(options, key_id)
    return 0


def _print_new_key(options: Options, api_key: ApiKey) -> None:
    if options.json:
        options.output.document(_document(api_key))
    else:
        options.output.note(f"Created the {api_key.kind} key {api_key.id}. It is shown only once:")
        options.output.text(api_key.key or "")


def _print_revoked_key(options: Options, key_id: str) -> None:
    if options.json:
        options.output.document({"id": key_id, "revoked": True})
    else:
        options.output.note(f"Revoked {key_id}.")


def _document(api_key: ApiKey) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(api_key)
    if document["key"] is None:
        del document["key"]
    return document


def _print_keys(options: Options, api_keys: Sequence[ApiKey]) -> None:
    if options.json:
        options.output.document([_document(api_key) for api_key in api_keys])
        return
    header, *rows = align_columns([_HEADER, *map(_cells, api_keys)])
    options.output.line(options.output.style(join_columns(header), dim=True))
    for row in rows:
        options.output.line(join_columns(row))


def _cells(api_key: ApiKey) -> tuple[str, ...]:
    return (
        first_line(api_key.id),
        api_key.kind,
        first_line(api_key.name) or "-",
        first_line(api_key.hint),
        _format_time(api_key.created_at),
        _format_time(api_key.last_used_at),
        str(api_key.calls),
        "active" if api_key.revoked_at is None else f"revoked {_format_time(api_key.revoked_at)}",
    )


def _format_time(milliseconds: int | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(milliseconds / 1000)) if milliseconds else "-"
