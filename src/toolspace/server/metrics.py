"""Metrics in the Prometheus text format. `GET /metrics` renders them.

Some are counted while the gateway works, which costs a dictionary lookup and an addition; the others are read on
request. Tool calls are counted by the orchestrator. Label values come from the configuration and the routes, never from
requests.
"""

from __future__ import annotations

import collections
import math
import os
import platform
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, get_args

from toolspace import __version__
from toolspace.agents.registry import ModelUsage
from toolspace.core.call_statistics import CallStats
from toolspace.errors import StorageError
from toolspace.providers.mcp.server_spec import ServerState
from toolspace.server.requests import Application, Message, Receive, Scope, Send
from toolspace.server.routing import Route
from toolspace.storage.database import Database, OperationKind
from toolspace.storage.queries.runs import OpenWorkCounts
from toolspace.toolspace import Toolspace

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKET_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BUCKET_MS = tuple(bound * 1000 for bound in BUCKET_SECONDS)
_OTHER = "other"
_MAX_TOOLS = 300
"""Tools with their own label; the tools with fewer calls are counted together as `other`."""
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD")
_SERVER_STATES: tuple[str, ...] = get_args(ServerState)

Labels = tuple[str, ...]
_BUILD_INFO: dict[Labels, float] = {(__version__, platform.python_version()): 1}


class _Family:
    """One metric: its name, help text and labels. `lines` renders its samples."""

    kind = ""

    def __init__(self, name: str, help: str, labels: Labels) -> None:
        self.name = name
        self.help = help
        self.labels = labels

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def _format(self, values: Labels, value: float) -> str:
        return f"{self.name}{_format_labels(self.labels, values)} {_format_number(value)}"

    def _format_histogram(
        self, values: Labels, bounds: Sequence[float], cumulative_counts: Iterable[int], *, count: int, total: float
    ) -> Iterator[str]:
        labels, bucket_labels = _format_labels(self.labels, values), (*self.labels, "le")
        for bound, cumulative in zip(bounds, cumulative_counts, strict=True):
            yield f"{self.name}_bucket{_format_labels(bucket_labels, (*values, _format_number(bound)))} {cumulative}"
        yield f"{self.name}_bucket{_format_labels(bucket_labels, (*values, '+Inf'))} {count}"
        yield f"{self.name}_sum{labels} {_format_number(total)}"
        yield f"{self.name}_count{labels} {count}"


class Counter(_Family):
    """Counts by label values. Beyond `max_label_sets` all are counted as `other`, which bounds the memory."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str, max_label_sets: int = 2_000) -> None:
        super().__init__(name, help, labels)
        self._max_label_sets = max_label_sets
        self._counts: dict[Labels, float] = {}

    def add(self, values: Labels = (), amount: float = 1) -> None:
        counts = self._counts
        if values not in counts and len(counts) >= self._max_label_sets:
            values = (_OTHER,) * len(self.labels)
        counts[values] = counts.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        return (self._format(values, count) for values, count in sorted(self._counts.items()))


class Histogram(_Family):
    """Counts durations by label values and buckets."""

    kind = "histogram"

    def __init__(
        self, name: str, help: str, *labels: str, bounds: Sequence[float] = BUCKET_SECONDS, max_label_sets: int = 500
    ) -> None:
        super().__init__(name, help, labels)
        self._bounds = bounds
        self._max_label_sets = max_label_sets
        self._series: dict[Labels, tuple[list[int], list[float]]] = {}
        """Label values → the count of each bucket, and the sum of all durations."""

    def add(self, durations: Iterable[float], values: Labels = ()) -> None:
        series = self._series.get(values)
        if series is None:
            if len(self._series) >= self._max_label_sets:
                values = (_OTHER,) * len(self.labels)
            series = self._series.setdefault(values, ([0] * (len(self._bounds) + 1), [0.0]))
        counts, total = series
        for seconds in durations:
            counts[bisect_left(self._bounds, seconds)] += 1
            total[0] += seconds

    def lines(self) -> Iterator[str]:
        for values, (counts, total) in sorted(self._series.items()):
            cumulative_counts = accumulate(counts[:-1])
            yield from self._format_histogram(
                values, self._bounds, cumulative_counts, count=sum(counts), total=total[0]
            )


class MetricSamples(_Family):
    """Samples of one metric that are read when they are rendered."""

    def __init__(self, name: str, kind: str, help: str, *labels: str) -> None:
        super().__init__(name, help, labels)
        self.kind = kind
        self._lines: list[str] = []

    def add(self, value: float, *values: str) -> None:
        self._lines.append(self._format(values, value))

    def add_stats(self, stats: Sequence[CallStats], *values: str) -> None:
        """Adds a histogram of the durations of calls."""
        columns = zip(*(tool_stats.cumulative_counts(_BUCKET_MS) for tool_stats in stats), strict=True)
        total = sum(tool_stats.total_ms for tool_stats in stats) / 1000
        count = sum(tool_stats.count for tool_stats in stats)
        self._lines += self._format_histogram(values, BUCKET_SECONDS, map(sum, columns), count=count, total=total)

    def lines(self) -> Iterator[str]:
        return iter(self._lines)


Values = Mapping[str, float] | Mapping[Labels, float] | float
"""One value, or values by label value or label values."""


def gauge(name: str, help: str, values: Values, *labels: str) -> MetricSamples:
    return _read_samples(name, "gauge", help, values, labels)


def counter(name: str, help: str, values: Values, *labels: str) -> MetricSamples:
    """Returns a counter that is counted elsewhere."""
    return _read_samples(name, "counter", help, values, labels)


def _read_samples(name: str, kind: str, help: str, values: Values, labels: Labels) -> MetricSamples:
    samples = MetricSamples(name, kind, help, *labels)
    for key, value in values.items() if isinstance(values, Mapping) else (((), values),):
        samples.add(value, *((key,) if isinstance(key, str) else key))
    return samples


def format_prometheus(families: Iterable[_Family]) -> bytes:
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
            self.request_seconds.add((seconds,), (route.path,))

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
        self.database_seconds.add(seconds, (kind,))
        for error in errors:
            if isinstance(error, StorageError):
                self.database_errors.add((kind,))


def render_metrics(gateway: Gateway, open_work: OpenWorkCounts | None) -> bytes:
    """Renders all metrics. `open_work` is None if the database is unavailable, which is a metric itself."""
    metrics, hub, scheduler = gateway.metrics, gateway.ledger.hub, gateway.agent_host.scheduler
    return format_prometheus(
        (
            gauge("toolspace_build_info", "The version of Toolspace.", _BUILD_INFO, "version", "python"),
            *_tool_metrics(gateway.toolspace),
            *list_server_metrics(gateway.toolspace),
            gauge("toolspace_stream_readers", "Event streams that are open in this process.", hub.subscription_count),
            gauge("toolspace_streams", "Streams with subscribers in this process.", hub.stream_count),
            counter("toolspace_events_total", "Events that this process stored.", gateway.ledger.stored_event_count),
            gauge(
                "toolspace_workers",
                "Workers that are connected to this process, by tool.",
                _limit_tools(gateway.workers.count_by_tool()),
                "tool",
            ),
            gauge(
                "toolspace_waiting_requests",
                "Requests that wait for a result in this process.",
                gateway.pending_calls.waiting_count,
            ),
            gauge(
                "toolspace_http_requests_running", "HTTP requests that run in this process.", gateway.limiter.requests
            ),
            gauge(
                "toolspace_agents_active",
                "Agents and background tasks that run in this process.",
                scheduler.active_count,
            ),
            counter(
                "toolspace_agent_cycles_total",
                "Cycles of agents.",
                dict(sorted(scheduler.cycle_counts.items())),
                "outcome",
            ),
            *_model_metrics(gateway.toolspace.agents.model_usage),
            gauge(
                "toolspace_clock_skew_seconds",
                "How far the clock of this process is ahead of the database.",
                round(gateway.ledger.database.clock.skew_seconds, 3),
            ),
            gauge("toolspace_database_up", "1 if the database responds.", int(open_work is not None)),
            *(_open_work_metrics(open_work) if open_work is not None else ()),
            metrics.requests,
            metrics.request_seconds,
            metrics.database_seconds,
            metrics.database_errors,
            *_process_metrics(metrics.started_at),
        )
    )


def _tool_metrics(ts: Toolspace) -> Iterator[MetricSamples]:
    call_log = ts.orchestrator.call_log
    calls = MetricSamples("toolspace_tool_calls_total", "counter", "Tool calls.", "tool", "status", "error_kind")
    durations = MetricSamples("toolspace_tool_call_duration_seconds", "histogram", "Duration of tool calls.", "tool")
    for tool, tool_stats in _group_by_tool(call_log.stats.items()):
        if successes := sum(stats.count - stats.failures for stats in tool_stats):
            calls.add(successes, tool, "ok", "")
        failures = sum((stats.failures_by_kind for stats in tool_stats), collections.Counter[str]())
        failures["unknown"] += sum(stats.failures - stats.failures_by_kind.total() for stats in tool_stats)
        for kind, number in sorted(failures.items()):
            if number > 0:
                calls.add(number, tool, "failed", kind)
        durations.add_stats(tool_stats, tool)
    waits = MetricSamples(
        "toolspace_tool_queue_wait_seconds", "histogram", "Wait of tool calls in their queue, if they had to wait."
    )
    waits.add_stats([call_log.queue_waits])
    yield from (calls, durations, waits)


def _group_by_tool(stats: Iterable[tuple[str, CallStats]]) -> Iterator[tuple[str, list[CallStats]]]:
    """Yields the statistics of the tools with the most calls, and those of all other tools together."""
    top_tools = sorted(stats, key=lambda item: -item[1].count)
    yield from ((tool, [tool_stats]) for tool, tool_stats in top_tools[:_MAX_TOOLS])
    if rest := [tool_stats for _, tool_stats in top_tools[_MAX_TOOLS:]]:
        yield _OTHER, rest


def _limit_tools(counts: Mapping[str, int]) -> dict[str, float]:
    top_tools = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    result: dict[str, float] = dict(top_tools[:_MAX_TOOLS])
    if rest := sum(number for _, number in top_tools[_MAX_TOOLS:]):
        result[_OTHER] = rest
    return result


def list_server_metrics(ts: Toolspace) -> Iterator[MetricSamples]:
    servers = ts.list_servers()
    yield gauge(
        "toolspace_mcp_server_state",
        "1 for the present state of the MCP server.",
        {(server.name, state): int(server.state == state) for server in servers for state in _SERVER_STATES},
        "server",
        "state",
    )
    restarts = {server.name: server.restarts for server in servers}
    yield counter("toolspace_mcp_server_restarts_total", "Restarts of the MCP server.", restarts, "server")
    open_circuits: collections.Counter[str] = collections.Counter()
    for name, circuit in ts.orchestrator.circuits.statuses():
        open_circuits[name] += circuit.is_open  # Several agents may have a provider of the same name.
    yield gauge(
        "toolspace_circuit_breakers_open",
        "Open circuit breakers of the provider: its calls fail at once, because the last ones failed.",
        _limit_tools(open_circuits),
        "provider",
    )


def _model_metrics(models: Mapping[str, ModelUsage]) -> Iterator[MetricSamples]:
    requests: dict[Labels, float] = {}
    tokens: dict[Labels, float] = {}
    costs: dict[str, float] = {}
    for model, model_usage in sorted(models.items()):
        requests |= {(model, status): number for status, number in sorted(model_usage.requests.items())}
        usage = model_usage.usage
        tokens[model, "input"] = usage.input_tokens
        tokens[model, "cached"] = usage.cached_tokens
        tokens[model, "output"] = usage.output_tokens
        costs[model] = usage.cost
    yield counter("toolspace_model_requests_total", "Requests to models.", requests, "model", "status")
    yield counter("toolspace_model_tokens_total", "Tokens that models read and wrote.", tokens, "model", "kind")
    yield counter("toolspace_model_cost_dollars_total", "Cost of models whose price is known.", costs, "model")


def _open_work_metrics(counts: OpenWorkCounts) -> Iterator[MetricSamples]:
    yield gauge("toolspace_calls_open", "Calls without a result, in all processes.", counts.calls, "status")
    yield gauge("toolspace_inbox_events", "Inbox events, in all processes.", counts.inbox, "status")
    yield gauge("toolspace_runs_open", "Open runs, in all processes.", counts.runs, "status")
    yield gauge("toolspace_nodes", "Processes that share the database.", counts.nodes)


def _process_metrics(started_at: float) -> Iterator[MetricSamples]:
    times = os.times()
    yield counter("process_cpu_seconds_total", "CPU time of the process.", times.user + times.system)
    yield gauge("process_start_time_seconds", "Start time of the process.", started_at)
    with suppress(OSError, ValueError, IndexError):  # Only Linux has these files.
        with open("/proc/self/statm", encoding="ascii") as file:
            resident_bytes = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield gauge("process_resident_memory_bytes", "Resident memory of the process.", resident_bytes)
        yield gauge("process_open_fds", "Open file descriptors of the process.", len(os.listdir("/proc/self/fd")))


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
