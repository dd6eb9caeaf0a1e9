"""Rate limits, with a fake clock."""

from __future__ import annotations

import pytest

from toolspace.config.server_settings import ServerSettings
from toolspace.config.value_types import RateSetting
from toolspace.server.authorization import AnonymousCaller, EntityCaller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.rate_limit import FailedLoginLimiter, RequestLimiter, TokenBuckets
from toolspace.server.responses import Problem


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def entity_caller(name: str = "ent_1") -> EntityCaller:
    return EntityCaller(entity_id=name, expires_at=0)


def retry_after(problem: Problem) -> int:
    return int(dict(problem.headers)[b"retry-after"])


@pytest.mark.spec("8.3")
def test_an_entity_may_burst_and_is_then_limited_to_the_rate() -> None:
    clock = Clock()
    limits = RequestLimiter(ServerSettings(rate_limit=RateSetting(count=10, seconds=1.0)), clock=clock)
    for _ in range(20):
        limits.admit(entity_caller())()
    with pytest.raises(Problem) as error_info:
        limits.admit(entity_caller())
    assert error_info.value.status == 429
    assert retry_after(error_info.value) == 1
    limits.admit(entity_caller("ent_2"))()  # Other entities are not affected.
    clock.now += 0.1
    limits.admit(entity_caller())()
    with pytest.raises(Problem):
        limits.admit(entity_caller())
    clock.now += 100
    for _ in range(20):
        limits.admit(entity_caller())()


def test_a_refused_request_takes_no_token() -> None:
    clock = Clock()
    buckets = TokenBuckets(RateSetting(count=1, seconds=10.0), burst=1, clock=clock)
    assert buckets.take("a") == 0
    for _ in range(100):
        assert buckets.take("a") == pytest.approx(10)
    clock.now += 10
    assert buckets.take("a") == 0


@pytest.mark.spec("8.3")
def test_keys_are_limited_only_if_configured() -> None:
    free = RequestLimiter(ServerSettings())
    for _ in range(1000):
        free.admit(SecretKeyCaller(key_id="key_1"))()
        free.admit(AnonymousCaller())()
    limits = RequestLimiter(ServerSettings(secret_rate_limit=RateSetting(count=1, seconds=1.0)), clock=Clock())
    for caller in (SecretKeyCaller(key_id="key_1"), ToolKeyCaller(key_id="key_2")):
        limits.admit(caller)()
        limits.admit(caller)()
        with pytest.raises(Problem) as error_info:
            limits.admit(caller)
        assert "secretRateLimit" in error_info.value.detail


@pytest.mark.spec("8.3")
def test_the_number_of_running_requests_is_limited() -> None:
    limits = RequestLimiter(ServerSettings(max_concurrent_requests=2))
    leave = limits.admit(SecretKeyCaller(key_id="key_1"))
    limits.admit(SecretKeyCaller(key_id="key_2"))
    with pytest.raises(Problem) as error_info:
        limits.admit(AnonymousCaller())
    assert error_info.value.status == 503
    assert retry_after(error_info.value) >= 1
    leave()
    limits.admit(SecretKeyCaller(key_id="key_1"))


@pytest.mark.spec("8.3")
def test_the_number_of_streams_is_limited_per_caller_and_in_total() -> None:
    limits = RequestLimiter(ServerSettings(max_streams=3, max_streams_per_caller=2, max_concurrent_requests=1))
    leave = limits.admit(entity_caller("ent_1"), stream=True)
    limits.admit(entity_caller("ent_1"), stream=True)
    with pytest.raises(Problem) as error_info:
        limits.admit(entity_caller("ent_1"), stream=True)
    assert error_info.value.status == 429
    limits.admit(entity_caller("ent_2"), stream=True)
    with pytest.raises(Problem) as error_info:
        limits.admit(entity_caller("ent_3"), stream=True)
    assert error_info.value.status == 503
    leave()
    leave()  # A second release has no effect.
    limits.admit(entity_caller("ent_3"), stream=True)
    with pytest.raises(Problem):
        limits.admit(entity_caller("ent_4"), stream=True)
    assert limits.streams == 3
    assert limits.requests == 0


def test_a_thousand_streams_of_one_key_are_within_the_defaults() -> None:
    limits = RequestLimiter(ServerSettings())
    leaves = [limits.admit(SecretKeyCaller(key_id="key_1"), stream=True) for _ in range(1000)]
    for leave in leaves:
        leave()
    assert limits.streams == 0


@pytest.mark.spec("8.3")
def test_an_address_with_many_wrong_credentials_has_to_wait() -> None:
    clock = Clock()
    failures = FailedLoginLimiter(RateSetting(count=60, seconds=60.0), clock=clock)
    for _ in range(60):
        failures.check("192.0.2.1")
        failures.record("192.0.2.1")
    with pytest.raises(Problem) as error_info:
        failures.check("192.0.2.1")
    assert error_info.value.status == 429
    assert retry_after(error_info.value) == 1
    failures.check("192.0.2.2")
    clock.now += 1
    failures.check("192.0.2.1")


def test_the_number_of_buckets_is_limited() -> None:
    clock = Clock()
    buckets = TokenBuckets(RateSetting(count=1, seconds=1.0), burst=1, clock=clock, max_buckets=100)
    for number in range(1000):
        assert buckets.take(f"one-{number}") == 0
    assert len(buckets) <= 100
    assert buckets.take("one-999") > 0


@pytest.mark.spec("8.3")
def test_one_entity_may_use_a_tenth_of_all_requests() -> None:
    limits = RequestLimiter(ServerSettings(rate_limit=None, max_concurrent_requests=20))
    leaves = [limits.admit(entity_caller("ent_1")) for _ in range(2)]
    with pytest.raises(Problem) as error_info:
        limits.admit(entity_caller("ent_1"))
    assert error_info.value.status == 429
    limits.admit(entity_caller("ent_2"))()
    for _ in range(18):
        limits.admit(SecretKeyCaller(key_id="key_1"))
    for leave in leaves:
        leave()
    limits.admit(entity_caller("ent_1"))


@pytest.mark.spec("8.3")
def test_an_ipv6_network_counts_as_one_address() -> None:
    failures = FailedLoginLimiter(RateSetting(count=10, seconds=10.0), clock=Clock())
    for number in range(10):
        failures.record(f"2001:db8:0:1::{number:x}")
    with pytest.raises(Problem):
        failures.check("2001:db8:0:1:ffff::1")
    failures.check("2001:db8:0:2::1")
    for _ in range(10):
        failures.record("::ffff:192.0.2.1")
    failures.check("::ffff:192.0.2.2")
    failures.check("no address")
    with pytest.raises(Problem):
        failures.check("192.0.2.1")
