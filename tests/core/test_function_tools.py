"""`@tool`: the definition of a function tool, and its calls. Hints are types here, not text."""

import dataclasses
import datetime
import enum
import functools
import math
import threading
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, Optional, Union

import jsonschema_rs
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from tests.core.functions import Colour, call, properties, schema, value
from toolspace import ToolCategory, ToolDefinitionError, tool
from toolspace.core.tool import FunctionTool

# The definition


@pytest.mark.spec("1.1")
@pytest.mark.spec("1.3")
def test_the_definition_comes_from_hints_defaults_and_docstring() -> None:
    @tool
    async def search(query: str, limit: int = 10, *, exact: bool = False) -> list[str]:
        """Searches the archive.

        Looks at titles first.

        Args:
            query: What to look for.
            limit (int, optional): How many to return,
                at most.
            exact: Whether case matters.

        Returns:
            The titles.
        """
        return [query] * limit

    assert search.to_dict() == {
        "name": "search",
        "description": "Searches the archive.\n\nLooks at titles first.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "What to look for."},
                "limit": {"type": "integer", "description": "How many to return, at most.", "default": 10},
                "exact": {"type": "boolean", "description": "Whether case matters.", "default": False},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
        "category": "custom",
        "executionType": "function",
        "visible": True,
        "isAsync": False,
    }


@pytest.mark.spec("1.1")
def test_options_of_the_decorator_are_in_the_definition() -> None:
    from toolspace import Annotations

    @tool(
        name="look-up", description="Looks up.", category="data", visible=False, timeout=1.5, queue="slow", cache=60,
        annotations=Annotations(read_only=True, destructive=False), tags=("a", "b"), version="2",
        output_schema={"type": "object"},
    )  # fmt: skip
    def look_up() -> None:
        """Not this."""

    wire = look_up.to_dict()
    assert wire["name"] == "look-up"
    assert wire["description"] == "Looks up."
    assert (wire["category"], wire["visible"], wire["queue"], wire["version"]) == ("data", False, "slow", "2")
    assert (wire["timeout"], wire["cache"]) == (1500, 60_000)
    assert wire["annotations"] == {"readOnly": True, "destructive": False}
    assert (wire["tags"], wire["outputSchema"]) == (["a", "b"], {"type": "object"})


@pytest.mark.spec("1.2")
def test_the_categories_are_exactly_these() -> None:
    assert [str(category) for category in ToolCategory] == [
        "system",
        "file",
        "network",
        "data",
        "memory",
        "code",
        "mcp",
        "rest",
        "agent",
        "space",
        "custom",
    ]
    with pytest.raises(ToolDefinitionError, match=r"'f' has the unknown category 'nope'; it is one of system, file"):
        tool(category="nope", name="f")(lambda: None)


@pytest.mark.spec("1.3")
def test_a_tool_can_still_be_called_as_the_function() -> None:
    @tool
    def double(x: int) -> int:
        return 2 * x

    assert double(21) == 42
    assert double(x=1) == 2


def test_a_function_without_docstring_has_no_description() -> None:
    def bare(x: int) -> int:
        return x

    class Bare:
        def __call__(self, x: int) -> int:
            return x

        def method(self, x: int) -> int:
            return x

    for function in (bare, Bare(), Bare().method, functools.partial(bare)):
        assert tool(function).description == "", function


@pytest.mark.parametrize("name", ["", "a b", "a.b", "ü", "a" * 65, "a\n", "<lambda>"])
def test_an_invalid_name_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(ToolDefinitionError, match=r"cannot name a tool; use 1 to 64 .* \(give one with name=…\)"):
        FunctionTool(lambda: None, name=name or "?")


# Hints


class Size(enum.StrEnum):
    """How large."""

    S = "s"
    L = "l"


class Address(TypedDict):
    street: str
    zip: NotRequired[str]


@dataclasses.dataclass
class Point:
    x: int
    y: int = 0


class Node(BaseModel):
    """A tree."""

    title: str
    children: list["Node"] = []


def accepts(function: Callable[..., Any], value: Any) -> bool:
    return jsonschema_rs.is_valid(schema(function), value)


@pytest.mark.spec("1.3")
@pytest.mark.parametrize(
    ("hint", "good", "converted_value", "bad"),
    [
        (str, "a", "a", 1),
        (int, 3, 3, "x"),
        (float, 1.5, 1.5, "x"),
        (bool, True, True, "x"),
        (Any, {"a": [1]}, {"a": [1]}, None),
        (list[int], [1, 2], [1, 2], ["x"]),
        (list, [1, "a"], [1, "a"], "x"),
        (dict[str, int], {"a": 1}, {"a": 1}, {"a": "x"}),
        (set[int], [1], {1}, ["x"]),
        (tuple[int, str], [1, "a"], (1, "a"), [1]),
        (Iterable[int], [1, 2], [1, 2], ["x"]),
        (int | None, None, None, "x"),
        (Optional[int], 5, 5, "x"),  # noqa: UP045
        (Union[int, str], "a", "a", []),  # noqa: UP007
        (Literal["a", "b"], "a", "a", "c"),
        (Literal[1, 2], 2, 2, 3),
        (Colour, "red", Colour.RED, "green"),
        (Size, "s", Size.S, "m"),
        (Address, {"street": "x"}, {"street": "x"}, {"zip": "1"}),
        (Point, {"x": 1}, Point(1), {"y": 1}),
        (Node, {"title": "a"}, Node(title="a"), {}),
        (list[Point], [{"x": 1}], [Point(1)], [{}]),
        (dict[str, Node], {"k": {"title": "a"}}, {"k": Node(title="a")}, {"k": {}}),
        (datetime.datetime, "2026-01-02T03:04:05", datetime.datetime(2026, 1, 2, 3, 4, 5), "yesterday"),
        (datetime.date, "2026-01-02", datetime.date(2026, 1, 2), "x"),
        (datetime.timedelta, "PT5S", datetime.timedelta(seconds=5), "x"),
        (uuid.UUID, "12345678123456781234567812345678", uuid.UUID(int=0x12345678123456781234567812345678), "x"),
        (Path, "/a/b", Path("/a/b"), 5),
        (bytes, "ab", b"ab", 5),
        (Annotated[int, Field(ge=1, le=3)], 2, 2, 4),
        (Annotated[str, Field(pattern="^a")], "ab", "ab", "b"),
        (Annotated[list[int], Field(max_length=1)], [1], [1], [1, 2]),
        (Annotated[str, "words"], "a", "a", 1),
    ],
    ids=str,
)  # fmt: skip
async def test_a_hint_is_in_the_schema_validated_and_converted(
    hint: Any, good: Any, converted_value: Any, bad: Any
) -> None:
    values: list[Any] = []

    def take(x: hint) -> None:  # pyright: ignore
        values.append(x)

    tested_tool = tool(take)
    assert jsonschema_rs.is_valid(dict(tested_tool.input_schema), {"x": good})
    assert (await call(tested_tool, {"x": good})).ok
    assert values == [converted_value]
    if bad is not None:
        failed = await call(tested_tool, {"x": bad})
        assert (failed.error_kind, failed.executed) == ("invalid_parameters", False)
        assert failed.error is not None
        assert failed.error.startswith("Parameter validation failed: x")
    assert len(values) == 1


@pytest.mark.spec("1.3")
def test_a_recursive_model_refers_to_itself_in_the_tools_own_definitions() -> None:
    def grow(tree: Node, second_tree: Node | None = None) -> None: ...

    input_schema = schema(grow)
    assert input_schema["properties"]["tree"] == {"$ref": "#/$defs/Node"}
    assert input_schema["$defs"]["Node"]["properties"]["title"] == {"type": "string"}
    deep: dict[str, Any] = {"title": "0"}
    for level in range(20):
        deep = {"title": str(level), "children": [deep]}
    assert accepts(grow, {"tree": deep})
    assert not accepts(grow, {"tree": {"title": "a", "children": [{}]}})


def test_schemas_carry_no_titles_but_properties_and_defaults_called_title_stay() -> None:
    class Book(BaseModel):
        title: str
        meta: dict[str, str] = {"title": "none"}

    def add(book: Book, title: str, extra: dict[str, str] = {"title": "x"}) -> None: ...  # noqa: B006

    assert schema(add) == {
        "type": "object",
        "properties": {
            "book": {"$ref": "#/$defs/Book"},
            "title": {"type": "string"},
            "extra": {"additionalProperties": {"type": "string"}, "type": "object", "default": {"title": "x"}},
        },
        "required": ["book", "title"],
        "additionalProperties": False,
        "$defs": {
            "Book": {
                "properties": {
                    "title": {"type": "string"},
                    "meta": {
                        "additionalProperties": {"type": "string"},
                        "default": {"title": "none"},
                        "type": "object",
                    },
                },
                "required": ["title"],
                "type": "object",
            }
        },
    }


async def test_a_parameter_without_hint_takes_anything() -> None:
    def take(x, y=1):  # type: ignore[no-untyped-def]
        return [x, y]

    assert properties(take) == {"x": {}, "y": {"default": 1}}
    assert await value(take, {"x": {"a": None}}) == [{"a": None}, 1]


# Defaults


@pytest.mark.parametrize(
    ("hint", "default", "keyword"),
    [
        (int, 5, {"default": 5}),
        (str | None, None, {"default": None}),
        (Size, Size.L, {"default": "l"}),
        (Colour, Colour.RED, {"default": "red"}),
        (Path, Path("/x"), {"default": "/x"}),
        (datetime.date, datetime.date(2026, 1, 2), {"default": "2026-01-02"}),
        (Point, Point(1, 2), {"default": {"x": 1, "y": 2}}),
        (list[int], [1], {"default": [1]}),
        (float, 1.5, {"default": 1.5}),
        (float, math.inf, {}),
        (float, math.nan, {}),
        (Any, object(), {}),
        (Any, len, {}),
        (int, Field(5, ge=1), {"default": 5}),
        (list[int], Field(default_factory=list), {}),
        (datetime.datetime, Field(default_factory=datetime.datetime.now), {}),
    ],
)
async def test_a_default_is_in_the_schema_if_json_can_express_it_and_always_applies(
    hint: Any, default: Any, keyword: dict[str, Any]
) -> None:
    values: list[Any] = []

    def take(x: hint = default) -> None:  # pyright: ignore
        values.append(x)

    input_schema = schema(take)
    assert "required" not in input_schema
    shown_default = {key: item for key, item in input_schema["properties"]["x"].items() if key == "default"}
    assert shown_default == keyword
    assert all(type(item) in (int, float, str, list, dict, type(None)) for item in shown_default.values())
    assert (await call(take)).ok
    assert type(values[0]).__name__ != "FieldInfo"


async def test_a_field_as_default_sets_bounds_description_and_alias() -> None:
    def take(
        count: int = Field(3, ge=1, description="How many."),
        tags: list[str] = Field(default_factory=list, max_length=2),  # noqa: B008
        name: str = Field(min_length=2),
        from_: str = Field("here", alias="from"),
    ) -> list[Any]:
        return [count, tags, name, from_]

    assert schema(take) == {
        "type": "object",
        "properties": {
            "count": {"type": "integer", "minimum": 1, "description": "How many.", "default": 3},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
            "name": {"type": "string", "minLength": 2},
            "from": {"type": "string", "default": "here"},
        },
        "required": ["name"],
        "additionalProperties": False,
    }
    assert await value(take, {"name": "ab"}) == [3, [], "ab", "here"]
    assert await value(take, {"name": "ab", "from": "there", "count": 1}) == [1, [], "ab", "there"]
    wrong = await call(take, {"name": "a", "count": 0, "from_": "x", "tags": ["a", "b", "c"]})
    assert wrong.error is not None
    for place in ("name: ", "count: ", "from_: ", "tags: "):
        assert place in wrong.error


async def test_each_call_gets_its_own_value_from_a_default_factory() -> None:
    def take(items: list[int] = Field(default_factory=list)) -> int:  # noqa: B008
        items.append(1)
        return len(items)

    assert [await value(take), await value(take)] == [1, 1]


async def test_a_default_factory_may_look_at_the_other_arguments() -> None:
    def take(a: int, b: int = Field(default_factory=lambda data: data["a"] + 1)) -> list[int]:
        return [a, b]

    assert await value(take, {"a": 1}) == [1, 2]


async def test_an_alias_makes_a_parameter_of_a_reserved_word() -> None:
    def send(from_: Annotated[str, Field(alias="from", description="Who.")], to: str = "b") -> list[str]:
        return [from_, to]

    assert schema(send)["properties"]["from"] == {"type": "string", "description": "Who."}
    assert schema(send)["required"] == ["from"]
    assert await value(send, '{"from": "a"}') == ["a", "b"]
    assert "from: required, but missing" in str((await call(send, {})).error)


async def test_a_default_inside_annotated_makes_a_parameter_optional() -> None:
    def take(x: Annotated[int, Field(default=5)], y: Annotated[int, Field(ge=0)] = 1) -> list[int]:
        return [x, y]

    assert "required" not in schema(take)
    assert await value(take) == [5, 1]


# Functions that cannot be tools


def test_a_type_that_json_cannot_express_is_refused_with_a_hint() -> None:
    def take(lock: threading.Event) -> None: ...

    with pytest.raises(
        ToolDefinitionError,
        match=r"a parameter of tool 'take' .*Event.*; take plain data, or give the tool an input_schema",
    ):
        schema(take)


def test_an_unsupported_bound_of_a_type_is_refused() -> None:
    def take(n: Annotated[int, Field(gt=0.5)], s: Annotated[str, Field(ge=1)] = "") -> None: ...

    with pytest.raises(ToolDefinitionError, match="a parameter of tool 'take' has a type that cannot be checked"):
        tool(take).validator  # noqa: B018


def test_a_return_type_that_json_cannot_express_is_accepted() -> None:
    @dataclasses.dataclass
    class Opaque:
        lock: threading.Event

    @tool
    def make() -> Opaque: ...

    assert make.output_schema is None
    assert "outputSchema" not in make.to_dict()


@pytest.mark.spec("1.1")
def test_a_structured_return_type_is_the_output_schema() -> None:
    @tool
    def locate() -> Point: ...

    @tool
    def plain() -> dict[str, int]: ...

    assert locate.output_schema is not None
    assert locate.output_schema["properties"] == {"x": {"type": "integer"}, "y": {"default": 0, "type": "integer"}}
    assert plain.output_schema is None
