"""3.30–3.34: the internal tools of an agent."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import pytest

from toolspace import EventType, QueueSpec, Settings, ToolContext, ToolRules, Toolspace, tool
from toolspace.providers.internal_tools import ReportFormat
from toolspace.testing import EventRecorder


@tool
async def add(a: int, b: int = 0) -> int:
    """Adds two numbers."""
    return a + b


@tool
async def fail() -> None:
    raise ValueError("boom")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.spec("3.30")
@pytest.mark.parametrize("format", get_args(ReportFormat))
@pytest.mark.parametrize("status", ["success", "failure", "partial"])
async def test_a_final_report_ends_the_run(format: str, status: str) -> None:
    json_format = format in ("json", "slack-block-kit")
    content: Any = {"content_json": {"blocks": [{"type": "divider"}]}} if json_format else {"content": "# Done"}
    async with Toolspace(tools=[add]) as ts:
        run = ts.run()
        result = await run.call(
            "agent__final_report", {"status": status, "format": format, **content, "metadata": {"k": 1}}
        )
        late = await run.call("add", {"a": 1})
        second_report = await run.call(
            "agent__final_report", {"status": "success", "format": "tty", "content": "other"}
        )
    assert result.ok, result.error
    assert run.is_finished
    assert run.final_report == {"status": status, "format": format, **content, "metadata": {"k": 1}}
    assert (late.error_kind, late.executed) == ("limit_exceeded", False)
    assert not second_report.ok


@pytest.mark.spec("3.30")
async def test_a_json_report_is_checked_against_the_schema_and_a_mismatch_goes_back_to_the_model() -> None:
    async with Toolspace() as ts:
        run = ts.run(report_format="json", report_schema=SCHEMA)
        report = {"status": "success", "format": "json"}
        wrong = await run.call("agent__final_report", {**report, "content_json": {"n": "many", "x": 1}})
        assert wrong.error_kind == "invalid_parameters"
        assert "content_json.n: expected integer" in (wrong.error or "")
        assert "content_json.x: no such parameter" in (wrong.error or "")
        assert not run.is_finished
        other_report = await run.call("agent__final_report", {"status": "success", "format": "tty", "content": "x"})
        assert 'asks for "json"' in (other_report.error or "")
        right = await run.call("agent__final_report", {**report, "content": '{"n": 3}'})
        assert right.ok
        assert run.final_report is not None
        assert run.final_report["content_json"] == {"n": 3}


@pytest.mark.spec("3.30")
@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ({"status": "success", "format": "markdown"}, "content: required"),
        ({"status": "success", "format": "json"}, "content_json: required"),
        ({"status": "done", "format": "markdown", "content": "x"}, "status"),
        ({"status": "success", "format": "html", "content": "x"}, "format"),
        ({"status": "success", "format": "slack-block-kit", "content_json": {"blocks": []}}, "blocks"),
        ({"status": "success", "format": "slack-block-kit", "content_json": [{"text": 1}]}, "type"),
        ({"status": "success", "format": "json", "content": "{"}, "not JSON"),
    ],
)
async def test_an_invalid_report_is_rejected(arguments: dict[str, Any], hint: str) -> None:
    async with Toolspace() as ts:
        run = ts.run()
        result = await run.call("agent__final_report", arguments)
    assert result.error_kind == "invalid_parameters"
    assert hint in (result.error or "")
    assert not run.is_finished


STATUS = {
    "status": "completed",
    "done": "all",
    "pending": "",
    "now": "",
    "ready_for_final_report": True,
    "need_to_run_more_tools": False,
}


@pytest.mark.spec("3.31")
async def test_task_status_is_an_event_and_reminds_of_the_final_report() -> None:
    async with Toolspace() as ts:
        recorder = EventRecorder(ts)
        run = ts.run()
        first_status = await run.call("agent__task_status", {**STATUS, "status": "in-progress"})
        assert first_status.result == {"received": True}
        assert run.final_report_reminder is None
        final_status = await run.call("agent__task_status", STATUS)
        assert "agent__final_report" in final_status.result["next"]
        assert run.final_report_reminder is not None
        await run.call("agent__final_report", {"status": "success", "format": "pipe", "content": "x"})
        assert run.final_report_reminder is None
    events = [event.to_dict() for event in recorder.of_type(EventType.TASK_STATUS)]
    assert [event["status"]["status"] for event in events] == ["in-progress", "completed"]
    assert events[0]["runId"] == run.id


@pytest.mark.spec("3.31")
@pytest.mark.parametrize(
    "change", [{"status": "in-progress"}, {"ready_for_final_report": False}, {"need_to_run_more_tools": True}]
)
async def test_the_reminder_needs_all_three_conditions(change: dict[str, Any]) -> None:
    async with Toolspace() as ts:
        run = ts.run()
        await run.call("agent__task_status", {**STATUS, **change})
        assert run.final_report_reminder is None


def batch(*calls: tuple[str, str, Any]) -> dict[str, Any]:
    return {"calls": [{"id": id, "tool": name, "parameters": parameters} for id, name, parameters in calls]}


@pytest.mark.spec("3.32")
async def test_a_batch_runs_in_parallel_and_returns_results_in_order() -> None:
    both = asyncio.Barrier(3)

    @tool
    async def meet(n: int) -> int:
        await both.wait()
        return n

    async with Toolspace(tools=[meet]) as ts:
        calls = batch(("c", "meet", {"n": 3}), ("a", "meet", {"n": 1}), ("b", "meet", {"n": 2}))
        result = await asyncio.wait_for(ts.call("agent__batch", calls), 10)
    assert [(entry["id"], entry["output"]) for entry in result.result["results"]] == [("c", 3), ("a", 1), ("b", 2)]


@pytest.mark.spec("3.32")
async def test_one_failure_never_fails_the_batch() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        calls = batch(("1", "fail", {}), ("2", "add", {"a": 1}), ("3", "nope", {}), ("4", "add", {"z": 1}))
        result = await ts.call("agent__batch", calls)
        records = [record.tool for record in ts.orchestrator.call_log.recent]
    assert result.ok
    entries = result.result["results"]
    assert [entry["ok"] for entry in entries] == [False, True, False, False]
    assert [entry.get("errorKind") for entry in entries] == [
        "execution_error",
        None,
        "unknown_tool",
        "invalid_parameters",
    ]
    assert sorted(records) == ["add", "add", "agent__batch", "fail", "nope"]


@pytest.mark.spec("3.32")
async def test_calls_of_a_batch_respect_queues_limits_and_permissions() -> None:
    running_calls = most = 0

    @tool(queue="narrow")
    async def busy() -> int:
        nonlocal running_calls, most
        running_calls += 1
        most = max(most, running_calls)
        await asyncio.sleep(0)
        running_calls -= 1
        return most

    @tool
    async def big() -> str:
        return "x" * 5_000

    settings = Settings(
        queues={"narrow": QueueSpec(concurrent=2)},
        tool_response_max_bytes=1_000,
        overrides={"add": ToolRules(enabled=False)},
    )
    async with Toolspace(tools=[add, big, busy], settings=settings) as ts:
        calls = batch(*((str(n), "busy", {}) for n in range(6)), ("big", "big", {}), ("add", "add", {"a": 1}))
        entries = (await ts.call("agent__batch", calls)).result["results"]
    assert most == 2
    assert entries[6]["output"]["tool_output"]["reason"] == "size_limit_exceeded"
    assert entries[7]["errorKind"] == "not_permitted"


@pytest.mark.spec("3.32")
async def test_a_nested_batch_is_refused_under_any_name() -> None:
    async with Toolspace(tools=[add], settings=Settings(aliases={"many": "agent__batch"})) as ts:
        inner = batch(("x", "add", {"a": 1}))
        result = await ts.call(
            "agent__batch", batch(("1", "agent__batch", inner), ("2", "many", inner), ("3", "batch", inner))
        )
        after = await ts.call("agent__batch", batch(("1", "add", {"a": 1})))
    assert [entry["ok"] for entry in result.result["results"]] == [False, False, False]
    assert "batch inside a batch is not allowed" in result.result["results"][0]["error"]
    assert after.result["results"][0]["ok"]


@pytest.mark.spec("3.32")
@pytest.mark.parametrize(
    "calls", [{"calls": []}, {"calls": "x"}, {}, batch(("1", "add", {}), ("1", "add", {})), {"calls": [{"id": "1"}]}]
)
async def test_an_invalid_batch_is_rejected(calls: Any) -> None:
    async with Toolspace(tools=[add]) as ts:
        assert (await ts.call("agent__batch", calls)).error_kind == "invalid_parameters"


@pytest.mark.spec("3.32")
async def test_a_batch_accepts_arguments_as_models_write_them() -> None:
    async with Toolspace(tools=[add]) as ts:
        calls = [
            {"id": 1, "tool": "add", "parameters": '{"a": 4}'},
            {"id": "2", "tool": "add", "parameters": {"a": 5}},
            {"id": "3", "tool": "add", "parameters": "no json"},
        ]
        result = await ts.call("agent__batch", {"calls": calls})
    assert [entry.get("output") for entry in result.result["results"]] == [4, 5, None]


@pytest.mark.spec("3.32")
async def test_cancelling_a_batch_cancels_its_calls() -> None:
    stopped: list[int] = []

    @tool
    async def wait(n: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(n)

    async with Toolspace(tools=[wait]) as ts:
        recorder = EventRecorder(ts)
        task = asyncio.create_task(
            ts.call("agent__batch", batch(("1", "wait", {"n": 1}), ("2", "wait", {"n": 2})), call_id="b")
        )
        await recorder.wait_for(lambda _: len(recorder.of_type(EventType.TOOL_CALL_REQUESTED)) == 3)
        ts.cancel("b")
        assert (await task).error_kind == "canceled"
    assert sorted(stopped) == [1, 2]


def numbered_tools(count: int) -> list[Any]:
    def make(n: int) -> Any:
        @tool(name=f"filler_{n}", description=f"Does the unremarkable thing number {n} with care and without haste.")
        async def filler(value: str, amount: int = 1) -> None: ...

        return filler

    return [make(n) for n in range(count)]


@tool
async def send_invoice(customer: str, cents: int) -> None:
    """Sends a bill by email to a customer.

    Args:
        customer: Who has to pay.
        cents: The amount.
    """


@tool
async def list_directory(path: str) -> None:
    """Shows the files in a folder."""


@pytest.mark.spec("3.34")
@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("send an invoice", "send_invoice"),
        ("email a bill", "send_invoice"),
        ("who has to pay", "send_invoice"),
        ("files in folders", "list_directory"),
        ("listing directories", "list_directory"),
    ],
)
async def test_tools_are_found_by_what_they_do(query: str, best: str) -> None:
    async with Toolspace(tools=[*numbered_tools(50), send_invoice, list_directory]) as ts:
        matches = (await ts.call("agent__find_tools", {"query": query})).result["tools"]
    assert matches[0]["name"] == best
    assert matches[0]["parameters"]["type"] == "object"
    assert matches[0]["description"]


@pytest.mark.spec("3.34")
async def test_no_match_is_an_empty_list_and_an_empty_query_is_rejected() -> None:
    async with Toolspace(tools=[send_invoice]) as ts:
        assert (await ts.call("agent__find_tools", {"query": "zzzz qqqq"})).result == {"tools": []}
        assert (await ts.call("agent__find_tools", {"query": "  "})).error_kind == "invalid_parameters"


@pytest.mark.spec("4.9")
async def test_beyond_a_threshold_the_model_gets_a_search_tool_and_its_results() -> None:
    few = Toolspace(tools=[send_invoice], settings=Settings(tool_search_threshold=1_000))
    assert [definition["function"]["name"] for definition in few.to_llm_tools()] == ["send_invoice"]
    many = Toolspace(tools=[*numbered_tools(100), send_invoice], settings=Settings(tool_search_threshold=1_000))
    async with many as ts:
        run = ts.run()
        tool_names = [definition["function"]["name"] for definition in ts.to_llm_tools(run=run)]
        assert "agent__find_tools" in tool_names
        assert "send_invoice" not in tool_names
        assert "filler_1" not in tool_names
        await run.call("agent__find_tools", {"query": "send an invoice", "limit": 1})
        tool_names = [definition["function"]["name"] for definition in ts.to_llm_tools(run=run)]
        assert "send_invoice" in tool_names
        assert "filler_1" not in tool_names
        assert "send_invoice" not in [definition["function"]["name"] for definition in ts.to_llm_tools(run=ts.run())]
    unlimited_toolspace = Toolspace(tools=numbered_tools(100), settings=Settings(tool_search_threshold=None))
    assert len(unlimited_toolspace.to_llm_tools()) == 100


async def test_internal_tools_are_offered_in_runs_and_always_callable() -> None:
    async with Toolspace(tools=[add]) as ts:
        assert [definition.name for definition in ts.list_tools()] == ["add"]
        in_run = [definition["function"]["name"] for definition in ts.to_llm_tools(run=ts.run())]
        assert in_run == ["add", "agent__final_report", "agent__task_status", "agent__batch"]
        direct = await ts.call("agent__final_report", {"status": "success", "format": "tty", "content": "x"})
        assert direct.result["accepted"] is True
        assert (await ts.call("agent__task_status", STATUS, context=ToolContext())).ok
