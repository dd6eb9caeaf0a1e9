"""The queue of progress reports for clients."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from toolspace.core.events import CallPartial, CallProgress
from toolspace.server.mcp.progress import ProgressQueue

_IDS = {"at": 0.0, "call_id": "c", "tool_name": "t", "run_id": None, "parent_id": None}
_events = st.lists(
    st.builds(
        lambda progress, total, message: CallProgress(**_IDS, progress=progress, total=total, message=message),
        st.floats(min_value=-1e300, max_value=1e300) | st.just(math.nan) | st.just(math.inf),
        st.none() | st.floats(),
        st.none() | st.text(),
    )
    | st.builds(lambda value: CallPartial(**_IDS, value=value), st.text() | st.integers() | st.lists(st.text())),
    max_size=30,
)


@given(_events)
def test_progress_grows_for_any_events(events: list[CallProgress | CallPartial]) -> None:
    wake_ups: list[None] = []
    reports = ProgressQueue(lambda: wake_ups.append(None))
    for event in events:
        reports.add(event)
    sent_reports = reports.drain()
    numbers = [report.progress for report in sent_reports]
    assert len(sent_reports) == len(wake_ups) == len(events)
    assert all(map(math.isfinite, numbers))
    assert all(later > earlier for earlier, later in itertools.pairwise(numbers))
    assert all(report.total is None or math.isfinite(report.total) for report in sent_reports)
    for report in sent_reports:
        (report.message or "").encode()


def test_slow_reader_loses_the_oldest_reports() -> None:
    reports = ProgressQueue(lambda: None)
    for number in range(5_000):
        reports.add(CallProgress(**_IDS, progress=number))
    sent_reports = reports.drain()
    assert len(sent_reports) == 1_000
    assert sent_reports[-1].progress == 4_999
