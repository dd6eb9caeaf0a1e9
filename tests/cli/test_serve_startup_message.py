"""What `toolspace serve` prints about its agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.gateway_api import write_config
from tests.server.gateway_process import start_gateway_process
from toolspace.models.registry import PROVIDERS

pytestmark = [pytest.mark.spec("11.7"), pytest.mark.spec("17.1")]

NO_KEYS = {variable: "" for provider in PROVIDERS.values() for variable in provider.key_variables}


async def test_without_a_model_key_the_startup_message_names_the_variables_and_the_chat_command(tmp_path: Path) -> None:
    async with start_gateway_process(tmp_path, environ=NO_KEYS) as gateway:
        text = "\n".join(gateway.stderr_lines)
    assert 'The agent Demo is in the space "Lobby". It follows a few fixed rules: no API key of a model is set.' in text
    assert f"OPENAI_API_KEY     openai:{PROVIDERS['openai'].default_model}" in text
    assert f"GEMINI_API_KEY     google:{PROVIDERS['google'].default_model}" in text
    assert "\n  toolspace chat\n" in text


async def test_with_a_model_key_the_startup_message_names_the_model(tmp_path: Path) -> None:
    async with start_gateway_process(tmp_path, environ={**NO_KEYS, "ANTHROPIC_API_KEY": "sk-ant-none"}) as gateway:
        text = "\n".join(gateway.stderr_lines)
    assert f'The agent Demo is in the space "Lobby", and uses anthropic:{PROVIDERS["anthropic"].default_model}.' in text
    assert "sk-ant-none" not in text


async def test_configured_agents_are_listed(tmp_path: Path) -> None:
    config = write_config(tmp_path, agents={"ann": {"model": "demo"}, "bob jones": {"model": "demo"}})
    async with start_gateway_process(tmp_path, config) as gateway:
        text = "\n".join(gateway.stderr_lines)
    assert "Agents: ann, bob jones. To chat with one, in another terminal:\n  toolspace chat ann\n" in text
    assert "Lobby" not in text


async def test_agents_without_a_usable_model_are_listed_with_the_reason(tmp_path: Path) -> None:
    agents = {"ann": {"model": "demo"}, "bob": {"model": "openai:gpt-5"}, "eve": {"model": "openai:gpt-5"}}
    async with start_gateway_process(tmp_path, write_config(tmp_path, agents=agents), environ=NO_KEYS) as gateway:
        text = "\n".join(gateway.stderr_lines)
    assert (
        "Agents without a usable model (toolspace doctor says more):\n  bob, eve: openai:gpt-5: no key is set" in text
    )
    assert "OPENAI_API_KEY" in text
