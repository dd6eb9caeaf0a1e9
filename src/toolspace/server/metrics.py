"""What `/metrics` shows: what is counted while the gateway works, and what is looked up when someone asks.

Counting is a dictionary and an addition, so that it costs a request nothing; tools are counted by the orchestrator's
books alone. Labels are names that the configuration or the table of routes gives, never what a caller sends.
"""

from __future__ import annotations

import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import get_args

import msgspec

from toolspace import __version__
from toolspace.agents.model_usage import ModelUsage
from toolspace.core.statistics import CallStats
from toolspace.errors import StorageError
from toolspace.providers.mcp.status import ServerState
from toolspace.server.asgi import Application, Message, Receive, Scope, Send
from toolspace.server.routing import Route
from toolspace.storage.database import Database, OperationKind
from toolspace.storage.queries.statistics import OpenWorkCounts as Counts
from toolspace.toolspace import Toolspace

# MERGED from prometheus: Counters, histograms and figures as Prometheus reads them. Knows nothing of what is measu…

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKET_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds that suit what takes from half a millisecond to a minute."""

Labels = tuple[str, ...]


class Counter:
    """Counts by labels. Beyond `most` sets of labels everything counts as `other`: nobody fills memory by asking."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str, max_label_sets: int = 2_000) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._most = max_label_sets
        self._counts: dict[Labels, float] = {}

    def add(self, values: Labels = (), amount: float = 1) -> None:
        counts = self._counts
        if values not in counts and len(counts) >= self._most:
            values = (_REST,) * len(self.labels)
        counts[values] = counts.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        for values, count in sorted(self._counts.items()):
            yield f"{self.name}{_labels(self.labels, values)} {_number(count)}"


class Histogram:
    """How long things took, by labels."""

    kind = "histogram"

    def __init__(
        self, name: str, text: str, *labels: str, bounds: Sequence[float] = BUCKET_SECONDS, max_label_sets: int = 500
    ) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._bounds = bounds
        self._most = max_label_sets
        self._found: dict[Labels, tuple[list[int], list[float]]] = {}
        """How many fell between two bounds, and the sum of all."""

    def add(self, seconds: float, values: Labels = ()) -> None:
        counts, total = self._found.get(values) or self._begin(values)
        counts[bisect_left(self._bounds, seconds)] += 1
        total[0] += seconds

    def add_all(self, many: Iterable[float], values: Labels = ()) -> None:
        """The same for several at once."""
        counts, total = self._found.get(values) or self._begin(values)
        bounds = self._bounds
        for seconds in many:
            counts[bisect_left(bounds, seconds)] += 1
            total[0] += seconds

    def _begin(self, values: Labels) -> tuple[list[int], list[float]]:
        if len(self._found) >= self._most:
            values = (_REST,) * len(self.labels)
        return self._found.setdefault(values, ([0] * (len(self._bounds) + 1), [0.0]))

    def lines(self) -> Iterator[str]:
        for values, (counts, total) in sorted(self._found.items()):
            below = 0
            within: list[int] = []
            for count in counts[:-1]:
                below += count
                within.append(below)
            yield from histogram_lines(
                self.name, self.labels, values, self._bounds, within, count=sum(counts), total=total[0]
            )


class MetricSamples:
    """Numbers that were looked up just now."""

    def __init__(self, name: str, kind: str, text: str, *labels: str) -> None:
        self.name = name
        self.kind = kind
        self.text = text
        self.labels = labels
        self._rows: list[str] = []

    def add(self, value: float, *values: str) -> None:
        self._rows.append(f"{self.name}{_labels(self.labels, values)} {_number(value)}")

    def add_histogram(
        self, values: Labels, bounds: Sequence[float], within: Sequence[int], *, count: int, total: float
    ) -> None:
        self._rows += histogram_lines(self.name, self.labels, values, bounds, within, count=count, total=total)

    def lines(self) -> Iterator[str]:
        return iter(self._rows)


MetricFamily = Counter | Histogram | MetricSamples


def gauge(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> MetricSamples:
    """Figures of one label, or one figure without."""
    made = MetricSamples(name, "gauge", text, *((label,) if label else ()))
    if isinstance(values, Mapping):
        for key, value in values.items():
            made.add(value, key)
    else:
        made.add(values)
    return made


def format_prometheus(families: Iterable[MetricFamily]) -> bytes:
    """The text that Prometheus reads."""
    lines: list[str] = []
    for family in families:
        lines += (f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}", *family.lines())
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def histogram_lines(
    name: str,
    labels: Labels,
    values: Labels,
    bounds: Sequence[float],
    within: Sequence[int],
    *,
    count: int,
    total: float,
) -> Iterator[str]:
    named = (*labels, "le")
    for bound, below in zip(bounds, within, strict=True):
        yield f"{name}_bucket{_labels(named, (*values, _number(bound)))} {below}"
    yield f"{name}_bucket{_labels(named, (*values, '+Inf'))} {count}"
    yield f"{name}_sum{_labels(labels, values)} {_number(total)}"
    yield f"{name}_count{_labels(labels, values)} {count}"


def _labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


_MOST_TOOLS = 300
"""Tools with lines of their own, those with the most calls; the others are one together."""
_REST = "other"
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")
_STATES: tuple[str, ...] = get_args(ServerState)


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
        if not route.is_stream:
            self.request_seconds.add(seconds, (route.path,))

    def count_requests(self, path: str, app: Application) -> Application:
        """An application that is mounted at a path, with its answers counted."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def noted(message: Message) -> None:
                if message["type"] == "http.response.start":
                    method = scope["method"] if scope["method"] in _METHODS else _REST
                    self.requests.add((method, path, str(message["status"])))
                await send(message)

            await app(scope, receive, noted)

        return counted

    def observe_database(self, database: Database) -> None:
        """Counts what a database does."""
        database.observer = self._count_programs

    def _count_programs(self, kind: OperationKind, seconds: Sequence[float], errors: Sequence[BaseException]) -> None:
        self.database_seconds.add_all(seconds, (kind,))
        for error in errors:
            if isinstance(error, StorageError):
                self.database_errors.add((kind,))


class LiveCounts(msgspec.Struct, frozen=True, kw_only=True):
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
    models: Mapping[str, ModelUsage] = {}
    """What was asked of which model, since the start."""


def render_metrics(metrics: Metrics, ts: Toolspace, live: LiveCounts, counts: Counts | None) -> bytes:
    """All of it. `counts` is None where the database does not answer: that it does not is a figure too."""
    return format_prometheus(
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


def _count(name: str, text: str, value: float) -> MetricSamples:
    made = MetricSamples(name, "counter", text)
    made.add(value)
    return made


def _build() -> Iterator[MetricFamily]:
    info = MetricSamples("toolspace_build_info", "gauge", "Which version this is.", "version", "python")
    info.add(1, __version__, platform.python_version())
    yield info


def _tools(ts: Toolspace) -> Iterator[MetricFamily]:
    books = ts.orchestrator.call_log
    calls = MetricSamples(
        "toolspace_tool_calls_total", "counter", "Calls that ended here.", "tool", "status", "error_kind"
    )
    seconds = MetricSamples("toolspace_tool_call_duration_seconds", "histogram", "How long calls took.", "tool")
    for name, pages in _by_tool(books.stats.items()):
        good = sum(page.count - page.failures for page in pages)
        if good:
            calls.add(good, name, "ok", "")
        kinds: dict[str, int] = {}
        for page in pages:
            known = page.failures_by_kind
            for kind, number in (*known.items(), ("unknown", page.failures - known.total())):
                kinds[kind] = kinds.get(kind, 0) + number
        for kind, number in sorted(kinds.items()):
            if number > 0:
                calls.add(number, name, "failed", kind)
        _put_durations(seconds, (name,), pages)
    waits = MetricSamples(
        "toolspace_tool_queue_wait_seconds", "histogram", "How long calls waited for their turn, of those that had to."
    )
    _put_durations(waits, (), [books.queue_waits])
    yield from (calls, seconds, waits)


def _by_tool(pages: Iterable[tuple[str, CallStats]]) -> Iterator[tuple[str, list[CallStats]]]:
    """The tools that are called most, and the others as one."""
    ranked = sorted(pages, key=lambda page: -page[1].count)
    yield from ((name, [page]) for name, page in ranked[:_MOST_TOOLS])
    if rest := [page for _, page in ranked[_MOST_TOOLS:]]:
        yield _REST, rest


_BOUNDS_MS = tuple(bound * 1000 for bound in BUCKET_SECONDS)


def _put_durations(into: MetricSamples, labels: tuple[str, ...], pages: list[CallStats]) -> None:
    columns = zip(*(page.cumulative_counts(_BOUNDS_MS) for page in pages), strict=True)
    total = sum(page.total_ms for page in pages) / 1000
    count = sum(page.count for page in pages)
    into.add_histogram(labels, BUCKET_SECONDS, [sum(column) for column in columns], count=count, total=total)


def _servers(ts: Toolspace) -> Iterator[MetricFamily]:
    states = MetricSamples(
        "toolspace_mcp_server_state", "gauge", "1 for the state that a server is in.", "server", "state"
    )
    restarts = MetricSamples(
        "toolspace_mcp_server_restarts_total", "counter", "How often a server was restarted.", "server"
    )
    for server in ts.list_servers():
        for state in _STATES:
            states.add(int(server.state == state), server.name, state)
        restarts.add(server.restarts, server.name)
    yield from (states, restarts)


def _agents(live: LiveCounts) -> Iterator[MetricFamily]:
    yield gauge("toolspace_agents_active", "Agents that think here now, and tasks of theirs.", live.agents)
    cycles = MetricSamples("toolspace_agent_cycles_total", "counter", "Cycles that ended here.", "outcome")
    for outcome, number in sorted(live.cycles.items()):
        cycles.add(number, outcome)
    requests = MetricSamples("toolspace_model_requests_total", "counter", "Requests to models.", "model", "status")
    tokens = MetricSamples(
        "toolspace_model_tokens_total", "counter", "Tokens that models read and wrote.", "model", "kind"
    )
    cost = MetricSamples(
        "toolspace_model_cost_dollars_total", "counter", "What that cost, as far as it is known.", "model"
    )
    for model, spent in sorted(live.models.items()):
        for status, number in sorted(spent.requests.items()):
            requests.add(number, model, status)
        usage = spent.usage
        tokens.add(usage.input_tokens, model, "input")
        tokens.add(usage.cached_tokens, model, "cached")
        tokens.add(usage.output_tokens, model, "output")
        cost.add(usage.cost, model)
    yield from (cycles, requests, tokens, cost)


def _bounded(figures: Mapping[str, int]) -> dict[str, float]:
    ranked = sorted(figures.items(), key=lambda one: (-one[1], one[0]))
    found: dict[str, float] = dict(ranked[:_MOST_TOOLS])
    if rest := sum(number for _, number in ranked[_MOST_TOOLS:]):
        found[_REST] = rest
    return found


def _open(counts: Counts) -> Iterator[MetricFamily]:
    yield gauge("toolspace_calls_open", "Calls without a result, in all processes.", counts.calls, "status")
    yield gauge("toolspace_inbox_events", "Events in inboxes, in all processes.", counts.inbox, "status")
    yield gauge("toolspace_runs_open", "Runs that have not ended, in all processes.", counts.runs, "status")
    yield gauge("toolspace_nodes", "Processes that share the database.", counts.nodes)


def _process(started: float) -> Iterator[MetricFamily]:
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
