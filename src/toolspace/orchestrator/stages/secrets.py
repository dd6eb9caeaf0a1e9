"""The stage `mask_secrets`: removes the values of references to secrets from what a tool returns.

It is the one next to the provider, so that hooks, caches, stored outputs, records and events never contain them. Only
toolspaces whose configuration has references have it. `Call` masks partial results and progress messages.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from toolspace.core.result import ToolResult

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

_LARGE_RESULT = 64 * 1024
"""Characters from which on a thread does it."""


def mask_secrets(stage: StageContext, next: CallHandler, /) -> CallHandler:
    if not stage.services.masks_secrets:
        return next
    # Imported here: few configurations have references to secrets.
    from toolspace.core.result_masking import has_reference_secrets, mask_reference_secrets

    threads = stage.services.threads

    async def run(call: Call) -> ToolResult:
        result = await next(call)
        call.finish_partials()
        if call.is_stored or not has_reference_secrets(result):  # A stream was masked before it was stored.
            return result
        try:
            if len(result.text) < _LARGE_RESULT:
                return mask_reference_secrets(result)
            return await threads.run(partial(mask_reference_secrets, result))
        except ValueError as error:
            return call.fail("execution_error", f"{error}, so its secrets cannot be masked", executed=True)

    return run
