"""Tools and servers behind Toolspace ask the MCP client, in both eras, with the SDK's client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from tests.providers.mcp.conftest import SERVERS, ServerLog, until
from tests.server.mcp.conftest import Serve, Served
from tests.server.mcp.test_sdk_clients import both_eras
from toolspace import FORWARD_TO_CALLER, ElicitationResult, Tool, ToolContext, ToolError, Toolspace, tool

pytestmark = [pytest.mark.spec("3.16"), pytest.mark.spec("12.3")]
COLOUR = {"type": "object", "properties": {"colour": {"type": "string"}}, "required": ["colour"]}


def asking_tools() -> list[Tool]:
    @tool
    async def paint(context: ToolContext, subject: str = "it") -> str:
        """Asks for a colour."""
        answer = await context.elicit(f"Which colour for {subject}?", COLOUR)
        return f"{answer.action} {answer.content['colour']}" if answer.content else answer.action

    @tool
    async def approve(context: ToolContext) -> str:
        """Asks for a confirmation."""
        return (await context.elicit("Go on?")).action

    @tool
    async def sign_in(context: ToolContext) -> str:
        """Asks to open a URL."""
        return (await context.elicit("Sign in", url="https://example.org/in")).action

    @tool
    async def think(context: ToolContext, prompt: str) -> Any:
        """Asks the model of the client."""
        message = {"role": "user", "content": {"type": "text", "text": prompt}}
        response = await context.sample({"messages": [message], "maxTokens": 10})
        return response["content"]["text"]

    @tool
    async def folders(context: ToolContext) -> list[str]:
        """Asks for the roots of the client."""
        return list(await context.roots())

    @tool
    async def careful(context: ToolContext) -> str:
        """Asks, and continues if the caller cannot be asked."""
        try:
            await context.elicit("Which?", COLOUR)
        except ToolError as error:
            return f"alone: {error}"
        return "asked"

    @tool
    async def outer(context: ToolContext) -> Any:
        """Calls a tool that asks."""
        return (await context.call("paint", {"subject": "the inside"})).unwrap()

    return [paint, approve, sign_in, think, folders, careful, outer]


@pytest.fixture
async def asking_server(serve: Serve) -> Served:
    return await serve(Toolspace(asking_tools()))


class ClientUser:
    """The user of the client, with a model and a folder."""

    def __init__(self, answer: Mapping[str, Any] | None = None, action: Any = "accept") -> None:
        self.questions: list[types.ElicitRequestParams] = []
        self._answer = answer
        self._action = action

    async def elicit(self, _: Any, params: types.ElicitRequestParams) -> types.ElicitResult:
        self.questions.append(params)
        content: Any = dict(self._answer) if self._answer is not None else None
        return types.ElicitResult(action=self._action, content=content)

    async def sample(self, _: Any, params: types.CreateMessageRequestParams) -> types.CreateMessageResult:
        text = f"{params.messages[0].content.text}!"  # type: ignore[union-attr]
        return types.CreateMessageResult(
            role="assistant", content=types.TextContent(type="text", text=text), model="small"
        )

    async def roots(self, _: Any) -> types.ListRootsResult:
        return types.ListRootsResult(roots=[types.Root(uri="file:///home/ann")])  # type: ignore[arg-type]

    def client(self, server: Any, mode: str) -> Client:
        return Client(
            server,
            mode=mode,  # type: ignore[arg-type]
            elicitation_callback=self.elicit,
            sampling_callback=self.sample,
            list_roots_callback=self.roots,
        )


@both_eras
async def test_tool_asks_the_user_of_the_client(asking_server: Served, mode: str) -> None:
    person = ClientUser({"colour": "red"})
    async with person.client(asking_server.url, mode) as client:
        result = await client.call_tool("paint", {"subject": "the fence"})
    assert result.content[0].text == "accept red"
    (question,) = person.questions
    assert question.message == "Which colour for the fence?"
    assert isinstance(question, types.ElicitRequestFormParams)
    assert question.requested_schema == COLOUR


@both_eras
@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_declined_question_reaches_the_tool(asking_server: Served, mode: str, action: str) -> None:
    async with ClientUser(action=action).client(asking_server.url, mode) as client:
        assert (await client.call_tool("paint", {})).content[0].text == action


@both_eras
async def test_question_without_fields_and_with_a_url(asking_server: Served, mode: str) -> None:
    person = ClientUser()
    async with person.client(asking_server.url, mode) as client:
        assert (await client.call_tool("approve", {})).content[0].text == "accept"
        assert (await client.call_tool("sign_in", {})).content[0].text == "accept"
    assert [getattr(params, "url", None) for params in person.questions] == [None, "https://example.org/in"]


@both_eras
async def test_tool_uses_sampling_and_roots_of_the_client(asking_server: Served, mode: str) -> None:
    async with ClientUser().client(asking_server.url, mode) as client:
        assert (await client.call_tool("think", {"prompt": "hm"})).content[0].text == "hm!"
        folders = await client.call_tool("folders", {})
    assert json.loads(folders.content[0].text) == ["file:///home/ann"]


@both_eras
async def test_nested_call_asks_the_same_user(asking_server: Served, mode: str) -> None:
    async with ClientUser({"colour": "blue"}).client(asking_server.url, mode) as client:
        assert (await client.call_tool("outer", {})).content[0].text == "accept blue"


@both_eras
async def test_answer_that_violates_the_schema_never_reaches_the_tool(asking_server: Served, mode: str) -> None:
    async with ClientUser({"colour": 7}).client(asking_server.url, mode) as client:
        result = await client.call_tool("paint", {})
    assert result.is_error
    assert "does not fit the question: colour: expected string" in result.content[0].text


async def test_client_without_elicitation_fails_the_call(asking_server: Served) -> None:
    async with Client(asking_server.url, mode="legacy") as client:
        result = await client.call_tool("paint", {})
        assert (await client.call_tool("careful", {})).content[0].text.startswith("alone: the caller cannot be asked")
    assert result.is_error
    assert result.content[0].text.startswith("(tool failed: the caller cannot be asked")


@both_eras
async def test_concurrent_questions_reach_their_own_clients(asking_server: Served, mode: str) -> None:
    async def paint(colour: str) -> str:
        async with ClientUser({"colour": colour}).client(asking_server.url, mode) as client:
            return (await client.call_tool("paint", {})).content[0].text

    colours = [f"colour {number}" for number in range(8)]
    assert await asyncio.gather(*map(paint, colours)) == [f"accept {colour}" for colour in colours]


@pytest.fixture
def server_log(tmp_path: Path) -> ServerLog:
    return ServerLog(tmp_path / "server.log")


@pytest.fixture
def configuration(tmp_path: Path, server_log: ServerLog) -> Path:
    server = {"command": sys.executable, "args": [str(SERVERS / "scripted.py"), str(server_log.path)]}
    path = tmp_path / "toolspace.yaml"
    path.write_text(json.dumps({"mcpServers": {"up": server}}))
    return path


@pytest.fixture
async def proxy(serve: Serve, configuration: Path) -> Served:
    toolspace = Toolspace.open(configuration, callbacks=FORWARD_TO_CALLER)
    far_server = await serve(toolspace)
    await until(lambda: toolspace.find_tool("up__ask"))
    return far_server


@both_eras
async def test_question_of_a_server_behind_reaches_the_client(proxy: Served, mode: str) -> None:
    person = ClientUser({"colour": "green"})
    async with person.client(proxy.url, mode) as client:
        result = await client.call_tool("up__ask", {"text": "Which?"})
    assert json.loads(result.content[0].text) == {"action": "accept", "content": {"colour": "green"}}
    assert [params.message for params in person.questions] == ["Which?"]


@both_eras
async def test_ambiguous_question_of_a_server_behind_is_declined(
    proxy: Served, server_log: ServerLog, mode: str
) -> None:
    ann, bob = ClientUser({"colour": "red"}), ClientUser({"colour": "blue"})
    async with ann.client(proxy.url, mode) as first, bob.client(proxy.url, mode) as second:
        wait_task = asyncio.create_task(first.call_tool("up__wait", {}))
        await server_log.until("waiting")
        result = await second.call_tool("up__ask", {"text": "Which?"})
        wait_task.cancel()
        await asyncio.gather(wait_task, return_exceptions=True)
    assert json.loads(result.content[0].text) == {"action": "decline"}
    assert ann.questions == bob.questions == []


@both_eras
async def test_question_of_a_server_behind_is_declined_without_elicitation(proxy: Served, mode: str) -> None:
    async with Client(proxy.url, mode=mode) as client:  # type: ignore[arg-type]
        result = await client.call_tool("up__ask", {"text": "Which?"})
    assert json.loads(result.content[0].text) == {"action": "decline"}


@both_eras
async def test_question_of_a_server_behind_reaches_the_stdio_client(
    configuration: Path, server_log: ServerLog, mode: str
) -> None:
    person = ClientUser({"colour": "green"})
    command = StdioServerParameters(
        command=sys.executable, args=["-m", "toolspace", "--config", str(configuration), "mcp"], env=dict(os.environ)
    )
    async with person.client(stdio_client(command), mode) as client:
        # Even with abandoned calls there is no doubt about the client: a stdio server has only one.
        given_up = asyncio.create_task(client.call_tool("up__wait", {}))
        await server_log.until("waiting")
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        result = await client.call_tool("up__ask", {"text": "Which?"})
    assert json.loads(result.content[0].text) == {"action": "accept", "content": {"colour": "green"}}


@both_eras
async def test_questions_pass_through_two_toolspaces(
    serve: Serve, asking_server: Served, tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "toolspace.yaml"
    path.write_text(json.dumps({"mcpServers": {"far": {"url": asking_server.url}}}))
    near_server = await serve(Toolspace.open(path, callbacks=FORWARD_TO_CALLER))
    person = ClientUser({"colour": "green"})
    async with person.client(near_server.url, mode) as client:
        assert (await client.call_tool("far__paint", {})).content[0].text == "accept green"
        assert (await client.call_tool("far__think", {"prompt": "hm"})).content[0].text == "hm!"
        folders = await client.call_tool("far__folders", {})
    assert folders.is_error
    assert len(person.questions) == 1


async def test_program_can_answer_questions() -> None:
    class Program:
        async def elicit(self, message: str, **_: Any) -> ElicitationResult:
            return ElicitationResult(action="accept", content={"colour": message})

        async def sample(self, params: Mapping[str, Any], **_: Any) -> Mapping[str, Any]:
            return {"content": {"type": "text", "text": str(params["maxTokens"])}}

        async def roots(self, **_: Any) -> list[str]:
            return ["file:///work"]

    async with Toolspace(asking_tools()) as ts:
        context = ToolContext(caller_client=Program())
        assert (await ts.call("outer", context=context)).result == "accept Which colour for the inside?"
        assert (await ts.call("think", {"prompt": ""}, context=context)).result == "10"
        assert (await ts.call("folders", context=context)).result == ["file:///work"]
        alone = await ts.call("paint")
    assert (alone.error_kind, alone.executed) == ("execution_error", True)
    assert alone.error == "nobody can be asked: the caller of this tool accepts no requests"
