"""Tools with a JSON Schema: the model gets it unchanged, and it is enforced."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.core.functions import call, value
from toolspace import Tool, ToolContext, ToolDefinitionError, Toolspace, tool

RAW: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Kept",
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City", "description": "Where"},
        "days": {"type": "integer", "minimum": 1, "default": 3},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"type": "string", "minLength": 2}},
    "x-vendor": {"title": "kept too"},
}


@pytest.mark.spec("1.4")
async def test_a_raw_schema_is_shown_unchanged_and_enforced() -> None:
    def handle(parameters: dict[str, Any], context: ToolContext) -> Any:
        return [parameters, context.user_id]

    ts = Toolspace(tools=[Tool("weather", "Tells the weather.", RAW, handler=handle)])
    definition = next(item for item in ts.to_llm_tools("anthropic") if item["name"] == "weather")
    assert definition["input_schema"] == RAW
    assert definition["input_schema"] is RAW
    good = await ts.call("weather", {"city": "Bern", "days": "2"}, context=ToolContext(user_id="ann"))
    assert good.result == [{"city": "Bern", "days": 2}, "ann"]
    bad = await ts.call("weather", '{"city": "B", "days": 0, "dais": 1}')
    assert (bad.error_kind, bad.executed) == ("invalid_parameters", False)
    assert bad.error is not None
    for place in ('city: it is shorter than 2 characters, got "B"', "days: it is less than", 'did you mean "days"?'):
        assert place in bad.error


@pytest.mark.spec("1.4")
async def test_a_function_can_be_given_a_raw_schema() -> None:
    @tool(input_schema=RAW)
    async def weather(city: str, ctx: ToolContext, days: int = 3) -> list[Any]:
        """Tells the weather."""
        return [city, days]

    assert weather.input_schema is RAW
    assert weather.description == "Tells the weather."
    assert await value(weather, {"city": "Bern"}) == ["Bern", 3]
    assert (await call(weather, {"city": 5})).error_kind == "invalid_parameters"


@pytest.mark.spec("1.4")
@pytest.mark.parametrize("kind", ["async", "sync", "stream"])
async def test_a_handler_may_be_of_any_kind(kind: str) -> None:
    async def async_(parameters: dict[str, Any], context: ToolContext) -> str:
        return f"{parameters['a']}{context.call_id[:4]}"

    def sync(parameters: dict[str, Any], context: ToolContext) -> str:
        return f"{parameters['a']}{context.call_id[:4]}"

    async def stream(parameters: dict[str, Any], context: ToolContext) -> AsyncIterator[str]:
        yield str(parameters["a"])
        yield context.call_id[:4]

    handler = {"async": async_, "sync": sync, "stream": stream}[kind]
    tested_tool = Tool("t", "", {"properties": {"a": {"type": "integer"}}}, handler=handler)
    assert await value(tested_tool, {"a": 1}) == "1call"


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"type": "objekt"}, 'type: expected one of "array", "boolean", "integer"'),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "none"),
        ({"$ref": "https://example.com/schema.json"}, "leaves the schema"),
        ({"properties": 5}, "properties: expected object, got 5"),
        ({"properties": {"a": {"pattern": "("}}}, "regex"),
    ],
    ids=str,
)
async def test_an_invalid_schema_is_an_error_that_names_the_tool(wrong: dict[str, Any], reason: str) -> None:
    tested_tool = Tool("broken", "", wrong, handler=lambda parameters, context: 1)
    with pytest.raises(
        ToolDefinitionError, match="the schema of tool 'broken' is not a valid JSON Schema"
    ) as caught_error:
        tested_tool.validator  # noqa: B018
    assert reason in str(caught_error.value)
    result = await call(tested_tool, {})
    assert (result.ok, result.executed) == (False, False)
    assert "'broken'" in result.text


async def test_a_tool_without_schema_takes_nothing() -> None:
    tested_tool = Tool("ping", handler=lambda parameters, context: "pong")
    assert await value(tested_tool) == "pong"
    assert "a: no such parameter; it takes none" in str((await call(tested_tool, {"a": 1})).error)


async def test_replacing_the_schema_of_a_function_replaces_the_check() -> None:
    def take(**rest: Any) -> Any:
        return rest

    narrow_tool = tool(take).replace(input_schema={"properties": {"a": {"type": "integer"}}, "required": ["a"]})
    assert (await call(narrow_tool, {})).error_kind == "invalid_parameters"
    assert await value(narrow_tool, {"a": 1}) == {"a": 1}
    assert await value(tool(take), {}) == {}
