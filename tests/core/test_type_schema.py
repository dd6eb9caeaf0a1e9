"""JSON Schemas of type hints, compared with those of pydantic."""

from __future__ import annotations

import datetime
import enum
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import jsonschema_rs
import pytest
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from hypothesis import HealthCheck, example, given, reject, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter
from pydantic.errors import PydanticUserError
from pydantic_core import SchemaError

from tests.core.functions import Colour
from toolspace.core.function_schema import schema_of

quick = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Only(enum.StrEnum):
    ONE = "one"


class Mixed(enum.Enum):
    NUMBER = 1
    TEXT = "one"
    NONE = None


class Documented(enum.Enum):
    """What the model should know."""

    YES = "yes"


class PointModel(BaseModel):
    x: int


PLAIN = [
    str, int, float, bool, None, Any, object, list, dict, datetime.datetime, datetime.date, datetime.time,
    datetime.timedelta, uuid.UUID, Path, Colour, Level, Only, Mixed, Documented, PointModel, bytes, set, tuple,
]  # fmt: skip
LITERALS = [
    Literal["a"], Literal["a", "b"], Literal[1], Literal[1, 2], Literal[True], Literal[True, False], Literal["a", 1],
    Literal[1, True], Literal["a", None], Literal[None], Literal[Colour.RED], Literal[0, "0", False],
]  # fmt: skip
METADATA = [
    Field(description="what it is"), Field(examples=["x", 1]), Field(ge=1, le=9), Field(min_length=1), Field(gt=0.5),
    Field(max_length=3, description="d"), Field(pattern="^a"), Field(multiple_of=2), Field(title="T"),
    Field(strict=True), Field(deprecated=True), Field(json_schema_extra={"x": 1}), Field(default=None),
    Field(alias="other"), Ge(1), Gt(1), Le(5), Lt(5), MinLen(1), MaxLen(4), object(),
]  # fmt: skip


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda hint: list[hint], inner),
        st.builds(lambda hint: Sequence[hint], inner),
        st.builds(lambda hint: Iterable[hint], inner),
        st.builds(lambda hint: dict[str, hint], inner),
        st.builds(lambda hint: Mapping[str, hint], inner),
        st.builds(lambda hint: dict[int, hint], inner),
        st.builds(lambda hint: tuple[hint, ...], inner),
        st.builds(lambda hint: set[hint], st.sampled_from([str, int])),
        st.builds(lambda hint: Optional[hint], inner),  # noqa: UP045
        st.builds(lambda first, second: Union[first, second], inner, inner),  # noqa: UP007
        st.builds(lambda hint, item: Annotated[hint, item], inner, st.sampled_from(METADATA)),
    )


hints = st.recursive(st.sampled_from(PLAIN + LITERALS), _wider, max_leaves=5)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-10, 10) | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "a", "b", "red", "one", "1", "abcdef", "2020-01-01"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "x", "1"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


def _inline(schema: Any, definitions: Mapping[str, Any]) -> Any:
    """Returns pydantic's schema without titles, with every definition inlined."""
    if isinstance(schema, list):
        return [_inline(item, definitions) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        keywords = {key: value for key, value in schema.items() if key not in ("$ref", "$defs", "title")}
        return {**_inline(definitions[schema["$ref"].removeprefix("#/$defs/")], definitions), **keywords}
    if len(schema.get("enum", ())) == 1:  # Versions of pydantic write a single choice differently.
        schema = {"const": schema["enum"][0], **{key: value for key, value in schema.items() if key != "enum"}}
    return {
        key: value if key in ("default", "const", "enum", "examples") else _inline(value, definitions)
        for key, value in schema.items()
        if key not in ("title", "$defs")
    }


def _by_pydantic(hint: Any) -> Any:
    try:
        schema = TypeAdapter(hint).json_schema()
    except (SchemaError, TypeError, PydanticUserError):
        reject()  # Such hints make no sense: an integer above 0.5.
    return schema


def _same(first: Any, second: Any) -> bool:
    """Whether two schemas are equal as JSON: `1` and `true` differ."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return first.keys() == second.keys() and all(_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return isinstance(first, bool) == isinstance(second, bool) and first == second


@pytest.mark.spec("1.3")
@quick
@given(hints)
@example(Annotated[int | str, Field(description="d")] | None)
@example(list[Annotated[str, MinLen(1), MaxLen(4)]])
@example(Annotated[dict[str, int], MinLen(1)])
@example(Annotated[Literal["a", "b"], MinLen(1)])
@example(Annotated[bool, Ge(1)])
@example(Annotated[datetime.date, MinLen(1)])
@example(Union[list, list[Any]])  # noqa: UP007
def test_a_hint_has_the_schema_of_pydantic_or_none(hint: Any) -> None:
    schema = schema_of(hint)
    if schema is None:
        return
    pydantic_schema = _by_pydantic(hint)
    expected = _inline(pydantic_schema, pydantic_schema.get("$defs", {}))
    assert _same(schema, expected), f"{hint}: {schema} but pydantic says {expected}"


@quick
@given(hints, json_values)
def test_both_schemas_agree_on_every_value(hint: Any, value: Any) -> None:
    schema = schema_of(hint)
    if schema is None:
        return
    assert jsonschema_rs.is_valid(schema, value) == jsonschema_rs.is_valid(_by_pydantic(hint), value)


@pytest.mark.parametrize(
    "hint",
    [str, int | None, list[str], dict[str, float], Literal["a", "b"], Colour, Annotated[int, Field(ge=1)], Any, Path],
)
def test_the_hints_that_most_tools_use_need_no_pydantic(hint: Any) -> None:
    assert schema_of(hint) is not None


@pytest.mark.parametrize(
    "hint", [PointModel, set[int], tuple[int, str], bytes, dict[int, str], Documented, math, 5, [], {}]
)
def test_hints_that_only_pydantic_supports_are_left_to_it(hint: Any) -> None:
    assert schema_of(hint) is None


def test_text_in_annotated_is_the_description() -> None:
    assert schema_of(Annotated[str, "The city."]) == {"type": "string", "description": "The city."}


def test_a_schema_can_be_changed_without_changing_the_next_one() -> None:
    first = schema_of(list[str])
    assert first is not None
    first["items"]["description"] = "changed"
    assert schema_of(list[str]) == {"items": {"type": "string"}, "type": "array"}
    bare = schema_of(list)
    assert bare is not None
    bare["items"]["type"] = "changed"
    assert schema_of(list) == {"items": {}, "type": "array"}
