"""The stages `before_hooks`, `after_hooks` and `error_hooks`, and `HookRegistry`, which runs hooks.

A hook that raises, takes too long or decides something that it cannot does not fail the call by accident: its
`on_failure` says whether the call passes or is denied. `spaces` uses the registry for results that come after the call.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.argument_validation import InvalidArguments
from toolspace.core.function_signature import execution_style
from toolspace.core.hooks import PASS, Hook, HookCall, HookDecision, HookPoint, parse_decision
from toolspace.core.result import PENDING_CALL_KEY, ToolResult, get_content_parts, join_parts
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.times import format_milliseconds
from toolspace.errors import ErrorKind, ToolError, ToolPermissionError
from toolspace.orchestrator.effective_settings import ToolSpellings, matches_name
from toolspace.orchestrator.stages.large_results import SpillSettings
from toolspace.orchestrator.stages.permission_and_validation import refuse_arguments

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.orchestrator import ToolOrchestrator
    from toolspace.orchestrator.pipeline import CallHandler, StageContext
    from toolspace.orchestrator.stages.invoke import WorkerThreads

_log = logging.getLogger("toolspace.hooks")
MAX_RESULT_BYTES = 4 * 1024 * 1024
"""Larger results are not passed to hooks: `on_failure` decides about them."""
_GRACE_SECONDS = 2.0
"""How long a hook may clean up after its cancellation."""


class ToolHooks(NamedTuple):
    """The hooks of one tool, in their order."""

    before: tuple[Hook, ...] = ()
    after: tuple[Hook, ...] = ()
    error: tuple[Hook, ...] = ()


_NO_HOOKS = ToolHooks()


class HookRegistry:
    """The hooks of an orchestrator and its layers. `configure` replaces them."""

    def __init__(self, hooks: Sequence[Hook], threads: WorkerThreads) -> None:
        self._threads = threads
        self._abandoned_tasks: set[asyncio.Task[Any]] = set()
        """Of hooks that ignored their cancellation, until they end."""
        self.hooks = tuple(hooks)

    def configure(self, hooks: Sequence[Hook]) -> None:
        self.hooks = tuple(hooks)

    def select(self, spellings: ToolSpellings) -> ToolHooks:
        """Returns the hooks of a tool."""
        if not self.hooks:
            return _NO_HOOKS
        names = spellings.names
        matches = [hook for hook in self.hooks if any(matches_name(pattern, names) for pattern in hook.patterns)]
        return ToolHooks(*(tuple(hook for hook in matches if hook.on == on) for on in ToolHooks._fields))

    async def process_outcome(self, hooks: ToolHooks, call: HookCall, outcome: ToolResult) -> ToolResult:
        """Returns a result after the after-hooks, or a failure after the error-hooks."""
        if outcome.ok:
            outcome = await self.process_result(hooks.after, call, outcome)
            if outcome.ok:
                return outcome
        return await self.process_failure(hooks.error, call, outcome)

    async def process_result(
        self, hooks: Sequence[Hook], call: HookCall, outcome: ToolResult, *, seconds: float = math.inf
    ) -> ToolResult:
        """Returns what the after-hooks make of a result. `seconds` is the most that each of them may take."""
        for hook in hooks:
            if _is_too_large(outcome):
                decision = self._fail(hook, call, _TOO_LARGE)
            else:
                seen_call = msgspec.structs.replace(call, on="after", outcome=_copy(outcome))
                decision = await self.ask(hook, seen_call, seconds=seconds)
            outcome = _apply(decision, outcome)
            if not outcome.ok:
                break
        return outcome

    async def process_failure(
        self, hooks: Sequence[Hook], call: HookCall, outcome: ToolResult, *, seconds: float = math.inf
    ) -> ToolResult:
        """Returns what the error-hooks make of a failure: another text, or a result."""
        for hook in hooks:
            seen_call = msgspec.structs.replace(call, on="error", outcome=_copy(outcome))
            outcome = _apply(await self.ask(hook, seen_call, seconds=seconds), outcome)
            if outcome.ok:
                break
        return outcome

    async def ask(self, hook: Hook, call: HookCall, *, seconds: float = math.inf) -> HookDecision:
        """Returns the decision of a hook. Raises only if the caller is cancelled."""
        seconds = min(hook.timeout, seconds)
        try:
            value = await self._run(partial(self._call, hook, call), seconds)
            return parse_decision(value, call.on)
        except TimeoutError:
            return self._fail(hook, call, f"it took longer than {format_milliseconds(round(seconds, 3))}ms")
        except Exception as error:
            return self._fail(hook, call, "it failed", error)

    def _fail(self, hook: Hook, call: HookCall, reason: str, error: Exception | None = None) -> HookDecision:
        """Logs that a hook failed, and returns what happens instead of its decision."""
        details = "" if error is None else f": {mask_secrets(str(error)) or type(error).__name__}"
        consequence = "the call passes" if hook.on_failure == "open" else "the call is denied"
        _log.warning(
            "call %s of %s: the %s-hook %s (%s): %s%s; %s",
            call.call_id, call.tool.name, call.on, hook.label, hook.source, reason, details, consequence,
        )  # fmt: skip
        # The caller does not learn more: the error of a hook may name internal addresses.
        return PASS if hook.on_failure == "open" else HookDecision(deny=f"the {call.on}-hook {hook.label}: {reason}")

    async def _call(self, hook: Hook, call: HookCall) -> Any:
        if execution_style(hook.use, hook.label) == "async":
            return await hook.use(call)
        value = await self._threads.run(partial(hook.use, call))
        return await value if isawaitable(value) else value

    async def _run(self, start: Callable[[], Coroutine[Any, Any, Any]], seconds: float) -> Any:
        """Runs a hook in a task of its own, so that one that ignores its cancellation does not hold up the call."""
        task = asyncio.get_running_loop().create_task(start())
        try:
            await asyncio.wait((task,), timeout=None if seconds == math.inf else max(0.0, seconds))
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if not task.done():
            self._abandon(task)
            await asyncio.wait((task,), timeout=_GRACE_SECONDS)
            raise TimeoutError
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._abandoned_tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._abandoned_tasks.discard(task)
        if not task.cancelled():
            task.exception()  # Retrieved: nobody else will.


_TOO_LARGE = f"the result has more than {MAX_RESULT_BYTES:,} bytes"


def before_hooks(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Lets hooks change the arguments, which are then validated again, or deny the call."""
    registry = stage.services.hooks
    hooks = registry.select(stage.entry.spellings).before
    if not hooks:
        return next
    validator = stage.entry.tool.validator

    async def run(call: Call) -> ToolResult:
        host = call.base_context.host
        if host is not None and host.has_approval(call.id):
            return await next(call)  # The hooks have seen it when it was requested.
        call.prepare_to_wait()
        for hook in hooks:
            decision = await registry.ask(hook, _describe(call, "before"), seconds=_remaining_seconds(call))
            if decision.deny is not None:
                return call.fail("not_permitted", _denial(decision.deny))
            if decision.arguments is not msgspec.UNSET:
                try:
                    call.values = validator.from_mapping(decision.arguments)
                except InvalidArguments as error:
                    return refuse_arguments(call, error, f" (arguments of the before-hook {hook.label})")
        return await next(call)

    return run


def after_hooks(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Lets hooks replace or withhold a result. Everything that is outside of this stage sees what they returned."""
    registry = stage.services.hooks
    hooks = registry.select(stage.entry.spellings).after
    if not hooks:
        return next

    async def run(call: Call) -> ToolResult:
        call.withholds_partials = True
        result = await next(call)
        if not result.ok or call.has_final_result or PENDING_CALL_KEY in result.extras:
            return result
        call.prepare_to_wait()
        if call.is_stored:
            # Only if all hooks pass results that are too large: see `prepare_for_hooks`.
            _log.warning("call %s of %s: its hooks do not see the result: %s", call.id, result.tool, _TOO_LARGE)
            return result
        seconds = _remaining_seconds(call)
        return await registry.process_result(hooks, _describe(call, "after"), result, seconds=seconds)

    return run


def error_hooks(stage: StageContext, next: CallHandler, /) -> CallHandler:
    """Lets hooks see failures, replace their text, or return a result instead."""
    registry = stage.services.hooks
    hooks = registry.select(stage.entry.spellings).error
    if not hooks:
        return next

    async def run(call: Call) -> ToolResult:
        try:
            result = await next(call)
        except ToolError as error:
            result = call.fail(error.kind, str(error), executed=error.executed)
        is_final = call.has_final_result or PENDING_CALL_KEY in result.extras
        if result.ok or is_final or result.error_kind == "canceled":
            return result
        call.prepare_to_wait()
        seconds = math.inf if result.error_kind == "timeout" else _remaining_seconds(call)
        return await registry.process_failure(hooks, _describe(call, "error"), result, seconds=seconds)

    return run


def has_before_hooks(orchestrator: ToolOrchestrator, name: str) -> bool:
    """Whether hooks may change or deny the calls of the tool that a name means."""
    match = orchestrator.explain(name) if orchestrator.services.hooks.hooks else None
    return match is not None and bool(orchestrator.services.hooks.select(match[0].spellings).before)


def prepare_for_hooks(stage: StageContext, spill: SpillSettings) -> SpillSettings:
    """Returns where the stream of a call is stored, and from how many bytes on.

    After-hooks need the whole text, so a stream stays in memory up to the size that they may see.
    """
    hooks = stage.services.hooks.select(stage.entry.spellings).after
    if not hooks:
        return spill
    closed_hooks = [hook for hook in hooks if hook.on_failure == "closed"]
    if not closed_hooks:
        return spill._replace(limit=max(spill.limit, MAX_RESULT_BYTES))
    reason = f"the after-hook {closed_hooks[0].label}: {_TOO_LARGE}"
    return spill._replace(limit=MAX_RESULT_BYTES, refusal=ToolPermissionError(reason, executed=True))


def _describe(call: Call, on: HookPoint) -> HookCall:
    context = call.base_context
    values = call.values
    if values is None:
        try:
            values = json_text.parse_arguments(call.arguments)
        except ValueError:
            values = {}
    return HookCall(
        on=on,
        tool=call.entry.tool,
        arguments=_copy_data(values),
        principal=context.principal,
        call_id=call.id,
        run_id=call.run.id if call.run is not None else context.run_id,
        agent_entity_id=context.agent_entity_id,
        space_id=context.space_id,
    )


def _remaining_seconds(call: Call) -> float:
    return call.run.remaining_seconds if call.run is not None else math.inf


def _copy(outcome: ToolResult) -> ToolResult:
    """A copy that a hook may change without an effect."""
    return msgspec.structs.replace(
        outcome, result=_copy_data(outcome.result), extras=_copy_data(outcome.extras), encoded=None
    )


def _copy_data(value: Any) -> Any:
    return json_text.decode(json_text.encode_bytes(value))


def _is_too_large(outcome: ToolResult) -> bool:
    text = outcome.text
    return len(text) > MAX_RESULT_BYTES // 4 and len(text.encode("utf-8", "replace")) > MAX_RESULT_BYTES


def _apply(decision: HookDecision, outcome: ToolResult) -> ToolResult:
    """Returns the outcome that a hook decided: a new object, unless it decided nothing."""
    if decision.deny is not None:
        return _fail(outcome, "not_permitted", _denial(decision.deny))
    if decision.error is not None:
        return _fail(outcome, outcome.error_kind or "execution_error", decision.error)
    if decision.result is msgspec.UNSET:
        return outcome
    value = decision.result
    if isinstance(value, ToolResult):
        return msgspec.structs.replace(
            outcome,
            ok=value.ok,
            result=value.result,
            error=value.error,
            error_kind=None if value.ok else value.error_kind or "execution_error",
            parts=value.parts,
            extras=value.extras,
            structured_content=value.structured_content,
            encoded=None,
        )
    parts = get_content_parts(value)
    value = join_parts(parts) if parts else json_text.to_json_data(value)
    return msgspec.structs.replace(
        outcome,
        ok=True,
        result=value,
        error=None,
        error_kind=None,
        parts=parts,
        extras={},
        structured_content=msgspec.UNSET,
        encoded=None,
    )


def _fail(outcome: ToolResult, kind: ErrorKind, message: str) -> ToolResult:
    """A failure in place of the outcome, without its content: that is what the hook withholds."""
    return msgspec.structs.replace(
        outcome,
        ok=False,
        result=None,
        error=message,
        error_kind=kind,
        parts=(),
        extras={},
        structured_content=msgspec.UNSET,
        encoded=None,
    )


def _denial(reason: str) -> str:
    prefix = ToolPermissionError.prefix
    return reason if reason.startswith(prefix) else f"{prefix}{reason}"
