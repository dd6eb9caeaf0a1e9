"""What the commands that serve have in common: their loop, their address, how their process is set up,
and how they wait for their end."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from ipaddress import ip_address

from toolspace.cli.interrupts import Interrupts

_OBJECTS = 10_000
"""How many more objects there may be before it is looked whether some of them are garbage."""
_TURN_SECONDS = 0.0002
"""How long a thread may keep the others waiting. Python's own measure is 25 times that: one thread that computes would
hold up every answer."""


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """The faster loop, where there is one: not on Windows."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


async def stopped(interrupts: Interrupts) -> None:
    """Waits for a signal."""
    asked = asyncio.Event()

    def stop() -> bool:
        asked.set()
        return True

    interrupts.stop = stop
    await asked.wait()
    interrupts.stop = None


def tune() -> None:
    """Sets the process up for serving, once all that it needs is there."""
    gc.collect()
    gc.freeze()  # What is there now stays: looking through it again and again costs the slowest calls most.
    gc.set_threshold(_OBJECTS, 10, 10)  # Most of what a request makes is gone before that, by itself.
    sys.setswitchinterval(_TURN_SECONDS)
