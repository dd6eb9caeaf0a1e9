"""Checks that the answer of an agent has the type that a program asked for (`output_type`). Asks no model.

The model gives its answer as JSON: in its final report, or as its last text. What does not fit goes back to the model
with the paths of the wrong values, a limited number of times.
"""

from __future__ import annotations

import re
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Union, cast, get_args, get_origin

from toolspace.core import json_text
from toolspace.core.argument_validation import MAX_ISSUES, Issue, format_path, masked_value
from toolspace.core.tool import Tool
from toolspace.errors import ToolspaceError, ToolValidationError

FINAL_REPORT = "agent__final_report"
MAX_ATTEMPTS = 4
"""How many answers of one run are checked: the first, and three corrections."""
_MAX_ERRORS = 1_000
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL | re.IGNORECASE)
_MISSING: Any = object()


class OutputCheck:
    """The output type of one run, and the answer once there is one."""

    def __init__(self, output_type: Any) -> None:
        """Raises `ToolspaceError` if values of the type cannot be checked."""
        from pydantic import TypeAdapter  # Imported here: only runs with an output type need it.
        from pydantic.errors import PydanticUserError
        from pydantic_core import SchemaError

        self.type_name = getattr(output_type, "__name__", None) if isinstance(output_type, type) else None
        self.type_name = self.type_name or str(output_type)
        try:
            self._adapter = TypeAdapter[Any](_convert_typed_dicts(output_type))
            self.schema: Mapping[str, Any] = self._adapter.json_schema()
        except (PydanticUserError, SchemaError, NameError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise ToolspaceError(
                f"output_type {self.type_name} cannot be checked: {reason}; give a pydantic model, a dataclass, "
                "a TypedDict, or a type such as list[int]"
            ) from None
        self.problem = ""
        """What was wrong with the last answer."""
        self._attempts = 0
        self._value: Any = _MISSING

    @property
    def has_value(self) -> bool:
        return self._value is not _MISSING

    @property
    def value(self) -> Any:
        """The answer; None if there is none."""
        return self._value if self.has_value else None

    @property
    def is_exhausted(self) -> bool:
        """Whether the model may not try again."""
        return not self.has_value and self._attempts >= MAX_ATTEMPTS

    @property
    def failure(self) -> str:
        """Why the run ends without an answer."""
        return f"none of {self._attempts} answers is a {self.type_name}: {self.problem}"

    def check(self, value: Any) -> None:
        """Takes the JSON data of a final report as the answer. Raises `ToolValidationError` if it does not fit."""
        self._check_json(json_text.encode(value), "content_json")
        if not self.has_value:
            raise ToolValidationError(self.problem)

    def check_text(self, text: str) -> bool:
        """Takes the model's last text as the answer. Returns whether it fits."""
        text = text.strip()
        if (match := _FENCE.fullmatch(text)) is not None:
            text = match[1]
        self._check_json(text, "")
        return self.has_value

    @property
    def advice(self) -> str:
        """What to tell the model after a text that does not fit."""
        return (
            f"REVIEW: your answer does not fit the output schema: {self.problem}. Answer again: call {FINAL_REPORT} "
            'with format "json", or write the JSON and nothing else.'
        )

    @property
    def instructions(self) -> str:
        """What the system prompt says about the answer."""
        return (
            "OUTPUT: your answer must be JSON that fits this JSON Schema. Give it as content_json to "
            f'{FINAL_REPORT}, with format "json"; if you do not have that tool, write the JSON and nothing else.\n'
            f"{json_text.encode(self.schema)}"
        )

    def describe_report(self, tool: Tool) -> Tool:
        """The definition of the final report tool, with the schema of the answer in it."""
        schema = dict(self.schema)
        definitions = {"$defs": schema.pop("$defs")} if "$defs" in schema else {}
        properties = cast("Mapping[str, Any]", tool.input_schema["properties"])
        required = [*cast("list[str]", tool.input_schema.get("required", [])), "content_json"]
        return Tool(
            tool.name,
            tool.description,
            {**tool.input_schema, "properties": {**properties, "content_json": schema}, "required": required}
            | definitions,
            category=tool.category,
            visible=tool.visible,
        )

    def _check_json(self, text: str, place: str) -> None:
        from pydantic import ValidationError

        self._attempts += 1
        self._value = _MISSING
        try:
            self._value = self._adapter.validate_json(text)
        except ValidationError as error:
            self.problem = _describe(error, place)
        except Exception as error:  # The program's own validators may raise anything.
            self.problem = json_text.single_line(f"{type(error).__name__}: {error}", 500)


def _describe(error: Any, place: str) -> str:
    """The paths of the wrong values and what was expected there."""
    if error.error_count() > _MAX_ERRORS:
        return f"{error.error_count():,} values do not fit"
    details = error.errors(include_url=False, include_context=False)
    prefix = (place,) if place else ()
    issues = [
        Issue(path := format_path((*prefix, *detail["loc"])), detail["msg"], _actual(path, detail))
        for detail in details[:MAX_ISSUES]
    ]
    more = len(details) - len(issues)
    return "; ".join(map(str, issues)) + (f"; and {more} more" if more else "")


def _actual(path: str, detail: Mapping[str, Any]) -> str:
    return "" if detail["type"] in ("missing", "json_invalid") else masked_value(path, detail["input"])


def _convert_typed_dicts(hint: Any) -> Any:
    """Replaces `typing.TypedDict`, which pydantic does not accept before Python 3.12, by an equal type."""
    if sys.version_info >= (3, 12):
        return hint
    if typing.is_typeddict(hint) and type(hint).__module__ == "typing":
        from typing_extensions import TypedDict

        optional_keys = cast("frozenset[str]", hint.__optional_keys__)
        fields = {
            name: _convert_field(field, name in optional_keys)
            for name, field in typing.get_type_hints(hint, include_extras=True).items()
        }
        return TypedDict(hint.__name__, fields)  # pyright: ignore
    origin, arguments = get_origin(hint), get_args(hint)
    if not arguments or origin in (typing.Literal, typing.Annotated):
        return hint
    new_arguments = tuple(map(_convert_typed_dicts, arguments))
    if new_arguments == arguments:
        return hint
    if origin is Union or origin is types.UnionType:
        return Union[new_arguments]  # noqa: UP007 - a computed union needs it
    return origin[new_arguments]


def _convert_field(hint: Any, is_optional: bool) -> Any:
    if (qualifier := get_origin(hint)) in (typing.Required, typing.NotRequired):
        # The keys of a class whose annotations are strings do not tell.
        is_optional, hint = qualifier is typing.NotRequired, get_args(hint)[0]
    new_hint = _convert_typed_dicts(hint)
    return typing.NotRequired[new_hint] if is_optional else new_hint
