"""Stage: waits for a slot of the tool's queue and of the run. Cancelling gives the place up at once."""

from __future__ import annotations

import time

from toolspace.core.result import ToolResult
from toolspace.errors import ToolLimitError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.queues import CallQueue, QueueSlot
from toolspace.orchestrator.stage import CallHandler, StageContext


def queue(plan: StageContext, next: CallHandler, /) -> CallHandler:
    name = plan.settings.queue.value
    own = plan.services.queues.get(name) if name is not None else None
    if name is not None and own is None:
        known = ", ".join(plan.services.queues.names()) or "none are configured"
        return _refuse(f'queue "{name}" does not exist ({plan.settings.queue.source}); known queues: {known}')

    async def run(call: Call) -> ToolResult:
        # The run's own slot first: one that waits for it must not hold a slot that other runs need.
        queues = [one for one in (call.run.concurrency_queue if call.run is not None else None, own) if one is not None]
        if not queues:
            return await next(call)
        held: list[QueueSlot] = []
        try:
            asked = time.perf_counter()
            try:
                for one in queues:
                    lease = one.try_acquire() if (above := _ancestor(call, one)) is None else None
                    if lease is None:
                        call.prepare_to_wait()
                        lease = await call.within_deadline(one.acquire(above))
                    held.append(lease)
                    if call.slots is None:
                        call.slots = {}
                    call.slots[one] = lease
            finally:
                call.queue_wait = time.perf_counter() - asked
            return await next(call)
        except ToolLimitError as error:
            return call.fail("limit_exceeded", str(error))
        finally:
            for lease in reversed(held):
                lease.release()

    return run if own is not None or plan.in_run else next


def _ancestor(call: Call, queue: CallQueue) -> QueueSlot | None:
    above = call.parent
    while above is not None:
        if above.slots is not None and (lease := above.slots.get(queue)) is not None:
            return lease
        above = above.parent
    return None


def _refuse(reason: str) -> CallHandler:
    async def run(call: Call) -> ToolResult:
        return call.fail("execution_error", reason, executed=False)

    return run
