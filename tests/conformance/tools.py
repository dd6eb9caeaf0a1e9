"""The tools that the conformance suite calls on a server, as ordinary Python tools. Serves nothing itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tests.conformance.questions import ASKING
from toolspace import Tool, ToolContext, Toolspace, tool
from toolspace.core.result import AudioPart, Content, ImagePart, ResourcePart, TextPart

RED_PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
SILENCE = "UklGRiYAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YQIAAAAAAA=="

RICH_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}


@tool
def test_simple_text() -> str:
    """Returns text."""
    return "This is a simple text response for testing."


@tool
def test_image_content() -> ImagePart:
    """Returns an image."""
    return ImagePart(data=RED_PIXEL)


@tool
def test_audio_content() -> AudioPart:
    """Returns audio."""
    return AudioPart(data=SILENCE)


@tool
def test_embedded_resource() -> ResourcePart:
    """Returns a resource."""
    return ResourcePart(
        uri="test://embedded-resource", mime_type="text/plain", text="This is an embedded resource content."
    )


@tool
def test_multiple_content_types() -> list[Content]:
    """Returns text, an image and a resource."""
    return [
        TextPart(text="Multiple content types test:"),
        ImagePart(data=RED_PIXEL),
        ResourcePart(
            uri="test://mixed-content-resource", mime_type="application/json", text='{"test":"data","value":123}'
        ),
    ]


@tool
def test_error_handling() -> str:
    """Always fails."""
    raise RuntimeError("This tool intentionally returns an error for testing")


@tool
async def test_tool_with_progress(context: ToolContext) -> str:
    """Reports its progress three times."""
    for step in (0, 50, 100):
        context.report_progress(step, 100, f"Completed step {step} of 100")
        await asyncio.sleep(0.05)  # The suite expects separate steps.
    return "done"


@tool
async def test_logging_tool(context: ToolContext) -> str:
    """Writes to its log."""
    context.logger.info("Tool execution started")
    return "logged"


@tool
async def test_tool_with_logging(context: ToolContext) -> str:
    """Writes to its log while it works."""
    for line in ("Tool execution started", "Tool processing data", "Tool execution completed"):
        context.logger.info(line)
    return "logged"


@tool(input_schema=RICH_SCHEMA)
def json_schema_2020_12_tool(**_: Any) -> str:
    """Has a schema with most features of JSON Schema 2020-12."""
    return "ok"


@tool(
    input_schema={
        "type": "object",
        "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "query": {"type": "string"}},
        "required": ["region"],
    }
)
def repeat_in_header(region: str, query: str = "") -> str:
    """Has an argument that is repeated in a header."""
    return f"{region} {query}"


def trigger_of(toolspace: Toolspace) -> Tool:
    """A tool that changes the list of tools while clients listen."""

    @tool
    def test_passing_by() -> str:
        """Exists temporarily."""
        return "here"

    @tool
    async def test_trigger_tool_change() -> str:
        """Adds a tool, or removes it."""
        if toolspace.find_tool(test_passing_by.name) is None:
            toolspace.add_tool(test_passing_by)
            return "added"
        toolspace.remove_tool(test_passing_by.name)
        return "removed"

    return test_trigger_tool_change


TOOLS: Sequence[Tool] = (
    test_simple_text,
    test_image_content,
    test_audio_content,
    test_embedded_resource,
    test_multiple_content_types,
    test_error_handling,
    test_tool_with_progress,
    test_logging_tool,
    test_tool_with_logging,
    json_schema_2020_12_tool,
    repeat_in_header,
    *ASKING,
)
