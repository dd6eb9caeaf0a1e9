"""Environment variables: `TOOLSPACE_*` overrides a setting, `${VAR}` and `${VAR:-default}` in a file are filled in.

A `TOOLSPACE_*` variable has the key in upper snake case; before the key comes the section, except for `defaults`:
`TOOLSPACE_TOOL_TIMEOUT`, `TOOLSPACE_TOOLS_ALLOWED_PATHS`, `TOOLSPACE_STORAGE_DIR`. In a file `$${` is a literal `${`,
`${parameters.x}` belongs to REST tools and stays, and keys are never changed. References to secrets (`${file:path}`)
are marked for `secret_references`. Also finds the secrets of a document.
Used by `load`. Reads no file, and no environment by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from toolspace.config.configuration import list_overridable_settings
from toolspace.config.file_formats import ConfigDocument, ConfigProblem, KeyPath
from toolspace.config.secret_references import (
    REFERENCE,
    SecretReference,
    check_place,
    find_references,
    mark_reference,
)
from toolspace.config.validation import Setting, snake_case
from toolspace.core.names import did_you_mean, nearest
from toolspace.core.secret_masking import is_secret_name

PREFIX = "TOOLSPACE_"
RESERVED = frozenset(
    PREFIX + name
    for name in [
        "CONFIG",
        "LOG",
        "LOG_FORMAT",
        "LOG_LEVEL",
        "QUIET",
        "VERBOSE",
        "TRACE",
        "URL",
        "KEY",
        "SECRET_KEY",
        "PUBLIC_KEY",
    ]
)
"""Variables that other parts of Toolspace read, or are reserved for them."""
MAX_LENGTH = 1_000_000
"""How long an expanded string may be: variables can be large."""
MAX_NESTING = 20
"""How deeply defaults may nest."""

_START = re.compile(r"\$?\$\{")
_BRACE = re.compile(r"\$?\$\{|\}")
_NAME = re.compile(r"(?:env:)?([A-Za-z_][A-Za-z0-9_]*)")
_PARAMETER = re.compile(r"\$\{\s*parameters\b[^{}]*\}")
_INPUT = re.compile(r"\$\{input:[^{}]*\}")
_VARIABLE = re.compile(r"(?<!\$)\$\{(?:env:)?([A-Za-z_][A-Za-z0-9_]*)")
_FALSE_WORDS = ("false", "no", "off", "0")


# `TOOLSPACE_*`


class EnvironmentOverrides(NamedTuple):
    """The settings that the environment overrides."""

    values: dict[KeyPath, tuple[str, Any]]
    """Key of a setting → the variable that overrides it, and its value as a file would have it."""
    warnings: list[str]


def list_variables() -> dict[str, tuple[KeyPath, Setting]]:
    """Every variable that overrides a setting."""
    return {_variable_name(key): (key, setting) for key, setting in list_overridable_settings()}


def read_overrides(environ: Mapping[str, str]) -> EnvironmentOverrides:
    """The settings that the environment overrides. An empty variable counts as not set."""
    variables = list_variables()
    values: dict[KeyPath, tuple[str, Any]] = {}
    warnings: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or not environ[variable].strip():
            continue
        if variable in variables:
            key, setting = variables[variable]
            values[key] = (variable, _parse(environ[variable], setting))
        elif variable not in RESERVED and (suggestion := _find_similar(variable, variables)):
            warnings.append(f"{variable} (environment): is no setting; did you mean {suggestion}?")
    return EnvironmentOverrides(values, warnings)


def _variable_name(key: KeyPath) -> str:
    parts = key[1:] if key[0] == "defaults" else key
    return PREFIX + "_".join(snake_case(str(part)) for part in parts).upper()


def _parse(text: str, setting: Setting) -> Any:
    text = text.strip()
    value_type = setting.value_type
    if value_type.nullable and text.lower() in ("null", "none"):
        return None
    if value_type.separator is None or text.lower() in ("true", "false"):
        return text
    return [part.strip() for part in text.split(value_type.separator) if part.strip()]


def _find_similar(variable: str, variables: Mapping[str, object]) -> str | None:
    # Compared without the prefix, which makes all of them similar.
    by_suffix = {name.removeprefix(PREFIX): name for name in variables}
    matches = nearest(variable.removeprefix(PREFIX), by_suffix, 1)
    return by_suffix[matches[0]] if matches else None


# `${VAR}`


class ExpandedDocument(NamedTuple):
    """The data of a document with its variables filled in."""

    data: dict[str, Any]
    original_texts: dict[KeyPath, str]
    """The original text of each changed string. Messages show it, because a variable may hold a secret."""
    problems: list[ConfigProblem]
    secret_references: Mapping[SecretReference, KeyPath] = {}
    """The references to secrets outside disabled entries, and the place of the first use of each."""


def expand(document: ConfigDocument, environ: Mapping[str, str], base_dir: Path | None = None) -> ExpandedDocument:
    """Fills the variables of a document in. A reference that cannot be filled in becomes a problem.

    `base_dir`: what references to secrets are relative to; without it they are problems.
    """
    secret_references: dict[SecretReference, KeyPath] = {}
    original_texts: dict[KeyPath, str] = {}
    problems: list[ConfigProblem] = []

    def expand_value(value: object, path: KeyPath, is_required: bool) -> Any:
        """`is_required`: whether a variable that is not set is a problem."""
        if isinstance(value, dict):
            mapping = cast("dict[str, object]", value)
            if is_required and "enabled" in mapping:
                # A disabled entry does not need its keys.
                is_enabled = expand_value(mapping["enabled"], (*path, "enabled"), True)
                is_false_word = isinstance(is_enabled, str) and is_enabled.strip().lower() in _FALSE_WORDS
                is_required = is_enabled is not False and not is_false_word
            if mapping.get("disabled") is True:  # As some editors write it.
                is_required = False
            return {key: expand_value(inner, (*path, key), is_required) for key, inner in mapping.items()}
        if isinstance(value, list):
            items = cast("list[object]", value)
            return [expand_value(inner, (*path, index), is_required) for index, inner in enumerate(items)]
        if not isinstance(value, str) or "${" not in value:
            return value
        try:
            expanded_text = expand_text(value, environ, base_dir=base_dir)
            references = find_references(expanded_text)
            if references and (reason := check_place(path)) is not None:
                raise ValueError(reason)
        except ValueError as error:
            if is_required:
                problems.append(ConfigProblem(path, str(error)))
            return value
        if expanded_text != value:
            original_texts[path] = value
        for reference in references if is_required else ():
            secret_references.setdefault(reference, path)
        return expanded_text

    return ExpandedDocument(expand_value(document.data, (), True), original_texts, problems, secret_references)


def expand_text(text: str, environ: Mapping[str, str], depth: int = 0, *, base_dir: Path | None = None) -> str:
    """One string with its variables filled in, and its references to secrets marked. Raises `ValueError`."""
    if depth > MAX_NESTING:
        raise ValueError(f"defaults nested deeper than {MAX_NESTING} levels")
    parts: list[str] = []
    position = 0
    while (start := _START.search(text, position)) is not None:
        parts.append(text[position : start.start()])
        if start[0] == "$${":
            parts.append("${")
            position = start.end()
        elif (parameter := _PARAMETER.match(text, start.start())) is not None:
            parts.append(parameter[0])
            position = parameter.end()
        else:
            value, position = _expand_reference(text, start.start(), environ, depth, base_dir)
            parts.append(value)
    parts.append(text[position:])
    expanded_text = "".join(parts)
    if len(expanded_text) > MAX_LENGTH:
        raise ValueError(f"longer than {MAX_LENGTH:,} characters once its variables are filled in")
    return expanded_text


def _expand_reference(
    text: str, start: int, environ: Mapping[str, str], depth: int, base_dir: Path | None
) -> tuple[str, int]:
    """The value of the reference that begins at `start`, and the position after it."""
    if (prompt := _INPUT.match(text, start)) is not None:
        raise ValueError(f"{prompt[0]} asks an editor's user; name a variable instead: ${{NAME}}")
    secret = REFERENCE.match(text, start) if base_dir is not None else None
    if secret is not None and base_dir is not None and (end := _find_closing_brace(text, start)) >= 0:
        inner_text = expand_text(text[secret.end() : end], environ, depth + 1)
        return mark_reference(secret[1], inner_text, base_dir), end + 1
    name = _NAME.match(text, start + 2)
    end = _find_closing_brace(text, start) if name is not None else -1
    if name is None or end < 0:
        raise _invalid_reference(text, start)
    rest = text[name.end() : end]
    value = environ.get(name[1])
    if rest.startswith(":-"):
        return (value, end + 1) if value else (expand_text(rest[2:], environ, depth + 1, base_dir=base_dir), end + 1)
    if rest:
        raise _invalid_reference(text, start)
    if value is None:
        hint = did_you_mean(name[1], environ) or f"; set it, or give a default: ${{{name[1]}:-value}}"
        raise ValueError(f"the variable {name[1]} is not set{hint}")
    return value, end + 1


def _find_closing_brace(text: str, start: int) -> int:
    """The position of the brace that closes the reference at `start`, or -1. References nest in defaults."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        if brace[0] != "$${":
            depth += 1 if brace[0] == "${" else -1
        if depth == 0:
            return brace.start()
    return -1


def _invalid_reference(text: str, start: int) -> ValueError:
    excerpt = text[start : start + 30].split("\n", maxsplit=1)[0]
    end = excerpt.find("}")
    reference = ascii(excerpt[: end + 1] if end >= 0 else excerpt)[1:-1]
    return ValueError(
        f'"{reference}" is not a variable; write ${{NAME}} or ${{NAME:-default}}, or $${{ for a literal ${{'
    )


# Secrets


def find_secrets(data: object, environ: Mapping[str, str], *, secret: bool = False) -> Iterator[str]:
    """The values under keys such as `apiKey`, and the values of variables that are named like a secret.

    `data` is the document as written. In a string with variables only their values are secret: `Bearer` in
    `Bearer ${KEY}` is not.
    """
    if isinstance(data, str):
        names = _VARIABLE.findall(data)
        if secret and not names:
            yield data
        yield from (environ[name] for name in names if name in environ and (secret or _is_secret_variable(name)))
    elif isinstance(data, list):
        for item in cast("list[object]", data):
            yield from find_secrets(item, environ, secret=secret)
    elif isinstance(data, Mapping):
        # `secret` is not passed down: a property `password` of a JSON Schema contains no password.
        for key, value in cast("Mapping[str, Any]", data).items():
            yield from find_secrets(value, environ, secret=is_secret_name(key))


def _is_secret_variable(name: str) -> bool:
    """Variables have shorter names than fields: `STRIPE_KEY`, `GITHUB_PAT`."""
    return is_secret_name(name) or name.upper().endswith(("_KEY", "_PAT", "_AUTH", "_TOKEN"))
