"""Secrets of the configuration are found, and no log shows them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from toolspace import Toolspace
from toolspace.config.environment_variables import find_secrets
from toolspace.config.load import load_config

CONFIG = """\
tools:
  webSearch: {provider: tavily, apiKey: "written-down"}
  definitions:
    - name: login
      executionType: static
      execution: {output: ok}
      inputSchema: {type: object, properties: {password: {type: string}}}
mcpServers:
  one:
    command: run
    args: ["${PLACE}", "--token=${MY_TOKEN}", "$${OTHER_TOKEN}", "${UNSET_TOKEN:-}"]
    headers: {Authorization: "Bearer ${PLAIN}"}
"""
ENVIRON = {"PLACE": "Lisbon", "MY_TOKEN": "in-a-token", "OTHER_TOKEN": "not-used", "PLAIN": "under-a-header"}


@pytest.mark.spec("4.11")
def test_secrets_are_found_by_key_or_variable_name(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(CONFIG)
    environ = {"TOOLSPACE_TOOLS_WEB_SEARCH_API_KEY": "from-outside", "TOOLSPACE_STORAGE_DIR": "/elsewhere"}
    config = load_config(path, environ=ENVIRON | environ)
    assert config.secret_values == {"written-down", "in-a-token", "under-a-header", "from-outside"}
    assert "in-a-token" not in repr(config)


@pytest.mark.spec("4.11")
async def test_secrets_of_the_configuration_are_in_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text('tools: {webSearch: {provider: tavily, apiKey: "${SEARCH}"}}\n')
    async with Toolspace.open(path, environ={"SEARCH": "search words 4711"}) as ts:
        with caplog.at_level(logging.DEBUG, logger="toolspace"):
            result = await ts.call("json_parse", {"text": "search words 4711"})
    assert not result.ok
    assert "[hidden]" in caplog.text
    assert "search words 4711" not in caplog.text


@pytest.mark.parametrize("variable", ["STRIPE_KEY", "GITHUB_PAT", "SENTRY_AUTH"])
def test_a_variable_with_a_short_name_for_a_secret_counts(variable: str) -> None:
    data = {"url": f"https://example.com/${{{variable}}}/x"}
    assert list(find_secrets(data, {variable: "value-of-it"})) == ["value-of-it"]
