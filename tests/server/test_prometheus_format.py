"""The Prometheus text format of metrics."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace.server.metrics import Counter, Histogram, MetricSamples, format_prometheus, gauge

pytestmark = pytest.mark.spec("12.4")

_SAMPLE = re.compile(
    r'(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})?'
    r" (?P<value>[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|Inf)|NaN)"
)


def samples(text: bytes) -> dict[str, str]:
    """Parses all samples; fails if a line is not valid Prometheus text."""
    values: dict[str, str] = {}
    for line in text.decode().split("\n"):
        if not line or line.startswith("# "):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        name = line.rpartition(" ")[0]
        assert name not in values, f"{name} is there twice"
        values[name] = match["value"]
    return values


def test_a_counter_counts_by_labels() -> None:
    counter = Counter("requests_total", "Requests.", "route", "status")
    counter.add(("/a", "200"))
    counter.add(("/a", "200"), 2)
    counter.add(("/b", "404"))

    text = format_prometheus([counter])

    assert text.startswith(b"# HELP requests_total Requests.\n# TYPE requests_total counter\n")
    assert samples(text) == {
        'requests_total{route="/a",status="200"}': "3",
        'requests_total{route="/b",status="404"}': "1",
    }


def test_a_histogram_counts_durations_up_to_each_bound() -> None:
    histogram = Histogram("seconds", "Time.", bounds=(0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 30.0):
        histogram.add((seconds,))

    assert samples(format_prometheus([histogram])) == {
        'seconds_bucket{le="0.1"}': "2",
        'seconds_bucket{le="1"}': "3",
        'seconds_bucket{le="+Inf"}': "4",
        "seconds_sum": "30.65",
        "seconds_count": "4",
    }


@pytest.mark.parametrize(
    ("make", "rest"),
    [
        (lambda: Counter("c", "", "tool", max_label_sets=10), 'c{tool="other"}'),
        (lambda: Histogram("c", "", "tool", max_label_sets=10), 'c_count{tool="other"}'),
    ],
    ids=["counter", "histogram"],
)
def test_label_sets_beyond_the_limit_count_as_other(make: Callable[[], Counter | Histogram], rest: str) -> None:
    family = make()
    for number in range(500):
        if isinstance(family, Counter):
            family.add((f"tool{number}",))
        else:
            family.add((0.1,), (f"tool{number}",))

    parsed = samples(format_prometheus([family]))

    assert parsed[rest] == "490"
    assert len([name for name in parsed if "le=" not in name and "_sum" not in name]) == 11


@given(st.text(max_size=30), st.floats())
def test_any_label_value_is_escaped(label: str, value: float) -> None:
    figures = MetricSamples("c", "gauge", "Text.", "name")
    figures.add(value, label)

    assert len(samples(format_prometheus([figures, gauge("d", "Text.", {label: 1.0}, "name")]))) == 2
