"""The exceptions that users of Toolspace may have to catch, and the error kinds of results.

    ToolspaceError
    ├── ConfigError             the configuration is wrong: names the file, line, key and how to correct it
    ├── RegistrationError       a tool or provider cannot be registered as it is
    │   ├── ToolDefinitionError the tool itself is wrong: its name, its signature, its schema
    │   └── ToolNameConflict    two providers offer the same name
    ├── ProviderError           a provider cannot start, or is not available
    ├── RefusedError            the gateway refuses a request: not found, forbidden, conflict, …
    ├── StorageError            stored data cannot be read or written
    │   ├── UnstorableValueError  a value that no supported database can store
    │   └── StorageUnavailable  the database does not respond; a later retry may succeed
    │       ├── StorageDamaged  files of the database are damaged
    │       ├── ReadTimeout     a read for a request took too long and was ended
    │       └── StorageInDoubt  the connection broke during a commit, which may have happened or not
    ├── ModelError              a model did not respond: no key, refused, overloaded; `kind` says which
    ├── ApiError, GatewayUnreachable  a gateway refuses or does not respond; in `toolspace.client.errors`
    └── ToolError               one call failed; `result.unwrap()` raises a subclass
        ├── ToolNotFoundError   unknown_tool
        ├── ToolPermissionError not_permitted
        ├── ToolValidationError invalid_parameters
        ├── ToolLimitError      limit_exceeded
        ├── ToolCanceledError   canceled
        ├── ToolTimeoutError    timeout
        ├── ToolTransportError  transport_error
        └── ToolExecutionError  execution_error, internal_error

A failing tool never raises into the agent loop. The orchestrator turns a `ToolError` that a tool raises into a result
of that kind, and any other exception into `execution_error`.
"""

from __future__ import annotations

from typing import ClassVar, Literal

ErrorKind = Literal[
    "unknown_tool",
    "not_permitted",
    "invalid_parameters",
    "limit_exceeded",
    "canceled",
    "timeout",
    "transport_error",
    "execution_error",
    "internal_error",
]

RefusalReason = Literal["invalid", "forbidden", "not_found", "conflict", "gone", "unprocessable", "unavailable"]

NOT_EXECUTED: frozenset[ErrorKind] = frozenset(
    ("unknown_tool", "not_permitted", "invalid_parameters", "limit_exceeded", "canceled")
)
"""The kinds that mean that no effect can have happened, unless the result says otherwise."""


class ToolspaceError(Exception):
    """The base of all exceptions of Toolspace."""


class ConfigError(ToolspaceError):
    """The configuration is wrong. The message names the place and how to correct it."""


class RegistrationError(ToolspaceError):
    """A tool or a provider cannot be registered as it is."""


class ToolDefinitionError(RegistrationError):
    """The definition of a tool is wrong."""


class ToolNameConflict(RegistrationError):
    """Two providers offer the same name."""


class ProviderError(ToolspaceError):
    """A provider cannot start, or is not available."""


class RefusedError(ToolspaceError):
    """The gateway refuses a request. `reason` is the kind of refusal; `details` are fields for the caller."""

    def __init__(self, reason: RefusalReason, message: str, **details: object) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.details = details


class StorageError(ToolspaceError):
    """Stored data cannot be read or written."""


class UnstorableValueError(StorageError):
    """A value that no supported database can store: a NUL in a text, a lone surrogate, an integer beyond 64 bits."""


class StorageUnavailable(StorageError):
    """The database does not respond. Nothing was acknowledged; a later retry may succeed."""


class StorageDamaged(StorageUnavailable):
    """The files of the database are damaged: a part of what was stored cannot be read."""


class ReadTimeout(StorageUnavailable):
    """A read took longer than its request may wait. It was ended; nothing was changed."""


class StorageInDoubt(StorageUnavailable):
    """The connection broke during a commit, which may have happened or not. The caller has to check."""


ModelErrorKind = Literal[
    "no_key", "not_permitted", "not_found", "invalid", "too_long", "rate_limited", "overloaded", "unavailable", "broken"
]
"""No key is set; the key is refused; there is no such model; the request is invalid; it does not fit the context
window; too many requests; the provider is busy; it cannot be reached; its response is incomplete or malformed."""


class ModelError(ToolspaceError):
    """A model did not respond. The message names the model and what to do."""

    def __init__(
        self, kind: ModelErrorKind, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind: ModelErrorKind = kind
        self.status = status
        self.retry_after = retry_after
        """How many seconds the provider asks to wait."""

    @property
    def is_transient(self) -> bool:
        """Whether the same request may succeed later."""
        return self.kind in ("rate_limited", "overloaded", "unavailable", "broken")


class ToolError(ToolspaceError):
    """One call failed. A tool raises a subclass to choose the error kind."""

    kind: ClassVar[ErrorKind] = "execution_error"
    prefix: ClassVar[str] = ""

    def __init__(
        self, message: str, *, tool: str | None = None, executed: bool | None = None, cause: object = None
    ) -> None:
        message = str(message)
        super().__init__(message if message.startswith(self.prefix) else self.prefix + message)
        self.tool = tool
        self.executed = self.kind not in NOT_EXECUTED if executed is None else executed
        """Whether an effect may have happened. By default the error kind decides."""
        self.cause = cause
        """Details. Of a `ToolValidationError`: the issues, a list of `{"path": …, "message": …}`."""


class ToolNotFoundError(ToolError):
    kind = "unknown_tool"


class ToolPermissionError(ToolError):
    kind = "not_permitted"
    prefix = "Permission denied: "


class ToolValidationError(ToolError):
    kind = "invalid_parameters"
    prefix = "Parameter validation failed: "


class ToolLimitError(ToolError):
    kind = "limit_exceeded"


class ToolCanceledError(ToolError):
    kind = "canceled"


class ToolTimeoutError(ToolError):
    kind = "timeout"


class ToolTransportError(ToolError):
    kind = "transport_error"


class ToolExecutionError(ToolError):
    kind = "execution_error"


ERROR_CLASSES: dict[ErrorKind, type[ToolError]] = {
    **{error.kind: error for error in ToolError.__subclasses__()},
    "internal_error": ToolExecutionError,
}
