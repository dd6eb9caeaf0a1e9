"""The annotations of a tool: as an object, or as a mapping."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Annotations, Tool, tool
from toolspace.errors import ToolDefinitionError
from toolspace.providers.rest.provider import RestProvider, RestSpec


@pytest.mark.parametrize(
    "annotations",
    [
        {"readOnly": True, "openWorld": False},
        {"read_only": True, "open_world": False},
        {"readOnlyHint": True, "openWorldHint": False},
    ],
)
def test_annotations_may_be_a_mapping(annotations: dict[str, bool]) -> None:
    @tool(annotations=annotations)
    def look() -> str:
        """Looks."""
        return ""

    expected = Annotations(read_only=True, open_world=False)
    assert look.annotations == expected
    assert Tool("look", "Looks.", annotations=annotations).annotations == expected
    assert Tool("look", "Looks.").replace(annotations=annotations).annotations == expected


@pytest.mark.parametrize("annotations", [{"readOnly": False, "idempotent": True}, {"idempotentHint": True}])
def test_annotations_of_a_rest_tool_may_be_a_mapping(annotations: dict[str, bool]) -> None:
    spec = RestSpec(name="pay", url="http://127.0.0.1:1/", method="POST", annotations=annotations)
    [rest_tool] = RestProvider([spec]).list_tools()
    assert (rest_tool.annotations.idempotent, rest_tool.annotations.read_only) == (True, False)


@pytest.mark.parametrize("annotations", [{"readonly?": True}, {"readOnly": "yes"}, ["readOnly"], "readOnly"])
def test_other_annotations_are_refused_when_the_tool_is_made(annotations: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="annotations are Annotations"):
        Tool("look", "Looks.", annotations=annotations)
    with pytest.raises(ToolDefinitionError, match="annotations are Annotations"):
        Tool("look", "Looks.").replace(annotations=annotations)
    with pytest.raises(ToolDefinitionError, match="annotations are Annotations"):
        RestProvider([RestSpec(name="look", url="http://127.0.0.1:1/", annotations=annotations)])
