"""How long to wait before a request is sent again. Waits for nothing itself."""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime

RETRIED = frozenset((429, 503))
"""The statuses that mean: not now."""

_FIRST_WAIT = 0.5


def seconds_to_wait(retry_after: str | None, attempt: int) -> float:
    """What the server asks for, in seconds or as a date; else longer each time, and not the same for everyone."""
    asked = _asked(retry_after.strip()) if retry_after else None
    return _FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.5, 1.0) if asked is None else asked


def _asked(text: str) -> float | None:
    if text.isascii() and text.isdigit():
        return float(text[:10])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
