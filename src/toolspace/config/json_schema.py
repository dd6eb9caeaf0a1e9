"""Renders the JSON Schema of configuration files from the declared settings, for completion and checks in editors.

The schema accepts every file that `load_config` accepts, if its words are in lower case or as documented. It also
accepts files with mistakes that only loading finds, such as a reference to a missing queue. Reads no file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from toolspace.config.configuration import AGENT_KEYS, ANY_FILE_KEYS, INLINE_KEYS, PROCESS_KEYS, TOOL_KEYS
from toolspace.config.validation import SectionType, Setting, ValueType

_VARIABLE = {"type": "string", "pattern": r"\$\{"}
"""A string with a variable, whose value may be of any type."""


def build_json_schema() -> dict[str, Any]:
    """The JSON Schema of a main file or of the file of an agent."""
    agent = _build_object((*TOOL_KEYS, *ANY_FILE_KEYS, *AGENT_KEYS, *INLINE_KEYS))
    entry = {"anyOf": [{"type": "string"}, agent]}
    agents = {
        "anyOf": [
            {"type": "object", "additionalProperties": entry},
            {"type": "array", "items": entry},
            {"type": "string"},
        ]
    }
    schema = _build_object((*TOOL_KEYS, *PROCESS_KEYS, *ANY_FILE_KEYS, *AGENT_KEYS))
    schema["properties"] |= {"$schema": {"type": "string"}, "inputs": {}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Toolspace configuration",
        **schema,
        "patternProperties": {"^x-": {}},
        "$defs": {"agents": agents},
    }


def _build_object(settings: Iterable[Setting], *, allows_unknown: bool = False) -> dict[str, Any]:
    settings = tuple(settings)
    properties = {key: _build_property(setting) for setting in settings for key in setting.keys}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    # A setting with aliases is not listed: it may be present under any of its keys.
    if required := [setting.key for setting in settings if setting.is_required and not setting.options.aliases]:
        schema["required"] = required
    if not allows_unknown:
        schema["additionalProperties"] = False
    return schema


def _build_property(setting: Setting) -> dict[str, Any]:
    schema: dict[str, Any] = {"description": setting.effect}
    if text := setting.default_text:
        is_plain = setting.default is None or isinstance(setting.default, bool | int)
        schema["default"] = setting.default if is_plain else text
    # `null` means that the setting is absent.
    return schema | {"anyOf": [build_value_schema(setting.value_type), _VARIABLE, {"type": "null"}]}


def build_value_schema(value_type: ValueType[Any]) -> dict[str, Any]:
    """The JSON Schema of the values that a type accepts."""
    if not isinstance(value_type, SectionType):
        return cast("dict[str, Any]", _replace_types(value_type.schema))
    schema = _build_object(value_type.settings, allows_unknown=value_type.keeps_unknown)
    return schema if value_type.shorthand is None else {"anyOf": [schema, {"type": "string"}]}


def _replace_types(schema: object) -> object:
    if isinstance(schema, ValueType):
        return build_value_schema(cast("ValueType[Any]", schema))
    if isinstance(schema, dict):
        return {key: _replace_types(part) for key, part in cast("dict[str, object]", schema).items()}
    if isinstance(schema, list):
        return [_replace_types(part) for part in cast("list[object]", schema)]
    return schema
