"""The composition root: builds a toolspace from tools or from configuration, and owns everything it opened."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import msgspec

from toolspace.config.files import default_state_dir
from toolspace.core import defaults
from toolspace.core.context import ToolContext
from toolspace.core.export import ToolFormat, export_tools
from toolspace.core.function_tool import as_tool
from toolspace.core.interfaces import OutputStore, Policy, ResultCache, TokenCounter, ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.statistics import ToolStats
from toolspace.core.tokens import estimate_tokens
from toolspace.core.tool import Tool
from toolspace.errors import ProviderError, ToolspaceError
from toolspace.orchestrator.call import Arguments, context_without_call
from toolspace.orchestrator.catalog import Catalog, CatalogEntry
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.layered import LayeredOrchestrator
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.orchestrator.queues import QueueSpec
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.settings import CallDefaults, ProviderRules, SourcedValue, ToolRules
from toolspace.providers.internal_tools import InternalProvider
from toolspace.providers.mcp.callbacks import NO_CALLBACKS, McpCallbacks
from toolspace.providers.mcp.status import ServerStatus
from toolspace.providers.plugins import MountedProvider
from toolspace.providers.registry import ToolRegistry
from toolspace.storage.caches.memory import MemoryCache
from toolspace.storage.outputs.disk import DiskOutputs

if TYPE_CHECKING:
    from toolspace.agents.agent import Agent
    from toolspace.agents.agent_request import AgentResult
    from toolspace.agents.registry import AgentRegistry
    from toolspace.composition.parts import ConfiguredParts
    from toolspace.core.model import ModelListener
    from toolspace.providers.mcp.provider import McpProvider

_log = logging.getLogger("toolspace")
_SWEEP_SECONDS = 3600.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What a program sets where there is no configuration file. Durations are seconds."""

    tool_timeout: float = defaults.TOOL_TIMEOUT_SECONDS
    tool_response_max_bytes: int = defaults.TOOL_RESPONSE_MAX_BYTES
    max_tool_calls_per_turn: int | None = None
    max_concurrent_tools: int | None = None
    context_window: int | None = None
    tool_search_threshold: int | None = defaults.TOOL_SEARCH_THRESHOLD
    tool_output_ttl: float = defaults.TOOL_OUTPUT_TTL_SECONDS
    queues: Mapping[str, QueueSpec] = {}
    aliases: Mapping[str, str] = {}
    overrides: Mapping[str, ToolRules] = {}
    policies: Sequence[Policy] = ()
    count_tokens: TokenCounter = estimate_tokens
    state_dir: Path | None = None
    """Where stored outputs are kept; where it is not said, in the user's state folder."""

    def defaults(self) -> CallDefaults:
        fields = CallDefaults.__struct_fields__
        return CallDefaults(**{name: SourcedValue(getattr(self, name), f"Settings.{name}") for name in fields})


class Toolspace:
    """Tools, and one way to call them.

        ts = Toolspace(tools=[add])
        result = await ts.call("add", {"a": 1, "b": 2})

    `async with` starts the providers and closes everything again; a toolspace of functions works without it.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        agents: Iterable[Agent] = (),
        providers: Iterable[ToolProvider] = (),
        context: ToolContext | None = None,
        settings: Settings | None = None,
        cache: ResultCache | None = None,
        outputs: OutputStore | None = None,
        parent: Toolspace | None = None,
    ) -> None:
        """`below`: another toolspace, whose tools are here too, except those whose names are taken here."""
        settings = settings or Settings()
        state_dir = settings.state_dir or default_state_dir()
        self._cache = cache or MemoryCache()
        self._parent = parent
        self._hides_builtins = False
        self._parts: ConfiguredParts | None = None
        if parent is None:
            self._outputs = outputs or DiskOutputs(
                state_dir / "outputs", ttl=settings.tool_output_ttl, count_tokens=settings.count_tokens
            )
            self.orchestrator = ToolOrchestrator(
                context=context,
                defaults=settings.defaults(),
                queues=settings.queues,
                cache=self._cache,
                outputs=self._outputs,
                policies=settings.policies,
                count_tokens=settings.count_tokens,
            )
        else:
            self._outputs = parent._outputs
            self.orchestrator = LayeredOrchestrator(
                parent.orchestrator, context=context, queues=settings.queues, cache=self._cache, is_hidden=self._hides
            )
        self.registry = ToolRegistry(tools, stats=self.orchestrator.call_log.stats)
        self._builtins = ToolRegistry(kind="builtin", stats=self.orchestrator.call_log.stats)
        self._internal = InternalProvider(
            search=self.orchestrator.search,
            outputs=self._outputs,
            has_stored_output=self.orchestrator.stored_sessions.__contains__,
        )
        self._agents: AgentRegistry | None = None
        self._configured: Sequence[Agent] = ()
        self._listens = False
        """Whether SIGHUP comes here."""
        self.config_path: Path | None = None
        self._environ: Mapping[str, str] = os.environ
        self.startup_wait = StartupWait()
        """How long `async with` waits for providers that start slowly."""
        self.state_dir = state_dir
        self._callbacks = NO_CALLBACKS
        self._background: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        """What closes providers that a reload took out. Never cancelled: it has to finish."""
        local = ProviderRules(overrides=settings.overrides)
        self.orchestrator.register(self._builtins, local)
        self.orchestrator.register(self.registry, local)
        self.orchestrator.register(self._internal)
        for provider in providers:
            self.orchestrator.register(provider)
        if parent is None or settings.aliases:
            self.orchestrator.configure(aliases=settings.aliases)
        if agents := tuple(agents):
            self.agents.add(agents)

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
        session: str | None = None,
        callbacks: McpCallbacks = NO_CALLBACKS,
        single_tool: str | None = None,
    ) -> Self:
        """A toolspace from a configuration file; from the built-ins alone where no path is given.

        Use it with `async with`. Raises `ConfigError` with every fault of the file. `callbacks` answer what MCP
        servers ask while they work. `only_for` names the one tool that is to be called: servers and services that
        it cannot need are left out, unless they are required.
        """
        from toolspace.composition.parts import build_parts  # Here: a toolspace of functions needs no configuration.
        from toolspace.config.load import load_config

        def call_agent(*asked: Any) -> Any:
            return self._call_agent(*asked)

        config = load_config(Path(path) if path is not None else None, environ=environ)
        parts = build_parts(config, callbacks=callbacks, single_tool=single_tool, call_agent=call_agent)
        cache: ResultCache | None = None
        if config.storage.cache == "disk":
            from toolspace.storage.caches.sqlite import SqliteCache  # SQLite only where it is asked for.

            cache = SqliteCache(config.state_dir / "cache.db")
        parts.context.session_id = session
        self = cls(
            context=parts.context,
            settings=Settings(tool_output_ttl=config.defaults.tool_output_ttl, state_dir=config.state_dir),
            cache=cache,
        )
        self._internal.always_offered = True
        self.config_path = Path(path) if path is not None else None
        self._environ = environ
        self._callbacks = callbacks
        self._apply(parts)
        return self

    async def __aenter__(self) -> Self:
        if self.orchestrator.closed:
            raise ToolspaceError("this toolspace was closed; make a new one")
        try:
            await self.orchestrator.warmup(wait=self.startup_wait)
        except BaseException:
            await self.aclose()
            raise
        if self._parent is not None:
            return self
        self._own(self._sweep())
        try:
            self.orchestrator.stored_sessions.update(await self._outputs.sessions())
        except OSError as error:
            _log.warning("stored outputs cannot be read: %s", error)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops what runs, and closes what was opened."""
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        for task in tuple(self._background):
            task.cancel()
        if self._closing:
            self.orchestrator.cancel()  # They wait for the last calls to end.
        await asyncio.gather(*self._background, *self._closing, return_exceptions=True)
        if self._agents is not None:
            self.orchestrator.cancel()  # Before what agents work with is closed under them.
            await self._agents.aclose()
        await self.orchestrator.cleanup()
        if self._parts is not None and self._parts.client is not None:
            await self._parts.client.aclose()
        await self._cache.aclose()
        if self._parent is None:
            await self._outputs.aclose()

    # Calls

    def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        run: Run | None = None,
        call_id: str | None = None,
    ) -> Coroutine[Any, Any, ToolResult]:
        """Runs one tool. `arguments` is a mapping, or the JSON text that a model sent."""
        return self.orchestrator.execute(name, arguments, context=context, run=run, call_id=call_id)

    def cancel(self, call_id: str) -> bool:
        """Stops a call and everything below it. Whether it was running."""
        return self.orchestrator.cancel(call_id)

    def run(self, **options: Any) -> Run:
        """A run: calls with limits, a budget, a deadline and a trace of their own. See `Run` for the options."""
        return self.orchestrator.run(**options)

    # Agents

    @property
    def agents(self) -> AgentRegistry:
        """The agents. Each is a tool too, `agent__{name}`."""
        if self._agents is None:
            from toolspace.agents.registry import AgentRegistry
            from toolspace.agents.subagents import (
                AgentProvider,  # Here: most toolspaces have no agents.
                RouterProvider,
            )

            crew = AgentRegistry(self.orchestrator, make_tools=self._tools_of, environ=self._environ)
            self.orchestrator.register(AgentProvider(crew), needs_start=False)
            self.orchestrator.register(RouterProvider(), needs_start=False)
            self._agents = crew
        return self._agents

    async def run_agent(
        self,
        name: str,
        prompt: str,
        *,
        context: ToolContext | None = None,
        listen: ModelListener | None = None,
        max_steps: int | None = None,
    ) -> AgentResult:
        """Has an agent answer. What goes wrong is in the result; raises only where there is no such agent.

        `listen` hears the model write. An agent that hands the request on is followed: `result.agent` answered.
        """
        from toolspace.agents.agent_request import run_agent

        return await run_agent(self.agents, name, prompt, context=context, listen=listen, max_steps=max_steps)

    def _tools_of(self, agent: Agent) -> Toolspace:
        """A toolspace that is one agent's alone, above this one."""
        own = Toolspace(agent.tools, parent=self, settings=Settings(state_dir=self.state_dir))
        own._callbacks = self._callbacks
        own._configure_for(agent)
        return own

    async def renew(self, agent: Agent) -> None:
        """For the toolspace that is one agent's alone: the agent is described otherwise now."""
        self._configure_for(agent)
        await self._finish_reload()

    def _configure_for(self, agent: Agent) -> None:
        config = agent.spec.config if agent.spec is not None else None
        if config is None or self._parent is None:
            return
        from toolspace.composition.parts import build_parts

        before = self._parts
        parts = build_parts(
            config,
            before.providers if before is not None else None,
            self._callbacks,
            client=before.client if before is not None else None,
            call_agent=self._parent._call_agent,
        )
        for warning in parts.warnings:
            _log.warning('the agent "%s": %s', agent.name, warning)
        parts.context.session_id = self._parent.orchestrator.context.session_id
        self._hides_builtins = bool(parts.builtins) or ("tools", "builtins") in config.origins
        self._apply(parts)

    def _hides(self, entry: CatalogEntry) -> bool:
        """Whether a tool below is not here: configuration says so, or there are others of its kind."""
        kind, parts = entry.provider.kind, self._parts
        if kind == "builtin" and self._hides_builtins:
            return True
        if parts is None or kind not in ("local", "builtin", "task"):
            return False
        return parts.rules.denial_reason(entry.local_name, entry.tool.name) is not None

    def _call_agent(
        self, name: str, parameters: Mapping[str, Any], context: ToolContext, task: str
    ) -> Coroutine[Any, Any, ToolResult]:
        from toolspace.agents.subagents import call_agent

        return call_agent(self.agents, name, parameters, context, task=task)

    # Tools

    def add_tool(self, tool: Tool | Callable[..., Any]) -> Tool:
        """Adds a tool, or a function as one, from now on. A name that is taken is an error."""
        made = as_tool(tool)
        self.orchestrator.check_name_available(self.registry, made.name)
        return self.registry.register(made)

    def remove_tool(self, name: str) -> Tool:
        return self.registry.unregister(name)

    async def add_provider(self, provider: ToolProvider, rules: ProviderRules | None = None) -> None:
        """Adds a provider and gets it ready."""
        self.orchestrator.register(provider, rules)
        await self.orchestrator.warmup()

    def list_tools(self, *, context: ToolContext | None = None) -> list[Tool]:
        return self.orchestrator.list_tools(context=context)

    def find_tool(self, name: str) -> Tool | None:
        """The tool that a name means, or None."""
        return self.orchestrator.find(name)

    def to_llm_tools(self, format: ToolFormat = "openai", *, run: Run | None = None) -> list[dict[str, Any]]:
        """What to show a model: the definitions, or a search tool and its finds where all would cost too much."""
        return export_tools(self.orchestrator.tools_for_model(run), format)

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        return self.orchestrator.search(query, limit)

    # MCP servers

    def list_servers(self) -> list[ServerStatus]:
        """How each MCP server is."""
        return [status() for status, _ in self._servers().values()]

    async def restart_server(self, name: str) -> ServerStatus:
        """Stops one MCP server and starts it again. Raises where there is none of that name, or it does not start."""
        servers = self._servers()
        if name not in servers:
            known = did_you_mean(name, servers) or ("; there is none" if not servers else "")
            raise ToolspaceError(f'there is no MCP server "{name}"{known}')
        status, restart = servers[name]
        await restart()
        return status()

    def _servers(self) -> dict[str, tuple[Callable[[], ServerStatus], Callable[[], Awaitable[None]]]]:
        found: dict[str, tuple[Callable[[], ServerStatus], Callable[[], Awaitable[None]]]] = {}
        for provider in self.orchestrator.providers:
            inner = provider.inner if isinstance(provider, MountedProvider) else provider
            # Asked for by its kind: its class comes with the MCP library, which is slow to import.
            if inner.kind == "mcp":
                server = cast("McpProvider", inner)
                found[server.namespace] = server.status, server.restart
        return found

    # Books

    @property
    def bus(self) -> EventBus:
        return self.orchestrator.bus

    @property
    def outputs(self) -> OutputStore:
        """Where results that are too large are kept."""
        return self._outputs

    def get_stats(self) -> ToolStats:
        return self.orchestrator.get_stats()

    @property
    def warnings(self) -> Sequence[str]:
        """What configuration asks for in vain."""
        return self._parts.warnings if self._parts is not None else ()

    # Configuration

    async def reload(self) -> None:
        """Reads the configuration again and applies what changed. Where it is wrong, nothing changes.

        Waits until new providers have started, or are known not to; one that does not start is tried again in the
        background, even if it is required. Providers that are gone are closed behind it, after their last call.
        """
        self._reload()
        await self._finish_reload()

    def _reload(self) -> None:
        if self._parts is None:
            raise ToolspaceError("this toolspace was made without configuration; there is nothing to reload")
        from toolspace.composition.parts import build_parts
        from toolspace.config.load import load_config

        config = load_config(self.config_path, environ=self._environ)
        parts = build_parts(
            config, self._parts.providers, self._callbacks, client=self._parts.client, call_agent=self._call_agent
        )
        parts.context.session_id = self.orchestrator.context.session_id
        self._apply(parts)

    def watch(self, *, interval: float = 1.0) -> None:
        """Reloads by itself whenever a file of the configuration changes, and on SIGHUP."""
        from toolspace.config.files import watch_files

        # Looked at now, not when the task first runs: no change may fall in between.
        self._own(self._reload_on(watch_files(self._files, interval=interval)))
        with suppress(AttributeError, NotImplementedError, RuntimeError, ValueError):  # Not here, or not this thread.
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload_now)
            self._listens = True

    def _files(self) -> Sequence[Path]:
        return self._parts.files() if self._parts is not None else ()

    def _apply(self, parts: ConfiguredParts) -> None:
        before = self._parts
        old = [mount.provider for mount in before.providers.values()] if before is not None else []
        configured = [*before.functions, *before.definitions] if before is not None else []
        local = [*parts.functions, *parts.definitions]
        local += [tool for tool in self.registry.list() if tool not in configured]  # Added by the program: they stay.
        mounts = {mount.provider: mount.rules for mount in parts.providers.values()}
        replaced = (self._builtins, self.registry, self._borrowed, *old)
        others = [provider for provider in self.orchestrator.providers if provider not in replaced]
        # Checked as a whole before anything is replaced: a conflict must leave the old tools in place.
        _check_names([ToolRegistry([*parts.builtins, *local]), *others, *mounts])
        self._apply_agents(parts)
        starting = before is None
        self._parts = parts
        gone = [provider for provider in old if provider not in mounts]
        for provider in gone:
            provider.retire()
        self._builtins.replace_all(())
        self.registry.replace_all(local)
        self._builtins.replace_all(parts.builtins)
        for provider, rules in mounts.items():
            if provider not in old:
                # What runs already is not to be stopped by a provider that does not start.
                once = rules if starting else msgspec.structs.replace(rules, required=False)
                self.orchestrator.register(provider, once)
        self.orchestrator.configure(
            defaults=parts.defaults,
            queues=parts.queues,
            aliases=parts.aliases,
            context=parts.context,
            rules={self.registry: parts.rules, self._builtins: parts.rules, **mounts},
        )
        for provider in gone:
            self._own(self._close_after_calls(provider), self._closing)

    @property
    def _borrowed(self) -> ToolProvider | None:
        return self.orchestrator.inherited_tools if isinstance(self.orchestrator, LayeredOrchestrator) else None

    def _apply_agents(self, parts: ConfiguredParts) -> None:
        if self._parent is None and (parts.agents or self._agents is not None):
            from toolspace.agents.agent import Agent

            added = [agent for agent in self.agents if agent not in self._configured]  # By the program: they stay.
            configured = [Agent.from_spec(spec) for spec in parts.agents]
            self.agents.replace([*added, *configured])
            self._configured = configured

    async def _finish_reload(self) -> None:
        try:
            await self._cache.clear()  # What was answered before may be another tool's answer now.
        except Exception as error:  # Whatever a broken cache raises: it must not keep new providers from starting.
            _log.warning("the cache could not be cleared: %r", error)
        if self._agents is not None:
            await self._agents.reload()
        await self.orchestrator.warmup()

    async def _reload_on(self, changes: AsyncIterator[None]) -> None:
        async for _ in changes:
            self._reload_now()

    def _reload_now(self) -> None:
        try:
            self._reload()
            _log.info("the configuration was reloaded")
            self._own(self._finish_reload())  # Beside it: a provider that hangs must not keep later changes out.
        except ToolspaceError as error:
            _log.warning("the changed configuration is wrong, the old one stays in force: %s", error)
        except Exception:  # Whatever it is, the next change may mend it, and has to be heard.
            _log.exception("the changed configuration could not be applied")

    async def _close_after_calls(self, provider: ToolProvider) -> None:
        """Closes a provider that offers nothing any more, once the calls that were under way have ended."""
        # Of all calls, not only its own: a tool may call others, and closing can wait.
        await self.orchestrator.wait_until_idle()
        try:
            await self.orchestrator.unregister(provider)
        except Exception:
            _log.exception("provider %s did not close", provider.namespace or provider.kind)

    async def _sweep(self) -> None:
        while True:
            await self._sweep_once()
            await asyncio.sleep(_SWEEP_SECONDS)

    async def _sweep_once(self) -> None:
        known = frozenset(self.orchestrator.stored_sessions)
        try:
            await self._outputs.sweep()
            left = await self._outputs.sessions()
        except OSError as error:
            _log.warning("stored outputs could not be swept: %s", error)
        else:
            self.orchestrator.stored_sessions.difference_update(known.difference(left))

    def _own(self, work: Any, owned: set[asyncio.Task[None]] | None = None) -> None:
        owned = self._background if owned is None else owned
        # Outside any call: a tool may ask for a reload, and what that does is not a part of its call.
        task = asyncio.get_running_loop().create_task(work, context=context_without_call())
        owned.add(task)
        task.add_done_callback(owned.discard)


def _check_names(providers: Iterable[ToolProvider]) -> None:
    """Raises where two of them offer one name, or one cannot say what it offers."""
    catalog = Catalog(lambda _: None)
    try:
        for provider in providers:
            try:
                catalog.add(provider, ProviderRules())
            except ToolspaceError:
                raise
            except Exception as error:  # Another's code: what it raises must not end whoever reloads.
                name = provider.namespace or provider.kind
                raise ProviderError(f"provider {name} cannot list its tools: {error!r}") from error
    finally:
        for provider in catalog.providers:
            catalog.remove(provider)
