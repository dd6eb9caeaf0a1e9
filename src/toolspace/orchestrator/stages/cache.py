"""The stage `cache`: returns cached results, and lets equal calls that run at the same time share one execution.

Calls of different principals are never equal, unless the tool's `cacheScope` is `shared`. Neither are calls of callers
that may reach different files, hosts or variables, nor calls of a tool before and after it changed.

If the cache fails, the call runs as if nothing were cached.
"""

from __future__ import annotations

import asyncio
import logging
import operator
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from toolspace.core import json_text
from toolspace.core.extension_points import CachedResult, ResultCache
from toolspace.core.result import PENDING_CALL_KEY, Content, ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.tool_fingerprint import digest, get_fingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from toolspace.core.hooks import Hook
    from toolspace.core.tool_context import ToolContext
    from toolspace.orchestrator.catalog import CatalogEntry
    from toolspace.orchestrator.pipeline import CallHandler, InstantHandler, StageContext

_log = logging.getLogger("toolspace.cache")
_MAX_KEY_TEXT = 512
_MAX_KEYS = 1_024
_get_reach = operator.attrgetter("allowed_paths", "private_paths", "allowed_env", "allowed_hosts", "web_search")
"""Returns what a caller may reach. Not what it may change, which depends on the code that a process has loaded."""
_get_caller = operator.attrgetter("user_id", "memory_dir", "session_dir")
"""Returns who a caller is, with its own directories: they do not keep shared results apart."""


def cache(stage: StageContext, next: CallHandler, /) -> CallHandler:
    ttl = stage.settings.cache.value
    store = stage.services.cache
    if not ttl or store is None:
        return next
    is_shared = stage.settings.cache_scope.value == "shared"
    entry, executions = stage.entry, stage.entry.shared_executions
    hooks = stage.services.hooks.select(entry.spellings).after  # They decide what is cached.

    async def run(call: Call) -> ToolResult:
        keys = entry.cache_keys
        if keys is None or keys.is_shared is not is_shared or not keys.cover(call.base_context):
            keys = entry.cache_keys = CacheKeys(entry, call.base_context, hooks, is_shared=is_shared)
        return await find_or_execute(call, keys.create(call))

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
    """Returns a function that finds the cached result of a call by its principal and the exact text of its arguments.

    A text that was cached before has been validated before, so it is not validated again. None for a tool without a
    cache.
    """
    store = stage.services.cache
    if not stage.settings.cache.value or store is None:
        return None
    entry, max_length = stage.entry, stage.settings.max_bytes.value // 4
    kind, namespace, name = entry.provider.kind, entry.provider.namespace, entry.tool.name
    peek, decode = store.peek, msgspec.json.Decoder().decode

    def find(call: Call) -> ToolResult | None:
        arguments, context, keys = call.arguments, call.base_context, entry.cache_keys
        if type(arguments) is not str or keys is None or (context is not keys.context and not keys.cover(context)):
            return None
        is_same = context is keys.context or keys.is_shared
        if (key := keys.by_text.get(arguments if is_same else (_get_caller(context), arguments))) is None:
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


class CacheKeys:
    """Creates the cache keys of one tool, for callers that may reach the same. Remembers those of recent calls.

    A key has the tool's name and fingerprint, its after-hooks, the principal unless the results are shared, what the
    caller may reach, and the arguments.
    """

    __slots__ = ("_entry", "_hooks", "_starts", "by_text", "context", "is_shared")

    def __init__(
        self, entry: CatalogEntry, context: ToolContext, hooks: Sequence[Hook] = (), *, is_shared: bool
    ) -> None:
        self.context = context
        """A context with this reach."""
        self.is_shared = is_shared
        self.by_text: dict[str | tuple[Any, str], str] = {}
        """Text of recent arguments → their key; with the caller, if the results are not shared and the call has another
        context."""
        self._entry = entry
        self._hooks = digest(hooks) if hooks else ""
        self._starts: dict[Any, str] = {}
        """Caller → the start of its keys."""

    def cover(self, context: ToolContext) -> bool:
        """Whether a caller with this context may reach the same, so that these keys are its keys."""
        return context is self.context or _get_reach(context) == _get_reach(self.context)

    def create(self, call: Call) -> str:
        """Returns the key of a call whose arguments are validated."""
        context = call.base_context
        caller = None if self.is_shared else _get_caller(context)
        start = self._starts.get(caller)
        if start is None:
            _clear_if_full(self._starts)
            self._starts[caller] = start = self._create_start(context)
        key = f"{start}\0{_encode_arguments(call.values)}"
        text = call.arguments
        if type(text) is str and len(text) < _MAX_KEY_TEXT:
            _clear_if_full(self.by_text)
            self.by_text[text if context is self.context or self.is_shared else (caller, text)] = key
        return key

    def _create_start(self, context: ToolContext) -> str:
        reach = _get_reach(context)
        if self.is_shared:
            caller = digest("shared", reach)
        else:
            caller = digest("principal", context.principal, context.memory_dir, context.session_dir, reach)
        return f"{self._entry.tool.name}\0{get_fingerprint(self._entry)}{self._hooks}\0{caller}"


def _clear_if_full(items: dict[Any, str]) -> None:
    if len(items) >= _MAX_KEYS:
        items.clear()


def _encode_arguments(values: object) -> str:
    arguments = json_text.encode_canonical(values)
    try:
        return arguments.decode() if len(arguments) < _MAX_KEY_TEXT else _hash(arguments)
    except UnicodeDecodeError:  # Half a surrogate pair, which JSON can express.
        return _hash(arguments)


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
    result.structured_content = shared_result.structured_content
    if meta := shared_result.extras.get("_meta"):
        result.extras = {"_meta": meta}
    return result


_parts_encoder = msgspec.json.Encoder()
_parts_decoder = msgspec.json.Decoder(tuple[Content, ...])
