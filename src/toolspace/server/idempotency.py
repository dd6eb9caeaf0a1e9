"""`Idempotency-Key`: a request that is sent again gets the first response again, and its effect happens once.

Routes that create something use `run_once`. A submitted result stores its key with the call (`submission_key`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final

from toolspace.core import json_text
from toolspace.core.ids import derived_id
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program, is_long_running, long_running
from toolspace.storage.queries import idempotency

HEADER: Final = "Idempotency-Key"
_KEY_PATTERN: Final = re.compile(r"[!-~]{1,200}")
_MAX_SUBMISSION_KEY_LENGTH: Final = 255


async def run_once(request: Request, program: Callable[[Effects], Program[Any]]) -> Response:
    """Runs a program once per idempotency key and responds with its result. Without a key the program always runs.

    The response is stored in the same transaction as the work, so neither exists without the other. A program that
    raises stores nothing, and its key can be used again. Raises `Problem` 422 if the key was used with another body.
    """
    status = request.route.status
    key = _storage_key(request)
    ledger = request.gateway.ledger
    if key is None:
        return Response(await ledger.commit(program), status=status)
    fingerprint = hashlib.sha256(await request.body()).hexdigest()

    def run_and_save(effects: Effects) -> Program[tuple[idempotency.StoredResponse, bool]]:
        stored_response = yield from idempotency.claim_key(key, fingerprint, ledger.node_id)
        if stored_response is not None:
            return stored_response, True
        body = json_text.encode((yield from program(effects)))
        yield from idempotency.save_response(key, status, body)
        return idempotency.StoredResponse(fingerprint, status, body), False

    response, is_replay = await ledger.commit(long_running(run_and_save) if is_long_running(program) else run_and_save)
    if response.fingerprint != fingerprint:
        raise Problem(422, f"This {HEADER} was used with a different body; use a new key for a new request")
    if response.status is None or response.body is None:
        raise Problem(409, f"The first request with this {HEADER} is still running; try again")
    headers = ((b"idempotency-replayed", b"true"),) if is_replay else ()
    return Response(response.body, status=response.status, media_type="application/json", headers=headers)


def submission_key(request: Request) -> str | None:
    """Returns the key of a submitted result: one per caller and header value."""
    value = request.header(HEADER)
    if value is None:
        return None
    if not 0 < len(value) <= _MAX_SUBMISSION_KEY_LENGTH:
        raise Problem(400, f"{HEADER} must have 1 to {_MAX_SUBMISSION_KEY_LENGTH} characters, not {len(value)}")
    return f"{request.caller.subject} {value}"


def _storage_key(request: Request) -> str | None:
    """Returns the key under which the response is stored: one per caller, method, path and header value."""
    value = request.header(HEADER)
    if value is None:
        return None
    if _KEY_PATTERN.fullmatch(value) is None:
        raise Problem(400, f"{HEADER} must have 1 to 200 printable characters and no spaces")
    return derived_id("idk", request.caller.subject, request.method, request.path, value)
