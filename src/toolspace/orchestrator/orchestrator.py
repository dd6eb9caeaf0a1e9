"""Runs every call: finds the tool, sends the call through its stages, and can stop it. Knows no HTTP, no files."""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from time import perf_counter, time
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.events import CallEvent, ToolsChanged
from toolspace.core.interfaces import OutputStore, Policy, ResultCache, TokenCounter, ToolProvider
from toolspace.core.names import SEPARATOR, sanitise
from toolspace.core.result import ToolResult
from toolspace.core.statistics import StatsCollector, ToolStats
from toolspace.core.tokens import estimate_tokens
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind
from toolspace.orchestrator import call as calls
from toolspace.orchestrator import deadline
from toolspace.orchestrator.call import Arguments, Call, call_chain, current_call
from toolspace.orchestrator.call_log import CallLog
from toolspace.orchestrator.catalog import AmbiguousName, Catalog, CatalogEntry
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.pipeline import STAGES, compile_handler, compile_instant
from toolspace.orchestrator.provider_startup import ProviderStartup, StartupWait
from toolspace.orchestrator.queues import QueueRegistry, QueueSpec
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.settings import CallDefaults, EffectiveSettings, ProviderRules, resolve_settings
from toolspace.orchestrator.stage import CallHandler, CallServices, Stage, StageContext
from toolspace.orchestrator.stages.announce import announce
from toolspace.orchestrator.stages.record import record
from toolspace.orchestrator.tool_listing import (
    TokenCosts,
    close_provider,
    get_instructions,
    is_offered,
    is_permitted,
    safe_token_counter,
    visible_tools,
)
from toolspace.orchestrator.tool_search import ToolIndex
from toolspace.orchestrator.worker_threads import WorkerThreads

_log = logging.getLogger("toolspace.orchestrator")
FIND_TOOLS = "agent__find_tools"


class ToolOrchestrator:
    """Every call takes one way. What it needs is given to it; it closes only what was registered with it."""

    def __init__(
        self,
        *,
        context: ToolContext | None = None,
        defaults: CallDefaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        cache: ResultCache | None = None,
        outputs: OutputStore | None = None,
        policies: Sequence[Policy] = (),
        stats: StatsCollector | None = None,
        count_tokens: TokenCounter = estimate_tokens,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        count_tokens = safe_token_counter(count_tokens)
        self.context = context or ToolContext()
        self.bus = EventBus()
        self.session = self.context.session_id or f"session-{os.urandom(8).hex()}"
        self._services = CallServices(
            bus=self.bus,
            call_log=CallLog(count_tokens=count_tokens, stats=stats),
            queues=QueueRegistry(dict(queues or {})),
            threads=WorkerThreads(),
            count_tokens=count_tokens,
            cache=cache,
            outputs=outputs,
            policies=policies,
            defaults=defaults or CallDefaults(),
        )
        self.stored_sessions: set[str] = set()
        """The sessions that have an output to read back."""
        self._stages = tuple(stages)
        self._outer_stages: tuple[Stage, ...] = ()
        self._layers: weakref.WeakSet[ToolOrchestrator] = weakref.WeakSet()
        """Those that have tools of their own above the ones here."""
        self._run_listeners: tuple[Callable[[Run], None], ...] = ()
        self._catalog = Catalog(self._list_changed)
        self._startup = ProviderStartup(self._provider_started)
        self._active: dict[Call, None] = {}
        self._idle_waiters: set[asyncio.Future[None]] = set()
        self._closed_providers: set[ToolProvider] = set()
        self.closed = False
        self._costs = TokenCosts(count_tokens)
        self._index: tuple[int, ToolIndex] | None = None

    # Providers and their tools

    def register(self, provider: ToolProvider, rules: ProviderRules | None = None, *, needs_start: bool = True) -> None:
        """Takes a provider's tools in, under the rules that configuration gives it."""
        rules = rules or ProviderRules()
        self._catalog.add(provider, rules)
        if needs_start:
            self._startup.add(provider, required=rules.required)

    def check_name_available(self, provider: ToolProvider, name: str) -> None:
        """Raises where another provider than this offers a tool under that name."""
        self._catalog.check_names_available(provider, (name,))

    async def unregister(self, provider: ToolProvider) -> None:
        """Takes a provider out and closes it. Calls in flight end as they end."""
        self._catalog.remove(provider)
        await self._startup.remove(provider)
        await provider.aclose()

    async def warmup(self, *, wait: StartupWait | None = None) -> None:
        """Gets all providers ready, side by side. Only one that is required can fail it.

        Those that take longer than the patience lasts go on beside it, and are ready when they are.
        """
        await self._startup.start(wait)

    @property
    def root(self) -> ToolOrchestrator:
        """The one that it stands above, at last; itself where it stands above none."""
        return self

    @property
    def providers(self) -> list[ToolProvider]:
        return self._catalog.providers

    def unavailable_providers(self) -> dict[str, str]:
        """Namespace → why its provider is not ready."""
        return {provider.namespace or provider.kind: reason for provider, reason in self._startup.failures.items()}

    def entries(self) -> Iterator[CatalogEntry]:
        """What may be used: each tool with its provider and its rules."""
        return iter(self._catalog)

    def is_offered(self, name: str, context: ToolContext) -> bool:
        """Whether the provider of a tool shows it to this caller now."""
        entry = self._catalog.entries.get(name)
        return entry is not None and is_offered(entry, context)

    def list_tools(self, *, context: ToolContext | None = None) -> list[Tool]:
        """The tools that this caller may use now."""
        caller = self._context(context)
        policies = self._services.policies
        return [
            entry.tool
            for entry in self._catalog
            if is_offered(entry, caller) and (not policies or is_permitted(entry.tool, caller, policies))
        ]

    def tools_for_model(self, run: Run | None = None, *, context: ToolContext | None = None) -> list[Tool]:
        """What to show a model: all tools, or a search tool and its finds where all would cost too much."""
        caller = self._context(context or (run.context if run is not None else None))
        if run is not None:
            caller = caller.bind(_nobody, run_id=run.id, session_id=run.session)
        entry = self._catalog.entries.get(FIND_TOOLS)
        tools = self.list_tools(context=caller)
        if run is not None and run.policy is not None:
            tools = [tool for tool in tools if is_permitted(tool, caller, (run.policy,))]
        return visible_tools(
            tools,
            self._costs,
            threshold=self._services.defaults.tool_search_threshold.value,
            search_tool=entry.tool if entry is not None else None,
            discovered=run.discovered_tools if run is not None else (),
        )

    @property
    def revision(self) -> int:
        """Another number whenever the tools are others: what was made of them before does not hold any more."""
        return self._catalog.version

    def token_cost(self, tool: Tool) -> int:
        """How many tokens the definition of a tool costs a model."""
        return self._costs.get(tool)

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """The tools that fit a description of what to do, best first."""
        if self._index is None or self._index[0] != self._catalog.version:
            self._index = (self._catalog.version, ToolIndex(entry.tool for entry in self._catalog))
        return self._index[1].search(query, limit)

    def find(self, name: str) -> Tool | None:
        """The tool that a name means, or None."""
        entry = self._find(name, None, calling=False)
        return entry.tool if entry.is_registered else None

    def explain(self, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
        """What holds for a tool, and what set it."""
        entry = self._find(name, None, calling=False)
        if not entry.is_registered:
            return None
        return entry, resolve_settings(entry.tool, entry.local_name, entry.rules, self._services.defaults)

    def instructions(self, *, context: ToolContext | None = None) -> str:
        """What the providers want a model to know, for the system prompt; of those whose tools the caller may use."""
        texts = {provider: text for provider in self._instruction_providers() if (text := get_instructions(provider))}
        if texts and context is not None and (policies := self._services.policies):
            caller = self._context(context)
            own = {entry.provider for entry in self._catalog if is_permitted(entry.tool, caller, policies)}
            texts = {provider: text for provider, text in texts.items() if provider in own}
        return "\n\n".join(f"## {one.namespace}\n{text}" if one.namespace else text for one, text in texts.items())

    def _instruction_providers(self) -> list[ToolProvider]:
        """The providers whose tools are here."""
        return self.providers

    # Calls

    async def execute(
        self,
        name: str,
        parameters: Arguments = None,
        *,
        context: ToolContext | None = None,
        run: Run | None = None,
        call_id: str | None = None,
        defer_completion: bool = False,
    ) -> ToolResult:
        """Runs one call and returns how it ended. Raises only if the caller itself is cancelled.

        With `defer_completion` the end is announced by `emit_completion`, once the caller has updated its own state.
        """
        parent = current_call.get()
        if parent is not None:
            if parent.owner is self:
                run = run or parent.run
            elif run is None or parent.owner.root is not self.root:
                parent = None  # Of another toolspace, which knows nothing of this one's limits.
        entry = self._catalog.entries.get(name)
        if entry is None:
            entry = self._find(name, parameters)
            # Where its provider is still at its first start, what it will offer is not known yet.
            if not entry.is_registered and await self._wait_for_start(name):
                entry = self._find(name, parameters)
        if run is not None and run.context is not None and (context or parent is None or parent.run is not run):
            context = run.context if context is None or context is run.context else context.with_defaults(run.context)
        if context is not None:
            base = context.with_defaults(self.context)
        else:
            base = self.context if parent is None else parent.base_context
        call = Call(
            call_id or next(calls.call_ids),
            entry,
            name,
            parameters,
            base,
            self,
            run,
            parent,
            perf_counter(),
            time() * 1000,
        )
        if defer_completion:
            call.defers_completion = True
        if run is None:
            if entry.instant_handler is not None and (result := entry.instant_handler(call)) is not None:
                return result
            handler = entry.handler or self._compile(entry, in_run=False)
        else:
            handler = entry.run_handler or self._compile(entry, in_run=True)
        token = current_call.set(call)
        try:
            return await handler(call)
        finally:
            if call.task is not None:
                self._untrack(call)
            try:  # noqa: SIM105 - it runs on every call, and `suppress` costs
                current_call.reset(token)
            except ValueError:
                pass  # Collected with a loop that was closed around it: this is another context.

    def track(self, call: Call, /) -> None:
        """A call is about to wait: from now on `cancel` finds it."""
        self._active[call] = None
        if call.run is not None:
            call.run.track(call)

    def _untrack(self, call: Call) -> None:
        call.is_over = True
        call.withdraw_cancellation()
        del self._active[call]
        if call.run is not None:
            call.run.untrack(call)
        for waiting in tuple(self._idle_waiters):
            waiting.get_loop().call_soon_threadsafe(_wake, waiting)

    def cancel(self, call_id: str | None = None) -> bool:
        """Stops one call and what is below it, or all of them. Whether there was anything to stop."""
        calls = [
            call
            for call in {**self._active, **dict.fromkeys(call_chain())}
            if call.owner is self and (call_id is None or any(one.id == call_id for one in call_chain(call)))
        ]
        for call in calls:
            call.cancel()
        above = [one.cancel(call_id) for one in tuple(self._layers)]
        return bool(calls) or any(above)

    async def wait_until_idle(self) -> None:
        """Waits until the calls that are under way now have ended; not for those that the code around is part of."""
        own = set(call_chain())
        calls = {call for call in self._active if call not in own and not _is_dead(call)}
        while calls & self._active.keys():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle_waiters.add(waiting)
            try:
                await waiting
            finally:
                self._idle_waiters.discard(waiting)

    def emit_completion(self, call: ToolResult | str) -> bool:
        """Announces the end of a call that was run with `defer_completion`. Once: the second time is nothing."""
        event: CallEvent | None = self._services.deferred_completions.pop(
            call if isinstance(call, str) else call.call_id, None
        )
        if event is None:
            return False
        self.bus.emit(event)
        return True

    def run(self, **options: Any) -> Run:
        """A run, bounded as configuration says unless the options say otherwise."""
        defaults = self._services.defaults
        options.setdefault("max_tool_calls_per_turn", defaults.max_tool_calls_per_turn.value)
        options.setdefault("max_concurrent_tools", defaults.max_concurrent_tools.value)
        options.setdefault("context_window", defaults.context_window.value)
        parent = current_call.get()
        child = Run(self, parent=parent, **options)
        if parent is not None and parent.span is not None:
            parent.span.add_child(child.trace)
        for listener in self.root._run_listeners:
            listener(child)
        return child

    # Books

    @property
    def call_log(self) -> CallLog:
        return self._services.call_log

    @property
    def active_call_ids(self) -> list[str]:
        """The ids of the calls that are running."""
        return [call.id for call in self._active]

    @property
    def abandoned_count(self) -> int:
        """Threads that still run a call nobody waits for, and coroutines that had to be closed by force."""
        return self._services.threads.abandoned + self._services.killed_count

    def get_stats(self) -> ToolStats:
        return self._services.call_log.stats.summary(entry.tool for entry in self._catalog)

    # Observers

    def add_stage(self, stage: Stage) -> Callable[[], None]:
        """Puts a stage around every call from now on, just inside the outermost. The answer takes it out again."""
        self._set_outer_stages((*self._outer_stages, stage))
        return lambda: self._set_outer_stages([one for one in self._outer_stages if one is not stage])

    def on_run(self, listener: Callable[[Run], None]) -> Callable[[], None]:
        """Tells of every run that is made. The answer takes the request back."""
        self._run_listeners = (*self._run_listeners, listener)

        def forget() -> None:
            self._run_listeners = tuple(one for one in self._run_listeners if one is not listener)

        return forget

    def _set_outer_stages(self, stages: Sequence[Stage]) -> None:
        self._outer_stages = tuple(stages)
        for above in tuple(self._layers):
            above._set_outer_stages(stages)
        for entry in self._catalog.entries.values():  # Compiled anew on the next call; calls in flight keep theirs.
            entry.handler = entry.run_handler = entry.instant_handler = None

    # Settings and end

    def configure(
        self,
        *,
        defaults: CallDefaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        aliases: Mapping[str, str] | None = None,
        rules: Mapping[ToolProvider, ProviderRules] | None = None,
        context: ToolContext | None = None,
        policies: Sequence[Policy] | None = None,
    ) -> None:
        """Puts new settings in force. Calls in flight finish under the old ones: their handlers are kept."""
        services = self._services
        if defaults is not None:
            for above in tuple(self._layers):
                if above._services.defaults is services.defaults:  # It has none of its own.
                    above.configure(defaults=defaults)
            services.defaults = defaults
        if queues is not None:
            services.queues.configure(dict(queues))
        if aliases is not None:
            self._catalog.aliases = dict(aliases)
        if context is not None:
            self.context = context
        if policies is not None:
            services.policies = policies
            for above in tuple(self._layers):
                above.configure(policies=policies)
        self._catalog.configure(rules or {})

    async def cleanup(self) -> None:
        """Stops all calls, tells everyone who waits, and closes the providers."""
        self.cancel()
        self.closed = True
        self._catalog.close()
        try:
            async with asyncio.timeout(deadline.GRACE_SECONDS + 1):
                await self.wait_until_idle()
        except TimeoutError:
            _log.warning("calls that do not end are left behind: %s", ", ".join(self.active_call_ids))
        await self._startup.aclose()
        for call_id in list(self._services.deferred_completions):
            self.emit_completion(call_id)
        providers = [provider for provider in self._catalog.providers if provider not in self._closed_providers]
        self._closed_providers.update(providers)  # Each is closed once, however often this is called.
        await asyncio.gather(*map(close_provider, providers))
        await self._close_services()

    async def _close_services(self) -> None:
        await self.bus.aclose()
        self._services.threads.close()

    # Inside

    def _context(self, context: ToolContext | None) -> ToolContext:
        caller = self.context if context is None else context.with_defaults(self.context)
        if caller.session_id is None:
            caller = caller.bind(_nobody, run_id=caller.run_id, session_id=self.session)
        return caller

    @property
    def policies(self) -> Sequence[Policy]:
        """Who may call what, beside the rules of providers."""
        return self._services.policies

    def _find(self, name: str, arguments: Arguments, *, calling: bool = True) -> CatalogEntry:
        """The entry that a name means; where it means none, one that says so when it is called."""
        name = str(name)
        if self.closed:
            return self._missing(name, "canceled", "the toolspace is closed")
        try:
            entry = self._catalog.entries.get(name) or self._catalog.resolve(name, arguments, is_call=calling)
        except AmbiguousName as several:
            names = tuple(several.names)
            return self._missing(name, "unknown_tool", partial(self._ambiguous, name, names))
        if entry is not None:
            return entry
        for provider, reason in self._unavailable_reasons().items():
            if provider.namespace and sanitise(name).startswith(sanitise(provider.namespace) + SEPARATOR):
                text = f'provider "{provider.namespace}" is not available: {reason}'
                return self._missing(name, "transport_error", partial(self._unavailable, name, text))
        return self._missing(name, "unknown_tool", partial(self._not_found, name))

    def _unavailable_reasons(self) -> Mapping[ToolProvider, str]:
        return self._startup.reasons()

    async def _wait_for_start(self, name: str) -> bool:
        return await self._startup.wait_for_first_start(name)

    def _not_found(self, name: str, call: Call) -> str:
        return self._catalog.not_found_message(name, self._may_know(self._catalog, call))

    def _ambiguous(self, name: str, meant: Sequence[str], call: Call) -> str:
        entries = self._catalog.entries
        known = [f'"{one}"' for one in self._may_know((entries[one] for one in meant if one in entries), call)]
        if not known:
            return self._not_found(name, call)
        return f'Tool "{name}" not found: it could mean {", ".join(known)}; say which'

    def _unavailable(self, name: str, reason: str, call: Call) -> str:
        may = is_permitted(Tool(name), call.base_context, self._services.policies)
        return reason if may else self._not_found(name, call)

    def _may_know(self, entries: Iterable[CatalogEntry], call: Call) -> Iterable[str]:
        """The names that this caller may hear of: what it may not use is not proposed to it either."""
        policies = self._services.policies
        return (
            entry.tool.name
            for entry in entries
            if not policies or is_permitted(entry.tool, call.base_context, policies)
        )

    def _missing(self, name: str, kind: ErrorKind, message: str | Callable[[Call], str]) -> CatalogEntry:
        entry = CatalogEntry(Tool(name), name, _nowhere, _no_rules, is_registered=False)
        entry.handler = entry.run_handler = self._refusing(entry, kind, message)
        return entry

    def _refusing(self, entry: CatalogEntry, kind: ErrorKind, message: str | Callable[[Call], str]) -> CallHandler:
        """Only says no; but a refused call is recorded and announced like any other."""

        async def refuse(call: Call) -> ToolResult:
            return call.fail(kind, message if isinstance(message, str) else message(call), executed=False)

        settings = resolve_settings(entry.tool, entry.local_name, entry.rules, self._services.defaults)
        plan = StageContext(entry, settings, self._services, in_run=True)
        handler = record(plan, refuse)
        for stage in reversed(self._outer_stages):
            handler = stage(plan, handler)
        return announce(plan, handler)

    def _compile(self, entry: CatalogEntry, *, in_run: bool) -> CallHandler:
        try:
            stages = (*self._stages[:1], *self._outer_stages, *self._stages[1:])
            handler = compile_handler(entry, self._services, in_run=in_run, stages=stages)
        except Exception as error:
            return self._refusing(entry, "internal_error", f"{error}")
        if in_run:
            entry.run_handler = handler
        else:
            entry.handler = handler
            entry.instant_handler = compile_instant(entry, self._services) if stages == STAGES else None
        return handler

    def _list_changed(self, provider: ToolProvider) -> None:
        self._costs.retain([entry.tool for entry in self._catalog.entries.values()])
        for above in tuple(self._layers):
            above.parent_changed()
        self.bus.emit(ToolsChanged(time() * 1000, provider.namespace))

    def parent_changed(self) -> None:
        """For those that stand above another: it has other tools now."""

    def _provider_started(self, provider: ToolProvider) -> None:
        """A provider has started: many know their tools only now, and not all of them say so."""
        if provider.namespace and not self._catalog.is_current(provider):
            provider.notify_changed()


def _is_dead(call: Call) -> bool:
    """Whether its loop was closed around it, so that it never ends."""
    return call.task is not None and call.task.get_loop().is_closed()


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class _Nowhere(ToolProvider):
    kind = "none"

    def list_tools(self) -> Sequence[Tool]:
        return ()

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        raise NotImplementedError


class _Nobody:
    """The handle of a context that belongs to no call: it asks which tools there are."""

    id = ""
    canceled = False
    run = None
    has_progress_listener = False
    remaining_seconds = allowed_seconds = float("inf")
    tool = Tool("")

    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...
    def partial(self, value: object) -> None: ...
    def report_status(self, status: Mapping[str, Any]) -> None: ...
    async def call(self, name: str, arguments: Mapping[str, Any] | str | None) -> ToolResult:
        raise NotImplementedError

    async def collect(self, values: AsyncGenerator[Any, None], *, emit_partials: bool, is_json: bool) -> ToolResult:
        raise NotImplementedError


_nowhere = _Nowhere()
_nobody = _Nobody()
_no_rules = ProviderRules()
