"""References to secrets in the settings of a gateway: its keys, notifications and MCP servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http_servers import http_server
from tests.server.gateway_api import SECRET, open_api, write_config
from toolspace.server.gateway import Gateway

pytestmark = [pytest.mark.spec("21.3")]
TOKEN = "webhook-token-93"


async def test_the_keys_of_a_gateway_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret-key").write_text(f"{SECRET}\n")
    path = write_config(tmp_path, server={"secretKey": "${file:secret-key}"})
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        assert (await api.get("/api/entities")).status == 200
        assert (await api.with_headers(x_secret_key="${file:secret-key}").get("/api/entities")).status == 401


async def test_a_gateway_whose_key_cannot_be_read_does_not_start(tmp_path: Path) -> None:
    path = write_config(tmp_path, server={"secretKey": "${file:missing}"})
    with pytest.raises(Exception, match=r"server\.secretKey.*there is no such file"):
        async with Gateway.open(path):
            pass


async def test_a_notification_has_the_secret_of_its_webhook(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    async with http_server() as webhook:
        settings = {"webhook": {"url": webhook.url("/hook"), "headers": {"x-token": "${file:token}"}}}
        async with Gateway.open(write_config(tmp_path, notifications=settings)) as gateway, open_api(gateway) as api:
            agent = await api.create("/api/entities", type="agent", name="Ada")
            run = await api.create("/api/runs", agentEntityId=agent["id"])
            call = {"name": "send_notification", "args": {"title": "Done", "body": "It is done."}}
            response = await api.post(f"/api/runs/{run['id']}/calls", call)
            assert response.status == 200, response.data
            assert TOKEN not in json.dumps(response.data)
        (request,) = webhook.requests
        assert request.headers["x-token"] == TOKEN
