"""Ids of stored records: a prefix that names the kind, the time, and random bits. They sort by time."""

from __future__ import annotations

import os
import re
import time
from typing import Final

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"
_PATTERN: Final = re.compile(r"[A-Za-z0-9_.:@~-]{1,128}")

ID_PATTERN: Final = "^[A-Za-z0-9_.:@~-]{1,128}$"
"""The pattern of ids, for schemas: programs may choose ids of their own."""


def new_id(prefix: str) -> str:
    """Returns a unique id: `spc_` and 26 characters. Later ids sort after earlier ones."""
    number = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    return f"{prefix}_{_base32(number)}"


def derived_id(prefix: str, *parts: str) -> str:
    """Returns the same id for the same parts, so that a repeated request finds the record of the first one."""
    import hashlib  # Imported here: programs that only call tools do not need it.

    digest = hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
    return f"{prefix}_{_base32(int.from_bytes(digest[:16]))}"


def session_id_for(agent_entity_id: str, scope_key: str = "") -> str:
    """Returns the id of a session of an agent: the agent's own id for its main session, else `agent/space:…`.

    `scope_key` is empty for the main session, else `space:ID` or `user:ID`. Other ids have no slash.
    """
    return f"{agent_entity_id}/{scope_key}" if scope_key else agent_entity_id


def agent_of_session(session_id: str) -> str:
    """Returns the agent of a session that `session_id_for` named."""
    return session_id.partition("/")[0]


def scope_key_of(session_id: str) -> str:
    """Returns the scope key of a session that `session_id_for` named."""
    return session_id.partition("/")[2]


def is_id(text: str) -> bool:
    """Whether a text may be an id."""
    return _PATTERN.fullmatch(text) is not None


def now_ms() -> int:
    """Returns the time in Unix milliseconds, as records and responses have it."""
    return time.time_ns() // 1_000_000


def _base32(number: int) -> str:
    return "".join(_ALPHABET[number >> shift & 31] for shift in range(125, -5, -5))
