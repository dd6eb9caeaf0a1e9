"""Results: their text, their wire form, and values that JSON cannot express."""

from __future__ import annotations

import asyncio
import base64
import collections
import contextlib
import dataclasses
import datetime
import decimal
import enum
import fractions
import json
import math
import pathlib
import types
import uuid
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from tests.core.functions import Colour
from toolspace import (
    AudioPart,
    ImagePart,
    JsonPart,
    ResourcePart,
    Settings,
    TextPart,
    ToolExecutionError,
    ToolResult,
    Toolspace,
    tool,
)
from toolspace.core import json_text

quick = settings(max_examples=200, deadline=None)
PNG = base64.b64encode(b"\x89PNG1234").decode()


def of(value: Any) -> ToolResult:
    return ToolResult(ok=True, result=value)


def wire(result: ToolResult) -> Any:
    """Returns the wire form after strict JSON encoding and decoding, as a browser has it."""
    return json.loads(json.dumps(result.to_dict(), allow_nan=False, ensure_ascii=False).encode())


async def result_of(value: Any) -> ToolResult:
    @tool
    async def give() -> Any:
        return value

    return await Toolspace(tools=[give]).call("give")


# Text


@pytest.mark.spec("1.8")
@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"), ("", ""), ("ü\n", "ü\n"), (None, "null"), (True, "true"), (False, "false"), (0, "0"),
        (-5, "-5"), (2**70, str(2**70)), (1.5, "1.5"), (1.0, "1.0"), ([], "[]"), ({}, "{}"),
        ({"a": [1, None, "x"]}, '{"a":[1,null,"x"]}'), ("null", "null"), ('{"a": 1}', '{"a": 1}'),
        ([1, "ü"], '[1,"ü"]'), ((1, 2), "[1,2]"),
    ],
    ids=repr,
)  # fmt: skip
async def test_the_text_of_a_success_is_its_text_or_compact_json(value: Any, text: str) -> None:
    assert of(value).text == text
    result = await result_of(value)
    assert (result.ok, result.text) == (True, text)


@pytest.mark.spec("1.8")
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(ok=False, error="boom", error_kind="execution_error"), "(tool failed: boom)"),
        (
            ToolResult(ok=False, error="Tool execution timed out after 5ms", error_kind="timeout"),
            "(tool failed: timeout)",
        ),
        (ToolResult(ok=False, error_kind="internal_error"), "(tool failed: unknown error)"),
        (ToolResult(ok=False, error="", error_kind="canceled"), "(tool failed: unknown error)"),
        (
            ToolResult(ok=False, error="context window budget exceeded", error_kind="limit_exceeded"),
            "(tool failed: context window budget exceeded)",
        ),
        (ToolResult(ok=False, error="x", result="kept", parts=(TextPart(text="y"),)), "(tool failed: x)"),
    ],
)
def test_the_text_of_a_failure_has_its_reason(result: ToolResult, text: str) -> None:
    assert result.text == text


@pytest.mark.spec("1.8")
async def test_a_result_beyond_the_budget_is_an_error() -> None:
    @tool
    async def much() -> str:
        return "word " * 5_000

    ts = Toolspace(tools=[much], settings=Settings(tool_response_max_bytes=10_000_000))
    result = await ts.call("much", run=ts.run(context_window=1))
    assert result.ok or result.text == "(tool failed: context window budget exceeded)"


# Parts


@pytest.mark.spec("1.6")
async def test_typed_parts_are_kept_and_read_as_text_with_placeholders() -> None:
    parts = (
        TextPart(text="See:"),
        ImagePart(data=PNG),
        AudioPart(data=PNG, mime_type="audio/mpeg"),
        ResourcePart(uri="file:///a", mime_type="text/plain"),
        ResourcePart(uri="file:///b", text="inside"),
        JsonPart(value={"a": 1}),
    )
    for value in (list(parts), parts):
        result = await result_of(value)
        assert result.content == parts
        assert result.text == (
            "See:\n[image image/png, 8 bytes]\n[audio audio/mpeg, 8 bytes]\n[resource file:///a text/plain]\n"
            'inside\n{"a":1}'
        )
    assert wire(result)["content"] == [
        {"type": "text", "text": "See:"},
        {"type": "image", "data": PNG, "mimeType": "image/png"},
        {"type": "audio", "data": PNG, "mimeType": "audio/mpeg"},
        {"type": "resource", "uri": "file:///a", "mimeType": "text/plain"},
        {"type": "resource", "uri": "file:///b", "text": "inside"},
        {"type": "json", "value": {"a": 1}},
    ]


@pytest.mark.spec("1.6")
@pytest.mark.parametrize(
    ("value", "content"),
    [
        ("a", [{"type": "text", "text": "a"}]),
        ({"a": 1}, [{"type": "json", "value": {"a": 1}}]),
        (None, [{"type": "json", "value": None}]),
    ],
    ids=repr,
)
def test_a_plain_result_is_one_typed_part(value: Any, content: Any) -> None:
    assert wire(of(value))["content"] == content
    assert ToolResult(ok=False, error="x").content == ()


async def test_one_json_part_is_its_value() -> None:
    assert (await result_of(JsonPart(value={"a": 1}))).result == {"a": 1}
    assert (await result_of([JsonPart(value=0)])).result == 0
    assert (await result_of(TextPart(text="t"))).result == "t"


async def test_a_list_that_only_partly_holds_parts_is_a_list() -> None:
    result = await result_of([TextPart(text="a"), 5])
    assert result.parts == ()
    assert wire(result)["result"] == [{"type": "text", "text": "a"}, 5]


# The wire


@pytest.mark.spec("1.6")
async def test_the_wire_form_has_exactly_these_fields() -> None:
    good = wire(await result_of({"a": 1}))
    assert set(good) == {
        "ok", "result", "executed", "startedAt", "completedAt", "durationMs", "kind", "namespace", "content", "extras",
        "tool", "callId",
    }  # fmt: skip
    assert (good["ok"], good["executed"], good["kind"], good["namespace"], good["tool"]) == (
        True,
        True,
        "local",
        "",
        "give",
    )
    assert good["completedAt"] >= good["startedAt"] > 1_600_000_000_000

    async def fail() -> None:
        raise ValueError("no")

    bad = wire(await Toolspace(tools=[fail]).call("fail"))
    assert set(bad) == (set(good) - {"result"}) | {"error", "errorKind"}
    assert (bad["error"], bad["errorKind"], bad["executed"], bad["content"]) == ("no", "execution_error", True, [])


class OldStyle(str, enum.Enum):  # noqa: UP042
    A = "a"


class NewStyle(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


class DatedModel(BaseModel):
    day: datetime.date = datetime.date(2026, 1, 2)
    from_: str = Field("x", alias="from")


@dataclasses.dataclass
class LinkedPoint:
    x: int
    at: Any = None


class Struct(msgspec.Struct, rename="camel"):
    some_name: int = 1


Pair = collections.namedtuple("Pair", "left right")


class Text(str):
    pass


class Whole(int):
    pass


class Part(float):
    pass


ODD: list[tuple[str, Any, Any]] = [
    ("bytes", b"\xff\x00", "/wA="),
    ("bytearray", bytearray(b"a"), "YQ=="),
    ("memoryview", memoryview(b"a"), "YQ=="),
    ("set", {1}, [1]),
    ("frozenset", frozenset(["a"]), ["a"]),
    ("tuple", (1, (2,)), [1, [2]]),
    ("deque", collections.deque([1]), [1]),
    ("range", range(3), [0, 1, 2]),
    ("datetime", datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "2026-01-02T00:00:00Z"),
    ("date", datetime.date(2026, 1, 2), "2026-01-02"),
    ("timedelta", datetime.timedelta(minutes=1), "PT60S"),
    ("uuid", uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ("path", pathlib.PurePosixPath("/a"), "/a"),
    ("decimal", decimal.Decimal("1.10"), "1.10"),
    ("fraction", fractions.Fraction(1, 3), "1/3"),
    ("complex", 1 + 2j, "(1+2j)"),
    ("nan", math.nan, None),
    ("infinity", -math.inf, None),
    ("nans inside", {"a": [math.nan]}, {"a": [None]}),
    ("large integer", 2**80, 2**80),
    ("integers inside", [2**80, -(2**80)], [2**80, -(2**80)]),
    ("enum", Colour.RED, "red"),
    ("str and Enum", OldStyle.A, "a"),
    ("StrEnum", NewStyle.A, "a"),
    ("IntEnum", Number.ONE, 1),
    ("str subclass", Text("a"), "a"),
    ("int subclass", Whole(5), 5),
    ("float subclass", Part(0.5), 0.5),
    ("subclasses inside", [Text("a"), Whole(5), {Text("k"): Part(0.5)}], ["a", 5, {"k": 0.5}]),
    ("model", DatedModel(**{"from": "y"}), {"day": "2026-01-02", "from": "y"}),
    ("models inside", {"m": [DatedModel()]}, {"m": [{"day": "2026-01-02", "from": "x"}]}),
    ("dataclass", LinkedPoint(1, LinkedPoint(2)), {"x": 1, "at": {"x": 2, "at": None}}),
    ("struct", Struct(), {"someName": 1}),
    ("namedtuple", Pair(1, 2), [1, 2]),
    ("proxy", types.MappingProxyType({"a": 1}), {"a": 1}),
    ("ordered", collections.OrderedDict(b=1, a=2), {"b": 1, "a": 2}),
    ("counter", collections.Counter("aab"), {"a": 2, "b": 1}),
    ("integer keys", {1: "a"}, {"1": "a"}),
    ("mixed keys", {(1, 2): 3, None: 4, "a": 5}, {"(1, 2)": 3, "None": 4, "a": 5}),
    ("enum keys", {NewStyle.A: 1}, {"a": 1}),
    ("exception", ValueError("why"), "ValueError: why"),
    ("exceptions inside", [KeyError("k")], ["KeyError: 'k'"]),
    ("class", LinkedPoint, "<class 'tests.core.test_result.LinkedPoint'>"),
    ("model class", DatedModel, "<class 'tests.core.test_result.DatedModel'>"),
    ("surrogate", "a\ud800b", "a?b"),
    ("surrogates inside", {"\udcff": ["\ud800"]}, {"?": ["?"]}),
]


@pytest.mark.spec("1.6")
@pytest.mark.parametrize(("value", "plain"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
async def test_unusual_values_are_plain_json_on_the_wire(value: Any, plain: Any) -> None:
    for result in (of(value), await result_of(value)):
        assert result.ok
        wire_data = wire(result)
        assert wire_data["result"] == plain
        assert type(wire_data["result"]) is type(plain)
        assert wire_data["content"][0].get("text", wire_data["content"][0].get("value")) == plain


@pytest.mark.spec("1.8")
@pytest.mark.parametrize(("value", "plain"), [case[1:] for case in ODD], ids=[case[0] for case in ODD])
def test_unusual_values_have_a_valid_text(value: Any, plain: Any) -> None:
    text = of(value).text
    assert text.encode()
    assert text == plain if isinstance(value, str) else json.loads(text) == plain


class Unreadable:
    def __str__(self) -> str:
        raise KeyError("no")

    __repr__ = __str__


class BadModel(BaseModel):
    def model_dump(self, **options: Any) -> Any:
        raise KeyError("no")


class BadError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def _loop_list() -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return loop


def _loop_dict() -> Any:
    loop: dict[str, Any] = {}
    loop["a"] = loop["b"] = [loop]
    return loop


def _loop_dataclass() -> Any:
    point = LinkedPoint(1)
    point.at = LinkedPoint(2, {"back": point})
    return point


def _loop_parts() -> Any:
    return [JsonPart(value=_loop_list()), TextPart(text="a")]


def _deep(levels: int) -> Any:
    value: Any = "end"
    for number in range(levels):
        value = {"a": value} if number % 2 else [value]
    return value


HOSTILE = {
    "list in itself": _loop_list,
    "dict in itself": _loop_dict,
    "dataclass in itself": _loop_dataclass,
    "part in itself": _loop_parts,
    "100,000 levels": lambda: _deep(100_000),
    "no text": Unreadable,
    "no text inside": lambda: {"a": [Unreadable(), 1]},
    "model that fails": BadModel,
    "model that fails inside": lambda: [BadModel(), {"b": BadModel()}],
    "error that fails": BadError,
    "huge integers": lambda: [10**5000, {"n": -(10**9000)}],
    "generator": lambda: (number for number in range(3)),
    "function": lambda: len,
    "future": asyncio.Future,
    "all at once": lambda: {"\ud800": [math.nan, 2**90, {1, 2}, b"x", Unreadable(), _loop_dict(), (None,)]},
}


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("make", HOSTILE.values(), ids=list(HOSTILE))
async def test_a_value_that_cannot_be_read_is_still_a_result(make: Any) -> None:
    for result in (of(make()), await result_of(make())):
        if not result.ok:  # A generator is no result: nobody would run it.
            assert "a coroutine or generator" in (result.error or "")
            continue
        assert result.text.encode()
        wire(result)


@pytest.mark.parametrize("value", ["a\ud800", 10**5000], ids=["surrogate", "huge integer"])
async def test_unusual_texts_and_integers_are_results_like_any_other(value: Any) -> None:
    result = await result_of(value)
    assert (result.ok, result.executed) == (True, True)
    assert result.text.encode()


def test_an_integer_too_long_for_decimal_digits_is_written_in_hexadecimal() -> None:
    assert of(10**5000).text == f'"{hex(10**5000)}"'
    assert wire(of([10**5000]))["result"] == [hex(10**5000)]


def test_extras_may_have_unusual_values() -> None:
    result = ToolResult(ok=True, result=1, extras={"when": datetime.date(2026, 1, 2), "loop": _loop_list(), "x": {1}})
    assert wire(result)["extras"] == {"when": "2026-01-02", "loop": ["…"], "x": [1]}


def test_an_error_text_with_lone_surrogates_is_corrected() -> None:
    result = ToolResult(ok=False, error="no such file: a\udcff", error_kind="execution_error")
    assert result.text == "(tool failed: no such file: a?)"
    assert wire(result)["error"] == "no such file: a?"


@pytest.mark.parametrize("result", [ToolResult(ok=True, result=1), ToolResult(ok=True)])
def test_results_share_nothing(result: ToolResult) -> None:
    result.extras["a"] = 1
    assert ToolResult(ok=True).extras == {}


@pytest.mark.spec("1.7")
def test_unwrapping_a_success_gives_the_value_itself() -> None:
    value = {"a": 1}
    assert of(value).unwrap() is value
    assert of(None).unwrap() is None
    assert of(False).unwrap() is False
    with pytest.raises(ToolExecutionError):
        ToolResult(ok=False, result="not this").unwrap()


# JSON text

any_text = st.text(st.characters(exclude_categories=[]) | st.sampled_from("\ud800\udfff"))
any_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | any_text | st.binary() | st.datetimes() | st.uuids()
    | st.decimals() | st.sampled_from([Colour.RED, Number.ONE, LinkedPoint(1), Struct(), DatedModel()]),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(st.text(max_size=3) | st.integers() | st.none() | st.tuples(st.integers()), inner, max_size=4)
    | st.tuples(inner) | st.builds(LinkedPoint, st.integers(), inner),
    max_leaves=10,
)  # fmt: skip


@quick
@given(any_values)
def test_anything_becomes_plain_json_data_once(value: Any) -> None:
    plain = json_text.to_json_data(value)
    assert json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()
    second_data = json_text.to_json_data(plain)
    assert second_data == plain or second_data is plain
    assert json_text.encode(value).encode()


@quick
@given(st.dictionaries(st.text(max_size=3), st.integers() | st.text() | st.floats(allow_nan=False), max_size=5))
def test_equal_arguments_have_one_canonical_text(arguments: dict[str, Any]) -> None:
    backwards = dict(reversed(arguments.items()))
    assert json_text.encode_canonical(arguments) == json_text.encode_canonical(backwards)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": 1}, {"a": "1"}), ({"a": 1}, {"a": True}), ({"a": None}, {}), ({"a": "\ud800"}, {"a": "?"}),
        ({"a": "\ud800"}, {"a": "\ud801"}), ({"a": 2**70}, {"a": 2**70 + 1}), ({"a": [1, 2]}, {"a": [2, 1]}),
    ],
    ids=repr,
)  # fmt: skip
def test_different_arguments_have_different_canonical_texts(first: Any, second: Any) -> None:
    assert json_text.encode_canonical(first) != json_text.encode_canonical(second)


@quick
@given(any_text | st.binary())
def test_any_text_is_data_or_a_value_error(text: str | bytes) -> None:
    with contextlib.suppress(ValueError):
        json_text.encode(json_text.decode(text))
