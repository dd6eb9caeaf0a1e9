"""Rate limits: how many requests and streams one caller, one address and all callers together may have.

The gateway and the MCP endpoint use it. It only counts; it knows neither keys nor routes.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Final

from toolspace.config.server_settings import ServerSettings
from toolspace.config.value_types import RateSetting
from toolspace.server.authorization import AnonymousCaller, Caller, EntityCaller, SecretKeyCaller
from toolspace.server.responses import Problem, unavailable

MAX_BUCKETS: Final = 50_000
SHARE: Final = 10
"""One entity or tool key may use a tenth of the requests. Another tenth of requests, streams and sessions is for secret
keys alone, so that operators can always get in."""


class TokenBuckets:
    """Token buckets by name. A full bucket needs no memory."""

    def __init__(
        self,
        rate: RateSetting,
        *,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        max_buckets: int = MAX_BUCKETS,
    ) -> None:
        self._seconds_per_token = rate.seconds / rate.count
        self._capacity_seconds = burst * self._seconds_per_token
        self._clock = clock
        self._max_buckets = max_buckets
        self._full_at: dict[str, float] = {}
        """When each bucket will be full again; a bucket that is missing is full."""

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, name: str) -> float:
        """Takes a token and returns 0.0. If there is none, takes nothing and returns the seconds to wait."""
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + self._seconds_per_token
        wait = full_at - now - self._capacity_seconds
        if wait > 1e-9:
            return wait
        self._store(name, full_at, now)
        return 0.0

    def peek(self, name: str) -> float:
        """Returns what `take` would return, but takes nothing."""
        now = self._clock()
        full_at = max(self._full_at.get(name, now), now) + self._seconds_per_token
        return max(0.0, full_at - now - self._capacity_seconds)

    def _store(self, name: str, full_at: float, now: float) -> None:
        buckets = self._full_at
        if name not in buckets and len(buckets) >= self._max_buckets:
            self._full_at = buckets = {key: at for key, at in buckets.items() if at > now}
            if len(buckets) >= self._max_buckets:
                # Drops many of the oldest at once, so that not every new caller costs a pass over all buckets.
                for oldest in list(islice(buckets, self._max_buckets // 10)):
                    del buckets[oldest]
        buckets[name] = full_at


class FailedLoginLimiter:
    """Limits how often an address may send wrong credentials. An IPv6 /64 network counts as one address."""

    def __init__(self, rate: RateSetting | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._buckets = TokenBuckets(rate, burst=rate.count, clock=clock) if rate is not None else None

    def check(self, address: str) -> None:
        """Raises `Problem` 429 if the address has to wait before it may send unverified credentials."""
        if self._buckets is not None and (wait := self._buckets.peek(network_of(address))) > 0:
            raise _too_many(wait, "Too many failed logins from this address (server.failedLoginLimit)")

    def record(self, address: str) -> None:
        """Counts a failed login."""
        if self._buckets is not None:
            self._buckets.take(network_of(address))


class RequestLimiter:
    """Admits requests and streams up to the configured limits."""

    def __init__(self, server: ServerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._entity_buckets = _create_buckets(server.rate_limit, clock)
        self._key_buckets = _create_buckets(server.secret_rate_limit, clock)
        self.requests = 0
        """Requests that are running, without streams."""
        self.streams = 0
        """Open streams."""
        self._streams_by_subject: Counter[str] = Counter()
        self._requests_by_subject: Counter[str] = Counter()
        """Requests of entities and tool keys."""
        self._limited_requests = 0
        """Running requests of all but secret keys."""
        self._limited_streams = 0
        self._max_requests_per_subject = max(1, server.max_concurrent_requests // SHARE)

    def admit(self, caller: Caller, *, stream: bool = False) -> Callable[[], None]:
        """Admits a request and returns a function to call when it has ended. Raises `Problem` 429 or 503."""
        is_entity = isinstance(caller, EntityCaller)
        buckets = self._entity_buckets if is_entity else self._key_buckets
        if buckets is not None and not isinstance(caller, AnonymousCaller) and (wait := buckets.take(caller.subject)):
            raise _too_many(wait, f"Too many requests (server.{'rateLimit' if is_entity else 'secretRateLimit'})")
        is_secret = isinstance(caller, SecretKeyCaller)
        if stream:
            return self._admit_stream(caller.subject, is_secret=is_secret)
        if not is_secret:
            return self._admit_limited(caller)
        if self.requests >= self._server.max_concurrent_requests:
            raise _too_many_requests()
        self.requests += 1
        return self._release

    def _release(self) -> None:
        self.requests -= 1

    def _admit_limited(self, caller: Caller) -> Callable[[], None]:
        subject = caller.subject
        count = self._requests_by_subject[subject]
        if count >= self._max_requests_per_subject and not isinstance(caller, AnonymousCaller):
            raise _too_many(
                1.0,
                f"{count} requests are running with these credentials; "
                f"the limit is a tenth of server.maxConcurrentRequests, {self._max_requests_per_subject}",
            )
        limit = self._server.max_concurrent_requests
        if self.requests >= limit or self._limited_requests >= _without_reserve(limit):
            raise _too_many_requests()
        self.requests += 1
        self._limited_requests += 1
        return _count(self._requests_by_subject, subject, self._release_limited)

    def _release_limited(self) -> None:
        self.requests -= 1
        self._limited_requests -= 1

    def _admit_stream(self, subject: str, *, is_secret: bool) -> Callable[[], None]:
        count = self._streams_by_subject[subject]
        if count >= self._server.max_streams_per_caller:
            raise _too_many(1.0, f"{count} streams are open with these credentials (server.maxStreamsPerCaller)")
        limit = self._server.max_streams
        if self.streams >= limit or (not is_secret and self._limited_streams >= _without_reserve(limit)):
            raise unavailable("Too many streams are open (server.maxStreams)", retry_seconds=5)
        self.streams += 1
        self._limited_streams += not is_secret
        return _count(
            self._streams_by_subject, subject, self._release_stream if is_secret else self._release_limited_stream
        )

    def _release_stream(self) -> None:
        self.streams -= 1

    def _release_limited_stream(self) -> None:
        self.streams -= 1
        self._limited_streams -= 1


class ConnectionLimiter:
    """Counts the open connections of each address. An IPv6 /64 network counts as one address."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._counts: Counter[str] = Counter()

    def admit(self, address: str) -> Callable[[], None] | None:
        """Counts a connection and returns a function to call when it is closed; None if the address has too many."""
        network = network_of(address)
        if self._limit is not None and self._counts[network] >= self._limit:
            return None
        return _count(self._counts, network, _do_nothing)


def _do_nothing() -> None: ...


def _too_many_requests() -> Problem:
    return unavailable("Too many requests are running (server.maxConcurrentRequests)")


def _without_reserve(limit: int) -> int:
    return limit - limit // SHARE


def _count(counts: Counter[str], subject: str, on_release: Callable[[], None]) -> Callable[[], None]:
    """Counts something that a caller has open. The function that it returns has an effect once."""
    counts[subject] += 1
    is_released = False

    def release() -> None:
        nonlocal is_released
        if not is_released:
            is_released = True
            on_release()
            counts[subject] -= 1
            if not counts[subject]:
                del counts[subject]

    return release


def network_of(address: str) -> str:
    """Returns the /64 network of an IPv6 address, because its owner can use all addresses of the network."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or parsed.packed[:8].hex())


def _create_buckets(rate: RateSetting | None, clock: Callable[[], float]) -> TokenBuckets | None:
    return TokenBuckets(rate, burst=2 * rate.count, clock=clock) if rate is not None else None


def _too_many(seconds: float, detail: str) -> Problem:
    wait = max(1, math.ceil(seconds))
    return Problem(429, f"{detail}; try again in {wait} s", headers=((b"retry-after", b"%d" % wait),))
