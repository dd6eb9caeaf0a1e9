"""The stage `queue`: waits for a slot in the queue of the tool and in that of the run.

A call that is canceled while it waits leaves the queue at once.
"""

from __future__ import annotations

import time

from toolspace.core.result import ToolResult
from toolspace.errors import ToolLimitError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.queues import CallQueue, QueueSlot
from toolspace.orchestrator.stage import CallHandler, StageContext


def queue(stage: StageContext, next: CallHandler, /) -> CallHandler:
    name = stage.settings.queue.value
    tool_queue = stage.services.queues.find(name) if name is not None else None
    if name is not None and tool_queue is None:
        names = ", ".join(stage.services.queues.names()) or "none are configured"
        return _fail(f'queue "{name}" does not exist ({stage.settings.queue.source}); known queues: {names}')

    async def run(call: Call) -> ToolResult:
        # The queue of the run first: a call that waits for it must not hold a slot that other runs need.
        run_queue = call.run.concurrency_queue if call.run is not None else None
        queues = [queue for queue in (run_queue, tool_queue) if queue is not None]
        if not queues:
            return await next(call)
        slots: list[QueueSlot] = []
        try:
            wait_start = time.perf_counter()
            try:
                for queue in queues:
                    inherited = _ancestor_slot(call, queue)
                    slot = queue.try_acquire() if inherited is None else None
                    if slot is None:
                        call.prepare_to_wait()
                        slot = await call.within_deadline(queue.acquire(inherited))
                    slots.append(slot)
                    if call.slots is None:
                        call.slots = {}
                    call.slots[queue] = slot
            finally:
                call.queue_wait = time.perf_counter() - wait_start
            return await next(call)
        except ToolLimitError as error:
            return call.fail("limit_exceeded", str(error))
        finally:
            for slot in reversed(slots):
                slot.release()

    return run if tool_queue is not None or stage.in_run else next


def _ancestor_slot(call: Call, queue: CallQueue) -> QueueSlot | None:
    """Returns the slot of this queue that the nearest ancestor of the call has, or None."""
    ancestor = call.parent
    while ancestor is not None:
        if ancestor.slots is not None and (slot := ancestor.slots.get(queue)) is not None:
            return slot
        ancestor = ancestor.parent
    return None


def _fail(reason: str) -> CallHandler:
    async def run(call: Call) -> ToolResult:
        return call.fail("execution_error", reason, executed=False)

    return run
