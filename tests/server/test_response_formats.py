"""`runtime.response.type` of an agent chooses the default format of its streams."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.agents.agent import entity_id_for
from toolspace.client.client import ToolspaceClient
from toolspace.config.load import load_config
from toolspace.server.gateway import Gateway

pytestmark = pytest.mark.spec("7.5")


def _agent(format: str | None) -> dict[str, Any]:
    return {"system": "You help.", "runtime": {"response": {"type": format}} if format is not None else {}}


async def _read(api: ApiClient, path: str, query: str = "") -> str:
    """The format of a stream."""
    reply = await api.get(f"{path}?from=start&until=run.done{query}")
    assert reply.status == 200, reply
    if "x-vercel-ai-ui-message-stream" in reply.headers:
        return "ui-message-stream"
    return "native" if b"event: run.started" in reply.body else "ag-ui"


async def _open_runs(api: ApiClient, space: str, *names: str) -> Mapping[str, str]:
    """Opens and closes a run of each agent in a space with all of them; returns the paths of their streams."""
    await api.create("/api/spaces", id=space, name=space, members=[entity_id_for(name) for name in names])
    for name in names:
        run = f"run_{space}_{name}"
        await api.create("/api/runs", id=run, agentEntityId=entity_id_for(name), spaceId=space)
        await api.create(f"/api/runs/{run}/close", status="completed")
    return {name: f"/api/runs/run_{space}_{name}/events" for name in names}


async def test_the_agent_chooses_the_default_format_of_its_runs_and_spaces(tmp_path: Path) -> None:
    agents = {"ada": _agent("ui-message-stream"), "bob": _agent("ag-ui"), "eve": _agent(None)}
    async with Gateway.open(write_config(tmp_path, agents=agents)) as gateway, open_api(gateway) as api:
        paths = await _open_runs(api, "all", "ada", "bob", "eve")
        formats = {name: await _read(api, path) for name, path in paths.items()}
        assert formats == {"ada": "ui-message-stream", "bob": "ag-ui", "eve": "native"}
        assert await _read(api, "/api/spaces/all/stream") == "native"  # They do not agree.
        await _open_runs(api, "own", "ada")
        assert await _read(api, "/api/spaces/own/stream") == "ui-message-stream"
        for path in (paths["ada"], "/api/spaces/own/stream"):
            assert await _read(api, path, "&format=native") == "native"
            assert await _read(api, path, "&format=ag-ui") == "ag-ui"
        async with ToolspaceClient(api.url, secret_key=api.headers["x-secret-key"]) as client:
            async for event in client.spaces.subscribe("own", from_start=True):
                assert event.type == "run.started"  # The client reads native events unless it is told otherwise.
                break


def test_an_unknown_format_is_a_warning_and_stays_native(tmp_path: Path) -> None:
    config = load_config(write_config(tmp_path, agents={"ada": _agent("text"), "bob": {"runtime": {"memory": 1}}}))
    (warning,) = [text for text in config.warnings if "runtime" in text]
    assert "agents.ada.runtime.response.type" in warning
    assert '"text" is no format of streams' in warning
    assert [spec.response_format for spec in config.agents.values()] == [None, None]
