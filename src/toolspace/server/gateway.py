"""The gateway, put together: a toolspace, what is kept, who may do what, and the application that serves it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from toolspace.agents.definition import Agent
from toolspace.agents.host import Residents, entity_of
from toolspace.agents.prebuilt.notifier import ConfiguredNotifier
from toolspace.agents.prebuilt.provider import PrebuiltProvider
from toolspace.agents.registry import Crew
from toolspace.agents.subagent_runs import LedgerHousing
from toolspace.agents.task_tools import TaskToolProvider
from toolspace.config.load import Config, load_config
from toolspace.config.model import AgentSpec
from toolspace.core.embedder import Embedder
from toolspace.errors import ModelError
from toolspace.server.app import App
from toolspace.server.authentication import Authenticator
from toolspace.server.authorization import Members
from toolspace.server.callers import Caller
from toolspace.server.database_setup import open_database
from toolspace.server.demo import demo_agent, set_up_demo
from toolspace.server.health import Readiness
from toolspace.server.key_usage import Usage
from toolspace.server.keys import FirstKeys, ensure_keys
from toolspace.server.mcp.json_rpc import Application
from toolspace.server.mcp.mounted import PATHS, McpMount
from toolspace.server.metrics import Live, Metrics
from toolspace.server.origins import Origins
from toolspace.server.request_limits import Limits
from toolspace.server.requests import Request
from toolspace.server.route_table import ROUTES
from toolspace.server.sse import Readers
from toolspace.server.tool_keys import ToolKeys
from toolspace.spaces.call_recorder import Recorder
from toolspace.spaces.elicitation import ASK_THE_SPACE
from toolspace.spaces.knowledge import Library
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.open_runs import Cycles
from toolspace.spaces.pending_calls import CallDesk
from toolspace.spaces.services import AgentServices, Notifier
from toolspace.spaces.subscribers import Audience
from toolspace.spaces.sweeper import Sweeper
from toolspace.spaces.workers import Workers
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries import presence
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.waiters import Waiters
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server")


class Gateway:
    """Everything that one process of the gateway has. `async with Gateway.open(path) as gateway`.

    `gateway.app` is an ASGI application for whatever serves it; it works until the block ends.
    """

    toolspace: Toolspace
    ledger: Ledger
    calls: CallDesk
    cycles: Cycles
    workers: Workers
    authenticator: Authenticator
    first_keys: FirstKeys | None
    """The keys that were made on this start, to be shown once."""
    demo: AgentSpec | None = None
    """The agent that is there to try things out with, where none is configured."""
    readers: Readers
    readiness: Readiness
    agents: Residents
    app: Application

    def __init__(self, config: Config, *, path: Path | None, environ: Mapping[str, str]) -> None:
        self.config = config
        self.metrics = Metrics()
        self.limits = Limits(config.server)
        self.tool_keys = ToolKeys()
        self._path = path
        self.environ = environ
        self._stack = AsyncExitStack()

    @classmethod
    def open(cls, path: str | Path | None = None, *, environ: Mapping[str, str] = os.environ) -> Self:
        """A gateway from a configuration file; on its defaults where none is given. Raises `ConfigError`."""
        found = Path(path) if path is not None else None
        return cls(load_config(found, environ=environ), path=found, environ=environ)

    async def __aenter__(self) -> Self:
        try:
            await self._start(self._stack)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        config, server = self.config, self.config.server
        database, wakeups = await open_database(config)
        self.ledger = self._ledger(database, wakeups)
        stack.push_async_callback(self.ledger.aclose)  # The last thing to close.
        # Closed after all that writes: until then others must not take this process for dead, nor it say goodbye.
        self.sweeper = await stack.enter_async_context(
            Sweeper(
                self.ledger,
                worker_grace=server.worker_grace,
                event_retention=server.event_retention,
                retention=server.retention,
            )
        )
        self.readiness = Readiness(lambda: self.ledger.read(presence.served), self._keep_something)
        stack.push_async_callback(self.readiness.aclose)
        self.calls = CallDesk(self.ledger, ttl=config.defaults.pending_call_ttl)
        self.calls.on_due = self.sweeper.poke
        stack.push_async_callback(self.calls.aclose)  # Before the sweeper looks for what nobody was told.
        self.tool_keys.desk = self.calls
        self.toolspace = Toolspace.open(self._path, environ=self.environ, callbacks=ASK_THE_SPACE)
        self.toolspace.orchestrator.register(PrebuiltProvider())
        self.toolspace.orchestrator.register(TaskToolProvider())
        self.toolspace.orchestrator.configure(policies=(self.tool_keys,))
        recorder = Recorder(self.ledger, self.toolspace.bus)
        stack.push_async_callback(recorder.aclose)
        self.toolspace.orchestrator.use(recorder.stage)
        usage = await stack.enter_async_context(Usage(self.ledger))
        self.toolspace.orchestrator.use(usage.stage)
        await stack.enter_async_context(self.toolspace)
        self.ledger.on_stop = self.toolspace.cancel
        self.cycles = Cycles(self.ledger, self.toolspace.run)
        stack.push_async_callback(self.cycles.aclose)
        await self._house_agents(stack)
        self.workers = await stack.enter_async_context(Workers(self.ledger, grace=server.worker_grace))
        self.audience = Audience(self.ledger)
        self.sweeper.on_forgotten = self.audience.tell_again
        self.members = Members(self.ledger)
        self.readers = Readers(heartbeat=server.heartbeat)
        stack.push_async_callback(self.readers.aclose)
        # Late: keys that are made are shown once, by whoever gets to the end of this.
        self.first_keys = await ensure_keys(self.ledger, server)
        self.authenticator = await Authenticator.open(self.ledger, server)
        stack.push_async_callback(self.authenticator.aclose)
        self.authenticator.on_used = usage.used
        # Who reads while a right is taken away reads no further.
        self.authenticator.on_change(self.readers.recheck)
        self.members.on_change(self.readers.recheck)
        mcp = await stack.enter_async_context(
            McpMount(
                self.toolspace,
                authenticator=self.authenticator,
                limits=self.limits,
                tool_keys=self.tool_keys,
                server=server,
            )
        )
        mounted = self.metrics.counting("/mcp", mcp)
        app = App(
            self,
            ROUTES,
            mounts=dict.fromkeys(PATHS, mounted),
            max_body=server.max_body_bytes,
            observe=self.metrics.observe,
        )
        self.app = Origins(app, server)

    async def _house_agents(self, stack: AsyncExitStack) -> None:
        """Gives the agents that are configured, or the one of the demonstration, all that they live from."""
        config, crew = self.config, self.toolspace.crew
        crew.housing = LedgerHousing(self.calls)
        self.demo = demo_agent(config, self.environ)
        if self.demo is not None:
            await set_up_demo(self.ledger)
            crew.add([Agent.from_spec(self.demo)])
        self.library = Library(self.ledger, self._open_embedder(stack))
        self.calls.services = services = AgentServices(
            self.library, notifier=ConfiguredNotifier.of(config.notifications)
        )

        def give_notifiers() -> None:
            services.notifiers = _notifiers(crew)

        give_notifiers()
        crew.on_change(give_notifiers)
        self.agents = await stack.enter_async_context(
            Residents(
                self.calls,
                crew,
                library=self.library,
                folder=config.tools.session_dir or config.state_dir / "sessions",
                max_active=config.server.max_active_agents,
            )
        )

    def _open_embedder(self, stack: AsyncExitStack) -> Embedder | None:
        """Who orders by meaning what `search_knowledge` finds. Without a key, words have to do, as where it is down."""
        said = self.config.embeddings
        if said is None:
            return None
        from toolspace.models.embeddings import open_embedder  # Here: few configure one.

        try:
            embedder = open_embedder(
                said.model,
                environ=self.environ,
                base_url=said.base_url,
                api_key=said.api_key,
                headers=said.headers,
            )
        except ModelError as error:
            _log.warning("embeddings are not in effect: %s", error)
            return None
        stack.push_async_callback(embedder.aclose)
        return embedder

    @property
    def hub(self) -> Hub:
        return self.ledger.hub

    @property
    def waiters(self) -> Waiters:
        return self.ledger.waiters

    def _ledger(self, database: Database, wakeups: WakeUps | None) -> Ledger:
        self.metrics.watch(database)
        return Ledger(database, wakeups)

    async def _keep_something(self) -> None:
        """Raises where nothing can be written. What is small may find room where most does not."""
        self.ledger.database.check_room()
        await self.sweeper.beat()

    def authenticate(self, request: Request) -> Caller | Awaitable[Caller]:
        """Who makes a request. Raises `Problem` where that is not known."""
        return self.authenticator.authenticate(request.scope["headers"], request.address)

    def enter(self, request: Request) -> Callable[[], None]:
        """Lets a request in, or raises `Problem`. The answer is called when it has ended."""
        return self.limits.enter(request.caller, stream=request.route.stream)

    def live(self) -> Live:
        """What is open at this moment."""
        return Live(
            readers=self.ledger.hub.subscriptions,
            streams=self.ledger.hub.streams,
            events=self.ledger.appended,
            workers=self.workers.serving(),
            waiting=self.calls.waiting,
            requests=self.limits.requests,
            agents=self.agents.dispatcher.active,
            cycles=self.agents.dispatcher.cycles,
            models=self.toolspace.crew.spending.models,
        )

    async def drain(self, timeout: float) -> None:
        """Ends what would not end by itself: streams, waiting calls, and after `timeout` seconds what still runs."""
        self.readers.end()
        self.workers.end()
        self.ledger.waiters.wake_all()  # Whoever waits for an inbox sees that it is time to go.
        stopping = asyncio.create_task(self.agents.dispatcher.drain(timeout))
        await self.calls.drain()
        await stopping
        try:
            async with asyncio.timeout(timeout):
                await self.toolspace.orchestrator.settle()
        except TimeoutError:
            self.toolspace.orchestrator.cancel()
            await self.toolspace.orchestrator.settle()


def _notifiers(crew: Crew) -> dict[str, Notifier]:
    """How each agent reaches people, where configuration says so."""
    found = {entity_of(one.name): ConfiguredNotifier.of(one.spec.notifications) for one in crew if one.spec is not None}
    return {entity_id: notifier for entity_id, notifier in found.items() if notifier is not None}
