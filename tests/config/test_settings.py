"""The table of settings, the typed sections, the documentation and the starter file agree."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from toolspace.config.documentation import describe_setting, list_all_rows, render_starter_file, render_table
from toolspace.config.environment import list_variables
from toolspace.config.load import load_config
from toolspace.config.reader import ReadingContext, Value
from toolspace.config.tool_settings import SECTIONS, SINGLE

DOCS = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

NOT_WRITTEN = {"name", "extra", "pauses_run"}
"""Fields that no key gives: the name of the entry, what is left over, what follows from others."""


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_has_its_setting(section: str) -> None:
    record = SECTIONS[section]
    fields = {field.name for field in msgspec.structs.fields(record.struct)}
    written = {setting.attribute for setting in record.settings}
    assert fields - written <= NOT_WRITTEN
    assert written <= fields


@pytest.mark.parametrize("section", SECTIONS)
def test_the_documented_default_is_the_one_that_holds(section: str) -> None:
    from toolspace.config.document import EMPTY

    record = SECTIONS[section]
    fields = {field.name: field for field in msgspec.structs.fields(record.struct)}
    for setting in record.settings:
        field = fields[setting.attribute]
        assert setting.effect.endswith("."), setting.key
        if setting.required or not setting.default:
            continue
        written = yaml.safe_load(setting.default)
        value = Value(written, ReadingContext(EMPTY, base_dir=Path()))
        assert (None if written is None else setting.kind.read(value)) == field.default, setting.key


@pytest.mark.spec("5.1")
@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_documented(section: str) -> None:
    assert render_table(section) in DOCS, f"docs/configuration.md lacks this table:\n{render_table(section)}"


def test_every_section_has_its_heading() -> None:
    for section in [*SECTIONS, *(setting.key for setting in SINGLE)]:
        assert re.search(rf"^##+ `{re.escape(section.removesuffix('.<name>'))}`", DOCS, re.MULTILINE), section


@pytest.mark.spec("17.3")
def test_every_variable_is_documented() -> None:
    for variable in list_variables():
        assert f"`{variable}`" in DOCS, variable


def test_every_example_of_the_documentation_loads(tmp_path: Path) -> None:
    examples = re.findall(r"^```(yaml|json|toml)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 12
    known = dict.fromkeys(re.findall(r"\$\{([A-Z_]+)\}", DOCS), "value")
    for number, (suffix, text) in enumerate(examples):
        path = tmp_path / f"example{number}.{suffix}"
        path.write_text(text)
        assert load_config(path, environ=known).warnings == (), text


def test_a_setting_describes_itself() -> None:
    assert describe_setting(("defaults", "toolTimeout")) == "How long one call may take."
    assert describe_setting(("nothing",)) == ""
    assert len({row.path for row in list_all_rows()}) == len(list_all_rows())


@pytest.mark.spec("17.1")
def test_the_starter_file_changes_nothing_until_a_line_is_taken_in(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(render_starter_file())
    config = load_config(path, environ={})
    assert config.defaults == load_config(None, environ={}).defaults
    assert config.mcp_servers == {}


def test_the_starter_file_loads_with_every_line_taken_in(tmp_path: Path) -> None:
    text = render_starter_file()
    path = tmp_path / "toolspace.yaml"
    path.write_text(re.sub(r"^#(?! )|^#(?=  )", "", text, flags=re.MULTILINE))
    config = load_config(path, environ={})
    assert config.warnings == ()
    assert config.defaults == load_config(None, environ={}).defaults
    assert all((config.mcp_servers, config.rest_tools, config.openapi))
    assert config.agents["assistant"].agents == ("researcher",)
    assert config.functions == ("./tools.py", "my_package.tools:search")
