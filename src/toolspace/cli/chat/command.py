"""`toolspace chat`: finds the gateway or starts one, and finds the agent and a space for the person and the agent.

`conversation` then runs the chat.
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Final, TypeVar

import click

from toolspace.cli.chat.conversation import Conversation
from toolspace.cli.chat.run_tracker import ChatContext
from toolspace.cli.chat.screen import open_screen
from toolspace.cli.config_file import config_environment, config_path, read_config
from toolspace.cli.event_loop import Interrupts, fast_loop_factory, run
from toolspace.cli.gateway_connection import (
    KEY_VARIABLE,
    URL_VARIABLE,
    GatewayAddress,
    create_client,
    find_gateway,
    find_local_gateway,
    gateway_options,
)
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import show_status
from toolspace.cli.serve import command_name, print_keys
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import Conflict, GatewayUnreachable, NotFound
from toolspace.client.transport import LocateGateway
from toolspace.core.ids import derived_id, is_id
from toolspace.core.names import did_you_mean
from toolspace.core.stored_records import AgentEntity, Entity, Space
from toolspace.errors import ProviderError
from toolspace.server.control_socket import LocalGateway, serve_control_socket
from toolspace.server.demo_setup import DEMO_AGENT_ID, LOBBY_SPACE_ID, YOU_ENTITY_ID

T = TypeVar("T")
_MAX_NAMES: Final = 10
_HOW_TO_RUN: Final = (
    "toolspace serve runs the agents of its configuration (agents:); other agents need the program that runs them"
)
_MAX_ATTEMPTS: Final = 1_000_000
"""At a terminal, requests wait until the gateway has restarted, however long it takes: the person can leave."""
_PIPE_ATTEMPTS: Final = 20
_CLOSE_SECONDS = 20.0
"""For a gateway that the chat started: to end its calls and close."""


@click.command("chat", cls=Command)
@click.argument("agent", required=False, metavar="[AGENT]")
@gateway_options
@click.option("--space", metavar="ID", help="Chat in this space of the agent. Default: a space for you and the agent.")
@click.pass_obj
def command(options: Options, agent: str | None, url: str | None, key: str | None, space: str | None) -> int:
    """Chat with an agent of a gateway: the gateway on this machine, else one that is started for the chat.

    AGENT is a name or an id, and may be omitted if only one agent runs. If standard input is not a terminal, each
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
        _open_chat(options, url, key, agent=agent, space=space) as context,
        open_screen(options.output) as screen,
    ):
        return await Conversation(options, context, screen).run(interrupts)


@asynccontextmanager
async def _open_chat(
    options: Options, url: str | None, key: str | None, *, agent: str | None, space: str | None
) -> AsyncGenerator[ChatContext]:
    """Yields the context of a chat. Raises `click.UsageError` if there is no such agent or space."""
    async with AsyncExitStack() as stack:
        try:
            address = await _find_or_start_gateway(options, url, key, stack)
            async with create_client(address) as client:
                agent_entity = await _find_agent(client, agent)
                person, chat_space = await _find_space(client, agent_entity, space)
                members = await client.spaces.list_members(chat_space.id)
            names = {member.entity_id: member.name for member in members}
            if agent_entity.is_running is False:
                options.output.warning(
                    f"nobody runs {agent_entity.name} now: messages wait in its inbox; {_HOW_TO_RUN}"
                )
            attempts = _MAX_ATTEMPTS if options.output.is_terminal else _PIPE_ATTEMPTS
            client = create_client(address, attempts=attempts, locate=_build_locator(options, address))
            await stack.enter_async_context(client)
            yield ChatContext(client, person, agent_entity, chat_space, names)
        except GatewayUnreachable as error:
            raise ProviderError(str(error)) from error


def _build_locator(options: Options, address: GatewayAddress) -> LocateGateway | None:
    """Returns what finds a gateway of this machine after a restart: its key is valid only while its process runs."""
    if not address.is_local:
        return None
    config = read_config(options)

    async def locate() -> tuple[str, str] | None:
        local = await find_local_gateway(config)
        return (local.url, local.key) if local is not None else None

    return locate


async def _find_or_start_gateway(
    options: Options, url: str | None, key: str | None, stack: AsyncExitStack
) -> GatewayAddress:
    """Returns the gateway of the options, the environment or this machine; otherwise starts one."""
    if url or key or os.environ.get(URL_VARIABLE) or os.environ.get(KEY_VARIABLE):
        return await find_gateway(options, url, key)
    return await find_local_gateway(read_config(options)) or await _start_gateway(options, stack)


async def _start_gateway(options: Options, stack: AsyncExitStack) -> GatewayAddress:
    """Starts a gateway in this process, on a free port of this machine, until the stack is closed."""
    from toolspace.server.gateway import Gateway  # Takes most of a second to import.
    from toolspace.server.uvicorn_server import bind_socket, serve_gateway

    output = options.output
    if not options.verbose:  # The chat shows why an agent fails, so the log need not.
        logging.getLogger("toolspace.agents").addFilter(lambda record: record.levelno > logging.WARNING)
    async with show_status(output, "starting a gateway"):
        environ = config_environment(options)
        gateway = await stack.enter_async_context(Gateway.open(config_path(options), environ=environ))
        url = await stack.enter_async_context(serve_gateway(gateway, bind_socket("127.0.0.1", 0)))
    local = LocalGateway(url, gateway.authenticator.create_local_key())
    await stack.enter_async_context(serve_control_socket(gateway.toolspace, local))
    for warning in gateway.toolspace.warnings:
        output.warning(warning)
    if gateway.first_keys is not None:
        print_keys(output, gateway.first_keys, command=command_name(gateway.config.path), as_results=False)
    output.note(f"No gateway was running, so this one runs until you leave: {url}")
    return GatewayAddress(local.url, local.key, is_local=True)


async def _find_agent(client: ToolspaceClient, agent: str | None) -> AgentEntity:
    """Returns the agent of a name or an id; without one the only agent, or the only one that runs.

    Raises `click.UsageError`.
    """
    if agent is not None:
        for entity_id in (derived_id("ent", "agent", agent), agent):
            if is_id(entity_id):
                with suppress(NotFound):
                    return await client.agents.get(entity_id)
    agents = [entity async for entity in client.agents.all()]
    if agent is not None:
        matches = [entity for entity in agents if entity.name.lower() == agent.lower()]
        if len(matches) == 1:
            return matches[0]
        if matches:
            ids = ", ".join(entity.id for entity in matches[:_MAX_NAMES])
            raise click.UsageError(f"there are {len(matches)} agents named {agent!r}; choose one by its id: {ids}")
        hint = did_you_mean(agent, (entity.name for entity in agents)) or _agent_names(agents)
        raise click.UsageError(f"there is no agent {agent!r}{hint}")
    running_agents = [entity for entity in agents if entity.is_running]
    if len(agents) == 1 or len(running_agents) == 1:
        return (running_agents or agents)[0]
    if not agents:
        raise click.UsageError(
            "the gateway has no agents; add one to agents: of the configuration, or set demo: true there"
        )
    note = "" if running_agents else f"\n{_HOW_TO_RUN}"
    names = _agent_names(running_agents or agents)
    raise click.UsageError(f"there are {len(agents)} agents; choose one: toolspace chat NAME{names}{note}")


def _agent_names(agents: list[AgentEntity]) -> str:
    names = ", ".join(sorted(agent.name for agent in agents)[:_MAX_NAMES])
    more = ", …" if len(agents) > _MAX_NAMES else ""
    return f"; there are {names}{more}" if agents else "; the gateway has none"


async def _find_space(client: ToolspaceClient, agent: Entity, space_id: str | None) -> tuple[Entity, Space]:
    """Returns the person and the space: the named one, the lobby of the demo, or one for the person and the agent."""
    if agent.id == DEMO_AGENT_ID and space_id in (None, LOBBY_SPACE_ID):
        with suppress(NotFound):
            return await client.entities.get(YOU_ENTITY_ID), await client.spaces.get(LOBBY_SPACE_ID)
    user = getpass.getuser()
    person_id = derived_id("ent", "chat", user)
    person = await _get_or_create(
        lambda: client.entities.get(person_id), lambda: client.entities.create("human", user, id=person_id)
    )
    if space_id is None:
        own_id, name = derived_id("spc", "chat", person.id, agent.id), f"{person.name} and {agent.name}"[:200]
        space = await _get_or_create(lambda: client.spaces.get(own_id), lambda: client.spaces.create(name, id=own_id))
    else:
        try:
            space = await client.spaces.get(space_id)
        except NotFound:
            raise click.UsageError(f"there is no space {space_id!r}") from None
        if agent.id not in {member.entity_id for member in await client.spaces.list_members(space.id)}:
            raise click.UsageError(f"the agent {agent.name!r} is not a member of the space {space_id!r}")
    for entity in (person, agent):
        await client.spaces.add_member(space.id, entity.id)
    return person, space


async def _get_or_create(get: Callable[[], Awaitable[T]], create: Callable[[], Awaitable[T]]) -> T:
    try:
        return await get()
    except NotFound:
        with suppress(Conflict):  # Another chat of the same person was faster.
            return await create()
        return await get()
