"""Reads a configuration file of any format into a document. Knows no settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from toolspace.config.document import Document, Parsed, TextFault, shown
from toolspace.errors import ConfigError

MAX_BYTES = 10_000_000


def read_document(path: Path) -> Document:
    """The document in a file. Raises `ConfigError` with the place of the fault."""
    name = display_name(path)
    try:
        if not path.is_dir() and path.exists() and not path.is_file():
            raise ConfigError(f"{name}: is no regular file")  # A pipe would keep the start waiting.
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror or error}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES:,} bytes, which no configuration needs")
    return parse_document(content, name)


def parse_document(content: bytes, name: str) -> Document:
    """The document in the content of a file; the end of its name says the format."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    try:
        data, lines, texts = _parser(name)(text)
    except TextFault as fault:
        column = f":{fault.column}" if fault.column is not None else ""
        raise ConfigError(f"{name}:{fault.line}{column}: {fault}") from None
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: expected a mapping of settings, got {shown(data)}")
    return Document(name, cast("dict[str, object]", data), lines, texts)


def display_name(path: Path) -> str:
    """What messages call a file: relative where it lies below the working folder."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return os.fspath(path)


def _parser(name: str) -> Callable[[str], Parsed]:
    # Here: a run loads the parser of the one format it meets; YAML's takes 30 ms.
    suffix = Path(name).suffix.lower()
    if suffix in (".json", ".jsonc"):
        from toolspace.config.jsontext import parse_json

        return parse_json
    if suffix == ".toml":
        from toolspace.config.tomltext import parse_toml

        return parse_toml
    if suffix in (".yaml", ".yml"):
        from toolspace.config.yamltext import parse_yaml

        return parse_yaml
    raise ConfigError(f"{name}: the name must end in .yaml, .yml, .json or .toml, which says its format")
