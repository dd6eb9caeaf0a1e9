"""Counters, histograms and figures as Prometheus reads them. Knows nothing of what is measured."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds that suit what takes from half a millisecond to a minute."""
_REST = "other"

Labels = tuple[str, ...]


class Counter:
    """Counts by labels. Beyond `most` sets of labels everything counts as `other`: nobody fills memory by asking."""

    kind = "counter"

    def __init__(self, name: str, text: str, *labels: str, most: int = 2_000) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._most = most
        self._counts: dict[Labels, float] = {}

    def add(self, values: Labels = (), amount: float = 1) -> None:
        counts = self._counts
        if values not in counts and len(counts) >= self._most:
            values = (_REST,) * len(self.labels)
        counts[values] = counts.get(values, 0) + amount

    def lines(self) -> Iterator[str]:
        for values, count in sorted(self._counts.items()):
            yield f"{self.name}{_labels(self.labels, values)} {_number(count)}"


class Histogram:
    """How long things took, by labels."""

    kind = "histogram"

    def __init__(self, name: str, text: str, *labels: str, bounds: Sequence[float] = SECONDS, most: int = 500) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._bounds = bounds
        self._most = most
        self._found: dict[Labels, tuple[list[int], list[float]]] = {}
        """How many fell between two bounds, and the sum of all."""

    def add(self, seconds: float, values: Labels = ()) -> None:
        counts, total = self._found.get(values) or self._begin(values)
        counts[bisect_left(self._bounds, seconds)] += 1
        total[0] += seconds

    def add_all(self, many: Iterable[float], values: Labels = ()) -> None:
        """The same for several at once."""
        counts, total = self._found.get(values) or self._begin(values)
        bounds = self._bounds
        for seconds in many:
            counts[bisect_left(bounds, seconds)] += 1
            total[0] += seconds

    def _begin(self, values: Labels) -> tuple[list[int], list[float]]:
        if len(self._found) >= self._most:
            values = (_REST,) * len(self.labels)
        return self._found.setdefault(values, ([0] * (len(self._bounds) + 1), [0.0]))

    def lines(self) -> Iterator[str]:
        for values, (counts, total) in sorted(self._found.items()):
            below = 0
            within: list[int] = []
            for count in counts[:-1]:
                below += count
                within.append(below)
            yield from histogram_lines(
                self.name, self.labels, values, self._bounds, within, count=sum(counts), total=total[0]
            )


class Figures:
    """Numbers that were looked up just now."""

    def __init__(self, name: str, kind: str, text: str, *labels: str) -> None:
        self.name = name
        self.kind = kind
        self.text = text
        self.labels = labels
        self._rows: list[str] = []

    def put(self, value: float, *values: str) -> None:
        self._rows.append(f"{self.name}{_labels(self.labels, values)} {_number(value)}")

    def put_histogram(
        self, values: Labels, bounds: Sequence[float], within: Sequence[int], *, count: int, total: float
    ) -> None:
        self._rows += histogram_lines(self.name, self.labels, values, bounds, within, count=count, total=total)

    def lines(self) -> Iterator[str]:
        return iter(self._rows)


Family = Counter | Histogram | Figures


def gauge(name: str, text: str, values: Mapping[str, float] | float, label: str = "") -> Figures:
    """Figures of one label, or one figure without."""
    made = Figures(name, "gauge", text, *((label,) if label else ()))
    if isinstance(values, Mapping):
        for key, value in values.items():
            made.put(value, key)
    else:
        made.put(values)
    return made


def exposition(families: Iterable[Family]) -> bytes:
    """The text that Prometheus reads."""
    lines: list[str] = []
    for family in families:
        lines += (f"# HELP {family.name} {family.text}", f"# TYPE {family.name} {family.kind}", *family.lines())
    return ("\n".join(lines) + "\n").encode("utf-8", "replace")


def histogram_lines(
    name: str,
    labels: Labels,
    values: Labels,
    bounds: Sequence[float],
    within: Sequence[int],
    *,
    count: int,
    total: float,
) -> Iterator[str]:
    named = (*labels, "le")
    for bound, below in zip(bounds, within, strict=True):
        yield f"{name}_bucket{_labels(named, (*values, _number(bound)))} {below}"
    yield f"{name}_bucket{_labels(named, (*values, '+Inf'))} {count}"
    yield f"{name}_sum{_labels(labels, values)} {_number(total)}"
    yield f"{name}_count{_labels(labels, values)} {count}"


def _labels(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True))
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
