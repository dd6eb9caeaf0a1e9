"""The orchestrator: runs every call through its stages, cancels calls, lists tools, and owns providers and runs.

`Toolspace` and agents use it. It knows neither HTTP nor files, and closes only what was registered with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import perf_counter, time
from typing import Any

from toolspace.core.call_statistics import StatsCollector, ToolStats
from toolspace.core.events import CallEvent, ToolsChanged
from toolspace.core.extension_points import OutputStore, Policy, ResultCache, TokenCounter, ToolProvider
from toolspace.core.hooks import Hook
from toolspace.core.quotas import Quota, QuotaStore
from toolspace.core.result import ToolResult
from toolspace.core.token_count import estimate_tokens
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator import call as calls
from toolspace.orchestrator.call import ActiveCalls, Arguments, Call, current_call
from toolspace.orchestrator.catalog import Catalog, CatalogEntry, Failure, NameResolver, missing_entry
from toolspace.orchestrator.effective_settings import (
    CallDefaults,
    EffectiveSettings,
    ProviderRules,
    ToolSpellings,
    resolve_settings,
)
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.pipeline import (
    STAGES,
    CallHandler,
    CallServices,
    Stage,
    compile_failure,
    compile_handler,
    compile_instant,
)
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.orchestrator.provider_startup import ProviderStartup, StartupWait
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stages import timeout
from toolspace.orchestrator.stages.call_log import CallLog
from toolspace.orchestrator.stages.circuit_breaker import CircuitRegistry
from toolspace.orchestrator.stages.hooks import HookRegistry
from toolspace.orchestrator.stages.invoke import WorkerThreads
from toolspace.orchestrator.stages.policy import ProgramApprovals
from toolspace.orchestrator.stages.queue import QueueRegistry, QueueSpec
from toolspace.orchestrator.tool_listing import ToolListing
from toolspace.orchestrator.tool_search import close_provider, safe_token_counter

_log = logging.getLogger("toolspace.orchestrator")


class ToolOrchestrator:
    """Runs every call through the same stages, whoever provides the tool."""

    def __init__(
        self,
        *,
        context: ToolContext | None = None,
        defaults: CallDefaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        cache: ResultCache | None = None,
        outputs: OutputStore | None = None,
        policies: Sequence[Policy] = (),
        quotas: Sequence[Quota] = (),
        hooks: Sequence[Hook] = (),
        stats: StatsCollector | None = None,
        count_tokens: TokenCounter = estimate_tokens,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        count_tokens = safe_token_counter(count_tokens)
        self.context = context or ToolContext()
        self.bus = EventBus()
        self.session = self.context.session_id or f"session-{os.urandom(8).hex()}"
        self.stored_sessions: set[str] = set()
        """The sessions that have a stored output."""
        self.closed = False
        self._services = CallServices(
            bus=self.bus,
            call_log=CallLog(count_tokens=count_tokens, stats=stats),
            queues=QueueRegistry(),
            circuits=CircuitRegistry(),
            threads=(threads := WorkerThreads()),
            hooks=HookRegistry(hooks, threads),
            count_tokens=count_tokens,
            cache=cache,
            outputs=outputs,
            policies=policies,
            quotas=quotas,
            defaults=defaults or CallDefaults(),
        )
        self._services.queues.configure(queues or {})
        self._stages = tuple(stages)
        self._outer_stages: tuple[Stage, ...] = ()
        self._layers: weakref.WeakSet[ToolOrchestrator] = weakref.WeakSet()
        """The orchestrators that inherit the tools of this one."""
        self._run_listeners: tuple[Callable[[Run], None], ...] = ()
        self._catalog = Catalog(self._list_changed)
        self._names = NameResolver(self._catalog, self._services)
        self._startup = ProviderStartup(self._provider_started)
        self.active_calls = ActiveCalls()
        self._closed_providers: set[ToolProvider] = set()
        self._listing = ToolListing(self._catalog, self._services)

    # Providers and their tools

    def register(self, provider: ToolProvider, rules: ProviderRules | None = None, *, needs_start: bool = True) -> None:
        """Adds a provider's tools, under the rules of the configuration."""
        rules = rules or ProviderRules()
        self._catalog.add(provider, rules)
        if needs_start:
            self._startup.add(provider, required=rules.required, patience=rules.start_patience)

    def find_unmatched(self, patterns: Iterable[str]) -> list[str]:
        """Returns the patterns that match no tool, denied ones included."""
        return self._catalog.find_unmatched(patterns)

    def get_spellings(self, name: str) -> ToolSpellings:
        """Returns all names of the tool with this full name; only this one if there is no such tool."""
        entry = self._catalog.entries.get(name)
        return entry.spellings if entry is not None else ToolSpellings((name,), (name,))

    def find_provider_kind(self, name: str) -> str | None:
        """Returns the kind of the provider that offers the tool with this full name; None if there is no such tool."""
        entry = self._catalog.entries.get(name)
        return entry.provider.kind if entry is not None else None

    def check_name_available(self, provider: ToolProvider, name: str) -> None:
        """Raises `ToolNameConflict` if another provider offers a tool of this name."""
        self._catalog.check_names_available(provider, (name,))

    async def unregister(self, provider: ToolProvider) -> None:
        """Removes a provider and closes it. Running calls are not cancelled."""
        self._catalog.remove(provider)
        await self._startup.remove(provider)
        await provider.aclose()

    async def warmup(self, *, wait: StartupWait | None = None) -> None:
        """Starts all providers in parallel. Those that take longer than `wait` allows continue in the background.
        Raises `ProviderError` if a required one is not ready in time."""
        await self._startup.start(wait)

    async def wait_for_lists(self) -> None:
        """Waits for providers that are starting, for each at most its `startPatience` since its start."""
        await self._startup.wait_for_lists(self._services.defaults.start_patience.value)

    @property
    def root(self) -> ToolOrchestrator:
        """The orchestrator at the bottom of the layers; this one if it is not layered."""
        return self

    @property
    def providers(self) -> list[ToolProvider]:
        return self._catalog.providers

    def unavailable_providers(self) -> dict[str, str]:
        """Returns namespace → why its provider is not ready."""
        return {provider.namespace or provider.kind: reason for provider, reason in self._startup.failures.items()}

    def entries(self) -> Iterator[CatalogEntry]:
        """Iterates over the tools that may be used, each with its provider and its rules."""
        return iter(self._catalog)

    def is_offered(self, name: str, context: ToolContext) -> bool:
        """Whether the provider of a tool shows it to this caller now."""
        return self._listing.is_offered(name, context)

    def list_tools(self, *, context: ToolContext | None = None) -> list[Tool]:
        """Returns the tools that this caller may use now."""
        return self._listing.list_tools(self._caller_context(context))

    def tools_for_model(self, run: Run | None = None, *, context: ToolContext | None = None) -> list[Tool]:
        """Returns the tools to show a model: all, or a search tool and its matches if all would cost too much."""
        caller = self._caller_context(context or (run.context if run is not None else None))
        if run is not None:
            caller = ToolContext(run_id=run.id, session_id=run.session).with_defaults(caller)
        return self._listing.tools_for_model(caller, run)

    @property
    def revision(self) -> int:
        """A number that changes whenever the tools change."""
        return self._catalog.version

    def token_cost(self, tool: Tool) -> int:
        """Returns how many tokens the definition of a tool costs a model."""
        return self._listing.costs.get(tool)

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """Returns the tools that match a description of what to do, best first, with their scores."""
        return self._listing.search(query, limit)

    def find(self, name: str) -> Tool | None:
        """Returns the tool that a name means, or None."""
        entry = self._find(name, None, is_call=False)
        return entry.tool if entry.is_registered else None

    def explain(self, name: str) -> tuple[CatalogEntry, EffectiveSettings] | None:
        """Returns the tool that a name means, and its settings with the place that set each; None if it means none."""
        entry = self._find(name, None, is_call=False)
        if not entry.is_registered:
            return None
        return entry, resolve_settings(entry.tool, entry.spellings.names, entry.rules, self._services.defaults)

    def instructions(self, *, context: ToolContext | None = None, is_fenced: bool = True) -> str:
        """Returns the instructions of the providers for a system prompt. With a context: only of permitted tools."""
        caller = self._caller_context(context) if context is not None else None
        return self._listing.instructions(self._instruction_providers(), caller, is_fenced=is_fenced)

    def _instruction_providers(self) -> list[ToolProvider]:
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
        is_for_program: bool = False,
    ) -> ToolResult:
        """Runs one call and returns its result. Raises only if the caller itself is cancelled.

        With `defer_completion` the completion event waits for `emit_completion`, so that the caller can update its own
        state first. `is_for_program`: outside a run, the result is whole up to `maxInlineBytes`; else, and for all
        other callers, a result above `toolResponseMaxBytes` is stored and replaced by its handle.
        """
        parent = current_call.get()
        if parent is not None:
            if parent.owner is self:
                run = run or parent.run
            elif run is None or parent.owner.root is not self.root:
                parent = None  # A call of another toolspace, whose limits do not apply here.
        entry = self._catalog.entries.get(name)
        if entry is None:
            entry = self._find(name, parameters)
            # The tools of a provider are unknown until its first start has ended.
            if not entry.is_registered and await self._wait_for_start(name):
                entry = self._find(name, parameters)
        if run is not None and run.context is not None and (context or parent is None or parent.run is not run):
            context = run.context if context is None or context is run.context else context.with_defaults(run.context)
        if context is not None:
            base_context = context.with_defaults(self.context)
        else:
            base_context = self.context if parent is None else parent.base_context
        call = Call(
            call_id or next(calls.call_ids),
            entry,
            name,
            parameters,
            base_context,
            self,
            run,
            parent,
            perf_counter(),
            time() * 1000,
        )
        if defer_completion:
            call.defers_completion = True
        if run is None:
            call.is_for_program = is_for_program
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
                self.active_calls.remove(call)
            try:  # noqa: SIM105 - `suppress` would cost every call
                current_call.reset(token)
            except ValueError:
                pass  # The coroutine was collected after its loop closed, in another context.

    def cancel(self, call_id: str | None = None) -> bool:
        """Cancels one call and its child calls; without an id, all calls. Returns whether there was any."""
        for call in (matches := self.active_calls.find(self, call_id)):
            call.cancel()
        cancelled_in_layers = [layer.cancel(call_id) for layer in tuple(self._layers)]
        return bool(matches) or any(cancelled_in_layers)

    async def wait_until_idle(self) -> None:
        """Waits until the calls that are active now have ended; not for those that the current code is part of."""
        await self.active_calls.wait_until_idle()

    def emit_completion(self, call: ToolResult | str) -> bool:
        """Emits the completion of a call that was run with `defer_completion`. Returns False if already done."""
        call_id = call if isinstance(call, str) else call.call_id
        event: CallEvent | None = self._services.deferred_completions.pop(call_id, None)
        if event is None:
            return False
        self.bus.emit(event)
        return True

    @property
    def defaults(self) -> CallDefaults:
        """What applies if neither the tool nor its provider sets it."""
        return self._services.defaults

    def run(self, **options: Any) -> Run:
        """Returns a new run. The configuration's limits apply unless the options set others."""
        defaults = self._services.defaults
        options.setdefault("max_tool_calls_per_turn", defaults.max_tool_calls_per_turn.value)
        options.setdefault("max_concurrent_tools", defaults.max_concurrent_tools.value)
        options.setdefault("context_window", defaults.context_window.value)
        parent = current_call.get()
        run = Run(owner=self, parent=parent, **options)
        if parent is not None and parent.span is not None:
            parent.span.add_child(run.trace)
        for listener in self.root._run_listeners:
            listener(run)
        return run

    # Statistics

    @property
    def call_log(self) -> CallLog:
        return self._services.call_log

    @property
    def queues(self) -> QueueRegistry:
        """The queues by name, with the numbers of their active and waiting calls."""
        return self._services.queues

    @property
    def circuits(self) -> CircuitRegistry:
        """The circuit breakers of the providers, those of layers included."""
        return self._services.circuits

    @property
    def abandoned_count(self) -> int:
        """How many threads still run a call that has ended, plus how many coroutines had to be closed by force."""
        return self._services.threads.abandoned_count + self._services.killed_count

    def get_stats(self, principal: str | None = None) -> ToolStats:
        """Returns the statistics of all calls, or of the calls of one principal."""
        return self._services.call_log.summarize(principal, (entry.tool for entry in self._catalog))

    # Extensions

    def add_stage(self, stage: Stage) -> Callable[[], None]:
        """Puts a stage around every call from now on, inside the outermost. Returns the function that removes it."""
        self._set_outer_stages((*self._outer_stages, stage))
        return lambda: self._set_outer_stages([item for item in self._outer_stages if item is not stage])

    def on_run(self, listener: Callable[[Run], None]) -> Callable[[], None]:
        """Calls the listener with every new run. Returns the function that removes it."""
        self._run_listeners = (*self._run_listeners, listener)

        def remove() -> None:
            self._run_listeners = tuple(item for item in self._run_listeners if item is not listener)

        return remove

    def _set_outer_stages(self, stages: Sequence[Stage]) -> None:
        self._outer_stages = tuple(stages)
        for layer in tuple(self._layers):
            layer._set_outer_stages(stages)
        for entry in self._catalog.entries.values():  # The next call compiles new handlers; running calls keep theirs.
            entry.handler = entry.run_handler = entry.instant_handler = None

    # Settings and shutdown

    def configure(
        self,
        *,
        defaults: CallDefaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        aliases: Mapping[str, str] | None = None,
        rules: Mapping[ToolProvider, ProviderRules] | None = None,
        context: ToolContext | None = None,
        policies: Sequence[Policy] | None = None,
        permissions: Sequence[Policy] | None = None,
        policy_rules: Sequence[PolicyRule] | None = None,
        approvals: ProgramApprovals | None = None,
        quotas: Sequence[Quota] | None = None,
        quota_store: QuotaStore | None = None,
        hooks: Sequence[Hook] | None = None,
        masks_secrets: bool | None = None,
    ) -> None:
        """Applies new settings. Running calls finish with the old ones."""
        services = self._services
        if defaults is not None:
            for layer in tuple(self._layers):
                if layer._services.defaults is services.defaults:  # The layer has no defaults of its own.
                    layer.configure(defaults=defaults)
            services.defaults = defaults
        if queues is not None:
            services.queues.configure(queues)
        if aliases is not None:
            self._catalog.aliases = dict(aliases)
        if context is not None:
            self.context = context
        decisions = {"policies": policies, "permissions": permissions, "policy_rules": policy_rules}
        limits = {"quotas": quotas, "quota_store": quota_store}
        settings = {**decisions, **limits, "approvals": approvals, "masks_secrets": masks_secrets}
        for name, value in settings.items():
            if value is not None:
                setattr(services, name, value)
                for layer in tuple(self._layers):
                    layer.configure(**{name: value})  # pyright: ignore[reportArgumentType]
        if hooks is not None:
            services.hooks.configure(hooks)  # The layers share it; their handlers are compiled again.
            for layer in tuple(self._layers):
                layer.configure()
        self._catalog.configure(rules or {})

    async def cleanup(self) -> None:
        """Cancels all calls, emits their deferred completions, and closes the providers."""
        self.cancel()
        self.closed = True
        self._catalog.close()
        try:
            async with asyncio.timeout(timeout.GRACE_SECONDS + 1):
                await self.wait_until_idle()
        except TimeoutError:
            _log.warning("closing although calls have not ended: %s", ", ".join(self.active_calls.ids))
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

    # Internals

    @property
    def services(self) -> CallServices:
        """The parts that the stages of calls share."""
        return self._services

    def _caller_context(self, context: ToolContext | None) -> ToolContext:
        caller = self.context if context is None else context.with_defaults(self.context)
        if caller.session_id is None:
            caller = ToolContext(session_id=self.session).with_defaults(caller)
        return caller

    def _find(self, name: str, arguments: Arguments, *, is_call: bool = True) -> CatalogEntry:
        """Returns the entry that a name means; if it means none, an entry whose calls fail with the reason."""
        name = str(name)
        if self.closed:
            return missing_entry(name, "canceled", "the toolspace is closed")
        return self._names.resolve(name, arguments, is_call=is_call, unavailable=self._unavailable_reasons)

    def _unavailable_reasons(self) -> Mapping[ToolProvider, str]:
        return self._startup.reasons()

    async def _wait_for_start(self, name: str) -> bool:
        default = self._services.defaults.tool_timeout.value
        return await self._startup.wait_for_first_start(name, lambda owner: self._catalog.get_timeout(owner, default))

    def _compile(self, entry: CatalogEntry, *, in_run: bool) -> CallHandler:
        services, outer_stages = self._services, self._outer_stages
        if entry.failure is not None:
            return compile_failure(entry, services, entry.failure, outer_stages)
        try:
            stages = (*self._stages[:1], *outer_stages, *self._stages[1:])
            handler = compile_handler(entry, services, in_run=in_run, stages=stages)
        except Exception as error:
            return compile_failure(entry, services, Failure("internal_error", f"{error}"), outer_stages)
        if in_run:
            entry.run_handler = handler
        else:
            entry.handler = handler
            entry.instant_handler = compile_instant(entry, services) if stages == STAGES else None
        return handler

    def _list_changed(self, provider: ToolProvider) -> None:
        self._listing.forget_removed_tools()
        for layer in tuple(self._layers):
            layer.parent_changed()
        self.bus.emit(ToolsChanged(time() * 1000, provider.namespace))

    def parent_changed(self) -> None:
        """Called if the tools of the parent changed. Does nothing in an orchestrator without a parent."""

    def _provider_started(self, provider: ToolProvider) -> None:
        """Refreshes the tools of a provider that has started: many know their tools only then."""
        if provider.namespace and not self._catalog.is_current(provider):
            provider.notify_changed()
