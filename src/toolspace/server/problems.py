"""Every failure as `application/problem+json`: the only place where an exception becomes an answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.errors import RefusalReason, RefusedError, StorageUnavailable, UnstorableValueError

_log = logging.getLogger("toolspace.server")

MEDIA_TYPE: Final = b"application/problem+json"
RETRY_SECONDS: Final = 1
"""When to try again while the database does not answer."""
_LONGEST: Final = 500
_REFUSED: Final[Mapping[RefusalReason, int]] = {
    "invalid": 400,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "unavailable": 503,
}

Headers = Sequence[tuple[bytes, bytes]]


class ProblemBody(msgspec.Struct, frozen=True, rename={"error_id": "errorId"}, omit_defaults=True, kw_only=True):
    """What went wrong, as RFC 9457 has it. Other members say more, depending on the problem."""

    type: str
    title: str
    status: int
    detail: str
    path: str | None = None
    """Where in the body or the query the wrong value is, as `$.members[0].entityId`."""
    error_id: str | None = None
    """Under which the log says more."""


class Problem(Exception):
    """A request that is answered with an error. `detail` names the value and the way out; `more` are further members.

    raise Problem(404, f'there is no space "{space_id}"')
    """

    def __init__(
        self, status: int, detail: str, *, title: str | None = None, headers: Headers = (), **more: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.title = title or _phrase(status)
        self.headers = headers
        self.extra_members: Mapping[str, Any] = more

    def body(self) -> bytes:
        shown = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        return json_text.encode_bytes({**shown, **self.extra_members, **shown})  # In this order, and these as they are.


def to_problem(error: BaseException) -> Problem:
    """The problem that an exception is. What nobody expected is logged under an id, and its text stays here."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RefusedError):
        problem = Problem(_REFUSED[error.reason], str(error))
        problem.extra_members = error.details  # Whatever they are called: what every problem has wins.
        return problem
    if isinstance(error, msgspec.ValidationError):
        return invalid_input(error)
    if isinstance(error, UnstorableValueError):
        return Problem(400, str(error))
    if isinstance(error, StorageUnavailable):
        _log.warning("the database does not answer: %s", error)
        return unavailable("the database does not answer now, so nothing is promised of what was asked; try again")
    error_id = new_id("err")
    _log.error("request failed, error %s", error_id, exc_info=error)
    return Problem(500, "something went wrong here; the server's log says more under the errorId", errorId=error_id)


def unavailable(detail: str, *, retry_seconds: int = RETRY_SECONDS) -> Problem:
    return Problem(503, detail, headers=((b"retry-after", b"%d" % retry_seconds),))


def invalid_input(error: Exception, *, place: Literal["body", "query"] = "body") -> Problem:
    """A body or a query that is not as it should be: names the place and what was expected there."""
    text = str(error)
    expected, _, path = text.partition(" - at `")
    path = _short(path.rstrip("`") or "$")
    expected = _short(expected)
    where = f"the {place}" if path == "$" else f"{place} {path}"
    return Problem(400, f"{where}: {expected[:1].lower()}{expected[1:]}", path=path)


def _short(text: str) -> str:
    """Some messages have in them what was sent, which may be long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Error"
