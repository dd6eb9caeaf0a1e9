"""`@tool` on every kind of callable: how it runs, and how it gets arguments and the context. Hints are types here."""

import asyncio
import functools
import inspect
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Optional

import pytest

from tests.core.functions import call, properties, schema, value
from toolspace import EventType, ToolContext, ToolDefinitionError, Toolspace, tool

# The context


class OwnContext(ToolContext):
    pass


@pytest.mark.spec("1.3")
@pytest.mark.parametrize(
    "hint",
    [
        ToolContext,
        Optional[ToolContext],  # noqa: UP045
        ToolContext | None,
        None | ToolContext,
        Annotated[ToolContext, "who calls"],
        Annotated[ToolContext | None, "who calls"],
        Optional[Annotated[ToolContext, "who calls"]],  # noqa: UP045
        "ToolContext",
        Optional["ToolContext"],
        Annotated["ToolContext", "who calls"],
        "Annotated[ToolContext | None, 5]",
        OwnContext,
    ],
    ids=str,
)
async def test_the_context_is_passed_and_is_not_in_the_schema(hint: Any) -> None:
    async def take(x: int, ctx: hint = None) -> list[Any]:  # pyright: ignore
        """Takes.

        Args:
            x: A number.
            ctx: Not for the model.
        """
        return [x, ctx.call_id]

    take.__globals__["ToolContext"] = ToolContext
    assert list(properties(take)) == ["x"]
    assert "model" not in str(tool(take).to_dict())
    result = await call(take, {"x": 1})
    assert result.result == [1, result.call_id]


@pytest.mark.spec("1.3")
@pytest.mark.parametrize("arguments", [{"ctx": "forged"}, {"ctx": None}, '{"ctx": {"user_id": "root"}}'])
async def test_a_caller_cannot_pass_the_context(arguments: Any) -> None:
    def closed(ctx: ToolContext) -> str | None:
        return ctx.user_id

    def open_(ctx: ToolContext, **rest: Any) -> str | None:
        assert rest == {}
        return ctx.user_id

    assert (await call(closed, arguments)).error_kind == "invalid_parameters"
    tested_tool = tool(open_)
    ts = Toolspace(tools=[tested_tool])
    result = await ts.call("open_", arguments, context=ToolContext(user_id="ann"))
    assert (result.ok, result.result) == (True, "ann")


def test_a_list_of_contexts_is_no_context() -> None:
    def take(ctx: list[ToolContext]) -> None: ...

    with pytest.raises(ToolDefinitionError, match="a parameter of tool 'take' has a type that cannot be checked"):
        schema(take)


def test_two_contexts_are_refused() -> None:
    def take(first: ToolContext, second: ToolContext) -> None: ...

    with pytest.raises(ToolDefinitionError, match="'take' takes two contexts, 'first' and 'second'"):
        schema(take)


# How it runs


@pytest.mark.spec("1.3")
async def test_async_functions_run_on_the_loop_and_plain_ones_in_a_thread() -> None:
    @tool
    async def on_loop() -> bool:
        return threading.current_thread() is threading.main_thread() and asyncio.get_running_loop() is not None

    @tool
    def in_thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert (on_loop.style, in_thread.style) == ("async", "sync")
    assert await value(on_loop) is True
    assert await value(in_thread) is False


@pytest.mark.spec("1.3")
@pytest.mark.parametrize(
    ("pieces", "joined_value"),
    [(["a", "b", "c"], "abc"), ([1, "b"], [1, "b"]), ([{"a": 1}, None], [{"a": 1}, None]), ([], "")],
)
async def test_an_async_generator_streams(pieces: list[Any], joined_value: Any) -> None:
    @tool
    async def stream(ctx: ToolContext) -> AsyncIterator[Any]:
        for piece in pieces:
            yield piece

    ts = Toolspace(tools=[stream])
    partial: list[Any] = []
    ts.bus.subscribe(lambda event: partial.append(event.value), EventType.TOOL_CALL_PARTIAL)  # pyright: ignore
    assert stream.style == "stream"
    assert (await ts.call("stream")).unwrap() == joined_value
    assert partial == pieces


def test_a_plain_generator_is_refused_with_a_hint() -> None:
    def count(n: int) -> Iterator[int]:
        yield from range(n)

    with pytest.raises(ToolDefinitionError, match="'count' is a plain generator; make it `async def`"):
        tool(count)


def test_star_args_are_refused_with_a_hint() -> None:
    def take(a: int, *rest: str) -> None: ...

    class Take:
        def __call__(self, *rest: str) -> None: ...

    for function, name in ((take, "take"), (Take(), "Take")):
        with pytest.raises(ToolDefinitionError, match=rf"tool '{name}' takes \*rest, .* rest: list\[str\]"):
            tool(function)


@pytest.mark.parametrize("function", [print, max, dict.update], ids=str)
def test_a_builtin_that_no_model_could_call_is_refused(function: Any) -> None:
    with pytest.raises(ToolDefinitionError):
        tool(function)


async def test_a_builtin_with_a_signature_works() -> None:
    assert await value(tool(math.sqrt), {"x": 16}) == 4.0


# Kinds of callables


@pytest.mark.spec("1.3")
async def test_named_positional_and_extra_parameters_arrive_where_they_belong() -> None:
    def take(a: int, b: int = 2, /, c: int = 3, *, d: int = 4, **rest: int) -> list[Any]:
        return [a, b, c, d, rest]

    input_schema = schema(take)
    assert list(input_schema["properties"]) == ["a", "b", "c", "d"]
    assert input_schema["required"] == ["a"]
    assert input_schema["additionalProperties"] == {"type": "integer"}
    assert await value(take, {"a": 1}) == [1, 2, 3, 4, {}]
    assert await value(take, {"a": 1, "b": 9, "d": 8, "e": "7"}) == [1, 9, 3, 8, {"e": 7}]
    assert "e: expected integer" in str((await call(take, {"a": 1, "e": "x"})).error)


async def test_an_omitted_positional_parameter_does_not_shift_the_next() -> None:
    def take(a: int = 1, b: int = 2, ctx: ToolContext | None = None, c: int = 3, /) -> list[Any]:
        return [a, b, ctx is not None, c]

    assert await value(take, {"b": 5}) == [1, 5, True, 3]
    assert await value(take, {"c": 5}) == [1, 2, True, 5]


async def test_extra_parameters_of_any_type_are_accepted() -> None:
    def take(**rest: Any) -> Any:
        return rest

    assert schema(take)["additionalProperties"] is True
    assert await value(take, {"a": [1], "b": None}) == {"a": [1], "b": None}


async def test_a_bound_method_is_a_tool_without_self() -> None:
    class Store:
        def __init__(self, items: list[str]) -> None:
            self.items = items

        async def find(self, prefix: str) -> list[str]:
            """Finds items."""
            return [item for item in self.items if item.startswith(prefix)]

        @classmethod
        def make(cls, n: int) -> str:
            return f"{cls.__name__}{n}"

        @staticmethod
        def twice(n: int) -> int:
            return 2 * n

    tested_tool = tool(Store(["ab", "b"]).find)
    assert (tested_tool.name, tested_tool.description, list(tested_tool.input_schema["properties"])) == (
        "find",
        "Finds items.",
        ["prefix"],
    )
    assert await value(tested_tool, {"prefix": "a"}) == ["ab"]
    assert await value(tool(Store.make), {"n": 1}) == "Store1"
    assert await value(tool(Store.twice), {"n": 2}) == 4


@pytest.mark.parametrize("read_first", [False, True])
async def test_the_decorator_works_inside_a_class(read_first: bool) -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.at = start

        @tool(name="add_to", tags=("x",))
        async def add(self, n: int, ctx: ToolContext) -> int:
            """Adds."""
            self.at += n
            return self.at

        @staticmethod
        @tool
        def fixed(n: int) -> int:
            return n

    if read_first:
        assert "self" in Counter.add.input_schema["properties"]
    first, second = Counter(1), Counter(10)
    assert list(first.add.input_schema["properties"]) == ["n"]
    assert (first.add.name, first.add.tags, first.add.description) == ("add_to", ("x",), "Adds.")
    assert await value(first.add, {"n": 1}) == 2
    assert await value(second.add, {"n": 1}) == 11
    assert await value(first.add, {"n": 1}) == 3
    assert await value(Counter(0).fixed, {"n": 4}) == 4


async def test_an_object_with_call_is_a_tool_named_like_its_class() -> None:
    class Greeter:
        """Greets people."""

        def __init__(self, salutation: str) -> None:
            self.salutation = salutation

        async def __call__(self, name: str) -> str:
            return f"{self.salutation} {name}"

    tested_tool = tool(Greeter("Hi"))
    assert (tested_tool.name, tested_tool.description, tested_tool.style) == ("Greeter", "Greets people.", "async")
    assert await value(tested_tool, {"name": "Ann"}) == "Hi Ann"


async def test_parameters_of_a_partial_are_hidden_and_cannot_be_passed() -> None:
    def fetch(url: str, api_key: str, retries: int = 1, **headers: str) -> list[Any]:
        """Fetches."""
        return [url, api_key, retries, headers]

    tested_tool = tool(functools.partial(fetch, api_key="s3cret"))
    assert tested_tool.name == "fetch"
    assert list(tested_tool.input_schema["properties"]) == ["url", "retries"]
    assert "s3cret" not in str(tested_tool.to_dict())
    assert await value(tested_tool, {"url": "u"}) == ["u", "s3cret", 1, {}]
    assert await value(tested_tool, {"url": "u", "x": "y"}) == ["u", "s3cret", 1, {"x": "y"}]
    for arguments in ({"url": "u", "api_key": "mine"}, '{"url": "u", "api_key": "mine"}'):
        stolen = await call(tested_tool, arguments)
        assert stolen.error_kind == "invalid_parameters"
        assert "s3cret" not in stolen.text
    assert await value(functools.partial(fetch, "u", "k"), {}) == ["u", "k", 1, {}]
    nested = functools.partial(functools.partial(fetch, api_key="a"), retries=5)
    assert await value(nested, {"url": "u"}) == ["u", "a", 5, {}]


async def test_a_wrapped_function_keeps_its_own_schema() -> None:
    calls: list[str] = []

    def with_log(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return wrapper

    @tool
    @with_log
    @with_log
    async def add(a: int, ctx: ToolContext, b: int = 1) -> int:
        """Adds."""
        return a + b

    @tool
    @with_log
    async def stream(n: int) -> AsyncIterator[str]:
        for i in range(n):
            yield str(i)

    assert (add.name, add.description, list(add.input_schema["properties"])) == ("add", "Adds.", ["a", "b"])
    assert await value(add, {"a": "1"}) == 2
    assert await value(stream, {"n": 3}) == "012"
    assert calls == ["add", "add", "stream"]


async def test_the_outermost_wrapper_decides_the_execution_style() -> None:
    def collect(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return [item async for item in function(*args, **kwargs)]

        return wrapper

    def on_loop(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    def as_stream(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            yield await function(*args, **kwargs)

        return wrapper

    @collect
    async def pieces(n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i

    @on_loop
    def thread() -> bool:
        return threading.current_thread() is threading.main_thread()

    @as_stream
    async def single(n: int) -> int:
        return n

    assert await value(pieces, {"n": 2}) == [0, 1]
    assert await value(thread) is True
    assert (tool(single).style, await value(single, {"n": 2})) == ("stream", [2])


async def test_cached_functions_and_class_decorators_keep_their_schema() -> None:
    @functools.lru_cache
    def square(n: int) -> int:
        """Squares."""
        return n * n

    class retry:
        def __init__(self, function: Callable[..., Any]) -> None:
            functools.update_wrapper(self, function)
            self.function = function

        async def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return await self.function(*args, **kwargs)

    @retry
    async def flaky(n: int) -> int:
        """Fails at times."""
        return n

    assert (tool(square).description, properties(square)) == ("Squares.", {"n": {"type": "integer"}})
    assert await value(square, {"n": 3}) == 9
    assert (tool(flaky).name, tool(flaky).description) == ("flaky", "Fails at times.")
    assert await value(flaky, {"n": "3"}) == 3


async def test_an_explicit_signature_is_used() -> None:
    def with_kwargs(**kwargs: Any) -> Any:
        return kwargs

    with_kwargs.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("n", inspect.Parameter.KEYWORD_ONLY, annotation=int)]
    )
    assert schema(with_kwargs)["required"] == ["n"]
    assert properties(with_kwargs) == {"n": {"type": "integer"}}
    assert await value(with_kwargs, {"n": "3"}) == {"n": 3}


async def test_a_class_is_a_tool_that_creates_an_instance() -> None:
    class Pair:
        def __init__(self, a: int, b: int = 2) -> None:
            self.a, self.b = a, b

        def __str__(self) -> str:
            return f"{self.a}+{self.b}"

    assert properties(Pair) == {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}}
    assert await value(Pair, {"a": "1"}) == "1+2"
