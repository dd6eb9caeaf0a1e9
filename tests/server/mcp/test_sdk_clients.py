"""The MCP SDK's client, in both eras, against a served toolspace."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from mcp.client.client import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import ToolsListChanged

from tests.server.mcp.conftest import Serve, Served
from toolspace import Tool, ToolProvider, Toolspace, tool

pytestmark = pytest.mark.spec("12.3")
MODES = ["legacy", "auto", "2026-07-28"]
both_eras = pytest.mark.parametrize("mode", MODES)


class ProgressRecorder:
    """Records the progress that the client receives, which may be after the result."""

    def __init__(self, expected: int) -> None:
        self.reports: list[tuple[float, float | None, str | None]] = []
        self.all = asyncio.Event()
        self._expected = expected

    async def __call__(self, progress: float, total: float | None, message: str | None) -> None:
        self.reports.append((progress, total, message))
        if len(self.reports) == self._expected:
            self.all.set()


@both_eras
async def test_tools_are_listed_with_annotations_and_schemas(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        tools = {entry.name: entry for entry in (await client.list_tools()).tools}
    assert list(tools) == sorted(tools)
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].input_schema["required"] == ["a", "b"]
    assert tools["add"].annotations is not None
    assert tools["add"].annotations.read_only_hint is True
    assert tools["add"].output_schema is None
    assert tools["weather"].output_schema is not None
    assert "agent__final_report" not in tools


@both_eras
async def test_result_has_text_and_structured_content(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        await client.list_tools()  # From now on the client validates results against the schemas.
        number = await client.call_tool("add", {"a": 1, "b": "2"})
        weather = await client.call_tool("weather", {"city": "Ulm"})
    assert number.content[0].text == "3"
    assert number.structured_content is None
    assert weather.structured_content == {"city": "Ulm", "degrees": 21.5}
    assert weather.content[0].text == '{"city":"Ulm","degrees":21.5}'
    assert not number.is_error


@both_eras
async def test_typed_parts_are_kept(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        result = await client.call_tool("picture", {})
    assert [part.type for part in result.content] == ["text", "image", "resource", "resource_link"]
    assert result.content[1].data == "aGVsbG8="
    assert result.content[2].resource.text == "inside"
    assert result.content[3].uri == "https://example.org/b"


@both_eras
async def test_failure_is_a_result_for_the_model(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        failed = await client.call_tool("fails", {})
        wrong = await client.call_tool("add", {"a": "x"})
    assert failed.is_error
    assert failed.content[0].text == "(tool failed: the printer is on fire)"
    assert wrong.is_error
    assert wrong.content[0].text.startswith("(tool failed: Parameter validation failed: a: ")


@both_eras
async def test_unknown_tool_is_an_error_with_similar_names(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        for name, message in [("ad", 'Tool "ad" not found; did you mean "add"?'), ("agent__final_report", "not found")]:
            with pytest.raises(MCPError) as error_info:
                await client.call_tool(name, {})
            assert error_info.value.error.code == -32602
            assert message in error_info.value.error.message


@both_eras
async def test_progress_reaches_the_client_that_asked(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        recorder = ProgressRecorder(3)
        result = await client.call_tool("steps", {}, progress_callback=recorder)
        await recorder.all.wait()
    assert result.structured_content == {"steps": 3}
    assert recorder.reports == [(1, 3, "step 1"), (2, 3, "step 2"), (3, 3, "step 3")]


@both_eras
async def test_partial_results_are_sent_as_progress(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        recorder = ProgressRecorder(3)
        result = await client.call_tool("words", {}, progress_callback=recorder)
        await recorder.all.wait()
    assert result.content[0].text == "one two three"
    assert recorder.reports == [(1, None, "one "), (2, None, "two "), (3, None, "three")]


@both_eras
async def test_progress_always_grows(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        recorder = ProgressRecorder(3)
        await client.call_tool("hang", {}, progress_callback=recorder)
        await recorder.all.wait()
    numbers = [report[0] for report in recorder.reports]
    assert numbers == sorted(set(numbers))
    assert numbers == pytest.approx([1, 1, 1])


@both_eras
@pytest.mark.parametrize("follow", [False, True], ids=["plain", "with progress"])
@pytest.mark.spec("4.5")
async def test_cancellation_stops_the_tool(mcp_server: Served, mode: str, follow: bool) -> None:
    async def hear(*_: Any) -> None: ...

    async with Client(mcp_server.url, mode=mode) as client:
        call = asyncio.create_task(client.call_tool("waits", {}, progress_callback=hear if follow else None))
        await mcp_server.signals.started.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await mcp_server.signals.stopped.wait()
        assert (await client.call_tool("add", {"a": 1, "b": 1})).content[0].text == "2"
    await mcp_server.toolspace.orchestrator.wait_until_idle()
    assert mcp_server.toolspace.orchestrator.active_calls.ids == []


async def test_tool_change_reaches_a_session(mcp_server: Served) -> None:
    notifications: asyncio.Queue[str] = asyncio.Queue()

    async def hear(message: Any) -> None:
        notifications.put_nowait(getattr(message, "method", ""))

    async with Client(mcp_server.url, mode="legacy", message_handler=hear) as client:
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed
        await wait_for_notification(mcp_server, notifications)
        names = [entry.name for entry in (await client.list_tools(cache_mode="bypass")).tools]
    assert "extra_0" in names


async def wait_for_notification(mcp_server: Served, notifications: asyncio.Queue[str]) -> None:
    # The client opens the stream for notifications at an unknown time, so the change is repeated.
    for number in range(50):
        mcp_server.toolspace.add_tool(Tool(f"extra_{number}", handler=lambda parameters, context: None))
        try:
            async with asyncio.timeout(0.2):
                while await notifications.get() != "notifications/tools/list_changed":
                    pass
                return
        except TimeoutError:
            continue
    pytest.fail("the session was never told")


@pytest.mark.parametrize("mode", MODES[1:])
async def test_tool_change_reaches_a_subscriber(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client, client.listen(tools_list_changed=True) as changes:
        mcp_server.toolspace.add_tool(Tool("extra", handler=lambda parameters, context: None))
        async for event in changes:
            assert isinstance(event, ToolsListChanged)
            break
        names = [entry.name for entry in (await client.list_tools(cache_mode="bypass")).tools]
    assert "extra" in names


@both_eras
@pytest.mark.spec("4.6")
async def test_too_large_result_is_a_link_that_is_read_whole_or_in_pages(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        assert (await client.list_resources()).resources == []
        result = await client.call_tool("big", {})
        handle = result.structured_content["tool_output"]["handle"]
        link = result.content[-1]
        assert link.type == "resource_link"
        assert link.uri == f"toolspace://outputs/{handle}"
        (whole_contents,) = (await client.read_resource(link.uri)).contents
        text, uri, pages = "", f"{link.uri}?offset=0", 0
        while uri:
            (contents,) = (await client.read_resource(uri)).contents
            text, pages = text + contents.text, pages + 1
            uri = (contents.meta or {}).get("toolspace/next")
        resource_list = (await client.list_resources(cache_mode="bypass")).resources
        names = [entry.name for entry in (await client.list_tools(cache_mode="bypass")).tools]
        read = await client.call_tool("agent__read_output", {"handle": handle, "limit": 1})
    assert pages > 1
    assert whole_contents.text == text
    assert whole_contents.meta is None
    assert text == "\n".join(f"line {number} ü" for number in range(50_000)) + "\n"
    assert [(resource.uri, resource.size) for resource in resource_list] == [(link.uri, len(text.encode()))]
    assert "agent__read_output" in names
    assert read.structured_content["content"] == "line 0 ü"


@both_eras
async def test_stored_result_keeps_its_structured_content_up_to_a_size(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        definitions = {entry.name: entry for entry in (await client.list_tools()).tools}
        result = await client.call_tool("big_weather", {"city": "Ulm"})
        larger_result = await client.call_tool("big_weather", {"city": "Konstanz"})
    assert "anyOf" not in (definitions["big_weather"].output_schema or {})
    assert result.structured_content == {"city": "Ulm" * 200_000, "degrees": 1.0}
    assert [part.type for part in result.content] == ["text", "resource_link"]
    assert larger_result.is_error  # Otherwise clients would demand a value that fits the schema.
    assert larger_result.structured_content is None
    assert [part.type for part in larger_result.content] == ["text", "text", "resource_link"]
    assert "The call succeeded" in larger_result.content[0].text


@both_eras
async def test_output_larger_than_an_answer_says_how_to_read_it(serve: Serve, mode: str) -> None:
    @tool
    async def huge() -> str:
        return "x" * 9_000_000

    huge_server = await serve(Toolspace([huge]))
    async with Client(huge_server.url, mode=mode) as client:
        link = (await client.call_tool("huge", {})).content[-1]
        with pytest.raises(MCPError, match=r"9,000,000 bytes.*offset=0.*agent__read_output"):
            await client.read_resource(link.uri)
        (page,) = (await client.read_resource(f"{link.uri}?offset=8999990")).contents
    assert page.text == "x" * 10


@both_eras
async def test_unknown_resource_is_an_error(mcp_server: Served, mode: str) -> None:
    wrong = ["toolspace://outputs/session-x/0123456789abcdef", "file:///etc/passwd", "toolspace://outputs/../../x"]
    async with Client(mcp_server.url, mode=mode) as client:
        for uri in wrong:
            with pytest.raises(MCPError) as error_info:
                await client.read_resource(uri)
            assert error_info.value.error.code == (-32002 if mode == "legacy" else -32602)


async def test_stored_output_belongs_to_its_session(mcp_server: Served) -> None:
    async with Client(mcp_server.url, mode="legacy") as first, Client(mcp_server.url, mode="legacy") as second:
        link = (await first.call_tool("big", {})).content[-1]
        await first.read_resource(link.uri)
        with pytest.raises(MCPError, match="can be read here"):
            await second.read_resource(link.uri)
        assert (await second.list_resources()).resources == []
        assert "agent__read_output" not in [tool.name for tool in (await second.list_tools()).tools]


@both_eras
async def test_10000_tools_are_listed_in_pages_without_gap_or_repetition(serve: Serve, mode: str) -> None:
    tools = [Tool(f"tool_{number}", handler=lambda parameters, context: "here") for number in range(10_000)]
    mcp_server = await serve(Toolspace(tools))
    names: list[str] = []
    async with Client(mcp_server.url, mode=mode) as client:
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            names += [entry.name for entry in page.tools]
            if (cursor := page.next_cursor) is None:
                break
        result = await client.call_tool("tool_9999", {})
        with pytest.raises(MCPError, match="unknown cursor"):
            await client.list_tools(cursor="bm9wZQ==")
    assert names == sorted(entry.name for entry in tools)
    assert result.content[0].text == "here"


@both_eras
async def test_provider_instructions_are_sent(serve: Serve, mode: str) -> None:
    class Notes(ToolProvider):
        kind = "notes"
        namespace = "notes"

        def list_tools(self) -> list[Tool]:
            return []

        def get_instructions(self) -> str:
            return "Read before you write."

        async def execute(self, name: str, parameters: dict[str, Any], context: Any) -> Any:
            raise NotImplementedError

    mcp_server = await serve(Toolspace(providers=[Notes()]))
    async with Client(mcp_server.url, mode="auto" if mode == "2026-07-28" else mode) as client:
        assert client.instructions == "## notes\nRead before you write."


async def test_session_supports_ping_and_log_level(mcp_server: Served) -> None:
    session = await mcp_server.open_session()
    for method, params in [("ping", {}), ("logging/setLevel", {"level": "debug"})]:
        answer = await mcp_server.post({"jsonrpc": "2.0", "id": 5, "method": method, "params": params}, headers=session)
        assert answer.json == {"jsonrpc": "2.0", "id": 5, "result": {}}


@both_eras
async def test_odd_schema_does_not_break_the_list(serve: Serve, mode: str) -> None:
    schemas: list[dict[str, Any]] = [
        {"type": "object", "properties": {"a": True}},
        {"properties": {"a": {"type": "string"}}, "required": "a"},
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}},
    ]
    tools = [
        Tool(f"odd_{number}", input_schema=schema, handler=lambda parameters, context: None)
        for number, schema in enumerate(schemas)
    ]
    lists = Tool("lists", output_schema={"type": "array"}, handler=lambda parameters, context: [1, 2])
    mcp_server = await serve(Toolspace([*tools, lists]))
    async with Client(mcp_server.url, mode=mode) as client:
        assert len((await client.list_tools()).tools) == 5
        result = await client.call_tool("lists", {})
    assert result.structured_content == (None if mode == "legacy" else [1, 2])


@both_eras
async def test_many_concurrent_calls(mcp_server: Served, mode: str) -> None:
    async with Client(mcp_server.url, mode=mode) as client:
        results = await asyncio.gather(*(client.call_tool("add", {"a": n, "b": n}) for n in range(50)))
    assert [result.content[0].text for result in results] == [str(2 * n) for n in range(50)]
