"""Hooks of a configuration: functions, webhooks and the included ones."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web

from tests.http_servers import http_server
from tests.setting_coverage import SettingCoverage
from toolspace import ConfigError, ToolContext, Toolspace

pytestmark = pytest.mark.spec("23.1")

TOOLS = """
from toolspace import tool, ToolExecutionError

@tool
async def find(name: str) -> dict:
    return {"name": name, "mail": name + "@example.com"}

@tool
async def lose(name: str) -> str:
    raise ToolExecutionError("no user " + name + "@example.com")
"""
HOOKS = """
from toolspace import HookDecision

def deny(call):
    return HookDecision(deny="no " + call.arguments["name"])

async def shout(call):
    return {"result": {key: str(value).upper() for key, value in call.result.items()}}

def explode(call):
    raise RuntimeError("boom")

async def hang(call):
    import asyncio
    await asyncio.Event().wait()

def two(call, other):
    pass

number = 5
"""

coverage = SettingCoverage()
OpenToolspace = Callable[..., Toolspace]


@pytest.fixture
def open_toolspace(tmp_path: Path) -> OpenToolspace:
    (tmp_path / "tools.py").write_text(TOOLS)
    (tmp_path / "hooks.py").write_text(HOOKS)
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "guard.py").write_text(HOOKS)

    def open_with(*hooks: Any, **config: Any) -> Toolspace:
        path = tmp_path / "toolspace.yaml"
        path.write_text(yaml.safe_dump({"functions": "./tools.py", "hooks": list(hooks), **config}))
        return Toolspace.open(path, environ={"HOME": str(tmp_path), "PATH": os.environ["PATH"], "KEY": "s3cret-value"})

    return open_with


@coverage.covers("hooks.on", "hooks.use", "hooks.tools")
@pytest.mark.parametrize("use", ["./hooks.py:deny", "team.guard:deny"])
async def test_a_function_of_a_file_or_module_is_a_hook(open_toolspace: OpenToolspace, use: str) -> None:
    hooks = [{"on": "before", "use": use, "tools": "los*"}, {"on": "after", "use": "./hooks.py:shout"}]
    async with open_toolspace(*hooks) as ts:
        assert (await ts.call("find", {"name": "carla"})).result == {"name": "CARLA", "mail": "CARLA@EXAMPLE.COM"}
        assert (await ts.call("lose", {"name": "carla"})).error == "Permission denied: no carla"


@coverage.covers("hooks.onFailure", "hooks.timeout")
async def test_a_failing_hook_passes_or_denies(open_toolspace: OpenToolspace) -> None:
    for use in ("./hooks.py:explode", "./hooks.py:hang"):
        hook = {"on": "before", "use": use, "timeout": "20ms"}
        async with open_toolspace(hook) as ts:
            assert (await ts.call("find", {"name": "x"})).error_kind == "not_permitted"
        async with open_toolspace({**hook, "onFailure": "open"}) as ts:
            assert (await ts.call("find", {"name": "x"})).ok


async def test_the_key_on_needs_no_quotes(open_toolspace: OpenToolspace, tmp_path: Path) -> None:
    open_toolspace()
    (tmp_path / "toolspace.yaml").write_text(
        "functions: ./tools.py\nhooks:\n  - {on: after, tools: find, use: mask_personal_data}\n"
    )
    async with Toolspace.open(tmp_path / "toolspace.yaml") as ts:
        assert (await ts.call("find", {"name": "carla"})).result == {"name": "carla", "mail": "[email]"}


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ({"on": "befor", "use": "a:b"}, 'hooks[0].on: expected one of before, after, error, got "befor"'),
        ({"on": "after"}, 'hooks[0]: "use" is missing'),
        ({"on": "after", "use": "mask_secret"}, 'did you mean "mask_secrets"?'),
        ({"on": "after", "use": "no function"}, "hooks[0].use: expected module:function"),
        ({"on": "before", "use": "mask_secrets"}, "hooks[0].on: mask_secrets masks results"),
        ({"on": "after", "use": "https://"}, "hooks[0].use: expected"),
        ({"on": "after", "use": "a:b", "headers": {"x": "y"}}, "only a webhook has headers"),
        ({"on": "after", "use": "a:b", "onFailure": "maybe"}, "hooks[0].onFailure: expected one of open, closed"),
        ({"on": "after", "use": "a:b", "tool": "x"}, 'unknown key; did you mean "tools"?'),
        ({"on": "after", "use": "./hooks.py:denny"}, "there is no 'denny' in it; did you mean"),
        ({"on": "after", "use": "./nowhere.py:x"}, "there is no file"),
        ({"on": "after", "use": "./hooks.py:number"}, "a int is no hook"),
        ({"on": "after", "use": "./hooks.py:two"}, "a hook is a function with one parameter"),
        ({"on": "after", "use": "nowhere:x"}, "No module named 'nowhere'"),
    ],
)
def test_a_wrong_hook_is_an_error_with_file_line_and_value(
    open_toolspace: OpenToolspace, hook: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        open_toolspace(hook)
    assert message in str(error.value)
    assert "toolspace.yaml:" in str(error.value)


@pytest.mark.spec("5.4")
async def test_a_reload_applies_other_hooks(open_toolspace: OpenToolspace, tmp_path: Path) -> None:
    async with open_toolspace(tools={"overrides": {"find": {"cache": "1h"}}}) as ts:
        assert (await ts.call("find", {"name": "a"})).result["mail"] == "a@example.com"
        open_toolspace({"on": "after", "use": "mask_personal_data"}, tools={"overrides": {"find": {"cache": "1h"}}})
        await ts.reload()
        assert (await ts.call("find", {"name": "a"})).result["mail"] == "[email]"
        (tmp_path / "hooks.py").write_text("def deny(call):\n    return {'deny': 'new code'}\n")
        open_toolspace({"on": "before", "use": "./hooks.py:deny"})
        await ts.reload()
        assert (await ts.call("find", {"name": "a"})).error == "Permission denied: new code"


async def test_masks_hold_for_results_and_failures_of_every_cache(open_toolspace: OpenToolspace) -> None:
    storage = {"dir": "./state", "cache": "disk"}
    tools = {"overrides": {"find": {"cache": "1h"}}}
    async with open_toolspace(storage=storage, tools=tools) as ts:
        assert "carla@" in (await ts.call("find", {"name": "carla"})).text
    async with open_toolspace({"on": "after", "use": "mask_personal_data"}, storage=storage, tools=tools) as ts:
        for _ in range(2):
            assert (await ts.call("find", {"name": "carla"})).result == {"name": "carla", "mail": "[email]"}
        failure = await ts.call("lose", {"name": "carla"})
        assert (failure.error, failure.error_kind) == ("no user [email]", "execution_error")


async def test_configured_secrets_are_masked_in_results(open_toolspace: OpenToolspace) -> None:
    server = {"url": "http://127.0.0.1:1/", "headers": {"authorization": "${KEY}"}, "enabled": False}
    async with open_toolspace({"on": "after", "use": "mask_secrets"}, mcpServers={"x": server}) as ts:
        assert (await ts.call("find", {"name": "is s3cret-value"})).result["name"] == "is [hidden]"


async def test_file_tools_cannot_write_the_file_of_a_hook(open_toolspace: OpenToolspace, tmp_path: Path) -> None:
    async with open_toolspace(
        {"on": "before", "use": "./hooks.py:deny", "tools": "nothing"}, tools={"allowedPaths": ["."]}
    ) as ts:
        result = await ts.call("write_file", {"path": str(tmp_path / "hooks.py"), "content": "def deny(call): pass"})
        assert result.error_kind == "not_permitted"
        assert (await ts.call("write_file", {"path": str(tmp_path / "notes.txt"), "content": "x"})).ok


# Webhooks


@coverage.covers("hooks.headers")
async def test_a_webhook_gets_the_call_and_decides(open_toolspace: OpenToolspace) -> None:
    replies: list[Any] = [
        {"arguments": {"name": "dave"}},
        {"result": "changed"},
        None,
        None,
        {"deny": "not today"},
        {"error": "somebody is missing"},
    ]

    async def respond(request: web.Request) -> web.Response:
        reply = replies.pop(0)
        return web.Response(status=204) if reply is None else web.json_response(reply)

    async with http_server(respond) as server:
        hooks = [
            {"on": on, "use": server.url(f"/{on}?token=abc"), "headers": {"authorization": "Bearer ${KEY}"}}
            for on in ("before", "after", "error")
        ]
        async with open_toolspace(*hooks) as ts:
            carla = ToolContext(user_id="ent_carla")
            run = ts.run(context=carla)
            assert (await run.call("find", {"name": "carla"}, call_id="call_1")).result == "changed"
            assert (await ts.call("find", {"name": "carla"})).result["name"] == "carla"
            denied = await ts.call("find", {"name": "carla"}, context=carla)
            assert (denied.error, denied.error_kind) == ("somebody is missing", "not_permitted")
    before, after, *_ = server.requests
    assert (before.method, before.target) == ("POST", "/before?token=abc")
    assert before.headers["authorization"] == "Bearer s3cret-value"
    body = json.loads(before.body)
    assert {**body, "tool": body["tool"]["name"]} == {
        "on": "before",
        "tool": "find",
        "callId": "call_1",
        "runId": run.id,
        "agentEntityId": None,
        "spaceId": None,
        "principal": "ent_carla",
        "arguments": {"name": "carla"},
    }
    assert body["tool"]["inputSchema"]["required"] == ["name"]
    body = json.loads(after.body)
    assert (body["arguments"], body["result"]["mail"], body["executed"]) == (
        {"name": "dave"}, "dave@example.com", True,
    )  # fmt: skip


async def _redirect(request: web.Request) -> web.Response:
    return web.Response(status=307, headers={"location": "/other"})


async def _fail(request: web.Request) -> web.Response:
    return web.Response(status=500, text="boom")


async def _send_text(request: web.Request) -> web.Response:
    return web.Response(text="ok")


async def _send_list(request: web.Request) -> web.Response:
    return web.json_response(["deny"])


async def _send_unknown_key(request: web.Request) -> web.Response:
    return web.json_response({"action": "pass"})


async def _hang(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise NotImplementedError


@pytest.mark.parametrize("respond", [_redirect, _fail, _send_text, _send_list, _send_unknown_key, _hang])
async def test_a_failing_webhook_denies_or_passes(
    open_toolspace: OpenToolspace, respond: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_server(respond) as server:
        hook = {"on": "before", "use": server.url("/check?api_key=topsecret"), "timeout": "300ms"}
        with caplog.at_level(logging.WARNING, "toolspace.hooks"):
            async with open_toolspace(hook) as ts:
                result = await ts.call("find", {"name": "x"})
                assert (result.error_kind, result.executed) == ("not_permitted", False)
                assert "the before-hook webhook: it " in (result.error or "")
                assert "127.0.0.1" not in (result.error or "")
            async with open_toolspace({**hook, "onFailure": "open"}) as ts:
                assert (await ts.call("find", {"name": "x"})).ok
    assert {request.path for request in server.requests} == {"/check"}
    assert "topsecret" not in caplog.text
    assert "hooks" in caplog.text


async def test_a_webhook_that_does_not_exist_denies(open_toolspace: OpenToolspace) -> None:
    async with http_server() as server:
        url = server.url()
    async with open_toolspace({"on": "after", "use": url}) as ts:
        result = await ts.call("find", {"name": "x"})
        assert (result.error_kind, result.executed) == ("not_permitted", True)


def test_every_setting_of_hooks_has_a_test() -> None:
    assert coverage.list_missing("hooks.") == []
