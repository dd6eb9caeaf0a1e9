"""The stages of a call in one function: the lower bound that the orchestrator is compared with.

It does what the contract asks of every call and nothing else: no policies, no queues, no output store, no log.
Results, events and estimates are Toolspace's own plain data, so that both sides fill in the same fields.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from time import monotonic, perf_counter, time
from typing import Any

import msgspec
from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from toolspace.core.events import CallCompleted, CallFailed, CallRequested
from toolspace.core.result import ToolResult
from toolspace.core.token_count import estimate_tokens

MAX_BYTES = 100_000
SHORT = 200
KEEP_SECONDS = 3600.0
_SCALE = 1 / math.log(1.04)

Function = Callable[..., Coroutine[Any, Any, Any]]
Validate = Callable[[str], dict[str, Any]]
Subscriber = Callable[[Any], None]

tools: dict[str, tuple[Function, Validate, float]] = {}
records: deque[tuple[Any, ...]] = deque(maxlen=1_000)
stats: dict[str, list[Any]] = {}
on_requested: list[Subscriber] = []
on_ended: list[Subscriber] = []
cached: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
current: ContextVar[tuple[str, int | None] | None] = ContextVar("byhand_call", default=None)
"""The id of the call around, and how many calls its run may still make."""

_process = f"call_{os.urandom(6).hex()}"
_ids = itertools.count(0x100000)
_canonical = msgspec.json.Encoder(order="deterministic").encode
_encode = msgspec.json.encode
_decode = msgspec.json.Decoder().decode


def register(function: Function, arguments: type, timeout: float = 30.0) -> None:
    """Takes a tool in. `arguments` is a TypedDict of its parameters."""
    arguments.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]
    tools[function.__name__] = (function, TypeAdapter(arguments).validator.validate_json, timeout)
    stats[function.__name__] = [0, 0, 0.0, {}]


async def call(name: str, text: str, defer_tokens: bool = False) -> ToolResult:
    """Runs one call: find, validate, limit, run with a timeout, check the size, record, publish events.

    With `defer_tokens` a short text is stored in the record and its tokens are counted on reading, as Toolspace does.
    """
    entry = tools.get(name)
    if entry is None:
        raise LookupError(name)
    function, validate, timeout = entry
    enclosing_call = current.get()
    parent, calls_left = (None, None) if enclosing_call is None else enclosing_call
    call_id = f"{_process}{next(_ids):x}"
    started_at, started = perf_counter(), time() * 1000
    request_event = CallRequested(started, call_id, name, None, parent, text)
    for subscriber in on_requested:
        subscriber(request_event)
    error = kind = value = None
    executed = False
    token = current.set((call_id, calls_left))
    try:
        values = validate(text)
        if calls_left is not None and calls_left <= 0:
            error, kind = "too many calls", "limit_exceeded"
        else:
            executed = True
            coroutine = function(**values)
            try:
                awaited_future = coroutine.send(None)
            except StopIteration as stop:
                value = stop.value
            else:
                async with asyncio.timeout(timeout):
                    value = await _Rest(coroutine, awaited_future)
    except ValidationError as failure:
        error, kind = str(failure), "invalid_parameters"
    except TimeoutError:
        error, kind = f"timed out after {timeout * 1000:g}ms", "timeout"
    except Exception as failure:
        error, kind = str(failure), "execution_error"
    finally:
        current.reset(token)
    duration = (perf_counter() - started_at) * 1000
    ok = error is None
    if not ok:
        out = f"(tool failed: {error})"
    elif type(value) is str:
        out = value
    else:
        out = str(value) if type(value) is int else _encode(value).decode()
    if len(out) > MAX_BYTES // 4 and len(out.encode()) > MAX_BYTES:
        raise NotImplementedError("the hand-written call has no output store")
    result = ToolResult(
        ok, value, error, kind, executed, started, started + duration, duration, "local", "", (), {}, name, call_id, out
    )  # fmt: skip
    records.append((
        call_id, name, name, "", "ok" if ok else "failed", kind, executed, started, duration, 0.0,
        len(text), len(out), out if defer_tokens and len(out) <= SHORT else estimate_tokens(out),
        False, None, None, None, parent,
    ))  # fmt: skip
    tool_stats = stats[name]
    tool_stats[0] += 1
    tool_stats[2] += duration
    buckets = tool_stats[3]
    bucket = math.floor(math.log(duration + 1e-4) * _SCALE)
    buckets[bucket] = buckets.get(bucket, 0) + 1
    if ok:
        end_event = CallCompleted(started + duration, call_id, name, None, parent, result)
    else:
        tool_stats[1] += 1
        end_event = CallFailed(started + duration, call_id, name, None, parent, result)
    for subscriber in on_ended:
        subscriber(end_event)
    return result


class _Rest:
    """Awaits the rest of a coroutine that was started with `send`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], awaited_future: Any) -> None:
        self._coroutine, self._awaited_future = coroutine, awaited_future

    def __await__(self) -> Any:
        coroutine, awaited_future = self._coroutine, self._awaited_future
        try:
            while True:
                try:
                    value = yield awaited_future
                except BaseException as error:
                    awaited_future = coroutine.throw(error)
                else:
                    awaited_future = coroutine.send(value)
        except StopIteration as stop:
            return stop.value


def remember(name: str, text: str, value: Any) -> None:
    """Puts a result into the cache."""
    key = name.encode() + _canonical(tools[name][1](text))
    cached[key] = (monotonic() + KEEP_SECONDS, _encode(value))


async def look_up(name: str, text: str) -> ToolResult | None:
    """A least-recently-used lookup under a canonical key, and nothing around it."""
    started_at, started = perf_counter(), time() * 1000
    key = name.encode() + _canonical(tools[name][1](text))
    entry = cached.get(key)
    if entry is None or entry[0] <= monotonic():
        return None
    cached.move_to_end(key)
    value = _decode(entry[1])
    duration = (perf_counter() - started_at) * 1000
    return ToolResult(
        True, value, None, None, False, started, started + duration, duration, "local", "", (), {}, name, ""
    )  # fmt: skip


async def cached_call(name: str, text: str, defer_tokens: bool = False) -> ToolResult | None:
    """The same lookup as a call that is recorded and published, as the contract requires for a cache hit."""
    entry = tools.get(name)
    if entry is None:
        raise LookupError(name)
    enclosing_call = current.get()
    parent, calls_left = (None, None) if enclosing_call is None else enclosing_call
    call_id = f"{_process}{next(_ids):x}"
    started_at, started = perf_counter(), time() * 1000
    request_event = CallRequested(started, call_id, name, None, parent, text)
    for subscriber in on_requested:
        subscriber(request_event)
    values = entry[1](text)
    if calls_left is not None and calls_left <= 0:
        return None
    key = name.encode() + _canonical(values)
    cache_entry = cached.get(key)
    if cache_entry is None or cache_entry[0] <= monotonic():
        return None
    cached.move_to_end(key)
    value = _decode(cache_entry[1])
    duration = (perf_counter() - started_at) * 1000
    out = value if type(value) is str else str(value) if type(value) is int else _encode(value).decode()
    result = ToolResult(
        True, value, None, None, False, started, started + duration, duration,
        "local", "", (), {}, name, call_id, out,
    )  # fmt: skip
    records.append((
        call_id, name, name, "", "ok", None, False, started, duration, 0.0,
        len(text), len(out), out if defer_tokens and len(out) <= SHORT else estimate_tokens(out),
        True, None, None, None, parent,
    ))  # fmt: skip
    tool_stats = stats[name]
    tool_stats[0] += 1
    tool_stats[2] += duration
    buckets = tool_stats[3]
    bucket = math.floor(math.log(duration + 1e-4) * _SCALE)
    buckets[bucket] = buckets.get(bucket, 0) + 1
    end_event = CallCompleted(started + duration, call_id, name, None, parent, result)
    for subscriber in on_ended:
        subscriber(end_event)
    return result


class AddArguments(TypedDict):
    a: int
    b: int
