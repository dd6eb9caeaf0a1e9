"""Ids and records in their wire form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from toolspace.core.ids import derived_id, is_id, new_id
from toolspace.core.stored_records import CallRecord


@pytest.mark.parametrize("result", [None, False, {"a": [1, "ü"]}, 2**70])
def test_a_call_record_is_the_same_as_data_and_as_json(result: Any) -> None:
    call = CallRecord(
        call_id="call_1",
        run_id=None,
        seq=1,
        agent_entity_id=None,
        space_id=None,
        tool_name="t",
        args={"x": 1},
        execution_type="external",
        execution_target="external",
        visible=False,
        is_async=True,
        status="resolved",
        result=result,
        is_error=False,
        error_kind=None,
        source="client",
        message_id=None,
        created_at=1,
        resolved_at=2,
        expires_at=None,
    )
    assert json.loads(call.wire_text()) == json.loads(json.dumps(call.wire()))
    assert call.wire()["toolCallId"] == call.wire()["callId"] == "call_1"


def test_ids_are_unique_sorted_by_time_and_the_same_for_the_same_parts() -> None:
    ids = [new_id("spc") for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert all(is_id(id) for id in ids)
    assert new_id("spc")[:8] >= ids[0][:8]
    assert derived_id("run", "a", "b") == derived_id("run", "a", "b") != derived_id("run", "ab", "")
    assert not is_id("../etc") and not is_id("") and not is_id("a" * 129)  # noqa: PT018
