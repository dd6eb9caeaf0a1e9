"""Metrics in the Prometheus text format. `GET /metrics` renders them.

Some are counted while the gateway works, which costs a dictionary lookup and an addition; the others are read on
request. Tool calls are counted by the orchestrator. Label values come from the configuration and the routes, never from
requests.
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
from toolspace.agents.registry import ModelUsage
from toolspace.core.statistics import CallStats
from toolspace.errors import StorageError
from toolspace.providers.mcp.spec import ServerState
from toolspace.server.requests import Application, Message, Receive, Scope, Send
from toolspace.server.routing import Route
from toolspace.storage.database import Database, OperationKind
from toolspace.storage.queries.runs import OpenWorkCounts
from toolspace.toolspace import Toolspace

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKET_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKET_MS = tuple(bound * 1000 for bound in BUCKET_SECONDS)
_OTHER = "other"
_MAX_TOOLS = 300
"""Tools with their own label; the tools with fewer calls are counted together as `other`."""
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")
_SERVER_STATES: tuple[str, ...] = get_args(ServerState)

Labels = tuple[str, ...]


class Counter:
    """Counts by label values. Beyond `max_label_sets` all are counted as `other`, which bounds the memory."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str, max_label_sets: int = 2_000) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._max_label_sets = max_label_sets
        self._counts: dict[Labels, float] = {}

    def add(self, values: Labels = (), amount: float = 1) -> None:
        counts = self._counts
        if values not in counts and len(counts) >= self._max_label_sets:
            values = (_OTHER,) * len(self.labels)
        counts[values] = counts.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        for values, count in sorted(self._counts.items()):
            yield f"{self.name}{_format_labels(self.labels, values)} {_format_number(count)}"


class Histogram:
    """Counts durations by label values and buckets."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, *labels: str, bounds: Sequence[float] = BUCKET_SECONDS, max_label_sets: int = 500
    ) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self._bounds = bounds
        self._max_label_sets = max_label_sets
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}
        """Label values → the count of each bucket, and the sum of all durations."""

    def add(self, seconds: float, values: Labels = ()) -> None:
        counts, total = self._series.get(values) or self._create_series(values)
        counts[bisect_left(self._bounds, seconds)] += 1
        total[0] += seconds

    def add_all(self, durations: Iterable[float], values: Labels = ()) -> None:
        counts, total = self._series.get(values) or self._create_series(values)
        bounds = self._bounds
        for seconds in durations:
            counts[bisect_left(bounds, seconds)] += 1
            total[0] += seconds

    def _create_series(self, values: Labels) -> tuple[list[int], list[float]]:
        if len(self._series) >= self._max_label_sets:
            values = (_OTHER,) * len(self.labels)
        return self._series.setdefault(values, ([0] * (len(self._bounds) + 1), [0.0]))

    def lines(self) -> Iterator[str]:
        for values, (counts, total) in sorted(self._series.items()):
            cumulative = 0
            cumulative_counts: list[int] = []
            for count in counts[:-1]:
                cumulative += count
                cumulative_counts.append(cumulative)
            yield from _histogram_lines(
                self.name, self.labels, values, self._bounds, cumulative_counts, count=sum(counts), total=total[0]
            )


class MetricSamples:
    """Samples of one metric that are read when they are rendered."""

    def __init__(self, name: str, kind: str, help: str, *labels: str) -> None:
        self.name = name
        self.kind = kind
        self.help = help
        self.labels = labels
        self._lines: list[str] = []

    def add(self, value: float, *values: str) -> None:
        self._lines.append(f"{self.name}{_format_labels(self.labels, values)} {_format_number(value)}")

    def add_histogram(
        self, values: Labels, bounds: Sequence[float], cumulative_counts: Sequence[int], *, count: int, total: float
    ) -> None:
        self._lines += _histogram_lines(
            self.name, self.labels, values, bounds, cumulative_counts, count=count, total=total
        )

    def lines(self) -> Iterator[str]:
        return iter(self._lines)


MetricFamily = Counter | Histogram | MetricSamples


def gauge(name: str, help: str, values: Mapping[str, float] | float, label: str = "") -> MetricSamples:
    """Returns a gauge with one label, or without labels."""
    samples = MetricSamples(name, "gauge", help, *((label,) if label else ()))
    if isinstance(values, Mapping):
        for key, value in values.items():
            samples.add(value, key)
    else:
        samples.add(values)
    return samples


def format_prometheus(families: Iterable[MetricFamily]) -> bytes:
    """Renders metrics in the text format that Prometheus reads."""
    lines: list[str] = []
    for family in families:
        lines += (f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}", *family.lines())
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


class Metrics:
    """What this process counts since its start."""

    def __init__(self) -> None:
        self.requests = Counter("toolspace_http_requests_total", "HTTP requests.", "method", "route", "status")
        self.request_seconds = Histogram(
            "toolspace_http_request_duration_seconds", "Duration of HTTP requests, without streams.", "route"
        )
        self.database_seconds = Histogram(
            "toolspace_database_seconds",
            "Duration of database operations, including the wait for a connection.",
            "kind",
        )
        self.database_errors = Counter("toolspace_database_errors_total", "Failed database operations.", "kind")
        self.started_at = time.time()

    def observe(self, route: Route | None, status: int, seconds: float) -> None:
        """Counts a response. Requests without a route are counted together, because clients invent the paths."""
        if route is None:
            self.requests.add((_OTHER, _OTHER, str(status)))
            return
        self.requests.add((route.method, route.path, str(status)))
        if not route.is_stream:
            self.request_seconds.add(seconds, (route.path,))

    def count_requests(self, path: str, app: Application) -> Application:
        """Wraps an application that is mounted at a path, and counts its responses."""

        async def counting_app(scope: Scope, receive: Receive, send: Send) -> None:
            async def counting_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    method = scope["method"] if scope["method"] in _METHODS else _OTHER
                    self.requests.add((method, path, str(message["status"])))
                await send(message)

            await app(scope, receive, counting_send)

        return counting_app

    def observe_database(self, database: Database) -> None:
        database.observer = self._count_operations

    def _count_operations(self, kind: OperationKind, seconds: Sequence[float], errors: Sequence[BaseException]) -> None:
        self.database_seconds.add_all(seconds, (kind,))
        for error in errors:
            if isinstance(error, StorageError):
                self.database_errors.add((kind,))


class LiveCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway process has open now, and some totals since its start."""

    readers: int = 0
    """Open event streams."""
    streams: int = 0
    """Streams with at least one subscriber."""
    events: int = 0
    """Events stored since the start."""
    workers: Mapping[str, int] = {}
    """Tool → connected workers that serve it."""
    waiting: int = 0
    """Requests that wait for a result."""
    requests: int = 0
    """Running requests."""
    agents: int = 0
    """Agents and background tasks that run."""
    cycles: Mapping[str, int] = {}
    """Outcome → cycles since the start."""
    models: Mapping[str, ModelUsage] = {}
    """Model → usage since the start."""


def render_metrics(metrics: Metrics, ts: Toolspace, live: LiveCounts, counts: OpenWorkCounts | None) -> bytes:
    """Renders all metrics. `counts` is None if the database is unavailable, which is a metric itself."""
    return format_prometheus(
        (
            *_build_info(),
            *_tool_metrics(ts),
            *_server_metrics(ts),
            gauge("toolspace_stream_readers", "Event streams that are open in this process.", live.readers),
            gauge("toolspace_streams", "Streams with subscribers in this process.", live.streams),
            _counter("toolspace_events_total", "Events that this process stored.", live.events),
            gauge(
                "toolspace_workers",
                "Workers that are connected to this process, by tool.",
                _limit_tools(live.workers),
                "tool",
            ),
            gauge("toolspace_waiting_requests", "Requests that wait for a result in this process.", live.waiting),
            gauge("toolspace_http_requests_running", "HTTP requests that run in this process.", live.requests),
            *_agent_metrics(live),
            gauge("toolspace_database_up", "1 if the database responds.", int(counts is not None)),
            *(_open_work_metrics(counts) if counts is not None else ()),
            metrics.requests,
            metrics.request_seconds,
            metrics.database_seconds,
            metrics.database_errors,
            *_process_metrics(metrics.started_at),
        )
    )


def _counter(name: str, help: str, value: float) -> MetricSamples:
    samples = MetricSamples(name, "counter", help)
    samples.add(value)
    return samples


def _build_info() -> Iterator[MetricFamily]:
    info = MetricSamples("toolspace_build_info", "gauge", "The version of Toolspace.", "version", "python")
    info.add(1, __version__, platform.python_version())
    yield info


def _tool_metrics(ts: Toolspace) -> Iterator[MetricFamily]:
    call_log = ts.orchestrator.call_log
    calls = MetricSamples("toolspace_tool_calls_total", "counter", "Tool calls.", "tool", "status", "error_kind")
    durations = MetricSamples("toolspace_tool_call_duration_seconds", "histogram", "Duration of tool calls.", "tool")
    for tool, all_stats in _group_by_tool(call_log.stats.items()):
        successes = sum(stats.count - stats.failures for stats in all_stats)
        if successes:
            calls.add(successes, tool, "ok", "")
        failures: dict[str, int] = {}
        for stats in all_stats:
            by_kind = stats.failures_by_kind
            for kind, number in (*by_kind.items(), ("unknown", stats.failures - by_kind.total())):
                failures[kind] = failures.get(kind, 0) + number
        for kind, number in sorted(failures.items()):
            if number > 0:
                calls.add(number, tool, "failed", kind)
        _add_durations(durations, (tool,), all_stats)
    waits = MetricSamples(
        "toolspace_tool_queue_wait_seconds", "histogram", "Wait of tool calls in their queue, if they had to wait."
    )
    _add_durations(waits, (), [call_log.queue_waits])
    yield from (calls, durations, waits)


def _group_by_tool(stats: Iterable[tuple[str, CallStats]]) -> Iterator[tuple[str, list[CallStats]]]:
    """Yields the statistics of the tools with the most calls, and those of all other tools together."""
    ranked = sorted(stats, key=lambda item: -item[1].count)
    yield from ((tool, [tool_stats]) for tool, tool_stats in ranked[:_MAX_TOOLS])
    if rest := [tool_stats for _, tool_stats in ranked[_MAX_TOOLS:]]:
        yield _OTHER, rest


def _add_durations(samples: MetricSamples, labels: Labels, all_stats: list[CallStats]) -> None:
    columns = zip(*(stats.cumulative_counts(_BUCKET_MS) for stats in all_stats), strict=True)
    total = sum(stats.total_ms for stats in all_stats) / 1000
    count = sum(stats.count for stats in all_stats)
    samples.add_histogram(labels, BUCKET_SECONDS, [sum(column) for column in columns], count=count, total=total)


def _server_metrics(ts: Toolspace) -> Iterator[MetricFamily]:
    states = MetricSamples(
        "toolspace_mcp_server_state", "gauge", "1 for the present state of the MCP server.", "server", "state"
    )
    restarts = MetricSamples("toolspace_mcp_server_restarts_total", "counter", "Restarts of the MCP server.", "server")
    for server in ts.list_servers():
        for state in _SERVER_STATES:
            states.add(int(server.state == state), server.name, state)
        restarts.add(server.restarts, server.name)
    yield from (states, restarts)


def _agent_metrics(live: LiveCounts) -> Iterator[MetricFamily]:
    yield gauge("toolspace_agents_active", "Agents and background tasks that run in this process.", live.agents)
    cycles = MetricSamples("toolspace_agent_cycles_total", "counter", "Cycles of agents.", "outcome")
    for outcome, number in sorted(live.cycles.items()):
        cycles.add(number, outcome)
    requests = MetricSamples("toolspace_model_requests_total", "counter", "Requests to models.", "model", "status")
    tokens = MetricSamples(
        "toolspace_model_tokens_total", "counter", "Tokens that models read and wrote.", "model", "kind"
    )
    cost = MetricSamples(
        "toolspace_model_cost_dollars_total", "counter", "Cost of models whose price is known.", "model"
    )
    for model, model_usage in sorted(live.models.items()):
        for status, number in sorted(model_usage.requests.items()):
            requests.add(number, model, status)
        usage = model_usage.usage
        tokens.add(usage.input_tokens, model, "input")
        tokens.add(usage.cached_tokens, model, "cached")
        tokens.add(usage.output_tokens, model, "output")
        cost.add(usage.cost, model)
    yield from (cycles, requests, tokens, cost)


def _limit_tools(counts: Mapping[str, int]) -> dict[str, float]:
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    limited: dict[str, float] = dict(ranked[:_MAX_TOOLS])
    if rest := sum(number for _, number in ranked[_MAX_TOOLS:]):
        limited[_OTHER] = rest
    return limited


def _open_work_metrics(counts: OpenWorkCounts) -> Iterator[MetricFamily]:
    yield gauge("toolspace_calls_open", "Calls without a result, in all processes.", counts.calls, "status")
    yield gauge("toolspace_inbox_events", "Inbox events, in all processes.", counts.inbox, "status")
    yield gauge("toolspace_runs_open", "Open runs, in all processes.", counts.runs, "status")
    yield gauge("toolspace_nodes", "Processes that share the database.", counts.nodes)


def _process_metrics(started_at: float) -> Iterator[MetricFamily]:
    times = os.times()
    yield _counter("process_cpu_seconds_total", "CPU time of the process.", times.user + times.system)
    yield gauge("process_start_time_seconds", "Start time of the process.", started_at)
    if (resident := _resident_bytes()) is not None:
        yield gauge("process_resident_memory_bytes", "Resident memory of the process.", resident)
    with suppress(OSError):  # Only Linux has it.
        yield gauge("process_open_fds", "Open file descriptors of the process.", len(os.listdir("/proc/self/fd")))


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _histogram_lines(
    name: str,
    labels: Labels,
    values: Labels,
    bounds: Sequence[float],
    cumulative_counts: Sequence[int],
    *,
    count: int,
    total: float,
) -> Iterator[str]:
    bucket_labels = (*labels, "le")
    for bound, cumulative in zip(bounds, cumulative_counts, strict=True):
        yield f"{name}_bucket{_format_labels(bucket_labels, (*values, _format_number(bound)))} {cumulative}"
    yield f"{name}_bucket{_format_labels(bucket_labels, (*values, '+Inf'))} {count}"
    yield f"{name}_sum{_format_labels(labels, values)} {_format_number(total)}"
    yield f"{name}_count{_format_labels(labels, values)} {count}"


def _format_labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
