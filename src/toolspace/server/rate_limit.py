"""How much one caller, one address and all together may ask for at a time. Counts; knows neither keys nor routes."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable
from itertools import islice
from typing import Final

from toolspace.config.server_settings import ServerSettings
from toolspace.config.value_types import RateSetting
from toolspace.server.authorization import AnonymousCaller, Caller, EntityCaller
from toolspace.server.problems import Problem, unavailable

_MOST_REMEMBERED: Final = 50_000
_SHARES: Final = 10


class TokenBuckets:
    """Token buckets by name: so many at once, refilled at a rate. One that is full again is forgotten."""

    def __init__(self, rate: RateSetting, *, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pace = rate.seconds / rate.count
        self._depth = burst * self._pace
        self._clock = clock
        self._full_at: dict[str, float] = {}
        """When each bucket will be full again; one that is not here is full now."""

    def take(self, name: str) -> float:
        """Takes one. 0.0, or the seconds to wait where there is none left; those who have to wait take nothing."""
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + self._pace
        wait = full_at - now - self._depth
        if wait > 1e-9:
            return wait
        self._keep(name, full_at, now)
        return 0.0

    def peek(self, name: str) -> float:
        """As `take`, but takes nothing."""
        now = self._clock()
        return max(0.0, max(self._full_at.get(name, now), now) + self._pace - now - self._depth)

    def _keep(self, name: str, full_at: float, now: float) -> None:
        full = self._full_at
        if name not in full and len(full) >= _MOST_REMEMBERED:
            self._full_at = full = {one: at for one, at in full.items() if at > now}
            if len(full) >= _MOST_REMEMBERED:  # More callers at once than are told apart: the oldest start anew.
                # Many of them, so that not everyone who comes next has to look through all again.
                for oldest in list(islice(full, _MOST_REMEMBERED // 10)):
                    del full[oldest]
        full[name] = full_at


class FailedLoginLimiter:
    """Slows down an address that tries one wrong key after another. One network of IPv6 counts as one address."""

    def __init__(self, rate: RateSetting | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = TokenBuckets(rate, burst=rate.count, clock=clock) if rate is not None else None

    def check(self, address: str) -> None:
        """Raises where the address has to wait before it may try credentials that are not known yet."""
        if self._buckets is not None and (wait := self._buckets.peek(_network(address))) > 0:
            raise _later(wait, "too many wrong credentials came from this address (server.failedLoginLimit)")

    def record(self, address: str) -> None:
        if self._buckets is not None:
            self._buckets.take(_network(address))


class RequestLimiter:
    """Lets requests and streams in while there is room. Each that is let in has to leave again."""

    def __init__(self, server: ServerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._public = _buckets(server.rate_limit, clock)
        self._secret = _buckets(server.secret_rate_limit, clock)
        self.requests = 0
        """Requests under way, streams aside."""
        self.streams = 0
        """Streams that are open."""
        self._streams_of: dict[str, int] = {}
        self._requests_of: dict[str, int] = {}
        self._share = max(1, server.max_concurrent_requests // _SHARES)
        """Requests that one caller with a public key may have under way: none of them takes the room of all others."""

    def admit(self, caller: Caller, *, stream: bool = False) -> Callable[[], None]:
        """Lets a request in, or raises `Problem` 429 or 503. Call the answer when it has ended."""
        setting, buckets = (
            ("rateLimit", self._public) if isinstance(caller, EntityCaller) else ("secretRateLimit", self._secret)
        )
        if buckets is not None and not isinstance(caller, AnonymousCaller) and (wait := buckets.take(caller.subject)):
            raise _later(wait, f"too many requests (server.{setting})")
        if stream:
            return self._open_stream(caller.subject)
        if self.requests >= self._server.max_concurrent_requests:
            raise unavailable("too many requests are under way (server.maxConcurrentRequests)")
        if isinstance(caller, EntityCaller):
            return self._enter_public(caller.subject)
        self.requests += 1
        return self._leave

    def _leave(self) -> None:
        self.requests -= 1

    def _enter_public(self, subject: str) -> Callable[[], None]:
        own = self._requests_of.get(subject, 0)
        if own >= self._share:
            limit = f"a tenth of server.maxConcurrentRequests is {self._share}"
            raise _later(1.0, f"{own} requests are under way with these credentials ({limit})")
        self.requests += 1
        self._requests_of[subject] = own + 1

        def leave() -> None:
            self.requests -= 1
            self._requests_of[subject] -= 1
            if not self._requests_of[subject]:
                del self._requests_of[subject]

        return leave

    def _open_stream(self, subject: str) -> Callable[[], None]:
        own = self._streams_of.get(subject, 0)
        if own >= self._server.max_streams_per_caller:
            raise _later(1.0, f"{own} streams are open with these credentials (server.maxStreamsPerCaller)")
        if self.streams >= self._server.max_streams:
            raise unavailable("too many streams are open (server.maxStreams)", retry_seconds=5)
        self.streams += 1
        self._streams_of[subject] = own + 1
        left = False

        def leave() -> None:
            nonlocal left
            if not left:
                left = True
                self.streams -= 1
                self._streams_of[subject] -= 1
                if not self._streams_of[subject]:
                    del self._streams_of[subject]

        return leave


def _network(address: str) -> str:
    """Whoever has one address of IPv6 has as many of its network as they like."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(found.ipv4_mapped or found.packed[:8].hex())


def _buckets(rate: RateSetting | None, clock: Callable[[], float]) -> TokenBuckets | None:
    return TokenBuckets(rate, burst=2 * rate.count, clock=clock) if rate is not None else None


def _later(seconds: float, detail: str) -> Problem:
    wait = max(1, math.ceil(seconds))
    return Problem(429, f"{detail}; try again in {wait} s", headers=((b"retry-after", b"%d" % wait),))
