"""Policies hold for every interface: library, command line, MCP, HTTP API, runs, batches, sub-agents, tasks, worker."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import types
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.cli.conftest import environment
from tests.cli.terminal import Terminal
from tests.server.gateway_api import ApiClient, write_config
from tests.server.gateway_process import start_gateway_process
from tests.server.scripted_agents import (
    ROOM,
    AgentGateway,
    agent_config,
    list_result_texts,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from tests.server.test_approvals import poll, read_payments, shop_config, wait_for_approvals
from toolspace import Toolspace, ToolspaceClient
from toolspace.client.worker import ToolWorker

pytestmark = pytest.mark.spec("20.2")
WORKER_TOOL = {
    "name": "saw",
    "executionType": "external",
    "visible": False,
    "isAsync": True,
    "inputSchema": {"type": "object", "properties": {"amount": {"type": "integer"}}},
}
ARGUMENTS = {"amount": 7}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}


class Interfaces:
    """One configuration, and a call of its tool over each interface. Each call returns what its caller reads."""

    def __init__(self, folder: Path, setup: AgentGateway) -> None:
        self.folder = folder
        self.setup = setup
        self.path = folder / "toolspace.json"
        self.worker_result = "paid"

    @property
    def api(self) -> ApiClient:
        return self.setup.api

    async def library(self) -> str:
        async with Toolspace.open(self._own_state(), environ={}) as ts:
            return (await ts.call("pay", ARGUMENTS)).text

    async def command_line(self) -> str:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "toolspace",
                "--config",
                str(self._own_state()),
                "call",
                "pay",
                "amount=7",
                "--json",
            ),
            cwd=self.folder,
            env=environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        return output.decode()

    async def mcp_stdio(self) -> str:
        command = StdioServerParameters(
            command=sys.executable,
            args=["-m", "toolspace", "--config", str(self._own_state()), "mcp"],
            env=environment(),
            cwd=self.folder,
        )
        async with Client(stdio_client(command), mode="legacy") as client:
            return str((await client.call_tool("pay", ARGUMENTS)).content[0])

    async def mcp_http(self) -> str:
        headers = {
            **self.api.headers,
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": "2026-07-28",
            "mcp-method": "tools/call",
            "mcp-name": "pay",
        }
        params = {"name": "pay", "arguments": ARGUMENTS, "_meta": META}
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        return (await self.api.post("/mcp", body, headers=headers)).body.decode()

    async def http_api(self) -> str:
        return (await self.api.post("/api/tools/pay/call", {"args": ARGUMENTS})).body.decode()

    async def run_of_a_program(self) -> str:
        agent = await self.api.create("/api/entities", type="agent", name="Program")
        run = await self.api.create("/api/runs", agentEntityId=agent["id"])
        reply = await self.api.post(f"/api/runs/{run['id']}/calls", {"name": "pay", "args": ARGUMENTS})
        return reply.body.decode()

    async def run_of_an_agent(self) -> str:
        return await self._let_agent_call(("pay", ARGUMENTS))

    async def batch(self) -> str:
        return await self._let_agent_call(
            ("agent__batch", {"calls": [{"id": "1", "tool": "pay", "parameters": ARGUMENTS}]})
        )

    async def subagent(self) -> str:
        self.setup.model_server.script(tool_calls_turn(("pay", ARGUMENTS)), "I tried.", model="of-bob")
        await self._let_agent_call(("agent__bob", {"prompt": "Pay.", "reason": "why"}), waits=False)
        return await self._read_result("of-bob")

    async def task(self) -> str:
        # The task and the agent ask the same model: whoever comes second, pays.
        self.setup.model_server.script(
            tool_calls_turn(("spawn_task", {"description": "pay", "input": "Pay."})),
            tool_calls_turn(("pay", ARGUMENTS)),
        )
        await self.setup.say("Let it be paid.")
        return await self._read_result("m", result_number=2)

    async def worker(self) -> str:
        worker = ToolWorker(self.api.url, secret_key=self.api.headers["x-secret-key"])

        @worker.tool("saw")
        async def saw(amount: int) -> str:
            with (self.folder / "effects.txt").open("a") as file:
                file.write(f"{amount}\n")
            return self.worker_result

        worker_task = asyncio.create_task(worker.run())
        try:
            await worker.ready.wait()
            reply = await self.api.post("/api/tools/saw/call", {"args": ARGUMENTS})
            if reply.status == 202 and not (await self.api.get("/api/approvals")).data["items"]:
                await poll(lambda: asyncio.to_thread(read_payments, self.folder), bool)
            return reply.body.decode()
        finally:
            worker_task.cancel()
            await asyncio.gather(worker_task, return_exceptions=True)

    def _own_state(self) -> Path:
        """The same configuration, with a state directory of its own."""
        config = json.loads(self.path.read_text())
        path = self.folder / "other.json"
        path.write_text(json.dumps({**config, "storage": {"dir": str(self.folder / "other")}}))
        return path

    async def _let_agent_call(self, call: tuple[str, Mapping[str, Any]], *, waits: bool = True) -> str:
        self.setup.model_server.script(tool_calls_turn(call), "Done.")
        await self.setup.say("Pay.")
        return await self._read_result("m") if waits else ""

    async def _read_result(self, model: str, result_number: int = 1) -> str:
        """What the model reads as the result; or `pending`, if somebody is asked."""

        async def read() -> str | None:
            if (await self.api.get("/api/approvals")).data["items"]:
                return '"status":"pending"'
            for request in self.setup.model_server.list_requests(model):
                if texts := list_result_texts(request)[result_number - 1 :]:
                    return texts[0]
            return None

        return await poll(read, lambda text: text is not None)


@asynccontextmanager
async def open_interfaces(folder: Path, **config: Any) -> AsyncGenerator[Interfaces]:
    async with open_model_server() as model_server:
        tools = {"definitions": [WORKER_TOOL], **config.pop("tools", {})}
        config = shop_config(folder, tools=tools, storage={"dir": str(folder / "state")}, **config)
        agents = {
            "ada": agent_config(model_server, agents=["bob"], tools=["spawn_task"]),
            "bob": agent_config(model_server, model={"name": "of-bob"}, spaces=[]),
        }
        async with open_agent_gateway(folder, model_server, agents=agents, **config) as setup:
            yield Interfaces(folder, setup)


INTERFACES: list[Callable[[Interfaces], Awaitable[str]]] = [
    Interfaces.library,
    Interfaces.command_line,
    Interfaces.mcp_stdio,
    Interfaces.mcp_http,
    Interfaces.http_api,
    Interfaces.run_of_a_program,
    Interfaces.run_of_an_agent,
    Interfaces.batch,
    Interfaces.subagent,
    Interfaces.task,
    Interfaces.worker,
]
WITHOUT_GATEWAY = (Interfaces.library, Interfaces.command_line, Interfaces.mcp_stdio)


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda interface: interface.__name__)
@pytest.mark.parametrize("decision", ["allow", "ask", "deny"])
async def test_a_policy_holds_for_every_interface(
    tmp_path: Path, decision: str, interface: Callable[[Interfaces], Awaitable[str]]
) -> None:
    policies = [{"tool": ["pay", "saw"], "decision": decision}]
    async with open_interfaces(tmp_path, policies=policies) as interfaces:
        text = await interface(interfaces)
        if decision == "allow":
            assert "paid" in text or "pending" in text
            assert read_payments(tmp_path) == [7]
            return
        assert read_payments(tmp_path) == []
        if decision == "deny":
            assert "denied by a policy" in text
        elif interface in WITHOUT_GATEWAY:
            assert "needs approval" in text
        else:
            assert "pending" in text
            [approval] = await wait_for_approvals(interfaces.setup, 1)
            assert approval["args"] == ARGUMENTS
            key = await interfaces.api.create("/api/keys", kind="secret", name="approver")
            async with ToolspaceClient(interfaces.api.url, secret_key=key["key"]) as client:
                [approval_record] = (await client.approvals.list()).items
                await client.approvals.decide(approval_record.id, "deny", reason="not like this")
            assert read_payments(tmp_path) == []


class User:
    """The user of an MCP client, who is asked."""

    def __init__(self, *, approves: bool) -> None:
        self.questions: list[str] = []
        self._approves = approves

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.questions.append(params.message)
        return types.ElicitResult(action="accept", content={"approve": self._approves})


@pytest.mark.parametrize("mode", ["legacy", "auto"])
@pytest.mark.parametrize("approves", [True, False])
@pytest.mark.parametrize("approvers", ["caller", "operators"])
async def test_an_mcp_client_is_asked_only_where_the_rule_names_the_caller(
    tmp_path: Path, mode: Any, approves: bool, approvers: str
) -> None:
    rule = {"tool": "pay", "decision": "ask", "approvers": approvers}
    path = tmp_path / "toolspace.json"
    path.write_text(json.dumps(shop_config(tmp_path, policies=[rule])))
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "toolspace", "--config", str(path), "mcp"],
        env=environment(),
        cwd=tmp_path,
    )
    user = User(approves=approves)
    async with Client(stdio_client(command), mode=mode, elicitation_callback=user.elicit) as client:
        result = await client.call_tool("pay", ARGUMENTS)
    runs = approves and approvers == "caller"
    assert (result.is_error, read_payments(tmp_path)) == (not runs, [7] if runs else [])
    assert len(user.questions) == (1 if approvers == "caller" else 0)
    if user.questions:
        assert '"amount":7' in user.questions[0]


@pytest.mark.parametrize("has_gateway", [False, True])
async def test_an_mcp_server_without_a_store_says_where_a_call_can_be_approved(
    tmp_path: Path, has_gateway: bool
) -> None:
    path = tmp_path / "toolspace.json"
    path.write_text(json.dumps(shop_config(tmp_path)))
    command = StdioServerParameters(
        command=sys.executable,
        args=["-m", "toolspace", "--config", str(path), "mcp"],
        env=environment(),
        cwd=tmp_path,
    )
    async with AsyncExitStack() as stack:
        place = "start toolspace serve with this configuration"
        if has_gateway:
            gateway = await stack.enter_async_context(start_gateway_process(tmp_path, path))
            place = f"connect this client to {gateway.url}/mcp, the gateway of this configuration"
        client = await stack.enter_async_context(Client(stdio_client(command)))
        result = await client.call_tool("pay", ARGUMENTS)
    text = str(result.content)
    assert result.is_error
    assert 'the tool "pay" needs approval by operators' in text
    assert place in text
    assert "set approvers: caller in the rule" in text
    assert read_payments(tmp_path) == []


@pytest.mark.parametrize("answer", ["y", "n"])
def test_the_person_at_the_terminal_is_asked(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "toolspace.json"
    path.write_text(json.dumps(shop_config(tmp_path)))
    words = ("--config", str(path), "call", "pay", "amount=7")
    with Terminal(*words, cwd=tmp_path, environ=environment(TERM="xterm"), columns=200) as terminal:
        terminal.wait_for("[y/N]")
        assert read_payments(tmp_path) == []
        terminal.type(f"{answer}\n")
        assert terminal.end() == (0 if answer == "y" else 1)
    assert read_payments(tmp_path) == ([7] if answer == "y" else [])


def test_a_terminal_does_not_approve_what_only_others_may(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.json"
    path.write_text(
        json.dumps(shop_config(tmp_path, policies=[{"tool": "pay", "decision": "ask", "approvers": "ann"}]))
    )
    words = ("--config", str(path), "call", "pay", "amount=7")
    with Terminal(*words, cwd=tmp_path, environ=environment(TERM="xterm"), columns=200) as terminal:
        assert terminal.end() == 1
        assert "needs the approval of ann" in terminal.output
    assert read_payments(tmp_path) == []


@pytest.mark.spec("20.4")
@pytest.mark.parametrize("answer", ["y", "n"])
async def test_the_person_in_a_chat_is_asked(tmp_path: Path, answer: str) -> None:
    async with open_model_server() as model_server:
        model_server.script(
            tool_calls_turn(("enter_space", {"spaceId": ROOM})),
            tool_calls_turn(("pay", ARGUMENTS)),
            tool_calls_turn(("send_message", {"text": "Finished."})),
            "Done.",
        )
        write_config(tmp_path, **shop_config(tmp_path, agents={"ada": agent_config(model_server)}))
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "toolspace", "chat", "--config", str(tmp_path / "toolspace.json"), "ada"),
            *("--space", ROOM),
            cwd=tmp_path,
            env={**environment(), "XDG_STATE_HOME": str(tmp_path / "state")},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate(f"Pay.\n{answer}\n".encode())
        assert "? pay" in errors.decode()
        assert "it needs approval: money" in errors.decode()
        assert output.decode() == "Finished.\n", errors.decode()
        request = next(request for request in model_server.list_requests() if len(list_result_texts(request)) == 2)
        assert ("(tool failed: Permission denied" in list_result_texts(request)[1]) == (answer == "n")
    assert read_payments(tmp_path) == ([7] if answer == "y" else [])
