"""Tools that the configuration declares, by execution type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import http_server
from toolspace import Toolspace
from toolspace.errors import ConfigError

OpenToolspace = Callable[..., Toolspace]


@pytest.fixture
def open_toolspace(tmp_path: Path) -> OpenToolspace:
    """OpenToolspace a toolspace with these definitions, in a file with one key per line."""

    def open_with(*definitions: dict[str, Any], **config: Any) -> Toolspace:
        path = tmp_path / "toolspace.json"
        path.write_text(json.dumps({"tools": definitions, **config}, indent=1))
        return Toolspace.open(path)

    return open_with


def define_tool(execution_type: str, execution: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    entry = {"name": "it", "executionType": execution_type, **more}
    return entry if execution is None else {**entry, "execution": execution}


def configuration_error(open_toolspace: OpenToolspace, *definitions: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error_info:
        open_toolspace(*definitions)
    return str(error_info.value)


# compute


@pytest.mark.spec("6.1")
async def test_a_compute_tool_evaluates_its_expression_over_the_input(open_toolspace: OpenToolspace) -> None:
    total = {"expression": "{'total': round(sum(x.price * x.n for x in items) * (1 + tax / 100), 2)}"}
    async with open_toolspace(define_tool("compute", total)) as ts:
        result = await ts.call("it", {"items": [{"price": 10, "n": 3}], "tax": 20})
        assert result.unwrap() == {"total": 36.0}
        failed_result = await ts.call("it", {"items": [], "tax": "x"})
        assert failed_result.error == "the expression has no value for this input: / needs a number, not a text"
        tool = ts.find_tool("it")
        assert tool is not None
        assert (tool.visible, tool.input_schema["properties"]) == (False, {"items": {}, "tax": {}})


@pytest.mark.spec("6.1")
@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("price *", "the end: "),
        ("prize * 2", 'the inputSchema has no "prize"; did you mean "price"?'),
        ("sun([price])", 'there is no function "sun"; did you mean "sum"?'),
    ],
)
def test_an_invalid_expression_is_a_configuration_error_with_its_line(
    open_toolspace: OpenToolspace, expression: str, expected: str
) -> None:
    schema = {"type": "object", "properties": {"price": {"type": "number"}}}
    message = configuration_error(
        open_toolspace, define_tool("compute", {"expression": expression}, inputSchema=schema)
    )
    assert "toolspace.json:15 (tools[0].execution.expression)" in message
    assert expected in message


def test_all_invalid_definitions_are_reported_together(open_toolspace: OpenToolspace) -> None:
    other_tool = {"name": "other", "executionType": "prebuilt", "execution": {"action": "sendMesage"}}
    message = configuration_error(open_toolspace, define_tool("compute", {"expression": "1 +"}), other_tool)
    assert "tools[0].execution.expression" in message
    assert "tools[1].execution.action" in message


# gateway


@pytest.mark.spec("6.1")
@pytest.mark.spec("3.20")
@pytest.mark.parametrize("execution_type", ["gateway", "request", "external", "space", None])
async def test_a_tool_with_a_url_is_an_http_request(open_toolspace: OpenToolspace, execution_type: str | None) -> None:
    async with http_server() as server:
        execution = {
            "url": server.url("/orders/${parameters.id}"),
            "method": "POST",
            "headers": {"X-Key": "secret"},
            "body": {"note": "${parameters.note}"},
        }
        definition = {"name": "order", "execution": execution}
        if execution_type is not None:
            definition["executionType"] = execution_type
        async with open_toolspace(definition) as ts:
            result = await ts.call("order", {"id": "a/b", "note": "hi"})
            assert result.ok, result.error
            tool = ts.find_tool("order")
            assert tool is not None
            assert (tool.execution_type, tool.visible) == ("gateway", True)
            assert tool.input_schema["required"] == ["id"]
        (request,) = server.requests
        assert (request.method, request.target) == ("POST", "/orders/a%2Fb")
        assert request.headers["x-key"] == "secret"
        assert json.loads(request.body) == {"note": "hi"}


@pytest.mark.spec("3.21")
async def test_a_failed_request_of_a_configured_tool_has_status_and_body(open_toolspace: OpenToolspace) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"why": "no such order"}, status=404)

    async with http_server(answer) as server, open_toolspace(define_tool("gateway", {"url": server.url()})) as ts:
        result = await ts.call("it", {"anything": 1})
        assert (result.error_kind, result.extras["status"], result.extras["body"]) == (
            "execution_error",
            404,
            {"why": "no such order"},
        )


async def test_requests_of_configured_tools_continue_after_a_reload(
    open_toolspace: OpenToolspace, tmp_path: Path
) -> None:
    async with http_server() as server, open_toolspace(define_tool("gateway", {"url": server.url()})) as ts:
        assert (await ts.call("it")).ok
        changed_config = {"tools": [define_tool("gateway", {"url": server.url("/new")})]}
        (tmp_path / "toolspace.json").write_text(json.dumps(changed_config))
        await ts.reload()
        assert (await ts.call("it")).ok
        assert [request.target for request in server.requests] == ["/", "/new"]


@pytest.mark.parametrize(
    ("execution", "expected"),
    [
        ({"url": "ftp://example.org"}, "tools[0].execution.url"),
        ({"url": "https://example.org/${parameters.}"}, "tools[0].execution.url"),
        ({"url": "https://example.org", "headers": {"Host": "${parameters.x}"}}, "tools[0].execution.headers"),
        ({"url": "https://example.org", "method": "FETCH"}, "expected one of GET, POST"),
        ({"url": "https://example.org", "headrs": {}}, 'unknown key; did you mean "headers"?'),
        ({}, '"url" is missing'),
    ],
)
def test_an_invalid_request_is_a_configuration_error(
    open_toolspace: OpenToolspace, execution: dict[str, Any], expected: str
) -> None:
    message = configuration_error(open_toolspace, define_tool("gateway", execution))
    assert "toolspace.json:" in message
    assert expected in message


# external, space, wait


@pytest.mark.spec("6.1")
@pytest.mark.parametrize(("execution_type", "executor"), [("external", "a worker"), ("space", "a person in a space")])
async def test_external_tools_need_the_gateway(
    open_toolspace: OpenToolspace, execution_type: str, executor: str
) -> None:
    async with open_toolspace(define_tool(execution_type)) as ts:
        result = await ts.call("it", {})
        assert (
            result.error
            == f'tool "it" is executed by {executor}; start the gateway (toolspace serve) and call it there'
        )
        assert (result.error_kind, result.executed) == ("execution_error", False)


@pytest.mark.spec("6.1")
async def test_wait_without_the_gateway_sleeps(open_toolspace: OpenToolspace) -> None:
    async with open_toolspace(
        define_tool("wait", {"duration": "5ms"}), {"name": "any", "executionType": "waiting"}
    ) as ts:
        assert (await ts.call("it")).unwrap() == {"waited": 5}
        assert (await ts.call("any", {"duration": 1})).unwrap() == {"waited": 1}
        assert "is not a duration" in ((await ts.call("any", {"duration": "soon"})).error or "")
        assert (await ts.call("any", {})).error_kind == "invalid_parameters"


@pytest.mark.parametrize(
    ("definition", "expected"),
    [
        (define_tool("wait", {"duration": "soon"}), 'expected milliseconds or a duration such as "30s"'),
        (define_tool("wait", inputSchema={"type": "object", "properties": {"x": {}}}), '"duration" is missing'),
        (define_tool("wait", {"time": 5}), "unknown key; the keys here are duration"),
        (define_tool("internal", {"url2": 5}), "unknown key; internal tools have none"),
        (define_tool("space", expiresAfter=0), "a duration longer than 0"),
        (define_tool("prebuilt"), '"action" is missing'),
        (
            define_tool("prebuilt", {"action": "set_goal"}),
            'there is no prebuilt action "set_goal"; did you mean "set_goals"',
        ),
    ],
)
def test_an_invalid_definition_names_file_and_line(
    open_toolspace: OpenToolspace, definition: dict[str, Any], expected: str
) -> None:
    message = configuration_error(open_toolspace, definition)
    assert "toolspace.json:" in message
    assert expected in message


# visibility


@pytest.mark.spec("6.2")
async def test_each_execution_type_has_its_own_default_for_visible(open_toolspace: OpenToolspace) -> None:
    executions: dict[str, dict[str, Any]] = {
        "gateway": {"url": "https://example.org"},
        "external": {},
        "space": {},
        "internal": {},
        "static": {"output": 1},
        "compute": {"expression": "1"},
        "prebuilt": {"action": "get_goals"},
        "wait": {"duration": 1},
        "agent": {},
        "image": {},
    }
    definitions = [
        {"name": kind, "executionType": kind, "execution": execution} for kind, execution in executions.items()
    ]
    async with open_toolspace(*definitions) as ts:
        tools = {tool.name: tool.visible for tool in ts.list_tools()}
    assert {name for name in executions if tools[name]} == {"gateway", "external", "space", "wait", "agent", "image"}
    assert not tools["read_file"]
    assert not tools["current_time"]


@pytest.mark.spec("6.2")
async def test_configuration_sets_visible(open_toolspace: OpenToolspace) -> None:
    definitions = [
        {"name": "shown", "executionType": "internal", "visible": True},
        {"name": "hidden", "executionType": "space", "visible": False},
    ]
    async with open_toolspace(*definitions) as ts:
        tools = {tool.name: tool.visible for tool in ts.list_tools()}
    assert (tools["shown"], tools["hidden"]) == (True, False)


# prebuilt


@pytest.mark.spec("6.1")
@pytest.mark.spec("9.6")
@pytest.mark.parametrize("action", ["setGoals", "set_goals"])
async def test_a_prebuilt_tool_has_the_schema_and_description_of_its_action(
    open_toolspace: OpenToolspace, action: str
) -> None:
    async with open_toolspace(define_tool("prebuilt", {"action": action})) as ts:
        tool = ts.find_tool("it")
        assert tool is not None
        assert tool.description.startswith("Set goals of yours")
        assert tool.input_schema["required"] == ["goals"]
        assert (tool.execution_type, tool.visible, tool.category) == ("prebuilt", False, "agent")
        result = await ts.call("it", {"goals": []})
        assert '"set_goals" is for agents, in their runs' in (result.error or "")


@pytest.mark.spec("8.2")
def test_no_configuration_makes_a_prebuilt_tool_visible(open_toolspace: OpenToolspace) -> None:
    ts = open_toolspace(define_tool("prebuilt", {"action": "get_goals"}, visible=True))
    tool = ts.find_tool("it")
    assert tool is not None
    assert not tool.visible
    assert "never shown" in ts.warnings[0]


@pytest.mark.spec("1.1")
async def test_a_definition_sets_the_timeout(open_toolspace: OpenToolspace) -> None:
    definitions = [
        {"name": "ask", "executionType": "space", "expiresAfter": "2h"},
        {"name": "old", "executionType": "basic"},
        {"name": "quick", "executionType": "basic", "timeout": 1000},
    ]
    async with open_toolspace(*definitions) as ts:
        tools = {tool.name: tool for tool in ts.list_tools()}
    assert (tools["ask"].expires_after, tools["ask"].to_dict()["expiresAfter"]) == (7200.0, 7_200_000)
    assert (tools["old"].expires_after, tools["old"].pauses_run, tools["quick"].pauses_run) == (None, True, False)


# The page


PAGE = (Path(__file__).parents[2] / "docs" / "execution-types.md").read_text()


async def test_the_examples_of_the_page_work(tmp_path: Path) -> None:
    yaml_text = PAGE.split("```yaml\n")[1].split("```")[0]
    (tmp_path / "toolspace.yaml").write_text(yaml_text)
    async with Toolspace.open(tmp_path / "toolspace.yaml") as ts:
        order = {"items": [{"price": 2.5, "count": 2}]}
        assert (await ts.call("orderTotal", order)).result == 5.0
        assert (await ts.call("orderTotal", {**order, "tax": 20})).result == 6.0
        assert (await ts.call("officeHours", {"name": "Ann"})).result == "We are here from 9 to 17, Ann."
        for name in ("executeRobotAction", "confirmAction", "setGoals"):
            tool = ts.find_tool(name)
            assert tool is not None
            values: dict[str, Any] = {"action": "x", "question": "x", "goals": []}
            arguments = {key: values[key] for key in tool.input_schema["required"]}
            assert not (await ts.call(name, arguments)).ok


def test_the_page_lists_every_function_and_action() -> None:
    from toolspace.agents.prebuilt.provider import ALL_ACTIONS
    from toolspace.providers.expressions.runtime import FUNCTIONS

    for name in (*FUNCTIONS, *ALL_ACTIONS):
        assert f"`{name}`" in PAGE, name
