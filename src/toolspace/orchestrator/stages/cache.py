"""The stage `cache`: returns cached results, and lets equal calls that run at the same time share one execution.

If the cache fails, the call runs as if nothing were cached.
"""

from __future__ import annotations

import asyncio
import logging
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from toolspace.core import json_text
from toolspace.core.extension_points import CachedResult, ResultCache
from toolspace.core.result import PENDING_CALL_KEY, Content, ToolResult
from toolspace.orchestrator.call import Call

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, InstantHandler, StageContext

_log = logging.getLogger("toolspace.cache")
_MAX_KEY_TEXT = 512
_MAX_KEYS = 1_024


def cache(stage: StageContext, next: CallHandler, /) -> CallHandler:
    ttl = stage.settings.cache.value
    store = stage.services.cache
    if not ttl or store is None:
        return next
    name = stage.entry.tool.name
    per_user = stage.settings.cache_per_user.value
    keys = stage.entry.cache_keys
    entry, executions = stage.entry, stage.entry.shared_executions

    async def run(call: Call) -> ToolResult:
        key = _cache_key(name, call, per_user)
        if not per_user and type(call.arguments) is str and len(call.arguments) < _MAX_KEY_TEXT:
            if len(keys) >= _MAX_KEYS:
                keys.clear()
            keys[call.arguments] = key
        return await find_or_execute(call, key)

    async def find_or_execute(call: Call, key: str) -> ToolResult:
        loop = asyncio.get_running_loop()
        while (loop, key) in executions:
            call.prepare_to_wait()
            if (result_future := executions[loop, key]) is None:
                result_future = executions[loop, key] = loop.create_future()
            shared_result = await call.within_deadline(asyncio.shield(result_future))
            if shared_result is not None and PENDING_CALL_KEY in shared_result.extras:
                return await next(call)  # The result of a pending call goes to one caller: each makes its own call.
            if shared_result is not None:
                return _copy_shared(call, shared_result)
            # The result of that call applies to it alone. The waiting calls look again, and one of them executes.
        cached = await _find(store, key, call)
        if cached is not None:
            return _from_cache(call, cached)
        if (loop, key) in executions:  # An equal call started while the cache was read.
            return await find_or_execute(call, key)
        executions[loop, key] = None
        result: ToolResult | None = None
        try:
            result = await next(call)
            # The placeholder of a pending call is no result to cache.
            if result.ok and not call.is_stored and not entry.is_stale and PENDING_CALL_KEY not in result.extras:
                await _save(store, key, result, ttl)
            return result
        finally:
            if (result_future := executions.pop((loop, key))) is not None:
                result_future.set_result(_shareable_copy(call, result))

    return run


def cached_lookup(stage: StageContext) -> InstantHandler | None:
    """Returns a function that finds the cached result of a call by the exact text of its arguments.

    A text that was cached before has been validated before, so it is not validated again. None for a tool without a
    cache, and for a tool whose results depend on the user.
    """
    store = stage.services.cache
    if not stage.settings.cache.value or store is None or stage.settings.cache_per_user.value:
        return None
    keys, max_length = stage.entry.cache_keys, stage.settings.max_bytes.value // 4
    kind, namespace, name = stage.entry.provider.kind, stage.entry.provider.namespace, stage.entry.tool.name
    peek, decode = store.peek, msgspec.json.Decoder().decode

    def find(call: Call) -> ToolResult | None:
        arguments = call.arguments
        if type(arguments) is not str or (key := keys.get(arguments)) is None:
            return None
        try:
            if (cached := peek(key)) is None:
                return None
        except Exception:
            return None  # The stage reads the cache again, and logs the error.
        encoded = cached.text
        if cached.parts or len(encoded) > max_length:
            return None
        call.cache_hit = True
        value = decode(encoded)
        text = value if type(value) is str else encoded.decode()
        elapsed_ms = (perf_counter() - call.monotonic_start) * 1000
        started_at = call.started_at
        return ToolResult(
            True, value, None, None, False, started_at, started_at + elapsed_ms, elapsed_ms,
            kind, namespace, (), {}, name, call.id, text,
        )  # fmt: skip

    return find


def _cache_key(tool: str, call: Call, per_user: bool) -> str:
    arguments = json_text.encode_canonical(call.values)
    try:
        text = arguments.decode() if len(arguments) < _MAX_KEY_TEXT else _hash(arguments)
    except UnicodeDecodeError:  # Half a surrogate pair, which JSON can express.
        text = _hash(arguments)
    return f"{tool}\0{call.base_context.user_id or ''}\0{text}" if per_user else f"{tool}\0{text}"


def _hash(data: bytes) -> str:
    from hashlib import blake2b  # Imported here: most keys are short and need no hash.

    return blake2b(data).hexdigest()


async def _find(store: ResultCache, key: str, call: Call) -> CachedResult | None:
    try:
        cached = store.peek(key)
        if cached is None:
            call.prepare_to_wait()
            cached = await store.get(key)
        return cached
    except Exception:
        _log.warning("cannot read the cache; call %s runs without it", call.id, exc_info=True)
        return None


async def _save(store: ResultCache, key: str, result: ToolResult, ttl: float) -> None:
    try:
        parts = _parts_encoder.encode(result.parts) if result.parts else b""
        await store.set(key, CachedResult(json_text.encode_bytes(result.result), parts), ttl)
    except Exception:
        _log.warning("cannot write to the cache; call %s is not cached", result.call_id, exc_info=True)


def _from_cache(call: Call, cached: CachedResult) -> ToolResult:
    call.cache_hit = True
    result = call.complete(json_text.decode(cached.text))
    if cached.parts:
        result.parts = _parts_decoder.decode(cached.parts)
    result.executed = False
    return result


def _shareable_copy(call: Call, result: ToolResult | None) -> ToolResult | None:
    """Returns the result for the equal calls that waited; None if it applies to the executing call alone."""
    if result is None or call.is_stored or result.error_kind == "canceled":
        return None
    if result.error_kind == "timeout" and call.run is not None and call.run.remaining_seconds <= 0:
        return None
    # Copied now: the first caller may change its result before the others read theirs.
    return msgspec.structs.replace(result, result=json_text.decode(json_text.encode_bytes(result.result)))


def _copy_shared(call: Call, shared_result: ToolResult) -> ToolResult:
    """Returns the result of the equal call that executed, as a result of this call."""
    call.cache_hit = True
    if not shared_result.ok:
        kind, message = shared_result.error_kind or "internal_error", shared_result.error or ""
        return call.fail(kind, message, executed=shared_result.executed)
    # Copied: callers may change their results.
    result = call.complete(json_text.decode(json_text.encode_bytes(shared_result.result)))
    result.parts = shared_result.parts
    return result


_parts_encoder = msgspec.json.Encoder()
_parts_decoder = msgspec.json.Decoder(tuple[Content, ...])
