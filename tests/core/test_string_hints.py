"""`@tool` with text hints (`from __future__ import annotations`), whose names may be defined anywhere."""

from __future__ import annotations

import enum
import functools
import gc
import weakref
from typing import TYPE_CHECKING, Annotated, Any, Optional

import pytest
from pydantic import BaseModel, Field

import toolspace
from toolspace import ToolContext, ToolDefinitionError, Toolspace, tool
from toolspace import ToolContext as Context

if TYPE_CHECKING:
    from decimal import Decimal


class Shape(BaseModel):
    sides: int
    inner: Shape | None = None


@tool
async def draw(shape: Shape, ctx: ToolContext, scale: Annotated[float, Field(gt=0)] = 1.0) -> int:
    """Draws."""
    return shape.sides


@pytest.mark.spec("1.3")
async def test_text_hints_are_evaluated() -> None:
    assert list(draw.input_schema["properties"]) == ["shape", "scale"]
    assert (await Toolspace(tools=[draw]).call("draw", {"shape": {"sides": 3, "inner": {"sides": 4}}})).unwrap() == 3


@pytest.mark.spec("1.3")
async def test_types_of_the_enclosing_function_are_found() -> None:
    class Unit(enum.StrEnum):
        C = "c"
        F = "f"

    class Query(BaseModel):
        city: str
        unit: Unit = Unit.C

    @tool
    async def weather(query: Query, unit: Unit, ctx: ToolContext | None = None) -> str:
        return f"{query.city} {unit.name} {ctx is not None}"

    @tool(name="renamed")
    def count_queries(query: list[Query]) -> int:
        return len(query)

    def plain(unit: Unit) -> str:
        return unit.name

    ts = Toolspace(tools=[weather, count_queries, tool(functools.partial(plain)), tool(Holder(Unit).pick)])
    assert (await ts.call("weather", {"query": {"city": "Bern"}, "unit": "f"})).unwrap() == "Bern F True"
    assert (await ts.call("renamed", {"query": [{"city": "Bern"}]})).unwrap() == 1
    assert (await ts.call("plain", {"unit": "c"})).unwrap() == "C"
    assert (await ts.call("pick", {"index": 1})).unwrap() == "f"


class Holder:
    def __init__(self, items: Any) -> None:
        self.items = list(items)

    def pick(self, index: int) -> str:
        return self.items[index]


def _optional(x: int, ctx: Optional[ToolContext] = None) -> bool:  # noqa: UP045
    return ctx is not None


def _annotated_hint(x: int, ctx: Annotated[ToolContext | None, "who"] = None) -> bool:
    return ctx is not None


def _renamed_hint(x: int, ctx: Context) -> bool:
    return ctx is not None


def _dotted_hint(x: int, ctx: toolspace.ToolContext) -> bool:
    return ctx is not None


def _quoted_twice(x: int, ctx: "ToolContext | None" = None) -> bool:  # noqa: UP037
    return ctx is not None


@pytest.mark.spec("1.3")
@pytest.mark.parametrize("function", [_optional, _annotated_hint, _renamed_hint, _dotted_hint, _quoted_twice])
async def test_the_context_is_not_in_the_schema_however_it_is_annotated(function: Any) -> None:
    tested_tool = tool(function)
    assert list(tested_tool.input_schema["properties"]) == ["x"]
    assert (await Toolspace(tools=[tested_tool]).call(tested_tool.name, {"x": 1})).unwrap() is True


def test_an_unresolvable_type_is_an_error_that_names_tool_type_and_hint() -> None:
    @tool
    def pay(amount: Decimal) -> None: ...

    @tool
    def pay_all(amounts: list[Optional[Decimal]]) -> None: ...  # noqa: UP045

    for function in (pay, pay_all):
        with pytest.raises(
            ToolDefinitionError,
            match=f"a type hint of tool '{function.name}' cannot be resolved: name 'Decimal' is not defined; import",
        ):
            function.input_schema  # noqa: B018


async def test_a_tool_with_an_unknown_type_is_refused_and_leaves_the_others() -> None:
    @tool
    def pay(amount: Decimal) -> None: ...

    ts = Toolspace(tools=[draw])
    with pytest.raises(ToolDefinitionError, match="name 'Decimal' is not defined"):
        ts.add_tool(pay)
    assert (await ts.call("draw", {"shape": {"sides": 3}})).ok


def test_a_return_type_that_only_type_checkers_know_is_accepted() -> None:
    @tool
    def price(item: str, ctx: ToolContext) -> Decimal:
        """Says the price."""
        raise NotImplementedError

    assert price.input_schema["properties"] == {"item": {"type": "string"}}
    assert price.output_schema is None


def test_a_model_with_a_part_that_nobody_defines_is_refused_by_name() -> None:
    namespace: dict[str, Any] = {"BaseModel": BaseModel, "__name__": __name__}
    exec("class Half(BaseModel):\n    other: 'Nowhere'", namespace)
    half = namespace["Half"]

    @tool
    def take(x: half) -> None: ...  # pyright: ignore

    with pytest.raises(ToolDefinitionError, match="'take'"):
        take.input_schema  # noqa: B018


async def test_methods_of_local_classes_find_local_types() -> None:
    class Item(BaseModel):
        n: int

    class Shop:
        @tool
        async def buy(self, item: Item, ctx: ToolContext) -> int:
            return item.n

        def sell(self, item: Item) -> int:
            return -item.n

    ts = Toolspace(tools=[Shop().buy, tool(Shop().sell)])
    assert (await ts.call("buy", {"item": {"n": 2}})).unwrap() == 2
    assert (await ts.call("sell", {"item": {"n": 2}})).unwrap() == -2


def test_a_tool_keeps_no_reference_to_the_enclosing_functions_names() -> None:
    class Big: ...

    def make() -> tuple[Any, weakref.ref[Big]]:
        big = Big()

        @tool
        def take(x: int) -> None: ...

        return take, weakref.ref(big)

    take, big = make()
    take.input_schema  # noqa: B018
    gc.collect()
    assert big() is None
