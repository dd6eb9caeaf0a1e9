"""The transaction in which the caller of a call acknowledges its result. Used by the routes of calls."""

from __future__ import annotations

from toolspace.core.stored_records import OPEN_CALL
from toolspace.errors import RefusedError
from toolspace.storage.database import Program
from toolspace.storage.queries import call_delivery


def acknowledge(call_id: str, principal: str | None = None) -> Program[None]:
    """The caller of a call has its result, which is never delivered again. Has no further effect if it is repeated.

    `principal`: the only one whose calls may be acknowledged. Raises `RefusedError`.
    """
    delivery = yield from call_delivery.find_delivery(call_id)
    if delivery is None:
        raise RefusedError("not_found", f'there is no call "{call_id}"')
    if principal is not None and delivery.principal != principal:
        raise RefusedError("forbidden", f'the call "{call_id}" was not made with this key')
    if delivery.is_of_own_agent:
        raise RefusedError(
            "forbidden", f'the call "{call_id}" belongs to an agent of the gateway, which gets its result'
        )
    if delivery.status in OPEN_CALL or delivery.status == "running":
        raise RefusedError("conflict", f'the call "{call_id}" has no result yet: it is {delivery.status}')
    yield from call_delivery.acknowledge(call_id, delivery.agent_entity_id)
