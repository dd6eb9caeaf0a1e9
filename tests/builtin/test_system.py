"""The system tools: time, sleep and environment variables."""

from __future__ import annotations

import math
import os
import time
from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from toolspace.core.tool_context import ToolContext


@pytest.mark.spec("10.1")
async def test_current_time_returns_milliseconds_and_the_utc_offset(tools: Any) -> None:
    before = int(time.time() * 1000)
    now = await tools.ok("current_time", {"timezone": "Asia/Kolkata"})
    after = int(time.time() * 1000)

    assert before <= now["timestamp"] <= after
    assert isinstance(now["timestamp"], int)
    assert now["timezone"] == "Asia/Kolkata"
    moment = datetime.fromisoformat(now["iso"])
    assert moment.utcoffset() == timedelta(hours=5, minutes=30)
    assert int(moment.timestamp() * 1000) == now["timestamp"]


async def test_current_time_defaults_to_the_time_zone_of_the_machine(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    now = await tools.ok("current_time", {})

    assert now["timezone"] == "America/New_York"
    moment = datetime.fromisoformat(now["iso"])
    assert moment.utcoffset() == moment.astimezone(ZoneInfo("America/New_York")).utcoffset()


@pytest.mark.parametrize("name", ["UTC", "utc", "Z"])
async def test_utc_has_several_names(tools: Any, name: str) -> None:
    now = await tools.ok("current_time", {"timezone": name})
    assert now["timezone"] == "UTC"
    assert now["iso"].endswith("+00:00")


@pytest.mark.parametrize(
    "name",
    ["Europe/Berln", "America", "../../etc/passwd", "/etc/localtime", "zone.tab", "", "a\0b", "\ud800", "x" * 9000],
)
async def test_an_unknown_time_zone_is_a_clear_error(tools: Any, name: str) -> None:
    await tools.call_fails("current_time", {"timezone": name}, "invalid_parameters", "timezone")


async def test_an_unknown_time_zone_suggests_similar_names(tools: Any) -> None:
    await tools.call_fails("current_time", {"timezone": "Europe/Berln"}, "invalid_parameters", '"Europe/Berlin"')
    await tools.call_fails("current_time", {"timezone": "berlin"}, "invalid_parameters", '"Europe/Berlin"')


@pytest.mark.spec("10.1")
async def test_sleep_returns_its_duration(tools: Any) -> None:
    assert await tools.ok("sleep", {"duration": 0.001}) == {"slept": 0.001}
    assert await tools.ok("sleep", {"duration": 0}) == {"slept": 0}


@pytest.mark.parametrize("duration", [-1, -0.001, math.nan, math.inf, -math.inf, 1e300, 86_401])
async def test_sleep_rejects_invalid_durations(tools: Any, duration: float) -> None:
    await tools.call_fails("sleep", {"duration": duration}, "invalid_parameters", "duration")


@pytest.mark.spec("10.1")
@pytest.mark.parametrize("key", ["LANG", "TZ", "HOME"])
async def test_harmless_variables_are_read_by_default(tools: Any, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv(key, "välue")
    assert await tools.ok("get_env", {"key": key}) == {"value": "välue"}
    monkeypatch.delenv(key)
    assert await tools.ok("get_env", {"key": key}) == {"value": None}


@pytest.mark.spec("10.1")
async def test_a_refusal_does_not_reveal_whether_the_variable_is_set(
    tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    set_message = await tools.call_fails("get_env", {"key": "DATABASE_PASSWORD"}, "not_permitted", "allowedEnv")
    monkeypatch.delenv("DATABASE_PASSWORD")
    unset_message = await tools.call_fails("get_env", {"key": "DATABASE_PASSWORD"}, "not_permitted")

    assert set_message == unset_message
    await tools.call_fails("set_env", {"key": "DATABASE_PASSWORD", "value": "x"}, "not_permitted")
    assert "DATABASE_PASSWORD" not in os.environ


@pytest.mark.spec("10.1")
async def test_allowed_variables_are_read_and_set(tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("APP_MODE", raising=False)
    context = ToolContext(allowed_env=["APP_*"])

    assert await tools.ok("set_env", {"key": "APP_MODE", "value": "a"}, context) == {"previous": None}
    assert await tools.ok("set_env", {"key": "APP_MODE", "value": "b"}, context) == {"previous": "a"}
    assert await tools.ok("get_env", {"key": "APP_MODE"}, context) == {"value": "b"}
    await tools.call_fails("get_env", {"key": "HOME"}, "not_permitted", context=context)


async def test_an_empty_list_allows_nothing(tools: Any) -> None:
    await tools.call_fails("get_env", {"key": "LANG"}, "not_permitted", context=ToolContext(allowed_env=[]))


@pytest.mark.parametrize("key", ["PATH", "LD_PRELOAD", "PYTHONPATH", "DYLD_INSERT_LIBRARIES", "https_proxy", "HOME"])
async def test_powerful_variables_must_be_allowed_by_exact_name(
    tools: Any, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv(key, "before")
    change = {"key": key, "value": "before"}

    await tools.call_fails("set_env", change, "not_permitted", key)
    await tools.call_fails("set_env", change, "not_permitted", "exactly", context=ToolContext(allowed_env=["*"]))
    named_context = ToolContext(allowed_env=["*", key])
    assert await tools.ok("set_env", change, named_context) == {"previous": "before"}


@pytest.mark.parametrize("key", ["", "A=B", "A\0B", "\ud800"])
async def test_an_invalid_variable_name_is_rejected(tools: Any, key: str) -> None:
    open_context = ToolContext(allowed_env=["*"])
    await tools.call_fails("get_env", {"key": key}, "invalid_parameters", "key", context=open_context)
    await tools.call_fails("set_env", {"key": key, "value": ""}, "invalid_parameters", "key", context=open_context)


@pytest.mark.parametrize("value", ["a\0b", "\ud800"])
async def test_an_invalid_variable_value_is_rejected(tools: Any, value: str) -> None:
    context = ToolContext(allowed_env=["APP_MODE"])
    await tools.call_fails(
        "set_env", {"key": "APP_MODE", "value": value}, "invalid_parameters", "value", context=context
    )
