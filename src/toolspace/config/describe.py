"""Describes every setting, for documentation and `toolspace explain`. Reads no file."""

from __future__ import annotations

from typing import NamedTuple

from toolspace.config.document import KeyPath, dotted
from toolspace.config.reading import Setting
from toolspace.config.settings import SECTIONS, SINGLE


class Row(NamedTuple):
    """One documented setting."""

    path: str
    type: str
    default: str
    effect: str


def rows(section: str) -> list[Row]:
    """The settings of one section."""
    return [_row(f"{section}.{setting.key}", setting) for setting in SECTIONS[section].settings]


def _row(path: str, setting: Setting) -> Row:
    default = "required" if setting.required else f"`{setting.default}`" if setting.default else ""
    return Row(path, setting.kind.label, default, setting.effect)


def all_rows() -> list[Row]:
    """Every documented setting, in the order of the documentation."""
    found = [row for section in SECTIONS for row in rows(section)]
    return found + [_row(setting.key, setting) for setting in SINGLE]


def markdown_table(section: str) -> str:
    """The table of one section, as docs/configuration.md has it."""
    lines = ["| key | type | default | effect |", "| --- | --- | --- | --- |"]
    for row in rows(section):
        key = row.path.removeprefix(f"{section}.")
        lines.append(f"| `{key}` | {row.type} | {row.default} | {row.effect} |")
    return "\n".join(lines)


def describe(path: KeyPath) -> str:
    """What a setting does, for `toolspace explain`; empty for what is no setting."""
    wanted = dotted(path)
    return next((row.effect for row in all_rows() if row.path == wanted), "")
