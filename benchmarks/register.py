"""Measure: registering 1,000 functions and listing them for a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NotRequired, Required, get_type_hints

from pydantic import ConfigDict, TypeAdapter
from typing_extensions import TypedDict

from benchmarks.harness import Contestant, Report, race
from benchmarks.workloads import create_toolspace, make_functions

COUNT = 1_000
OURS = "register and list, all definitions"
SEARCH = "register and list, default settings"
ADAPTERS = "their pydantic adapters, from TypedDicts"
DIRECT = "their pydantic adapters, from the functions"
PYDANTIC_AI = "pydantic-ai FunctionToolset, tool definitions"


async def measure() -> Report:
    functions: list[Callable[..., Any]] = []

    def fresh() -> None:
        functions[:] = make_functions(COUNT)

    async def list_all(_: int) -> None:
        definitions = create_toolspace(functions, tool_search_threshold=None).to_llm_tools()
        if len(definitions) != COUNT:
            raise RuntimeError(f"{len(definitions)} of {COUNT} tools were listed")

    async def search(_: int) -> None:
        create_toolspace(functions).to_llm_tools()

    async def adapters(_: int) -> None:
        for function in functions:
            TypeAdapter(_arguments_of(function))

    async def direct(_: int) -> None:
        for function in functions:
            TypeAdapter(function)

    contestants = [
        Contestant(OURS, list_all, fresh),
        Contestant(SEARCH, search, fresh),
        Contestant(ADAPTERS, adapters, fresh),
        Contestant(DIRECT, direct, fresh),
    ]
    timings = await race(contestants, rounds=9)
    cheapest = min(ADAPTERS, DIRECT, key=timings.best)
    report = Report(f"Register {COUNT:,} functions and list them for a model")
    report.ratio("all definitions listed", timings.ratio(OURS, cheapest), must=1.0, aim=0.5)
    report.ratio("default settings: a search tool listed", timings.ratio(SEARCH, cheapest), must=1.0, aim=0.5)
    for contestant in contestants:
        report.figure(contestant.name, timings.best(contestant.name) * 1000, "ms")
    report.notes.append(f"against building {cheapest}, the cheaper of the two ways")
    return report


def _arguments_of(function: Callable[..., Any]) -> Any:
    hints = get_type_hints(function)
    hints.pop("return", None)
    defaults = len(function.__defaults__ or ())
    required = len(hints) - defaults
    fields: dict[str, Any] = {
        name: Required[hint] if index < required else NotRequired[hint]
        for index, (name, hint) in enumerate(hints.items())
    }
    shape: Any = TypedDict(function.__name__, fields)  # type: ignore[operator]
    shape.__pydantic_config__ = ConfigDict(extra="forbid")
    return shape
