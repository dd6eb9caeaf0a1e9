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
from toolspace.core.statistics import StatsBook, ToolStats
from toolspace.core.tokens import estimate
from toolspace.core.tool import Tool
from toolspace.errors import ErrorKind
from toolspace.orchestrator import call as calls
from toolspace.orchestrator import deadline
from toolspace.orchestrator.call import Arguments, Call, current_call, lineage
from toolspace.orchestrator.catalog import Ambiguous, Catalog, Entry
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.guards import careful_counter, close, instructions_of, offers, permits
from toolspace.orchestrator.pipeline import STAGES, compile_handler, compile_instant
from toolspace.orchestrator.queues import QueueBook, QueueSpec
from toolspace.orchestrator.recording import Accounting
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.search import ToolIndex
from toolspace.orchestrator.services import Services
from toolspace.orchestrator.settings import Defaults, Effective, ProviderRules, effective
from toolspace.orchestrator.stage import Handler, Plan, Stage
from toolspace.orchestrator.stages.announce import announce
from toolspace.orchestrator.stages.record import record
from toolspace.orchestrator.threads import WorkerThreads
from toolspace.orchestrator.view import TokenCosts, visible_tools
from toolspace.orchestrator.warmup import Patience, Warmup

_log = logging.getLogger("toolspace.orchestrator")
FIND_TOOLS = "agent__find_tools"


class ToolOrchestrator:
    """Every call takes one way. What it needs is given to it; it closes only what was registered with it."""

    def __init__(
        self,
        *,
        context: ToolContext | None = None,
        defaults: Defaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        cache: ResultCache | None = None,
        outputs: OutputStore | None = None,
        policies: Sequence[Policy] = (),
        stats: StatsBook | None = None,
        count_tokens: TokenCounter = estimate,
        stages: Sequence[Stage] = STAGES,
    ) -> None:
        count_tokens = careful_counter(count_tokens)
        self.context = context or ToolContext()
        self.bus = EventBus()
        self.session = self.context.session_id or f"session-{os.urandom(8).hex()}"
        self._services = Services(
            bus=self.bus,
            accounting=Accounting(count_tokens=count_tokens, stats=stats),
            queues=QueueBook(dict(queues or {})),
            threads=WorkerThreads(),
            count_tokens=count_tokens,
            cache=cache,
            outputs=outputs,
            policies=policies,
            defaults=defaults or Defaults(),
        )
        self.stored_sessions: set[str] = set()
        """The sessions that have an output to read back."""
        self._stages = tuple(stages)
        self._around: tuple[Stage, ...] = ()
        self._above: weakref.WeakSet[ToolOrchestrator] = weakref.WeakSet()
        """Those that have tools of their own above the ones here."""
        self._run_listeners: tuple[Callable[[Run], None], ...] = ()
        self._catalog = Catalog(self._list_changed)
        self._warmup = Warmup(self._refreshed)
        self._active: dict[Call, None] = {}
        self._settling: set[asyncio.Future[None]] = set()
        self._ended: set[ToolProvider] = set()
        self.closed = False
        self._costs = TokenCosts(count_tokens)
        self._index: tuple[int, ToolIndex] | None = None

    # Providers and their tools

    def register(self, provider: ToolProvider, rules: ProviderRules | None = None, *, needs_start: bool = True) -> None:
        """Takes a provider's tools in, under the rules that configuration gives it."""
        rules = rules or ProviderRules()
        self._catalog.add(provider, rules)
        if needs_start:
            self._warmup.add(provider, required=rules.required)

    def check_free(self, provider: ToolProvider, name: str) -> None:
        """Raises where another provider than this offers a tool under that name."""
        self._catalog.check_free(provider, (name,))

    async def unregister(self, provider: ToolProvider) -> None:
        """Takes a provider out and closes it. Calls in flight end as they end."""
        self._catalog.remove(provider)
        await self._warmup.remove(provider)
        await provider.aclose()

    async def warmup(self, *, patience: Patience | None = None) -> None:
        """Gets all providers ready, side by side. Only one that is required can fail it.

        Those that take longer than the patience lasts go on beside it, and are ready when they are.
        """
        await self._warmup.start(patience)

    @property
    def root(self) -> ToolOrchestrator:
        """The one that it stands above, at last; itself where it stands above none."""
        return self

    @property
    def providers(self) -> list[ToolProvider]:
        return self._catalog.providers

    def unavailable(self) -> dict[str, str]:
        """Namespace → why its provider is not ready."""
        return {provider.namespace or provider.kind: reason for provider, reason in self._warmup.failures.items()}

    def entries(self) -> Iterator[Entry]:
        """What may be used: each tool with its provider and its rules."""
        return iter(self._catalog)

    def offers(self, name: str, context: ToolContext) -> bool:
        """Whether the provider of a tool shows it to this caller now."""
        entry = self._catalog.entries.get(name)
        return entry is not None and offers(entry, context)

    def list_tools(self, *, context: ToolContext | None = None) -> list[Tool]:
        """The tools that this caller may use now."""
        caller = self._context(context)
        policies = self._services.policies
        return [
            entry.tool
            for entry in self._catalog
            if offers(entry, caller) and (not policies or permits(entry.tool, caller, policies))
        ]

    def tools_for_model(self, run: Run | None = None, *, context: ToolContext | None = None) -> list[Tool]:
        """What to show a model: all tools, or a search tool and its finds where all would cost too much."""
        caller = self._context(context or (run.context if run is not None else None))
        if run is not None:
            caller = caller.bind(_nobody, run_id=run.id, session_id=run.session)
        entry = self._catalog.entries.get(FIND_TOOLS)
        tools = self.list_tools(context=caller)
        if run is not None and run.policy is not None:
            tools = [tool for tool in tools if permits(tool, caller, (run.policy,))]
        return visible_tools(
            tools,
            self._costs,
            threshold=self._services.defaults.tool_search_threshold.value,
            search_tool=entry.tool if entry is not None else None,
            discovered=run.discovered if run is not None else (),
        )

    @property
    def revision(self) -> int:
        """Another number whenever the tools are others: what was made of them before does not hold any more."""
        return self._catalog.version

    def token_cost(self, tool: Tool) -> int:
        """How many tokens the definition of a tool costs a model."""
        return self._costs.of(tool)

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """The tools that fit a description of what to do, best first."""
        if self._index is None or self._index[0] != self._catalog.version:
            self._index = (self._catalog.version, ToolIndex(entry.tool for entry in self._catalog))
        return self._index[1].search(query, limit)

    def find(self, name: str) -> Tool | None:
        """The tool that a name means, or None."""
        entry = self._find(name, None, calling=False)
        return entry.tool if entry.known else None

    def explain(self, name: str) -> tuple[Entry, Effective] | None:
        """What holds for a tool, and what set it."""
        entry = self._find(name, None, calling=False)
        if not entry.known:
            return None
        return entry, effective(entry.tool, entry.own_name, entry.rules, self._services.defaults)

    def instructions(self, *, context: ToolContext | None = None) -> str:
        """What the providers want a model to know, for the system prompt; of those whose tools the caller may use."""
        texts = {provider: text for provider in self._instructing() if (text := instructions_of(provider))}
        if texts and context is not None and (policies := self._services.policies):
            caller = self._context(context)
            own = {entry.provider for entry in self._catalog if permits(entry.tool, caller, policies)}
            texts = {provider: text for provider, text in texts.items() if provider in own}
        return "\n\n".join(f"## {one.namespace}\n{text}" if one.namespace else text for one, text in texts.items())

    def _instructing(self) -> list[ToolProvider]:
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
            if not entry.known and await self._patience_with(name):
                entry = self._find(name, parameters)
        if run is not None and run.context is not None and (context or parent is None or parent.run is not run):
            context = run.context if context is None or context is run.context else context.within(run.context)
        if context is not None:
            base = context.within(self.context)
        else:
            base = self.context if parent is None else parent.base
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
            call.deferred = True
        if run is None:
            if entry.instant is not None and (result := entry.instant(call)) is not None:
                return result
            handler = entry.handler or self._compile(entry, in_run=False)
        else:
            handler = entry.run_handler or self._compile(entry, in_run=True)
        token = current_call.set(call)
        try:
            return await handler(call)
        finally:
            if call.task is not None:
                self._end(call)
            try:  # noqa: SIM105 - it runs on every call, and `suppress` costs
                current_call.reset(token)
            except ValueError:
                pass  # Collected with a loop that was closed around it: this is another context.

    def begin(self, call: Call, /) -> None:
        """A call is about to wait: from now on `cancel` finds it."""
        self._active[call] = None
        if call.run is not None:
            call.run.begin(call)

    def _end(self, call: Call) -> None:
        call.over = True
        call.untell()
        del self._active[call]
        if call.run is not None:
            call.run.end(call)
        for waiting in tuple(self._settling):
            waiting.get_loop().call_soon_threadsafe(_wake, waiting)

    def cancel(self, call_id: str | None = None) -> bool:
        """Stops one call and what is below it, or all of them. Whether there was anything to stop."""
        calls = [
            call
            for call in {**self._active, **dict.fromkeys(lineage())}
            if call.owner is self and (call_id is None or any(one.id == call_id for one in lineage(call)))
        ]
        for call in calls:
            call.cancel()
        above = [one.cancel(call_id) for one in tuple(self._above)]
        return bool(calls) or any(above)

    async def settle(self) -> None:
        """Waits until the calls that are under way now have ended; not for those that the code around is part of."""
        own = set(lineage())
        calls = {call for call in self._active if call not in own and not _is_dead(call)}
        while calls & self._active.keys():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._settling.add(waiting)
            try:
                await waiting
            finally:
                self._settling.discard(waiting)

    def emit_completion(self, call: ToolResult | str) -> bool:
        """Announces the end of a call that was run with `defer_completion`. Once: the second time is nothing."""
        event: CallEvent | None = self._services.deferred.pop(call if isinstance(call, str) else call.call_id, None)
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
        if parent is not None and parent.operation is not None:
            parent.operation.adopt(child.trace)
        for listener in self.root._run_listeners:
            listener(child)
        return child

    # Books

    @property
    def accounting(self) -> Accounting:
        return self._services.accounting

    @property
    def active(self) -> list[str]:
        """The ids of the calls that are running."""
        return [call.id for call in self._active]

    @property
    def abandoned(self) -> int:
        """Threads that still run a call nobody waits for, and coroutines that had to be closed by force."""
        return self._services.threads.abandoned + self._services.killed

    def get_stats(self) -> ToolStats:
        return self._services.accounting.stats.summary(entry.tool for entry in self._catalog)

    # Observers

    def use(self, stage: Stage) -> Callable[[], None]:
        """Puts a stage around every call from now on, just inside the outermost. The answer takes it out again."""
        self._surround((*self._around, stage))
        return lambda: self._surround([one for one in self._around if one is not stage])

    def on_run(self, listener: Callable[[Run], None]) -> Callable[[], None]:
        """Tells of every run that is made. The answer takes the request back."""
        self._run_listeners = (*self._run_listeners, listener)

        def forget() -> None:
            self._run_listeners = tuple(one for one in self._run_listeners if one is not listener)

        return forget

    def _surround(self, stages: Sequence[Stage]) -> None:
        self._around = tuple(stages)
        for above in tuple(self._above):
            above._surround(stages)
        for entry in self._catalog.entries.values():  # Compiled anew on the next call; calls in flight keep theirs.
            entry.handler = entry.run_handler = entry.instant = None

    # Settings and end

    def configure(
        self,
        *,
        defaults: Defaults | None = None,
        queues: Mapping[str, QueueSpec] | None = None,
        aliases: Mapping[str, str] | None = None,
        rules: Mapping[ToolProvider, ProviderRules] | None = None,
        context: ToolContext | None = None,
        policies: Sequence[Policy] | None = None,
    ) -> None:
        """Puts new settings in force. Calls in flight finish under the old ones: their handlers are kept."""
        services = self._services
        if defaults is not None:
            for above in tuple(self._above):
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
            for above in tuple(self._above):
                above.configure(policies=policies)
        self._catalog.configure(rules or {})

    async def cleanup(self) -> None:
        """Stops all calls, tells everyone who waits, and closes the providers."""
        self.cancel()
        self.closed = True
        self._catalog.close()
        try:
            async with asyncio.timeout(deadline.GRACE_SECONDS + 1):
                await self.settle()
        except TimeoutError:
            _log.warning("calls that do not end are left behind: %s", ", ".join(self.active))
        await self._warmup.aclose()
        for call_id in list(self._services.deferred):
            self.emit_completion(call_id)
        providers = [provider for provider in self._catalog.providers if provider not in self._ended]
        self._ended.update(providers)  # Each is closed once, however often this is called.
        await asyncio.gather(*map(close, providers))
        await self._close_services()

    async def _close_services(self) -> None:
        await self.bus.aclose()
        self._services.threads.close()

    # Inside

    def _context(self, context: ToolContext | None) -> ToolContext:
        caller = self.context if context is None else context.within(self.context)
        if caller.session_id is None:
            caller = caller.bind(_nobody, run_id=caller.run_id, session_id=self.session)
        return caller

    @property
    def policies(self) -> Sequence[Policy]:
        """Who may call what, beside the rules of providers."""
        return self._services.policies

    def _find(self, name: str, arguments: Arguments, *, calling: bool = True) -> Entry:
        """The entry that a name means; where it means none, one that says so when it is called."""
        name = str(name)
        if self.closed:
            return self._missing(name, "canceled", "the toolspace is closed")
        try:
            entry = self._catalog.entries.get(name) or self._catalog.resolve(name, arguments, calling=calling)
        except Ambiguous as several:
            names = tuple(several.names)
            return self._missing(name, "unknown_tool", partial(self._ambiguous, name, names))
        if entry is not None:
            return entry
        for provider, reason in self._reasons().items():
            if provider.namespace and sanitise(name).startswith(sanitise(provider.namespace) + SEPARATOR):
                text = f'provider "{provider.namespace}" is not available: {reason}'
                return self._missing(name, "transport_error", partial(self._unavailable, name, text))
        return self._missing(name, "unknown_tool", partial(self._not_found, name))

    def _reasons(self) -> Mapping[ToolProvider, str]:
        return self._warmup.reasons()

    async def _patience_with(self, name: str) -> bool:
        return await self._warmup.patience_with(name)

    def _not_found(self, name: str, call: Call) -> str:
        return self._catalog.not_found(name, self._may_know(self._catalog, call))

    def _ambiguous(self, name: str, meant: Sequence[str], call: Call) -> str:
        entries = self._catalog.entries
        known = [f'"{one}"' for one in self._may_know((entries[one] for one in meant if one in entries), call)]
        if not known:
            return self._not_found(name, call)
        return f'Tool "{name}" not found: it could mean {", ".join(known)}; say which'

    def _unavailable(self, name: str, reason: str, call: Call) -> str:
        may = permits(Tool(name), call.base, self._services.policies)
        return reason if may else self._not_found(name, call)

    def _may_know(self, entries: Iterable[Entry], call: Call) -> Iterable[str]:
        """The names that this caller may hear of: what it may not use is not proposed to it either."""
        policies = self._services.policies
        return (entry.tool.name for entry in entries if not policies or permits(entry.tool, call.base, policies))

    def _missing(self, name: str, kind: ErrorKind, message: str | Callable[[Call], str]) -> Entry:
        entry = Entry(Tool(name), name, _nowhere, _no_rules, known=False)
        entry.handler = entry.run_handler = self._refusing(entry, kind, message)
        return entry

    def _refusing(self, entry: Entry, kind: ErrorKind, message: str | Callable[[Call], str]) -> Handler:
        """Only says no; but a refused call is recorded and announced like any other."""

        async def refuse(call: Call) -> ToolResult:
            return call.fail(kind, message if isinstance(message, str) else message(call), executed=False)

        settings = effective(entry.tool, entry.own_name, entry.rules, self._services.defaults)
        plan = Plan(entry, settings, self._services, in_run=True)
        handler = record(plan, refuse)
        for stage in reversed(self._around):
            handler = stage(plan, handler)
        return announce(plan, handler)

    def _compile(self, entry: Entry, *, in_run: bool) -> Handler:
        try:
            stages = (*self._stages[:1], *self._around, *self._stages[1:])
            handler = compile_handler(entry, self._services, in_run=in_run, stages=stages)
        except Exception as error:
            return self._refusing(entry, "internal_error", f"{error}")
        if in_run:
            entry.run_handler = handler
        else:
            entry.handler = handler
            entry.instant = compile_instant(entry, self._services) if stages == STAGES else None
        return handler

    def _list_changed(self, provider: ToolProvider) -> None:
        self._costs.keep([entry.tool for entry in self._catalog.entries.values()])
        for above in tuple(self._above):
            above.below_changed()
        self.bus.emit(ToolsChanged(time() * 1000, provider.namespace))

    def below_changed(self) -> None:
        """For those that stand above another: it has other tools now."""

    def _refreshed(self, provider: ToolProvider) -> None:
        """A provider has started: many know their tools only now, and not all of them say so."""
        if provider.namespace and not self._catalog.is_current(provider):
            provider.changed()


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
    watched = False
    remaining_seconds = allowed_seconds = float("inf")
    tool = Tool("")

    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...
    def partial(self, value: object) -> None: ...
    def report_status(self, status: Mapping[str, Any]) -> None: ...
    async def call(self, name: str, arguments: Mapping[str, Any] | str | None) -> ToolResult:
        raise NotImplementedError

    async def collect(self, values: AsyncGenerator[Any, None], *, announced: bool, is_json: bool) -> ToolResult:
        raise NotImplementedError


_nowhere = _Nowhere()
_nobody = _Nobody()
_no_rules = ProviderRules()
