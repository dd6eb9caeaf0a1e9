"""Responses of the HTTP API, and problems (RFC 9457): the one place where an exception becomes an error response.

Handlers return or raise them. Knows no routes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.errors import ReadTimeout, RefusalReason, RefusedError, StorageUnavailable, UnstorableValueError

if TYPE_CHECKING:
    from toolspace.server.requests import Receive, Scope, Send

_log = logging.getLogger("toolspace.server")

MEDIA_TYPE: Final = b"application/problem+json"
RETRY_SECONDS: Final = 1
"""`Retry-After` while the database is unavailable."""
_MAX_QUOTED_LENGTH: Final = 500
_STATUSES: Final[Mapping[RefusalReason, int]] = {
    "invalid": 400,
    "forbidden": 403,
    "not_found": 404,
    "conflict": 409,
    "gone": 410,
    "unprocessable": 422,
    "unavailable": 503,
}

Headers = Sequence[tuple[bytes, bytes]]
_COMMON_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_JSON_HEADERS: Final = [(b"content-type", b"application/json"), *_COMMON_HEADERS]
_PROBLEM_HEADERS: Final = [(b"content-type", MEDIA_TYPE), *_COMMON_HEADERS]


@dataclass(slots=True)
class Response:
    """A response with its own status or headers. `body` is encoded as JSON, unless there is a `media_type`."""

    body: Any = None
    _: KW_ONLY
    status: int = 200
    headers: Headers = ()
    media_type: str | None = None
    on_sent: Callable[[], None] | None = None
    """Called once the whole response was passed to the connection."""

    def encode(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Returns the headers and the body."""
        if self.status in (204, 304):
            return [*_COMMON_HEADERS, *self.headers], b""
        if self.media_type is not None:
            body = self.body if isinstance(self.body, bytes) else str(self.body).encode("utf-8", "replace")
            return [(b"content-type", self.media_type.encode("latin-1")), *_COMMON_HEADERS, *self.headers], body
        return [*_JSON_HEADERS, *self.headers], json_text.encode_bytes(self.body)


class StreamingResponse(Protocol):
    """A response that sends itself, as server-sent events do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


NO_CONTENT: Final = Response(status=204)


async def send_response(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, head_only: bool
) -> None:
    """Sends a whole response. `head_only` leaves out the body but keeps its content-length."""
    if status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head_only else body})


async def send_json(send: Send, body: bytes, *, status: int, head_only: bool) -> None:
    await send_response(send, status, _JSON_HEADERS.copy(), body, head_only=head_only)


async def send_problem(send: Send, problem: Problem, *, head_only: bool = False) -> None:
    headers = [*_PROBLEM_HEADERS, *problem.headers]
    await send_response(send, problem.status, headers, problem.body(), head_only=head_only)


class ProblemBody(msgspec.Struct, frozen=True, rename={"error_id": "errorId"}, omit_defaults=True, kw_only=True):
    """An error, as RFC 9457 defines it. Some problems have further members."""

    type: str
    """`about:blank`: the status says what kind of problem it is."""
    title: str
    """The reason phrase of the status."""
    status: int
    """The HTTP status of the response."""
    detail: str
    """What is wrong, with the value, and how to fix it."""
    path: str | None = None
    """Where in the body or the query the invalid value is, such as `$.members[0]`."""
    error_id: str | None = None
    """The id under which the server's log has the exception."""


class Problem(Exception):
    """Ends a request with an error response. `detail` names the value and the way out.

    raise Problem(404, f'Space "{space_id}" not found')
    """

    def __init__(
        self, status: int, detail: str, *, title: str | None = None, headers: Headers = (), **extra_members: Any
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.title = title or HTTPStatus(status).phrase
        self.headers = headers
        self.extra_members: Mapping[str, Any] = extra_members

    def body(self) -> bytes:
        members = {"type": "about:blank", "title": self.title, "status": self.status, "detail": self.detail}
        # Twice: the standard members come first, and extra members cannot replace them.
        return json_text.encode_bytes({**members, **self.extra_members, **members})


def to_problem(error: BaseException) -> Problem:
    """Converts an exception to a problem. An unexpected one is logged under an id, and its text is not sent."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RefusedError):
        problem = Problem(_STATUSES[error.reason], str(error))
        problem.extra_members = error.details
        return problem
    if isinstance(error, msgspec.ValidationError):
        return invalid_input(error)
    if isinstance(error, UnstorableValueError):
        return Problem(400, str(error))
    if isinstance(error, ReadTimeout):
        return unavailable(f"{error}; ask for less, such as a shorter list, or try again")
    if isinstance(error, StorageUnavailable):
        _log.warning("database unavailable; answering 503: %s", error)
        return unavailable("The database is unavailable; the request may or may not have taken effect. Try again")
    error_id = new_id("err")
    _log.error("request failed, error %s", error_id, exc_info=error)
    return Problem(500, "Internal error; the server's log has the details under the errorId", errorId=error_id)


def unavailable(detail: str, *, retry_seconds: int = RETRY_SECONDS) -> Problem:
    return Problem(503, detail, headers=((b"retry-after", b"%d" % retry_seconds),))


def invalid_input(error: Exception, *, place: Literal["body", "query"] = "body") -> Problem:
    """A body or a query that does not match its schema. The problem names the place and what was expected."""
    expected, _, path = str(error).partition(" - at `")
    path = _shorten(path.rstrip("`") or "$")
    expected = _shorten(expected)
    location = place if path == "$" else f"{place} {path}"
    return Problem(400, f"Invalid {location}: {expected[:1].lower()}{expected[1:]}", path=path)


def not_found(kind: str, id: str) -> Problem:
    return Problem(404, f'{kind} "{id[:200]}" not found')


def _shorten(text: str) -> str:
    """Shortens a message, which may quote a long value from the request."""
    return text if len(text) <= _MAX_QUOTED_LENGTH else f"{text[:_MAX_QUOTED_LENGTH]}…"
