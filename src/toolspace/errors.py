"""Every exception Toolspace raises, and the kinds of failure a result can carry.

    ToolspaceError
    ├── ConfigError             the configuration is wrong: names file, line, key and the way out
    ├── RegistrationError       a tool or provider cannot be registered as it is
    │   ├── ToolDefinitionError the tool itself is wrong: its name, its signature, its schema
    │   └── ToolNameConflict    two owners offer one name
    ├── ProviderError           a provider cannot start, or cannot answer now
    ├── RefusedError            what was asked of the gateway cannot be done: not there, not yours, not now
    ├── StorageError            what is kept cannot be read or written as asked
    │   ├── UnkeepableError     a value that no database here can keep
    │   └── StorageUnavailable  the database does not answer now; trying again later may help
    │       └── StorageInDoubt  it went away during a commit: what was asked may have happened, or not
    ├── ModelError              a model did not answer: no key, refused, overloaded; `kind` says which
    ├── ApiError, Unreachable   what a gateway refused, or did not answer, to a client: `toolspace.client.errors`
    └── ToolError               one call failed; `result.unwrap()` raises its children
        ├── ToolNotFoundError   unknown_tool
        ├── ToolPermissionError not_permitted
        ├── ToolValidationError invalid_parameters
        ├── ToolLimitError      limit_exceeded
        ├── ToolCanceledError   canceled
        ├── ToolTimeoutError    timeout
        ├── ToolTransportError  transport_error
        └── ToolExecutionError  execution_error, internal_error

A failing tool never raises into the model loop: the orchestrator turns a `ToolError` raised inside a tool
into a result of that kind, and any other exception into `execution_error`.
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

RefusalReason = Literal["invalid", "forbidden", "not_found", "conflict", "unavailable"]

NOT_EXECUTED: frozenset[ErrorKind] = frozenset(
    ("unknown_tool", "not_permitted", "invalid_parameters", "limit_exceeded", "canceled")
)
"""The kinds that mean, unless the result says otherwise, that no effect can have happened."""


class ToolspaceError(Exception):
    """The root of everything raised here."""


class ConfigError(ToolspaceError):
    """The configuration is wrong. The message names the place and the way out."""


class RegistrationError(ToolspaceError):
    """A tool or a provider cannot be registered as it is."""


class ToolDefinitionError(RegistrationError):
    """A tool's own definition is wrong."""


class ToolNameConflict(RegistrationError):
    """Two owners offer one name."""


class ProviderError(ToolspaceError):
    """A provider cannot start, or cannot answer now."""


class RefusedError(ToolspaceError):
    """What was asked of the gateway cannot be done. `reason` says why, `details` what else the caller should know."""

    def __init__(self, reason: RefusalReason, message: str, **details: object) -> None:
        super().__init__(message)
        self.reason: RefusalReason = reason
        self.details = details


class StorageError(ToolspaceError):
    """What is kept cannot be read or written as asked."""


class UnstorableValueError(StorageError):
    """A value that no database here can keep: a NUL in a text, a lone surrogate, an integer beyond 64 bits."""


class StorageUnavailable(StorageError):
    """The database does not answer now. Nothing of what was asked is acknowledged; trying again later may help."""


class StorageInDoubt(StorageUnavailable):
    """The database went away during a commit: what was asked may have happened, or not. Whoever needs to know looks."""


ModelErrorKind = Literal[
    "no_key", "not_permitted", "not_found", "invalid", "too_long", "rate_limited", "overloaded", "unavailable", "broken"
]
"""No key is set; the key is refused; there is no such model; the request is refused; it does not fit the context
window; too many requests; the provider is busy; it cannot be reached; its answer broke off or makes no sense."""


class ModelError(ToolspaceError):
    """A model did not answer. The message names the model and the way out."""

    def __init__(
        self, kind: ModelErrorKind, message: str, *, status: int | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.kind: ModelErrorKind = kind
        self.status = status
        self.retry_after = retry_after
        """Seconds that the provider asks to wait."""

    @property
    def is_transient(self) -> bool:
        """Whether the same request may go well later."""
        return self.kind in ("rate_limited", "overloaded", "unavailable", "broken")


class ToolError(ToolspaceError):
    """One call failed. Raise a child of it inside a tool to choose the kind of the failure."""

    kind: ClassVar[ErrorKind] = "execution_error"
    prefix: ClassVar[str] = ""

    def __init__(self, message: str, *, tool: str | None = None, executed: bool | None = None) -> None:
        message = str(message)
        super().__init__(message if message.startswith(self.prefix) else self.prefix + message)
        self.tool = tool
        self.executed = self.kind not in NOT_EXECUTED if executed is None else executed
        """Whether an effect may have happened; by the kind of the failure unless the tool knows better."""


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
    "unknown_tool": ToolNotFoundError,
    "not_permitted": ToolPermissionError,
    "invalid_parameters": ToolValidationError,
    "limit_exceeded": ToolLimitError,
    "canceled": ToolCanceledError,
    "timeout": ToolTimeoutError,
    "transport_error": ToolTransportError,
    "execution_error": ToolExecutionError,
    "internal_error": ToolExecutionError,
}
