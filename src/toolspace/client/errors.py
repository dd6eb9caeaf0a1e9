"""What a gateway's refusals become: one exception for each kind, with all that the problem document says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.errors import ToolspaceError


class ApiError(ToolspaceError):
    """The gateway refused a request, or could not answer it."""

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
        """The whole problem document: members beyond these say more."""
        self.retry_after = retry_after
        """In how many seconds the gateway would like to be asked again, where it says so."""


class BadRequest(ApiError):
    """Something in the request is not as it should be."""


class Unauthorized(ApiError):
    """There are no credentials, or wrong or expired ones."""


class Forbidden(ApiError):
    """These credentials are not for this."""


class NotFound(ApiError):
    """There is nothing of that id."""


class Conflict(ApiError):
    """It is there already, or has moved on: a result that was given before stays as it is."""


class TooLarge(ApiError):
    """More was sent than the gateway takes at once."""


class Unprocessable(ApiError):
    """Understood, and yet not possible: one `Idempotency-Key` with two different bodies."""


class TooManyRequests(ApiError):
    """A limit is reached; `retry_after` says when to come back."""


class ServerError(ApiError):
    """The gateway has a fault of its own."""


class Unavailable(ServerError):
    """The gateway cannot answer now: it starts, stops, or its database is away."""


class GatewayUnreachable(ToolspaceError):
    """The gateway did not answer."""

    def __init__(self, message: str, *, was_sent: bool = True) -> None:
        super().__init__(message)
        self.was_sent = was_sent
        """Whether the request may have reached the gateway: then what it asked for may have been done."""


class UnexpectedResponse(ToolspaceError):
    """The answer is not one of a gateway that this client knows."""


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
    """The class for a status."""
    return ERRORS_BY_STATUS.get(status) or (ServerError if status >= 500 else ApiError)
