"""One finding of `toolspace doctor`. Looks at nothing itself."""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["ok", "warning", "problem"]


class Check(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was found, and how to fix it."""

    state: State
    what: str
    found: str
    fix: str = ""
