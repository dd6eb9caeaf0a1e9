"""The stages of a call written in a row, for this benchmark alone: the floor that the orchestrator is held against.

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
from toolspace.core.tokens import estimate_tokens

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
    """Runs one call: find, check, limit, run in time, cap, record, announce.

    With `defer_tokens` a short text is kept in the record, for whoever reads it to count, as Toolspace does.
    """
    entry = tools.get(name)
    if entry is None:
        raise LookupError(name)
    function, validate, timeout = entry
    above = current.get()
    parent, left = (None, None) if above is None else above
    call_id = f"{_process}{next(_ids):x}"
    began, started = perf_counter(), time() * 1000
    requested = CallRequested(started, call_id, name, None, parent, text)
    for subscriber in on_requested:
        subscriber(requested)
    error = kind = value = None
    executed = False
    token = current.set((call_id, left))
    try:
        values = validate(text)
        if left is not None and left <= 0:
            error, kind = "too many calls", "limit_exceeded"
        else:
            executed = True
            coroutine = function(**values)
            try:
                waiting = coroutine.send(None)
            except StopIteration as done:
                value = done.value
            else:
                async with asyncio.timeout(timeout):
                    value = await _Rest(coroutine, waiting)
    except ValidationError as wrong:
        error, kind = str(wrong), "invalid_parameters"
    except TimeoutError:
        error, kind = f"timed out after {timeout * 1000:g}ms", "timeout"
    except Exception as raised:
        error, kind = str(raised), "execution_error"
    finally:
        current.reset(token)
    elapsed = (perf_counter() - began) * 1000
    ok = error is None
    if not ok:
        out = f"(tool failed: {error})"
    elif type(value) is str:
        out = value
    else:
        out = str(value) if type(value) is int else _encode(value).decode()
    if len(out) > MAX_BYTES // 4 and len(out.encode()) > MAX_BYTES:
        raise NotImplementedError("this floor stores nothing")
    result = ToolResult(
        ok, value, error, kind, executed, started, started + elapsed, elapsed, "local", "", (), {}, name, call_id, out
    )  # fmt: skip
    records.append((
        call_id, name, name, "", "ok" if ok else "failed", kind, executed, started, elapsed, 0.0,
        len(text), len(out), out if defer_tokens and len(out) <= SHORT else estimate_tokens(out),
        False, None, None, None, parent,
    ))  # fmt: skip
    books = stats[name]
    books[0] += 1
    books[2] += elapsed
    buckets = books[3]
    bucket = math.floor(math.log(elapsed + 1e-4) * _SCALE)
    buckets[bucket] = buckets.get(bucket, 0) + 1
    if ok:
        ended = CallCompleted(started + elapsed, call_id, name, None, parent, result)
    else:
        books[1] += 1
        ended = CallFailed(started + elapsed, call_id, name, None, parent, result)
    for subscriber in on_ended:
        subscriber(ended)
    return result


class _Rest:
    """Awaits a coroutine that has been started by hand."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waiting: Any) -> None:
        self._coroutine, self._waiting = coroutine, waiting

    def __await__(self) -> Any:
        coroutine, waiting = self._coroutine, self._waiting
        try:
            while True:
                try:
                    sent = yield waiting
                except BaseException as error:
                    waiting = coroutine.throw(error)
                else:
                    waiting = coroutine.send(sent)
        except StopIteration as done:
            return done.value


def remember(name: str, text: str, value: Any) -> None:
    """Puts a result into the cache."""
    key = name.encode() + _canonical(tools[name][1](text))
    cached[key] = (monotonic() + KEEP_SECONDS, _encode(value))


async def look_up(name: str, text: str) -> ToolResult | None:
    """A least-recently-used lookup under a canonical key, and nothing around it."""
    began, started = perf_counter(), time() * 1000
    key = name.encode() + _canonical(tools[name][1](text))
    entry = cached.get(key)
    if entry is None or entry[0] <= monotonic():
        return None
    cached.move_to_end(key)
    value = _decode(entry[1])
    elapsed = (perf_counter() - began) * 1000
    return ToolResult(
        True, value, None, None, False, started, started + elapsed, elapsed, "local", "", (), {}, name, ""
    )  # fmt: skip


async def cached_call(name: str, text: str, defer_tokens: bool = False) -> ToolResult | None:
    """The same lookup as a call that is recorded and announced, as the contract asks of a hit too."""
    entry = tools.get(name)
    if entry is None:
        raise LookupError(name)
    above = current.get()
    parent, left = (None, None) if above is None else above
    call_id = f"{_process}{next(_ids):x}"
    began, started = perf_counter(), time() * 1000
    requested = CallRequested(started, call_id, name, None, parent, text)
    for subscriber in on_requested:
        subscriber(requested)
    values = entry[1](text)
    if left is not None and left <= 0:
        return None
    key = name.encode() + _canonical(values)
    known = cached.get(key)
    if known is None or known[0] <= monotonic():
        return None
    cached.move_to_end(key)
    value = _decode(known[1])
    elapsed = (perf_counter() - began) * 1000
    out = value if type(value) is str else str(value) if type(value) is int else _encode(value).decode()
    result = ToolResult(
        True, value, None, None, False, started, started + elapsed, elapsed,
        "local", "", (), {}, name, call_id, out,
    )  # fmt: skip
    records.append((
        call_id, name, name, "", "ok", None, False, started, elapsed, 0.0,
        len(text), len(out), out if defer_tokens and len(out) <= SHORT else estimate_tokens(out),
        True, None, None, None, parent,
    ))  # fmt: skip
    books = stats[name]
    books[0] += 1
    books[2] += elapsed
    buckets = books[3]
    bucket = math.floor(math.log(elapsed + 1e-4) * _SCALE)
    buckets[bucket] = buckets.get(bucket, 0) + 1
    ended = CallCompleted(started + elapsed, call_id, name, None, parent, result)
    for subscriber in on_ended:
        subscriber(ended)
    return result


class AddArguments(TypedDict):
    a: int
    b: int
