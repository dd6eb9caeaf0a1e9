"""Stage: answers from the cache, and lets equal calls in flight share one execution. Never fails a call."""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter

import msgspec

from toolspace.core import json_text
from toolspace.core.interfaces import CachedResult, ResultCache
from toolspace.core.result import PENDING_CALL_KEY, Content, ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import SharedExecution
from toolspace.orchestrator.stage import CallHandler, InstantHandler, StageContext

_log = logging.getLogger("toolspace.cache")
_LONG_KEY = 512
_MOST_KEYS = 1_024


def cache(plan: StageContext, next: CallHandler, /) -> CallHandler:
    ttl = plan.settings.cache.value
    store = plan.services.cache
    if not ttl or store is None:
        return next
    name = plan.entry.tool.name
    per_user = plan.settings.cache_per_user.value
    keys = plan.entry.cache_keys
    entry, flights = plan.entry, plan.entry.shared_executions

    async def run(call: Call) -> ToolResult:
        key = _key(name, call, per_user)
        if not per_user and type(call.arguments) is str and len(call.arguments) < _LONG_KEY:
            if len(keys) >= _MOST_KEYS:
                keys.clear()
            keys[call.arguments] = key
        return await answer(call, key)

    async def answer(call: Call, key: str) -> ToolResult:
        loop = asyncio.get_running_loop()
        while (flight := flights.get((loop, key))) is not None:
            call.prepare_to_wait()
            if flight.result_future is None:
                flight.result_future = loop.create_future()
            shared = await call.within_deadline(asyncio.shield(flight.result_future))
            if shared is not None and PENDING_CALL_KEY in shared.extras:
                return await next(call)  # Its answer comes later, and to one caller: each asks for itself.
            if shared is not None:
                return _share(call, shared)
            # It ended for reasons of its own: whoever waited looks again, and one of them runs it.
        known = await _look_up(store, key, call)
        if known is not None:
            return _recall(call, known)
        if (loop, key) in flights:  # Someone took off while the cache was asked.
            return await answer(call, key)
        flights[loop, key] = flight = SharedExecution()
        result: ToolResult | None = None
        try:
            result = await next(call)
            # What only says that the answer comes later is no answer to keep.
            if result.ok and not call.is_stored and not entry.is_stale and PENDING_CALL_KEY not in result.extras:
                await _remember(store, key, result, ttl)
            return result
        finally:
            del flights[loop, key]
            if flight.result_future is not None:
                flight.result_future.set_result(_shareable(call, result))

    return run


def cached_lookup(plan: StageContext) -> InstantHandler | None:
    """Answers a call whose very text was answered before, without checking it again: text says all of it.

    None for a tool without a cache, and for one whose answers depend on the user.
    """
    store = plan.services.cache
    if not plan.settings.cache.value or store is None or plan.settings.cache_per_user.value:
        return None
    keys, limit = plan.entry.cache_keys, plan.settings.max_bytes.value // 4
    kind, namespace, name = plan.entry.provider.kind, plan.entry.provider.namespace, plan.entry.tool.name
    peek, decode = store.peek, msgspec.json.Decoder().decode

    def recall(call: Call) -> ToolResult | None:
        arguments = call.arguments
        if type(arguments) is not str or (key := keys.get(arguments)) is None:
            return None
        try:
            if (known := peek(key)) is None:
                return None
        except Exception:
            return None  # The stage asks again, and says what is wrong.
        encoded = known.text
        if known.parts or len(encoded) > limit:
            return None
        call.cache_hit = True
        value = decode(encoded)
        text = value if type(value) is str else encoded.decode()
        elapsed = (perf_counter() - call.monotonic_start) * 1000
        started = call.started_at
        return ToolResult(
            True, value, None, None, False, started, started + elapsed, elapsed,
            kind, namespace, (), {}, name, call.id, text,
        )  # fmt: skip

    return recall


def _key(tool: str, call: Call, per_user: bool) -> str:
    arguments = json_text.encode_canonical(call.values)
    try:
        text = arguments.decode() if len(arguments) < _LONG_KEY else _digest(arguments)
    except UnicodeDecodeError:  # Half a surrogate pair, which JSON can spell.
        text = _digest(arguments)
    return f"{tool}\0{call.base_context.user_id or ''}\0{text}" if per_user else f"{tool}\0{text}"


def _digest(data: bytes) -> str:
    from hashlib import blake2b  # Most keys are short and speak for themselves.

    return blake2b(data).hexdigest()


async def _look_up(store: ResultCache, key: str, call: Call) -> CachedResult | None:
    try:
        known = store.peek(key)
        if known is None:
            call.prepare_to_wait()
            known = await store.get(key)
        return known
    except Exception:
        _log.warning("the cache could not be read; the call runs without it", exc_info=True)
        return None


async def _remember(store: ResultCache, key: str, result: ToolResult, ttl: float) -> None:
    try:
        parts = _parts_encoder.encode(result.parts) if result.parts else b""
        await store.set(key, CachedResult(json_text.encode_bytes(result.result), parts), ttl)
    except Exception:
        _log.warning("the cache could not be written; the result is given all the same", exc_info=True)


def _recall(call: Call, known: CachedResult) -> ToolResult:
    call.cache_hit = True
    result = call.succeed(json_text.decode(known.text))
    if known.parts:
        result.parts = _parts_decoder.decode(known.parts)
    result.executed = False
    return result


def _shareable(call: Call, result: ToolResult | None) -> ToolResult | None:
    """What an ended call leaves to those that waited for it; nothing where the end was its own, not the tool's."""
    if result is None or call.is_stored or result.error_kind == "canceled":
        return None
    if result.error_kind == "timeout" and call.run is not None and call.run.remaining_seconds <= 0:
        return None
    # A copy, made now: its caller may change what it gets before the others look.
    return msgspec.structs.replace(result, result=json_text.decode(json_text.encode_bytes(result.result)))


def _share(call: Call, shared: ToolResult) -> ToolResult:
    """The outcome of the equal call that ran, as this call's own."""
    call.cache_hit = True
    if not shared.ok:
        return call.fail(shared.error_kind or "internal_error", shared.error or "", executed=shared.executed)
    # A copy: callers may change what they get.
    result = call.succeed(json_text.decode(json_text.encode_bytes(shared.result)))
    result.parts = shared.parts
    return result


_parts_encoder = msgspec.json.Encoder()
_parts_decoder = msgspec.json.Decoder(tuple[Content, ...])
