"""Export of tool definitions to OpenAI, Anthropic, Gemini and MCP."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from toolspace import Annotations, Settings, Tool, ToolRegistry, Toolspace
from toolspace.core.tool import tool
from toolspace.core.tool_export import export_tools

RAW: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "title": "Kept",
    "properties": {"city": {"$ref": "#/$defs/City"}, "units": {"enum": ["C", "F"], "default": "C"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string", "minLength": 1, "x-vendor": True}},
}
FORMATS = {
    "openai": lambda wire: wire["function"]["parameters"],
    "openai-responses": lambda wire: wire["parameters"],
    "anthropic": lambda wire: wire["input_schema"],
    "gemini": lambda wire: wire["parametersJsonSchema"],
    "mcp": lambda wire: wire["inputSchema"],
}


@tool(annotations=Annotations(read_only=True, open_world=False))
async def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Args:
        a: The first.
    """
    return a + b


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "The first."}, "b": {"type": "integer", "default": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
GEMINI_SCHEMA = {
    **SCHEMA,
    "properties": {
        "a": {"type": "integer", "description": "The first."},
        "b": {"type": "integer", "description": "default: 1"},
    },
}


@pytest.mark.spec("1.9")
@pytest.mark.parametrize(
    ("format", "wire"),
    [
        (
            "openai",
            {
                "type": "function",
                "function": {"name": "add", "description": "Adds two numbers.", "parameters": SCHEMA},
            },
        ),
        (
            "openai-responses",
            {
                "type": "function",
                "name": "add",
                "description": "Adds two numbers.",
                "parameters": SCHEMA,
                "strict": False,
            },
        ),
        ("anthropic", {"name": "add", "description": "Adds two numbers.", "input_schema": SCHEMA}),
        ("gemini", {"name": "add", "description": "Adds two numbers.", "parametersJsonSchema": GEMINI_SCHEMA}),
        (
            "mcp",
            {
                "name": "add",
                "description": "Adds two numbers.",
                "inputSchema": SCHEMA,
                "annotations": {"readOnlyHint": True, "openWorldHint": False},
            },
        ),
    ],
)
def test_each_format_has_the_exact_shape_of_its_api(format: Any, wire: dict[str, Any]) -> None:
    assert ToolRegistry([add]).to_llm_tools(format=format) == [wire]
    assert Toolspace(tools=[add]).to_llm_tools(format) == [wire]


@pytest.mark.spec("1.9")
def test_openai_chat_is_the_default_format() -> None:
    assert ToolRegistry([add]).to_llm_tools() == ToolRegistry([add]).to_llm_tools(format="openai")
    assert Toolspace(tools=[add]).to_llm_tools() == Toolspace(tools=[add]).to_llm_tools("openai")


@pytest.mark.spec("1.4")
@pytest.mark.spec("1.9")
@pytest.mark.parametrize("format", [format for format in FORMATS if format != "gemini"])
def test_a_raw_schema_reaches_the_model_unchanged(format: Any) -> None:
    before = copy.deepcopy(RAW)
    weather = Tool("weather", "The weather.", RAW, handler=lambda parameters, context: "fine")

    [wire] = Toolspace(tools=[weather]).to_llm_tools(format)

    assert FORMATS[format](wire) == before
    assert before == RAW


@pytest.mark.spec("1.9")
def test_mcp_gets_the_output_schema_and_type_object_by_default() -> None:
    output = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
    loose = Tool("loose", "Takes anything.", {"properties": {"a": {}}}, output_schema=output)

    [wire] = export_tools([loose], "mcp")

    assert wire["inputSchema"] == {"type": "object", "properties": {"a": {}}}
    assert wire["outputSchema"] == output
    assert "annotations" not in wire


@pytest.mark.spec("1.9")
def test_a_tool_without_parameters_says_so_in_every_format() -> None:
    for format, schema_of in FORMATS.items():
        [wire] = export_tools([Tool("ping")], format)  # type: ignore[arg-type]
        assert schema_of(wire)["properties"] == {}


@pytest.mark.spec("1.9")
def test_an_unknown_format_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'gpt'.*openai, openai-responses, anthropic, gemini, mcp"):
        Toolspace(tools=[add]).to_llm_tools("gpt")  # type: ignore[arg-type]


@pytest.mark.spec("1.9")
@pytest.mark.spec("4.9")
async def test_the_export_for_a_run_includes_discovered_tools() -> None:
    many = [Tool(f"tool_{number}", f"Counts to {number}.", handler=lambda p, c: 1) for number in range(20)]
    ts = Toolspace(tools=[*many, add], settings=Settings(tool_search_threshold=50))

    def tool_names() -> set[str]:
        return {wire["name"] for wire in ts.to_llm_tools("anthropic", run=run)}

    async with ts, ts.run() as run:
        assert "agent__find_tools" in tool_names()
        assert "add" not in tool_names()
        await run.call("agent__find_tools", {"query": "adds two numbers", "limit": 1})
        assert "add" in tool_names()
