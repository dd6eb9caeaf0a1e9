"""The gateway: opens the database, the toolspace, the agents and the HTTP application, and closes them in order.

`toolspace serve` and `toolspace chat` open one. It handles no requests itself; `app` does.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Self

from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.agent_host import AgentHost
from toolspace.agents.approved_calls import execute_approved_call
from toolspace.agents.background_tasks import TaskToolProvider
from toolspace.agents.prebuilt.notifications import ConfiguredNotifier
from toolspace.agents.prebuilt.provider import PrebuiltProvider
from toolspace.agents.registry import AgentRegistry
from toolspace.agents.subagent_run_recorder import open_stored_recorder
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config.configuration import AgentSpec, Config
from toolspace.config.find_and_watch import mark_user_state
from toolspace.config.load import load_config
from toolspace.config.secret_references import load_secrets
from toolspace.core.clock import SystemClock
from toolspace.core.language_model import Embedder
from toolspace.core.result import ToolResult
from toolspace.errors import ModelError
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.server.api_keys import InitialKeys, KeyUsage, create_missing_keys
from toolspace.server.authentication import Authenticator
from toolspace.server.authorization import Caller, MembershipCache
from toolspace.server.demo_setup import demo_agent, set_up_demo
from toolspace.server.host_and_cors import API_CORS, MCP_PATHS, CorsMiddleware, HostCheck, allowed_hosts
from toolspace.server.mcp.http_endpoint import McpMount
from toolspace.server.metrics import Metrics
from toolspace.server.process_limits import describe_process_limits
from toolspace.server.rate_limit import RequestLimiter
from toolspace.server.request_reads import RequestReads
from toolspace.server.requests import Request
from toolspace.server.routes import ROUTES
from toolspace.server.routes.health_and_metrics import OpenWorkCounter, Readiness
from toolspace.server.routes.streams import StreamSubscribers
from toolspace.server.routing import App
from toolspace.server.sse_responses import StreamRegistry
from toolspace.server.tool_permissions import ToolKeyPolicy
from toolspace.spaces.approvals import GatewayApprovals
from toolspace.spaces.call_context import AgentServices, GatewayCallHost, Notifier
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.elicitation import ASK_SPACE_MEMBERS
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.quota_counters import StoredQuotas
from toolspace.spaces.runs import OpenRuns
from toolspace.spaces.submission_hooks import SubmissionHooks
from toolspace.spaces.sweeper import Sweeper
from toolspace.spaces.workers import Workers
from toolspace.storage.database import Database, WakeUps, find_database_file
from toolspace.storage.queries import workers_and_presence as presence
from toolspace.storage.queries.approvals import ApprovedCall
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.waiters import Waiters
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server")


class Gateway:
    """All parts of one gateway process. `async with Gateway.open(path) as gateway`.

    `gateway.app` is an ASGI application that works until the block ends.
    """

    first_keys: InitialKeys | None = None
    """The keys that this start created, to be shown once."""
    demo_agent: AgentSpec | None = None
    """The demo agent, if no agent is configured."""
    process_limits_notice: str | None = None
    """Which limits are not shared with the other gateways of the database; None if there are none."""

    def __init__(
        self,
        config: Config,
        *,
        path: Path | None,
        environ: Mapping[str, str],
        system_clock: SystemClock | None = None,
    ) -> None:
        self.config = config
        self._system_clock = system_clock
        self.metrics = Metrics()
        self.limiter = RequestLimiter(config.server)
        self.tool_key_policy = ToolKeyPolicy()
        self._path = path
        self.environ = environ
        self._stack = AsyncExitStack()

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        system_clock: SystemClock | None = None,
    ) -> Self:
        """Creates a gateway from a configuration file, or from the defaults. Raises `ConfigError`.

        `environ`, `system_clock`: None is the environment and the clock of the process.
        """
        environ = os.environ if environ is None else environ
        config_path = Path(path) if path is not None else None
        config = load_config(config_path, environ=environ)
        return cls(config, path=config_path, environ=environ, system_clock=system_clock)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self, stack: AsyncExitStack) -> None:
        if self.config.secret_references:
            await load_secrets(*self.config.list_secret_holders())
            self.config = await asyncio.to_thread(resolve_process_secrets, self.config)
        config, server = self.config, self.config.server
        database, wakeups = await _open_database(config, self._system_clock)
        self.metrics.observe_database(database)
        self.ledger = Ledger(database, wakeups)
        stack.push_async_callback(self.ledger.aclose)  # Closed last.
        self.request_reads = RequestReads(database, timeout=server.read_timeout)
        # Closed after everything that writes: until then this process must send heartbeats.
        self.sweeper = await stack.enter_async_context(
            Sweeper(
                self.ledger,
                worker_grace=server.worker_grace,
                event_retention=server.event_retention,
                retention=server.retention,
            )
        )
        self.readiness = Readiness(
            lambda: self.ledger.read(presence.list_heartbeats, except_node=self.ledger.node_id),
            self._check_writable,
            is_damaged=lambda: database.damage is not None,
        )
        stack.push_async_callback(self.readiness.aclose)
        self.open_work = OpenWorkCounter(self.ledger)
        stack.push_async_callback(self.open_work.aclose)
        self.pending_calls = PendingCalls(
            self.ledger,
            ttl=config.defaults.pending_call_ttl,
            max_per_principal=config.server.max_pending_calls_per_caller,
        )
        self.pending_calls.on_timer_started = self.sweeper.wake
        stack.push_async_callback(self.pending_calls.aclose)
        self.tool_key_policy.pending_calls = self.pending_calls
        self.toolspace = Toolspace.open(self._path, environ=self.environ, callbacks=ASK_SPACE_MEMBERS)
        # Servers that start slowly delay neither the API nor MCP clients, which are notified of their tools.
        self.toolspace.startup_wait = StartupWait(only_required=True)
        self.toolspace.orchestrator.register(PrebuiltProvider())
        self.toolspace.add_local_provider(TaskToolProvider())
        self.tool_key_policy.get_base_context = lambda: self.toolspace.orchestrator.context
        self.tool_key_policy.shares_memory = self.config.tools.memory_scope == "shared"
        self.tool_key_policy.get_spellings = self.toolspace.orchestrator.get_spellings
        self.toolspace.orchestrator.configure(
            permissions=(self.tool_key_policy,), quota_store=StoredQuotas(self.ledger)
        )
        recorder = CallRecorder(self.ledger, self.toolspace.bus)
        stack.push_async_callback(recorder.aclose)
        self.toolspace.orchestrator.add_stage(recorder.stage)
        usage = await stack.enter_async_context(KeyUsage(self.ledger))
        self.toolspace.orchestrator.add_stage(usage.stage)
        await stack.enter_async_context(self.toolspace)
        self.ledger.on_stop_call = self.toolspace.cancel
        self.pending_calls.hooks = self.sweeper.due_calls.hooks = SubmissionHooks(
            self.toolspace.orchestrator.services, self.ledger, self._find_entry
        )
        self.open_runs = OpenRuns(self.ledger, self.toolspace.run)
        stack.push_async_callback(self.open_runs.aclose)
        await self._start_agents(stack)
        self.approvals = self.pending_calls.approvals = GatewayApprovals(self.pending_calls, self._execute_approved)
        stack.push_async_callback(self.approvals.aclose)
        self.workers = await stack.enter_async_context(Workers(self.ledger, grace=server.worker_grace))
        self.subscribers = StreamSubscribers(self.ledger)
        self.sweeper.heartbeats.on_declared_dead = self.subscribers.register_again
        self.memberships = MembershipCache(self.ledger)
        self.streams = StreamRegistry(heartbeat=server.heartbeat)
        stack.push_async_callback(self.streams.aclose)
        # Late, because new keys are shown once: a start that fails before must not create them.
        self.first_keys = await create_missing_keys(self.ledger, server)
        self.authenticator = await Authenticator.open(self.ledger, server)
        stack.push_async_callback(self.authenticator.aclose)
        self.authenticator.on_key_used = usage.record_use
        # Subscribers that lose a permission receive nothing more.
        self.authenticator.on_change(self.streams.recheck_permissions)
        self.memberships.on_change(self.streams.recheck_permissions)
        mcp = await stack.enter_async_context(
            McpMount(
                self.toolspace,
                authenticator=self.authenticator,
                limits=self.limiter,
                tool_keys=self.tool_key_policy,
                server=server,
            )
        )
        app = App(
            self,
            ROUTES,
            mounts=dict.fromkeys(MCP_PATHS, self.metrics.count_requests("/mcp", mcp)),
            max_body=server.max_body_bytes,
            observe=self.metrics.observe,
        )
        check = HostCheck(allowed_hosts(server), server.allowed_origins)
        self.app = CorsMiddleware(app, check, API_CORS, excluded_paths=MCP_PATHS)
        await self._note_process_limits()

    async def _note_process_limits(self) -> None:
        """Says which limits are not shared, if other gateways use the database."""
        connected = await self.ledger.find_connected_processes()
        if connected is not None and connected.count > 1:
            self.process_limits_notice = describe_process_limits(connected.count - 1)
            _log.info("%s", self.process_limits_notice)

    def _find_entry(self, tool: str, agent_entity_id: str | None) -> CatalogEntry | None:
        match = self.toolspace.agents.find_tools(agent_entity_id).explain(tool)
        return match[0] if match is not None else None

    async def _start_agents(self, stack: AsyncExitStack) -> None:
        """Starts the configured agents, or the demo agent."""
        config, agents = self.config, self.toolspace.agents
        agents.open_run_recorder = partial(open_stored_recorder, self.pending_calls)
        self.demo_agent = demo_agent(config, self.environ)
        if self.demo_agent is not None:
            await set_up_demo(self.ledger)
            agents.add([Agent.from_spec(self.demo_agent)])
        self.library = DocumentLibrary(self.ledger, self._open_embedder(stack))
        self.pending_calls.services = services = AgentServices(
            self.library, notifier=ConfiguredNotifier.from_config(config.notifications)
        )

        def update_notifiers() -> None:
            services.notifiers = _create_notifiers(agents)

        update_notifiers()
        agents.on_change(update_notifiers)
        self.agent_host = await stack.enter_async_context(
            AgentHost(
                self.pending_calls,
                agents,
                library=self.library,
                session_dir=config.tools.session_dir or config.state_dir / "sessions",
                max_active=config.server.max_active_agents,
            )
        )

    async def _execute_approved(self, approved_call: ApprovedCall, host: GatewayCallHost) -> ToolResult:
        await self.tool_key_policy.load_key(self.ledger, approved_call.context["userId"])
        return await execute_approved_call(self.toolspace.orchestrator, self.toolspace.agents, approved_call, host)

    def _open_embedder(self, stack: AsyncExitStack) -> Embedder | None:
        """Opens the configured embedder. Without one, `search_knowledge` searches by words alone."""
        settings = self.config.embeddings
        if settings is None:
            return None
        from toolspace.models.embeddings import open_embedder  # Imported here: few configurations have one.

        try:
            embedder = open_embedder(
                settings.model,
                environ=self.environ,
                base_url=settings.base_url,
                api_key=settings.api_key,
                headers=settings.headers,
            )
        except ModelError as error:
            _log.warning("embeddings are disabled; searching by words: %s", error)
            return None
        stack.push_async_callback(embedder.aclose)
        return embedder

    @property
    def hub(self) -> Hub:
        return self.ledger.hub

    @property
    def waiters(self) -> Waiters:
        return self.ledger.waiters

    async def _check_writable(self) -> None:
        """Raises if the database cannot be written. On a nearly full disk a small write may still succeed."""
        self.ledger.database.check_free_space()
        await self.sweeper.heartbeats.send()

    def authenticate(self, request: Request) -> Caller | Awaitable[Caller]:
        """Returns the caller of a request, or an awaitable of it. Raises `Problem` 401, 429 or 503."""
        return self.authenticator.authenticate(request.scope["headers"], request.address)

    def admit(self, request: Request) -> Callable[[], None]:
        """Admits a request and returns a function to call when it has ended. Raises `Problem` 429 or 503."""
        return self.limiter.admit(request.caller, stream=request.route.is_stream)

    async def drain(self, timeout: float) -> None:
        """Ends streams and waiting calls, and cancels calls that still run after `timeout` seconds."""
        self.streams.close_all()
        self.workers.disconnect_all()
        self.ledger.waiters.wake_all()  # Ends long polls of inboxes.
        drain_task = asyncio.create_task(self.agent_host.scheduler.drain(timeout))
        await self.pending_calls.drain()
        await drain_task
        try:
            async with asyncio.timeout(timeout):
                await self.toolspace.orchestrator.wait_until_idle()
        except TimeoutError:
            self.toolspace.orchestrator.cancel()
            await self.toolspace.orchestrator.wait_until_idle()


async def _open_database(config: Config, system_clock: SystemClock | None) -> tuple[Database, WakeUps | None]:
    """Opens SQLite in the state directory, or PostgreSQL if `storage.url` names it. Raises `StorageError`."""
    url = config.storage.url
    file = find_database_file(url, config.state_dir)
    if file is not None:
        from toolspace.storage.sqlite.database import SqliteDatabase

        if config.path is None:
            await asyncio.to_thread(mark_user_state, config.state_dir)
        return await SqliteDatabase.open(file, system_clock=system_clock), None
    from toolspace.storage.postgres.database import PostgresDatabase  # asyncpg is an optional dependency.
    from toolspace.storage.postgres.wakeups import PostgresWakeUps

    assert url is not None
    database = await PostgresDatabase.open(url, system_clock=system_clock)
    try:
        wakeups = await PostgresWakeUps.open(url)
    except BaseException:
        await database.aclose()
        raise
    return database, wakeups


def _create_notifiers(agents: AgentRegistry) -> dict[str, Notifier]:
    """Returns the notifier of each agent that has one configured, by entity id."""
    notifiers = {
        entity_id_for(agent.name): ConfiguredNotifier.from_config(agent.spec.notifications)
        for agent in agents
        if agent.spec is not None
    }
    return {entity_id: notifier for entity_id, notifier in notifiers.items() if notifier is not None}
