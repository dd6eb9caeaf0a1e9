"""The annotations of a tool: as an object, or as a mapping."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Annotations, Tool, tool
from toolspace.errors import ToolDefinitionError


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

    assert look.annotations == Annotations(read_only=True, open_world=False)


@pytest.mark.parametrize("annotations", [{"readonly?": True}, {"readOnly": "yes"}, ["readOnly"], "readOnly"])
def test_other_annotations_are_refused_when_the_tool_is_made(annotations: Any) -> None:
    with pytest.raises(ToolDefinitionError, match="annotations are Annotations"):
        Tool("look", "Looks.", annotations=annotations)
