"""Where a chat takes place: finds the gateway or starts one, the agent, and a space for the person and the agent."""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, NamedTuple

import click

from toolspace.cli.gateway_connection import KEY_VARIABLE, URL_VARIABLE, GatewayAddress, create_client, find_gateway
from toolspace.cli.local_toolspace import config_environment, config_path
from toolspace.cli.options import Options
from toolspace.cli.output import show_status
from toolspace.cli.serve import show_keys
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import Conflict, GatewayUnreachable, NotFound
from toolspace.config.load import load_config
from toolspace.core.ids import derived_id, is_id
from toolspace.core.names import did_you_mean
from toolspace.core.records import Entity, EntityType, Space
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ProviderError
from toolspace.server import control_socket
from toolspace.server.demo import DEMO_AGENT_ID, LOBBY_SPACE_ID, YOU_ENTITY_ID

_LISTED: Final = 10


class ChatContext(NamedTuple):
    """Who talks to whom, and where."""

    client: ToolspaceClient
    is_local: bool
    """Whether the gateway's key is good for as long as its process lives."""
    me: Entity
    agent: Entity
    space: Space
    names: dict[str, str]
    """What everyone in the space is called, by id. Who comes later is added."""


@asynccontextmanager
async def open_chat(
    options: Options, url: str | None, key: str | None, *, agent: str | None, space: str | None
) -> AsyncGenerator[ChatContext]:
    """The room, for as long as the block runs. Raises `click.UsageError` where there is no such agent or space."""
    async with AsyncExitStack() as stack:
        try:
            door = await _door(options, url, key, stack)
            client = await stack.enter_async_context(create_client(door))
            found = await _find_agent(client, agent)
            me, place = await _find_place(client, found, space)
            members = await client.spaces.list_members(place.id)
            names = {member.entity_id: member.name for member in members}
            yield ChatContext(client, door.is_local, me, found, place, names)
        except GatewayUnreachable as error:
            raise ProviderError(str(error)) from error


async def _door(options: Options, url: str | None, key: str | None, stack: AsyncExitStack) -> GatewayAddress:
    """The gateway that is named or runs here; else one of our own."""
    if url or key or os.environ.get(URL_VARIABLE) or os.environ.get(KEY_VARIABLE):
        return await find_gateway(options, url, key)
    config = load_config(config_path(options), environ=config_environment(options))
    register_secrets(config.secret_values)
    local = await control_socket.find_gateway(config.state_dir, config.path)
    if local is not None:
        return GatewayAddress(local.url, local.key, is_local=True)
    return await _start(options, stack)


async def _start(options: Options, stack: AsyncExitStack) -> GatewayAddress:
    """Starts a gateway in this process, on a free port of this machine, until the chat ends."""
    from toolspace.server.gateway import Gateway  # With all that it needs: most of a second to import.
    from toolspace.server.web_server import bind_socket, serve_gateway

    output = options.output
    if not options.verbose:  # The conversation itself says why an agent fails; once is enough.
        logging.getLogger("toolspace.agents").addFilter(lambda record: record.levelno > logging.WARNING)
    async with show_status(output, "starting a gateway"):
        gateway = await stack.enter_async_context(
            Gateway.open(config_path(options), environ=config_environment(options))
        )
        url = await stack.enter_async_context(serve_gateway(gateway, bind_socket("127.0.0.1", 0)))
    local = control_socket.LocalGateway(url, gateway.authenticator.create_local_key())
    await stack.enter_async_context(control_socket.serve_control_socket(gateway.toolspace, local))
    for warning in gateway.toolspace.warnings:
        output.warning(warning)
    if gateway.first_keys is not None:
        show_keys(output, gateway.first_keys, as_results=False)
    output.note(f"No gateway was running, so this one runs until you leave: {url}")
    return GatewayAddress(local.url, local.key, is_local=True)


async def _find_agent(client: ToolspaceClient, wanted: str | None) -> Entity:
    """The agent of a name or an id; without either the only one that there is."""
    if wanted is not None:
        for entity_id in (derived_id("ent", "agent", wanted), wanted):
            if is_id(entity_id):
                with suppress(NotFound):
                    return await client.agents.get(entity_id)
    agents = [one async for one in client.agents.all()]
    if wanted is not None:
        named = [one for one in agents if one.name.lower() == wanted.lower()]
        if len(named) == 1:
            return named[0]
        if named:
            ids = ", ".join(one.id for one in named[:_LISTED])
            raise click.UsageError(f"there are {len(named)} agents named {wanted!r}; say which by its id: {ids}")
        hint = did_you_mean(wanted, (one.name for one in agents)) or _those(agents)
        raise click.UsageError(f"there is no agent {wanted!r}{hint}")
    if len(agents) == 1:
        return agents[0]
    if not agents:
        raise click.UsageError(
            "the gateway has no agents; describe one in agents: of the configuration, or set demo: true there"
        )
    raise click.UsageError(f"there are {len(agents)} agents; say which: toolspace chat NAME{_those(agents)}")


def _those(agents: list[Entity]) -> str:
    names = ", ".join(sorted(one.name for one in agents)[:_LISTED])
    more = ", …" if len(agents) > _LISTED else ""
    return f"; there are {names}{more}" if agents else "; the gateway has none"


async def _find_place(client: ToolspaceClient, agent: Entity, space_id: str | None) -> tuple[Entity, Space]:
    """Who the person is, and the space: one of the two alone unless another is named, or the demo's lobby."""
    if agent.id == DEMO_AGENT_ID and space_id in (None, LOBBY_SPACE_ID):
        with suppress(NotFound):
            return await client.entities.get(YOU_ENTITY_ID), await client.spaces.get(LOBBY_SPACE_ID)
    user = getpass.getuser()
    me = await _entity(client, derived_id("ent", "chat", user), "human", user)
    if space_id is None:
        own = derived_id("spc", "chat", me.id, agent.id)
        space = await _space(client, own, f"{me.name} and {agent.name}"[:200])
    else:
        try:
            space = await client.spaces.get(space_id)
        except NotFound:
            raise click.UsageError(f"there is no space {space_id!r}") from None
        if agent.id not in {member.entity_id for member in await client.spaces.list_members(space.id)}:
            raise click.UsageError(f"the agent {agent.name!r} is not a member of the space {space_id!r}")
    for entity in (me, agent):
        await client.spaces.add_member(space.id, entity.id)
    return me, space


async def _entity(client: ToolspaceClient, entity_id: str, type: EntityType, name: str) -> Entity:
    try:
        return await client.entities.get(entity_id)
    except NotFound:
        with suppress(Conflict):  # Another chat of the same person was faster.
            return await client.entities.create(type, name, id=entity_id)
        return await client.entities.get(entity_id)


async def _space(client: ToolspaceClient, space_id: str, name: str) -> Space:
    try:
        return await client.spaces.get(space_id)
    except NotFound:
        with suppress(Conflict):
            return await client.spaces.create(name, id=space_id)
        return await client.spaces.get(space_id)
