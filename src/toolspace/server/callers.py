"""Who calls, as data, and who a route is for. Verifies nothing."""

from __future__ import annotations

import enum
from typing import ClassVar

import msgspec

CONFIGURED = "key_configured"
"""The id of a key that is written in the configuration: it has no row."""


class Access(enum.Enum):
    """Who may use a route. Which spaces, agents and calls of it are someone's own, its handler looks up."""

    OPEN = "open"
    """Anyone; credentials are not looked at."""
    ANY = "any"
    """Whoever has valid credentials of any kind."""
    SECRET = "secret"
    """Secret keys alone."""
    MEMBER = "member"
    """Secret keys, and entities with a public key and a token."""
    TOOLS = "tools"
    """Secret keys and tool keys."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever makes a request."""

    kind: ClassVar[str] = ""

    @property
    def subject(self) -> str:
        """One text for one caller: limits, repeated requests and what is stored for it go by this."""
        raise NotImplementedError


class Anonymous(Caller, frozen=True, kw_only=True):
    """Someone of whom nothing is known, on an open route."""

    kind = "anonymous"

    @property
    def subject(self) -> str:
        return "anonymous"


class Secret(Caller, frozen=True, kw_only=True):
    """The holder of a secret key: a backend, an operator. May do everything."""

    kind = "secret"

    key_id: str

    @property
    def subject(self) -> str:
        return self.key_id


class Public(Caller, frozen=True, kw_only=True):
    """An entity, proved by a token beside a public key: sees its own spaces, and nothing else."""

    kind = "public"

    entity_id: str
    key_id: str = CONFIGURED
    expires_at: int
    """Unix milliseconds: when the token ends. A stream that was opened with it ends then too."""

    @property
    def subject(self) -> str:
        return f"entity:{self.entity_id}"


class ToolKey(Caller, frozen=True, kw_only=True):
    """The holder of a key for tools alone: lists and calls those that it allows."""

    kind = "tools"

    key_id: str
    tools_allowed: tuple[str, ...] | None = None
    """Patterns of names; None: all that are not denied."""
    tools_denied: tuple[str, ...] = ()
    agent_entity_id: str | None = None
    """The agent in whose name it calls."""

    @property
    def subject(self) -> str:
        return self.key_id


_KINDS: dict[Access, tuple[type[Caller], ...]] = {
    Access.OPEN: (Anonymous, Secret, Public, ToolKey),
    Access.ANY: (Secret, Public, ToolKey),
    Access.SECRET: (Secret,),
    Access.MEMBER: (Secret, Public),
    Access.TOOLS: (Secret, ToolKey),
}


def admits(access: Access, caller: Caller) -> bool:
    """Whether a route of this access is for this kind of caller."""
    return isinstance(caller, _KINDS[access])
