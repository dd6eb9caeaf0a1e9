"""Maps charset names from files, pages and HTTP headers to codecs that are safe to decode with."""

from __future__ import annotations

import codecs

# Decoders that take quadratic time or interpret escapes. Real text does not use them; an attacker may declare them.
_REFUSED_CODECS = frozenset(("idna", "punycode", "raw-unicode-escape", "undefined", "unicode-escape"))


def find_codec(charset: str) -> str | None:
    """The name of Python's codec for a charset. None if there is none for text, or it is unsafe to use."""
    try:
        b"x".decode(charset, "replace")  # Not empty: Python does not look up the codec to decode nothing.
        name = codecs.lookup(charset).name
    except (LookupError, ValueError):
        return None
    return None if name in _REFUSED_CODECS else name
