"""How much one request may take, whatever the server does."""

from __future__ import annotations

import msgspec

_MIB = 1 << 20


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are bytes of an answer, unpacked; times are seconds."""

    memory: int = 64 * _MIB
    """What may be held in memory of an answer that is text or JSON."""
    binary: int = 16 * _MIB
    """What may be held of an image, of sound, of any other file."""
    stored: int = 4096 * _MIB
    """What may go to the output store as it comes."""
    attempts: int = 3
    """How often an idempotent request is sent while the answer is 429 or 503."""
    longest_wait: float = 30.0
    """How long `Retry-After` may ask to wait."""
    redirects: int = 5


DEFAULT_LIMITS = Limits()
