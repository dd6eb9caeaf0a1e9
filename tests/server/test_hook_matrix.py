"""Hooks and the masking of secrets hold for every interface: the same ones as in `test_policy_matrix`, and people."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.server.test_approvals import poll, read_payments
from tests.server.test_policy_matrix import INTERFACES, Interfaces, open_interfaces
from toolspace.server.gateway import Gateway

SECRET = "s3cret-of-the-shop"
TOOLS = """
from pathlib import Path
from toolspace import tool

LOG = Path(__file__).parent / "effects.txt"

@tool(visible=False)
def pay(amount: int, to: str = "shop") -> dict:
    with LOG.open("a") as file:
        file.write(f"{amount}\\n")
    text = "card " + Path(__file__).with_name("key").read_text()
    if amount > 100:
        raise ValueError(text)
    return {"paid": amount, "with": text}
"""
HOOKS = """
def add_one(call):
    return {"arguments": {**call.arguments, "amount": call.arguments["amount"] + 1}}

def overpay(call):
    return {"arguments": {**call.arguments, "amount": 1000}}

def stamp(call):
    return {"result": "stamped for " + call.principal}

def explain(call):
    return {"error": "explained by a hook"}
"""
Interface = Callable[[Interfaces], Awaitable[str]]


def write_files(folder: Path) -> dict[str, Any]:
    (folder / "shop.py").write_text(TOOLS)
    (folder / "hooks.py").write_text(HOOKS)
    (folder / "key").write_text(SECRET)
    return {"functions": ["./shop.py"], "policies": []}


def hook(on: str, function: str) -> dict[str, Any]:
    return {"on": on, "tools": ["pay", "saw"], "use": f"./hooks.py:{function}"}


async def read_outcome(interfaces: Interfaces, text: str) -> str:
    """What the caller reads; of a call that a worker executes: the result that is stored later."""
    if '"status":"pending"' not in text.replace(" ", ""):
        return text
    call_id = json.loads(text)["callId"]

    async def read_call() -> Any:
        return (await interfaces.api.get(f"/api/calls/{call_id}")).data

    return json.dumps(await poll(read_call, lambda call: call["status"] == "resolved"))


@pytest.mark.spec("23.1")
@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
async def test_before_and_after_hooks_hold_for_every_interface(tmp_path: Path, interface: Interface) -> None:
    config = write_files(tmp_path)
    hooks = [hook("before", "add_one"), hook("after", "stamp")]
    async with open_interfaces(tmp_path, hooks=hooks, **config) as interfaces:
        text = await read_outcome(interfaces, await interface(interfaces))
        assert read_payments(tmp_path) == [8]
        assert "stamped for " in text
        assert "card" not in text


@pytest.mark.spec("23.1")
@pytest.mark.parametrize("interface", [item for item in INTERFACES if item is not Interfaces.worker])
async def test_error_hooks_hold_for_every_interface(tmp_path: Path, interface: Interface) -> None:
    config = write_files(tmp_path)
    hooks = [hook("before", "overpay"), hook("error", "explain")]
    async with open_interfaces(tmp_path, hooks=hooks, **config) as interfaces:
        text = await interface(interfaces)
        assert read_payments(tmp_path) == [1000]
        assert "explained by a hook" in text
        assert "card" not in text


@pytest.mark.spec("21.3")
@pytest.mark.parametrize("fails", [False, True], ids=["result", "failure"])
@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
async def test_no_interface_shows_a_secret_that_a_tool_returns(
    tmp_path: Path, interface: Interface, fails: bool
) -> None:
    config = write_files(tmp_path)
    if fails and interface is Interfaces.worker:
        pytest.skip("the worker does not fail")
    hooks = [hook("before", "overpay")] if fails else []
    # A secret of one part of the configuration is masked in the results of all tools.
    tools = {"webSearch": {"provider": "tavily", "apiKey": "${file:key}"}}
    async with open_interfaces(tmp_path, hooks=hooks, tools=tools, **config) as interfaces:
        interfaces.worker_result = f"card {SECRET}"
        text = await read_outcome(interfaces, await interface(interfaces))
        assert "card [hidden]" in text
        assert SECRET not in text
        assert SECRET not in json.dumps(interfaces.setup.model_server.list_requests())
        for run in (await interfaces.api.get("/api/runs")).data["items"]:
            calls = (await interfaces.api.get(f"/api/runs/{run['id']}/calls")).body.decode()
            assert SECRET not in calls


async def open_call(api: ApiClient, name: str) -> str:
    reply = await api.post(f"/api/tools/{name}/call", {"args": {}})
    assert reply.status == 202, reply.body
    return reply.data["callId"]


async def wait_for_end(api: ApiClient, call_id: str) -> Any:
    async def read_call() -> Any:
        return (await api.get(f"/api/calls/{call_id}")).data

    return await poll(read_call, lambda call: call["status"] not in ("pending", "waiting"))


LATE_TOOLS = [
    {"name": "pause", "executionType": "wait", "isAsync": True, "execution": {"duration": "10ms"}},
    {"name": "pause_here", "executionType": "wait", "execution": {"duration": "10ms"}},
    {"name": "forgotten", "executionType": "external", "visible": False, "isAsync": True, "expiresAfter": "10ms"},
    {"name": "forgotten_here", "executionType": "external", "visible": False, "expiresAfter": "300ms"},
    {"name": "ask", "executionType": "space", "isAsync": True, "description": "Asks."},
]
LATE_HOOKS = """
import pathlib

log = pathlib.Path(__file__).with_name("hooks.log")

def note(call):
    with log.open("a") as file:
        file.write(f"{call.on} {call.tool.name} {call.result or call.error}\\n")

def stamp(call):
    note(call)
    return {"result": "stamped"}

def explain(call):
    note(call)
    return {"error": "explained"}
"""


def write_late_config(folder: Path, storage: dict[str, Any], *more_hooks: dict[str, Any], **config: Any) -> Path:
    (folder / "hooks.py").write_text(LATE_HOOKS)
    hooks = [{"on": "after", "use": "./hooks.py:stamp"}, {"on": "error", "use": "./hooks.py:explain"}, *more_hooks]
    return write_config(
        folder, tools=LATE_TOOLS, hooks=hooks, storage={"dir": str(folder / "state"), **storage}, **config
    )


def read_log(folder: Path) -> list[str]:
    return sorted((folder / "hooks.log").read_text().splitlines())


@pytest.mark.spec("23.1")
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_timers_and_expired_calls_pass_the_hooks_once(
    tmp_path: Path, database: str, request: pytest.FixtureRequest
) -> None:
    storage = {"url": request.getfixturevalue("postgres_url")} if database == "postgres" else {}
    path = write_late_config(tmp_path, storage)
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        call = await wait_for_end(api, await open_call(api, "pause"))
        assert (call["status"], call["result"]) == ("resolved", "stamped")
        call = await wait_for_end(api, await open_call(api, "forgotten"))
        assert (call["status"], call["result"], call["isError"]) == ("expired", "explained", True)
        # Callers that wait get the same.
        reply = await api.post("/api/tools/pause_here/call", {"args": {}})
        assert reply.data["result"] == "stamped"
        reply = await api.post("/api/tools/forgotten_here/call", {"args": {}})
        assert (reply.data["ok"], reply.data["error"]) == (False, "explained")
        lines = read_log(tmp_path)
        assert [line.rpartition(":")[0] or line for line in lines if line.startswith("after")] == [
            "after pause {'waited'",
            "after pause_here {'waited'",
        ]
        assert [line for line in lines if line.startswith("error")] == [
            "error forgotten nobody answered before the call expired",
            "error forgotten_here nobody answered before the call expired",
        ]


@pytest.mark.spec("23.1")
async def test_an_error_hook_may_return_a_result_for_an_expired_call(tmp_path: Path) -> None:
    (tmp_path / "rescue.py").write_text("def rescue(call):\n    return {'result': {'rescued': call.error}}\n")
    hooks = [{"on": "error", "use": "./rescue.py:rescue"}]
    path = write_config(tmp_path, tools=LATE_TOOLS, hooks=hooks)
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        call = await wait_for_end(api, await open_call(api, "forgotten"))
        assert (call["status"], call["isError"]) == ("resolved", False)
        assert call["result"] == {"rescued": "nobody answered before the call expired"}


@pytest.mark.spec("23.1")
async def test_a_denied_approval_passes_the_error_hooks(tmp_path: Path) -> None:
    policies = [{"tool": "pause", "decision": "ask"}]
    path = write_late_config(tmp_path, {}, policies=policies)
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        key = await api.create("/api/keys", kind="secret", name="approver")
        call_id = await open_call(api, "pause")
        approver = api.with_headers(x_secret_key=key["key"])
        assert (await approver.post(f"/api/approvals/{call_id}", {"decision": "deny", "reason": "no"})).status == 200
        call = await wait_for_end(api, call_id)
        assert (call["result"], call["errorKind"]) == ("explained", "not_permitted")
        assert read_log(tmp_path) == ["error pause Permission denied: no"]


@pytest.mark.spec("23.1", "21.3")
async def test_what_people_answer_passes_masks_and_hooks(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    (tmp_path / "hooks.py").write_text("def wrap(call):\n    return {'result': {'wrapped': call.result}}\n")
    hooks = [{"on": "after", "use": "./hooks.py:wrap"}]
    tools = {"definitions": LATE_TOOLS, "webSearch": {"provider": "tavily", "apiKey": "${file:key}"}}
    path = write_config(tmp_path, tools=tools, hooks=hooks)
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        agent = await api.create("/api/entities", type="agent", name="Ada")
        human = await api.create("/api/entities", type="human", name="Husam")
        space = await api.create("/api/spaces", name="Room", members=[agent["id"], human["id"]])
        run = await api.create("/api/runs", agentEntityId=agent["id"], spaceId=space["id"])
        reply = await api.post(f"/api/runs/{run['id']}/calls", {"name": "ask", "args": {}})
        call_id = reply.data["callId"]
        person = await api.member(human["id"])
        body = {"toolCallId": call_id, "runId": run["id"], "result": {"text": f"it is {SECRET}!"}}
        reply = await person.post(f"/api/spaces/{space['id']}/tool-results", body)
        assert reply.status == 200, reply.body
        call = (await api.get(f"/api/calls/{call_id}")).data
        assert call["result"] == {"wrapped": {"text": "it is [hidden]!"}}
