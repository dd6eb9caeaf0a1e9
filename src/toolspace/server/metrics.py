"""What `/metrics` shows: what is counted while the gateway works, and what is looked up when someone asks.

Counting is a dictionary and an addition, so that it costs a request nothing; tools are counted by the orchestrator's
books alone. Labels are names that the configuration or the table of routes gives, never what a caller sends.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

import msgspec

from toolspace import __version__
from toolspace.agents.model_usage import Spent
from toolspace.core.statistics import CallStats
from toolspace.errors import StorageError
from toolspace.providers.mcp.status import State
from toolspace.server.mcp.json_rpc import Application, Message, Receive, Scope, Send
from toolspace.server.prometheus import SECONDS, Counter, Family, Figures, Histogram, exposition, gauge
from toolspace.server.routing import Route
from toolspace.storage.database import Database, Kind
from toolspace.storage.queries.statistics import Figures as Counts
from toolspace.toolspace import Toolspace

_MOST_TOOLS = 300
"""Tools with lines of their own, those with the most calls; the others are one together."""
_REST = "other"
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")
_STATES: tuple[str, ...] = get_args(State)


class Metrics:
    """What is counted here, in this process, since it started."""

    def __init__(self) -> None:
        self.requests = Counter(
            "toolspace_http_requests_total", "Requests that were answered.", "method", "route", "status"
        )
        self.request_seconds = Histogram(
            "toolspace_http_request_duration_seconds", "How long an answer took, streams aside.", "route"
        )
        self.database_seconds = Histogram(
            "toolspace_database_seconds", "How long the database took, with waiting for it.", "kind"
        )
        self.database_errors = Counter("toolspace_database_errors_total", "What the database did not do.", "kind")
        self.started = time.time()

    def observe(self, route: Route | None, status: int, seconds: float) -> None:
        """Counts an answer. What fits no route is one together: its path is the caller's invention."""
        if route is None:
            self.requests.add((_REST, _REST, str(status)))
            return
        self.requests.add((route.method, route.path, str(status)))
        if not route.stream:
            self.request_seconds.add(seconds, (route.path,))

    def counting(self, path: str, app: Application) -> Application:
        """An application that is mounted at a path, with its answers counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    method = scope["method"] if scope["method"] in _METHODS else _REST
                    self.requests.add((method, path, str(message["status"])))
                await send(message)

            await app(scope, receive, noted)

        return counted

    def watch(self, database: Database) -> None:
        """Counts what a database does."""
        database.observe = self._count_programs

    def _count_programs(self, kind: Kind, seconds: Sequence[float], errors: Sequence[BaseException]) -> None:
        self.database_seconds.add_all(seconds, (kind,))
        for error in errors:
            if isinstance(error, StorageError):
                self.database_errors.add((kind,))


class Live(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway has open at this moment."""

    readers: int = 0
    streams: int = 0
    """Streams that someone reads."""
    events: int = 0
    """Events that were stored, since the start."""
    workers: Mapping[str, int] = {}
    """Tool → workers that serve it here."""
    waiting: int = 0
    """Requests that wait for a result."""
    requests: int = 0
    """Requests under way."""
    agents: int = 0
    """Agents that think."""
    cycles: Mapping[str, int] = {}
    """How many cycles ended in which way, since the start."""
    models: Mapping[str, Spent] = {}
    """What was asked of which model, since the start."""


def render(metrics: Metrics, ts: Toolspace, live: Live, counts: Counts | None) -> bytes:
    """All of it. `counts` is None where the database does not answer: that it does not is a figure too."""
    return exposition(
        (
            *_build(),
            *_tools(ts),
            *_servers(ts),
            gauge("toolspace_stream_readers", "Event streams that are open here.", live.readers),
            gauge("toolspace_streams", "Streams that someone reads here.", live.streams),
            _count("toolspace_events_total", "Events that were stored here.", live.events),
            gauge("toolspace_workers", "Workers that are connected here, by tool.", _bounded(live.workers), "tool"),
            gauge("toolspace_waiting_requests", "Requests that wait here for a result.", live.waiting),
            gauge("toolspace_http_requests_running", "Requests that are under way here.", live.requests),
            *_agents(live),
            gauge("toolspace_database_up", "Whether the database answered just now.", int(counts is not None)),
            *(_open(counts) if counts is not None else ()),
            metrics.requests,
            metrics.request_seconds,
            metrics.database_seconds,
            metrics.database_errors,
            *_process(metrics.started),
        )
    )


def _count(name: str, text: str, value: float) -> Figures:
    made = Figures(name, "counter", text)
    made.put(value)
    return made


def _build() -> Iterator[Family]:
    info = Figures("toolspace_build_info", "gauge", "Which version this is.", "version", "python")
    info.put(1, __version__, platform.python_version())
    yield info


def _tools(ts: Toolspace) -> Iterator[Family]:
    books = ts.orchestrator.accounting
    calls = Figures("toolspace_tool_calls_total", "counter", "Calls that ended here.", "tool", "status", "error_kind")
    seconds = Figures("toolspace_tool_call_duration_seconds", "histogram", "How long calls took.", "tool")
    for name, pages in _by_tool(books.stats.pages()):
        good = sum(page.count - page.failures for page in pages)
        if good:
            calls.put(good, name, "ok", "")
        kinds: dict[str, int] = {}
        for page in pages:
            known = page.kinds
            for kind, number in (*known.items(), ("unknown", page.failures - known.total())):
                kinds[kind] = kinds.get(kind, 0) + number
        for kind, number in sorted(kinds.items()):
            if number > 0:
                calls.put(number, name, "failed", kind)
        _put_durations(seconds, (name,), pages)
    waits = Figures(
        "toolspace_tool_queue_wait_seconds", "histogram", "How long calls waited for their turn, of those that had to."
    )
    _put_durations(waits, (), [books.waits])
    yield from (calls, seconds, waits)


def _by_tool(pages: Iterable[tuple[str, CallStats]]) -> Iterator[tuple[str, list[CallStats]]]:
    """The tools that are called most, and the others as one."""
    ranked = sorted(pages, key=lambda page: -page[1].count)
    yield from ((name, [page]) for name, page in ranked[:_MOST_TOOLS])
    if rest := [page for _, page in ranked[_MOST_TOOLS:]]:
        yield _REST, rest


_BOUNDS_MS = tuple(bound * 1000 for bound in SECONDS)


def _put_durations(into: Figures, labels: tuple[str, ...], pages: list[CallStats]) -> None:
    columns = zip(*(page.within(_BOUNDS_MS) for page in pages), strict=True)
    total = sum(page.total_ms for page in pages) / 1000
    count = sum(page.count for page in pages)
    into.put_histogram(labels, SECONDS, [sum(column) for column in columns], count=count, total=total)


def _servers(ts: Toolspace) -> Iterator[Family]:
    states = Figures("toolspace_mcp_server_state", "gauge", "1 for the state that a server is in.", "server", "state")
    restarts = Figures("toolspace_mcp_server_restarts_total", "counter", "How often a server was restarted.", "server")
    for server in ts.servers():
        for state in _STATES:
            states.put(int(server.state == state), server.name, state)
        restarts.put(server.restarts, server.name)
    yield from (states, restarts)


def _agents(live: Live) -> Iterator[Family]:
    yield gauge("toolspace_agents_active", "Agents that think here now, and tasks of theirs.", live.agents)
    cycles = Figures("toolspace_agent_cycles_total", "counter", "Cycles that ended here.", "outcome")
    for outcome, number in sorted(live.cycles.items()):
        cycles.put(number, outcome)
    requests = Figures("toolspace_model_requests_total", "counter", "Requests to models.", "model", "status")
    tokens = Figures("toolspace_model_tokens_total", "counter", "Tokens that models read and wrote.", "model", "kind")
    cost = Figures("toolspace_model_cost_dollars_total", "counter", "What that cost, as far as it is known.", "model")
    for model, spent in sorted(live.models.items()):
        for status, number in sorted(spent.requests.items()):
            requests.put(number, model, status)
        usage = spent.usage
        tokens.put(usage.input_tokens, model, "input")
        tokens.put(usage.cached_tokens, model, "cached")
        tokens.put(usage.output_tokens, model, "output")
        cost.put(usage.cost, model)
    yield from (cycles, requests, tokens, cost)


def _bounded(figures: Mapping[str, int]) -> dict[str, float]:
    ranked = sorted(figures.items(), key=lambda one: (-one[1], one[0]))
    found: dict[str, float] = dict(ranked[:_MOST_TOOLS])
    if rest := sum(number for _, number in ranked[_MOST_TOOLS:]):
        found[_REST] = rest
    return found


def _open(counts: Counts) -> Iterator[Family]:
    yield gauge("toolspace_calls_open", "Calls without a result, in all processes.", counts.calls, "status")
    yield gauge("toolspace_inbox_events", "Events in inboxes, in all processes.", counts.inbox, "status")
    yield gauge("toolspace_runs_open", "Runs that have not ended, in all processes.", counts.runs, "status")
    yield gauge("toolspace_nodes", "Processes that share the database.", counts.nodes)


def _process(started: float) -> Iterator[Family]:
    times = os.times()
    yield _count("process_cpu_seconds_total", "Time that the processor spent on this.", times.user + times.system)
    yield gauge("process_start_time_seconds", "When the process started.", started)
    if (resident := _resident_bytes()) is not None:
        yield gauge("process_resident_memory_bytes", "Memory in use.", resident)
    with suppress(OSError):  # Elsewhere than on Linux there is no such folder.
        yield gauge("process_open_fds", "Files and sockets that are open.", len(os.listdir("/proc/self/fd")))


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None
