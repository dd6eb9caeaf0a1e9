"""Opening, reloading and closing a toolspace with a configuration, in all three formats."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pydoc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toolspace import ConfigError, EventType, FunctionTool, ToolNameConflict, Toolspace, ToolspaceError, tool
from toolspace.agents.registry import AgentRegistry
from toolspace.config.find_and_watch import default_state_dir
from toolspace.config.load import load_config
from toolspace.server.gateway import Gateway
from toolspace.testing import EventRecorder

TOOLS = """
import asyncio
from toolspace import tool

@tool
async def version() -> int:
    return 1

@tool
async def wait() -> str:
    await asyncio.sleep(60)
    return "done"
"""

SAME = {
    "toolspace.yaml": "functions: ./tools.py\ndefaults:\n  toolTimeout: 50ms\n",
    "toolspace.json": '{"functions": "./tools.py", "defaults": {"toolTimeout": "50ms"}}',
    "toolspace.toml": 'functions = "./tools.py"\n[defaults]\ntoolTimeout = "50ms"\n',
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.py").write_text(TOOLS)
    return tmp_path


@pytest.mark.spec("5.1")
@pytest.mark.parametrize("name", SAME)
async def test_all_three_formats_configure_the_same(folder: Path, name: str) -> None:
    (folder / name).write_text(SAME[name])
    async with Toolspace.open(folder / name) as ts:
        assert (await ts.call("version")).result == 1
        assert (await ts.call("wait")).error == "Tool execution timed out after 50ms"
        assert (await ts.call("json_parse", {"text": "1"})).result == {"data": 1}
        explanation = ts.orchestrator.explain("wait")
    assert explanation is not None
    line = {"toolspace.yaml": 3, "toolspace.json": 1, "toolspace.toml": 3}[name]
    assert explanation[1].timeout.source.endswith(f"{name}:{line} (defaults.toolTimeout)")


@pytest.mark.spec("5.1")
async def test_without_a_file_there_are_the_built_in_tools() -> None:
    async with Toolspace.open() as ts:
        names = [tool.name for tool in ts.list_tools()]
    assert {"read_file", "http_get", "agent__batch", "agent__final_report"} <= set(names)
    assert "agent__read_output" not in names


@pytest.mark.spec("5.2")
def test_all_problems_are_reported_at_once(folder: Path) -> None:
    (folder / "toolspace.yaml").write_text(
        "defaults:\n  toolTimeot: 5\nqueues:\n  a: {concurrent: none}\n"
        "tools:\n  webSearch: {apiKey: '${NOT_SET_HERE}'}\n"
    )
    with pytest.raises(ConfigError) as wrong:
        Toolspace.open(folder / "toolspace.yaml", environ={})
    text = str(wrong.value)
    assert 'toolspace.yaml:2: defaults.toolTimeot: unknown key; did you mean "toolTimeout"?' in text
    assert "toolspace.yaml:4" in text
    assert "NOT_SET_HERE" in text


def test_a_function_with_the_name_of_a_built_in_tool_is_a_conflict_that_names_both(folder: Path) -> None:
    (folder / "tools.py").write_text("from toolspace import tool\n\n@tool\ndef read_file() -> None: ...\n")
    (folder / "toolspace.yaml").write_text("functions: ./tools.py\n")
    with pytest.raises(
        ToolNameConflict, match=r"read_file \(.*builtin/files\.py:\d+\) and read_file \(.*tools\.py:\d+\)"
    ):
        Toolspace.open(folder / "toolspace.yaml")
    (folder / "toolspace.yaml").write_text("functions: ./tools.py\ntools: {builtins: ['json_*']}\n")
    assert Toolspace.open(folder / "toolspace.yaml").find_tool("read_file") is not None


@pytest.mark.spec("5.4")
async def test_a_reload_applies_changes_and_running_calls_keep_the_old_rules(folder: Path) -> None:
    config = folder / "toolspace.yaml"
    config.write_text("functions: ./tools.py\ndefaults: {toolTimeout: 400ms}\n")
    async with Toolspace.open(config) as ts:
        events = EventRecorder(ts)
        running_call = asyncio.create_task(ts.call("wait"))
        await events.wait_for_start("wait")
        (folder / "tools.py").write_text(TOOLS.replace("return 1", "return 22222"))
        config.write_text("functions: ./tools.py\ndefaults: {toolTimeout: 20ms}\ntools: {toolsDenied: [json_*]}\n")
        await ts.reload()
        assert (await ts.call("version")).result == 22222
        assert (await ts.call("wait")).error == "Tool execution timed out after 20ms"
        assert (await ts.call("json_parse", {"text": "1"})).error_kind == "not_permitted"
        assert (await running_call).error == "Tool execution timed out after 400ms"
        assert events.of_type(EventType.TOOLS_CHANGED)


@pytest.mark.spec("5.4")
@pytest.mark.parametrize("cache", ["memory", "disk"])
async def test_a_reload_clears_the_cache(folder: Path, cache: str) -> None:
    config = folder / "toolspace.yaml"
    config.write_text(
        f"functions: ./tools.py\nstorage: {{dir: ./state, cache: {cache}}}\n"
        "tools: {overrides: {version: {cache: 1h}}}\n"
    )
    async with Toolspace.open(config) as ts:
        assert [(await ts.call("version")).executed for _ in range(2)] == [True, False]
        (folder / "tools.py").write_text(TOOLS.replace("return 1", "return 22222"))
        await ts.reload()
        assert (await ts.call("version")).result == 22222


@pytest.mark.spec("5.4")
@pytest.mark.parametrize(
    ("config", "tools"),
    [
        ("defaults: {nonsense: 1}\n", TOOLS),
        ("functions: ./gone.py\n", TOOLS),
        ("functions: ./tools.py\n", "this is no python"),
        ("functions: ./tools.py\n", "from toolspace import tool\n\n@tool\ndef read_file() -> None: ...\n"),
    ],
)
async def test_a_wrong_configuration_changes_nothing(folder: Path, config: str, tools: str) -> None:
    path = folder / "toolspace.yaml"
    path.write_text("functions: ./tools.py\ndefaults: {toolTimeout: 30ms}\n")
    async with Toolspace.open(path) as ts:
        before = [tool.name for tool in ts.list_tools()]
        path.write_text(config)
        (folder / "tools.py").write_text(tools)
        with pytest.raises(ToolspaceError):
            await ts.reload()
        assert [tool.name for tool in ts.list_tools()] == before
        assert (await ts.call("version")).result == 1
        assert (await ts.call("wait")).error == "Tool execution timed out after 30ms"


async def _until(condition: Callable[[], bool]) -> None:
    """Polls until the condition holds: watching files has no event."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def _wait_for_reload(ts: Toolspace, act: Callable[[], Any]) -> Any:
    """The result of `version` after an action that causes a reload."""
    events = EventRecorder(ts)
    act()
    await events.wait_for(lambda event: event.type is EventType.TOOLS_CHANGED)
    events.stop()
    return (await ts.call("version")).result


@pytest.mark.spec("5.4")
async def test_a_changed_file_and_sighup_reload_the_configuration(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "toolspace.yaml"
    path.write_text("functions: ./tools.py\n")
    async with Toolspace.open(path) as ts:
        ts.watch(interval=0.02)
        changed_tools = TOOLS.replace("return 1", "return 22222")
        assert await _wait_for_reload(ts, lambda: (folder / "tools.py").write_text(changed_tools)) == 22222
        path.write_text("functions: [")
        await _until(lambda: "the changed configuration is invalid" in caplog.text)
        assert (await ts.call("version")).result == 22222
        (folder / "other.py").write_text(TOOLS.replace("return 1", "return 333"))
        assert await _wait_for_reload(ts, lambda: path.write_text("functions: ./other.py\n")) == 333
    async with Toolspace.open(path) as ts:
        ts.watch(interval=3600)
        (folder / "other.py").write_text(TOOLS.replace("return 1", "return 4444"))
        assert await _wait_for_reload(ts, lambda: os.kill(os.getpid(), signal.SIGHUP)) == 4444
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


async def test_only_a_configured_toolspace_can_reload() -> None:
    with pytest.raises(ToolspaceError, match="without configuration"):
        await Toolspace().reload()


async def test_file_tools_cannot_change_the_configuration(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "toolspace.yaml").write_text("functions: ./tools.py\n")
    async with Toolspace.open(folder / "toolspace.yaml") as ts:
        for name in ("toolspace.yaml", "tools.py"):
            assert (await ts.call("read_file", {"path": name})).ok
            result = await ts.call("write_file", {"path": name, "content": "x"})
            assert result.error_kind == "not_permitted"
        for name in ("helper.py", "sub/toolspace.yaml", "toolspace.toml", "Toolspace.JSON"):
            assert (await ts.call("write_file", {"path": name, "content": "x"})).error_kind == "not_permitted"
        assert (await ts.call("write_file", {"path": "notes.txt", "content": "x"})).ok
        move_result = await ts.call("move_file", {"from": "notes.txt", "to": "sub/toolspace.yml"})
        assert move_result.error_kind == "not_permitted"


def test_rules_that_match_no_tool_are_warnings(folder: Path) -> None:
    (folder / "toolspace.yaml").write_text(
        "tools:\n  toolsDenied: [delete_fil]\n  overrides: {'htp_*': {timeout: 1s}}\n"
        "  aliases: {x: nope, y: read_file}\n"
    )
    warnings = "\n".join(Toolspace.open(folder / "toolspace.yaml").warnings)
    for misspelt in ('"delete_fil"', '"htp_*"', '"x" stands for "nope"'):
        assert misspelt in warnings
    assert '"y"' not in warnings


@pytest.mark.spec("1.4")
async def test_tools_declared_in_configuration_are_called_like_any_other(folder: Path) -> None:
    definitions = [
        {"name": "displayChart", "executionType": "internal", "visible": True, "inputSchema": {"type": "object"}},
        {
            "name": "greet",
            "executionType": "basic",
            "execution": {"mode": "static", "output": {"text": "Hi {{who.name}}", "n": "{{n}}", "list": ["{{n}}"]}},
            "inputSchema": {"type": "object"},
        },
        {"name": "confirmAction", "executionType": "space", "isAsync": True, "inputSchema": {"type": "object"}},
    ]
    (folder / "toolspace.json").write_text(json.dumps({"tools": definitions}))
    async with Toolspace.open(folder / "toolspace.json") as ts:
        chart = await ts.call("displayChart", {"data": [1]})
        greeting_result = await ts.call("greet", {"who": {"name": "Ann"}, "n": 3})
        elsewhere = await ts.call("confirmAction", {})
        tools = {tool.name: tool for tool in ts.list_tools()}
    assert chart.result == {"success": True, "args": {"data": [1]}}
    assert greeting_result.result == {"text": "Hi Ann", "n": 3, "list": [3]}
    assert "is executed by a person in a space; start the gateway" in str(elsewhere.error)
    assert (tools["displayChart"].visible, tools["greet"].visible, tools["confirmAction"].is_async) == (
        True,
        False,
        True,
    )


async def test_a_persistent_session_reads_its_outputs_back_in_another_process(folder: Path) -> None:
    path = folder / "toolspace.yaml"
    path.write_text("defaults: {maxInlineBytes: 500}\nstorage: {dir: ./state}\n")
    async with Toolspace.open(path, session="me") as ts:
        stored_result = await ts.call("json_stringify", {"data": list(range(1000))})
        handle = stored_result.result["tool_output"]["handle"]
    async with Toolspace.open(path, session="me") as ts:
        assert "agent__read_output" in [tool.name for tool in ts.list_tools()]
        assert (await ts.call("agent__read_output", {"handle": handle})).ok
    async with Toolspace.open(path, session="you") as ts:
        assert not (await ts.call("agent__read_output", {"handle": handle})).ok


@pytest.mark.spec("5.4")
async def test_tools_that_the_program_added_stay_through_a_reload(folder: Path) -> None:
    (folder / "toolspace.yaml").write_text("functions: ./tools.py\n")

    @tool
    async def own_tool() -> str:
        return "own_tool"

    async with Toolspace.open(folder / "toolspace.yaml") as ts:
        ts.add_tool(own_tool)
        (folder / "tools.py").write_text(TOOLS.replace("return 1", "return 2"))
        await ts.reload()
        assert (await ts.call("version")).result == 2
        assert (await ts.call("own_tool")).result == "own_tool"
        (folder / "tools.py").write_text(TOOLS.replace("version", "own_tool"))
        with pytest.raises(ToolNameConflict, match="own_tool"):
            await ts.reload()
        ts.remove_tool("own_tool")
        await ts.reload()
        assert (await ts.call("own_tool")).result == 1


@pytest.mark.spec("5.4")
async def test_a_result_of_the_old_tool_is_not_cached_after_a_reload(folder: Path) -> None:
    (folder / "toolspace.yaml").write_text("functions: ./tools.py\n")
    source = """
import asyncio
from toolspace import tool

started, go = asyncio.Event(), asyncio.Event()

@tool(cache=60)
async def answer() -> str:
    started.set()
    await go.wait()
    return "old"
"""
    (folder / "tools.py").write_text(source)
    async with Toolspace.open(folder / "toolspace.yaml") as ts:
        old = ts.find_tool("answer")
        assert isinstance(old, FunctionTool)
        names = old.function.__globals__
        call = asyncio.create_task(ts.call("answer"))
        await names["started"].wait()
        (folder / "tools.py").write_text(source.replace("    await go.wait()\n", "").replace("old", "new"))
        await ts.reload()
        names["go"].set()
        assert (await call).result == "old"
        assert (await ts.call("answer")).result == "new"


@pytest.mark.spec("5.4")
async def test_a_call_without_an_end_event_does_not_block_closing(folder: Path) -> None:
    (folder / "provider.py").write_text(
        """
import asyncio
from toolspace import Tool, ToolProvider, ToolResult

class Waiting(ToolProvider):
    def list_tools(self):
        return [Tool("wait", "", {"type": "object"})]

    async def execute(self, name, parameters, context):
        context.emit_partial("here")
        await asyncio.sleep(60)
        return ToolResult(ok=True)
"""
    )
    config = folder / "toolspace.yaml"
    config.write_text("providers:\n  w:\n    uses: ./provider.py:Waiting\n")
    async with asyncio.timeout(10):
        async with Toolspace.open(config) as ts:
            events = EventRecorder(ts)
            call = asyncio.create_task(ts.orchestrator.execute("w__wait", call_id="c", defer_completion=True))
            await events.wait_for_start("w__wait")
            config.write_text("functions: ./tools.py\n")
            await ts.reload()
            ts.cancel("c")
            await call  # Its caller forgets to say so.
        assert events.types()[-1] == "TOOL_CALL_FAILED"


async def test_an_unexpected_failure_of_a_reload_does_not_stop_watching(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = folder / "toolspace.yaml"
    config.write_text("functions: ./tools.py\n")
    async with Toolspace.open(config) as ts:
        events = EventRecorder(ts)
        ts.watch(interval=0.01)
        with monkeypatch.context() as broken:
            broken.setattr("toolspace.config.load.load_config", lambda *_, **__: 1 / 0)
            spoke_event = asyncio.Event()
            listener = logging.Handler()
            listener.emit = lambda _: spoke_event.set()
            broken.setattr(logging.getLogger("toolspace"), "handlers", [listener])
            (folder / "tools.py").write_text(TOOLS.replace("return 1", "return 20"))
            async with asyncio.timeout(10):
                await spoke_event.wait()
        (folder / "tools.py").write_text(TOOLS.replace("return 1", "return 300"))
        await events.wait_for(lambda event: event.type is EventType.TOOLS_CHANGED)
        assert (await ts.call("version")).result == 300


def test_a_pipe_instead_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "toolspace.yaml")
    with pytest.raises(ConfigError, match="no regular file"):
        Toolspace.open(tmp_path / "toolspace.yaml")


@pytest.mark.parametrize("function", [Toolspace, Gateway, AgentRegistry, load_config, default_state_dir])
def test_help_does_not_print_the_environment(function: object) -> None:
    text = pydoc.plain(pydoc.render_doc(function))

    assert "environ: " in text
    assert "PATH" not in text
    assert os.environ["PATH"] not in text
