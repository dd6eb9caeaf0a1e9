"""What the commands that serve have in common: their loop, their address, and how they wait for their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from ipaddress import ip_address

from toolspace.cli.interrupts import Interrupts


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
