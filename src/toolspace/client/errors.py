"""The exceptions of the client: one for each kind of refusal, with the problem document of the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.errors import ToolspaceError


class ApiError(ToolspaceError):
    """The gateway refused a request, or failed to handle it."""

    def __init__(
        self,
        status: int,
        title: str,
        detail: str = "",
        *,
        problem: Mapping[str, Any] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{status} {title}: {detail}" if detail else f"{status} {title}")
        self.status = status
        self.title = title
        self.detail = detail
        self.problem: Mapping[str, Any] = problem or {}
        """The whole problem document, which may have more members."""
        self.retry_after = retry_after
        """After how many seconds the gateway asks to retry; None if it does not say."""


class BadRequest(ApiError):
    """The request is invalid."""


class Unauthorized(ApiError):
    """The credentials are missing, wrong or expired."""


class Forbidden(ApiError):
    """The credentials do not permit the request."""


class NotFound(ApiError):
    """The resource does not exist."""


class Conflict(ApiError):
    """The resource exists already, or its state does not allow the change, such as a second result of a call."""


class TooLarge(ApiError):
    """The request is larger than the gateway accepts."""


class Unprocessable(ApiError):
    """The request is valid but not possible, such as one `Idempotency-Key` with two different bodies."""


class TooManyRequests(ApiError):
    """A rate limit or quota is reached; `retry_after` says when to retry."""


class ServerError(ApiError):
    """The gateway failed."""


class Unavailable(ServerError):
    """The gateway cannot respond now: it starts, stops, or has no database connection."""


class GatewayUnreachable(ToolspaceError):
    """The gateway did not respond."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """Whether the request may have reached the gateway, so that its effect may have happened."""


class UnexpectedResponse(ToolspaceError):
    """The client cannot decode the response; the gateway may have another version."""


ERRORS_BY_STATUS: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: TooManyRequests,
    503: Unavailable,
}


def error_class(status: int) -> type[ApiError]:
    """Returns the exception class of an HTTP status."""
    return ERRORS_BY_STATUS.get(status) or (ServerError if status >= 500 else ApiError)
