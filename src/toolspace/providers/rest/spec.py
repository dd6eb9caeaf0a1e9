"""What describes one REST tool: plain data, from configuration or from code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolspace.core.tool import NO_ANNOTATIONS, Annotations


class RestSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One request to one service. `${parameters.x}` stands in its templates; variables are filled in already."""

    name: str
    url: str
    description: str = ""
    method: str = "GET"
    headers: Mapping[str, str] = {}
    query: Mapping[str, Any] = {}
    body: Any = None
    parameters_schema: Mapping[str, Any] | None = None
    """None: made from the parameters that the templates name."""
    output_schema: Mapping[str, Any] | None = None
    queue: str | None = None
    cache: float | None = None
    cache_per_user: bool = False
    timeout: float | None = None
    annotations: Annotations = NO_ANNOTATIONS
    """What it leaves open is known from the method."""
    tags: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"RestSpec({self.name!r})"  # Keys may be in every other field.
