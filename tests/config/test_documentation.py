"""The declared settings, the documentation, the starter file and the environment variables agree."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
import yaml

from toolspace.config.configuration import SECTIONS, SINGLE_SETTINGS
from toolspace.config.documentation import (
    list_all_rows,
    render_starter_file,
    render_table,
    render_variables_table,
)
from toolspace.config.environment_variables import list_variables
from toolspace.config.file_formats import EMPTY
from toolspace.config.load import load_config
from toolspace.config.validation import ReadingContext, Value

DOCS = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()

DERIVED_FIELDS = {"name", "names", "extra", "pauses_run"}
"""Fields without a setting: the name of the entry, the names in a list, the unknown keys, and what follows from other
settings."""


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_declares_a_setting(section: str) -> None:
    section_type = SECTIONS[section]
    fields = {field.name for field in msgspec.structs.fields(section_type.section)}
    attributes = {setting.attribute for setting in section_type.settings}
    assert fields - attributes <= DERIVED_FIELDS
    assert attributes <= fields


@pytest.mark.parametrize("section", SECTIONS)
def test_the_documented_default_is_the_one_in_force(section: str) -> None:
    section_type = SECTIONS[section]
    fields = {field.name: field for field in msgspec.structs.fields(section_type.section)}
    for setting in section_type.settings:
        assert setting.effect.endswith("."), setting.key
        if setting.is_required or not setting.default_text:
            continue
        data = yaml.safe_load(setting.default_text)
        value = Value(data, ReadingContext(EMPTY, base_dir=Path()))
        expected = fields[setting.attribute].default
        assert (None if data is None else setting.value_type.read(value)) == expected, setting.key


@pytest.mark.spec("5.1")
@pytest.mark.parametrize("section", SECTIONS)
def test_every_setting_is_documented(section: str) -> None:
    assert render_table(section) in DOCS, f"docs/configuration.md lacks this table:\n{render_table(section)}"


def test_every_section_has_its_heading() -> None:
    for section in [*SECTIONS, *(setting.key for setting in SINGLE_SETTINGS)]:
        heading = re.escape(section.removesuffix(".<name>").removesuffix("[]"))
        assert re.search(rf"^##+ `{heading}`", DOCS, re.MULTILINE), section


@pytest.mark.spec("17.3")
def test_every_variable_is_documented() -> None:
    assert len(list_variables()) > 60
    assert render_variables_table() in DOCS, f"docs/configuration.md lacks this table:\n{render_variables_table()}"


def test_every_example_of_the_documentation_loads(tmp_path: Path) -> None:
    examples = re.findall(r"^```(yaml|json|toml)\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 12
    environ = dict.fromkeys(re.findall(r"\$\{([A-Z_]+)\}", DOCS), "value")
    for number, (suffix, text) in enumerate(examples):
        path = tmp_path / f"example{number}.{suffix}"
        path.write_text(text)
        assert load_config(path, environ=environ).warnings == (), text


def test_every_setting_has_one_row_with_its_effect() -> None:
    effects = {row.path: row.effect for row in list_all_rows()}
    assert effects["defaults.toolTimeout"] == "How long one call may take."
    assert all(effects.values())
    assert len({row.path for row in list_all_rows()}) == len(list_all_rows())


@pytest.mark.spec("17.1")
def test_the_starter_file_changes_nothing_until_a_line_is_uncommented(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(render_starter_file())
    config = load_config(path, environ={})
    assert config.defaults == load_config(None, environ={}).defaults
    assert config.mcp_servers == {}


def test_the_starter_file_loads_with_every_line_uncommented(tmp_path: Path) -> None:
    text = render_starter_file()
    path = tmp_path / "toolspace.yaml"
    path.write_text(re.sub(r"^#(?! )|^#(?=  )", "", text, flags=re.MULTILINE))
    config = load_config(path, environ={})
    assert config.warnings == ()
    assert config.defaults == load_config(None, environ={}).defaults
    assert all((config.mcp_servers, config.rest_tools, config.openapi))
    assert config.agents["assistant"].agents == ("researcher",)
    assert config.functions == ("./tools.py", "my_package.tools:search")
