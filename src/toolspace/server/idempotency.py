"""Requests that may come twice: an `Idempotency-Key` lets the second find what the first was answered."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

from toolspace.core import json_text
from toolspace.core.ids import derived_id
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, is_long_running, long_running
from toolspace.storage.queries import idempotency

T = TypeVar("T")

HEADER: Final = "Idempotency-Key"
_KEY: Final = re.compile(r"[!-~]{1,200}")


async def run_once(
    request: Request, program: Callable[[Effects], Program[T]], *, show: Callable[[T], Any] = lambda result: result
) -> Response:
    """Runs a program once for each key that the caller gives, and answers with what it gives; without a key, always.

    The answer is kept in the transaction that does the work: there is no moment at which one is there without the
    other. A program that refuses leaves nothing behind, so its key is free again.
    """
    status = request.route.status
    key = idempotency_key(request)
    ledger = request.gateway.ledger
    if key is None:
        return Response(show(await ledger.commit(program)), status=status)
    fingerprint = hashlib.sha256(await request.body()).hexdigest()

    def keeping(effects: Effects) -> Program[tuple[idempotency.StoredResponse, bool]]:
        kept = yield from idempotency.claim_key(key, fingerprint, ledger.node_id)
        if kept is not None:
            return kept, True
        body = json_text.encode(show((yield from program(effects))))
        yield from idempotency.save_response(key, status, body)
        return idempotency.StoredResponse(fingerprint, status, body), False

    kept, repeated = await ledger.commit(long_running(keeping) if is_long_running(program) else keeping)
    if kept.fingerprint != fingerprint:
        raise Problem(422, f"this {HEADER} was used for a request with another body; take a new key for a new request")
    if kept.status is None or kept.body is None:
        raise Problem(409, f"the first request with this {HEADER} has not been answered yet; try again")
    headers = ((b"idempotency-replayed", b"true"),) if repeated else ()
    return Response(kept.body, status=kept.status, media_type="application/json", headers=headers)


def idempotency_key(request: Request) -> str | None:
    """What the caller's key stands for: one thing for each caller and each address. None where there is no key."""
    given = request.header(HEADER)
    if given is None:
        return None
    if _KEY.fullmatch(given) is None:
        raise Problem(400, f"{HEADER} has 1 to 200 printable characters and no spaces")
    return derived_id("idk", request.caller.subject, request.method, request.path, given)
