"""Values of references to secrets never leave a toolspace in a result, a stream, a stored output or an event."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolspace import EventType, Toolspace
from toolspace.core.secret_values import SecretValues, StreamMasking

pytestmark = pytest.mark.spec("21.3")

SECRET = 'quoted "s3cret" with / and ü'
SERVER = """
import os
from mcp.server.mcpserver import MCPServer

server = MCPServer("leaky")

@server.tool()
def leak() -> dict[str, str]:
    return {"token": "it is " + os.environ["SHOP_KEY"]}

server.run()
"""
FUNCTIONS = """
from pathlib import Path
from toolspace import tool, ToolContext

KEY = Path(__file__).with_name("key").read_text()

@tool
async def echo(text: str) -> dict:
    return {"text": text, KEY: [KEY], "length": len(KEY)}

@tool
def fail() -> str:
    raise ValueError("wrong key " + KEY)

@tool
async def stream(size: int = 1):
    yield "start "
    for letter in KEY * size:
        yield letter
    yield {"value": KEY}

@tool
async def long_text(size: int):
    for _ in range(size):
        yield KEY[:9]
        yield KEY[9:] + "\\n"

@tool
async def partials(context: ToolContext) -> str:
    context.report_progress(1, 2, "with " + KEY)
    context.emit_partial("a " + KEY[:5])
    context.emit_partial(KEY[5:] + " b " + KEY[:3])
    return "done"

@tool
async def encoded() -> list:
    import base64, json, urllib.parse
    texts = [json.dumps(KEY), json.dumps(KEY, ensure_ascii=False), urllib.parse.quote(KEY)]
    return [*texts, base64.b64encode(KEY.encode()).decode()]

@tool
async def pin(value: str) -> dict:
    return {"pin": 4711, "text": value}
"""


@asynccontextmanager
async def open_shop(folder: Path, secret: str = SECRET, **config: Any) -> AsyncIterator[Toolspace]:
    (folder / "key").write_text(secret)
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "server.py").write_text(SERVER)
    server = {"command": sys.executable, "args": [str(folder / "server.py")], "env": {"SHOP_KEY": "${file:key}"}}
    path = folder / "toolspace.json"
    path.write_text(json.dumps({"functions": ["./functions.py"], "mcpServers": {"leaky": server}, **config}))
    async with Toolspace.open(path, environ={}) as ts:
        yield ts


async def test_results_and_failures_of_functions_and_servers_have_no_secret(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as ts:
        result = await ts.call("echo", {"text": SECRET})
        assert result.result == {"text": "[hidden]", "[hidden]": ["[hidden]"], "length": len(SECRET)}
        # The server got the real value: nothing is masked on the way out.
        result = await ts.call("leaky__leak")
        assert "s3cret" not in json.dumps(result.to_dict())
        assert "it is [hidden]" in result.text
        assert (await ts.call("fail")).error == "wrong key [hidden]"


async def test_encoded_forms_are_masked(tmp_path: Path) -> None:
    async with open_shop(tmp_path) as ts:
        result = await ts.call("encoded")
        assert [text.strip('"=') for text in result.result] == ["[hidden]"] * 4


async def test_a_stream_shows_no_secret_that_is_spread_over_its_parts(tmp_path: Path) -> None:
    events: list[Any] = []
    async with open_shop(tmp_path) as ts:
        ts.bus.subscribe(events.append, EventType.TOOL_CALL_PARTIAL, EventType.TOOL_CALL_PROGRESS)
        result = await ts.call("stream", {"size": 3})
        await ts.call("partials")
    assert result.result[-1] == {"value": "[hidden]"}
    assert "".join(result.result[:-1]) == "start " + "[hidden]" * 3
    texts = [event.value for event in events if event.type == EventType.TOOL_CALL_PARTIAL]
    assert "".join(filter(lambda text: isinstance(text, str), texts)).endswith("a [hidden] b quo")
    assert "s3cret" not in "".join(map(str, texts))
    assert [event.message for event in events if event.type == EventType.TOOL_CALL_PROGRESS] == ["with [hidden]"]


async def test_stored_outputs_and_caches_have_no_secret(tmp_path: Path) -> None:
    storage = {"dir": str(tmp_path / "state"), "cache": "disk"}
    override = {"overrides": {"echo": {"cache": "1h"}}}
    async with open_shop(tmp_path, storage=storage, tools=override) as ts:
        run = ts.run()
        result = await ts.orchestrator.execute("long_text", {"size": 20_000}, run=run)
        assert result.extras["stored"] is True
        await ts.call("echo", {"text": "x"})
        assert (await ts.call("echo", {"text": "x"})).result["text"] == "x"
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert any("[hidden]\n[hidden]" in path.read_text("utf-8", "replace") for path in files)
    assert not any(b"s3cret" in path.read_bytes() for path in files)


async def test_hooks_do_not_see_secrets(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("def quote(call):\n    return {'result': {'seen': call.result['text']}}\n")
    async with open_shop(tmp_path, hooks=[{"on": "after", "tools": "echo", "use": "./hooks.py:quote"}]) as ts:
        assert (await ts.call("echo", {"text": SECRET})).result == {"seen": "[hidden]"}


async def test_a_short_secret_is_masked_as_a_whole_word(tmp_path: Path) -> None:
    async with open_shop(tmp_path, secret="4711") as ts:
        result = await ts.call("pin", {"value": "pin=4711, order 14711, a4711; 4711"})
        assert result.result == {"pin": "[hidden]", "text": "pin=[hidden], order 14711, a4711; [hidden]"}


async def test_a_secret_that_is_too_short_to_be_masked_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with open_shop(tmp_path, secret="471") as ts:
            assert (await ts.call("pin", {"value": "471"})).result["text"] == "471"
    assert "the secret has fewer than 4 characters, so it cannot be masked in results and logs" in caplog.text


async def test_file_tools_cannot_read_the_file_of_a_secret(tmp_path: Path) -> None:
    async with open_shop(tmp_path, tools={"allowedPaths": [str(tmp_path)]}) as ts:
        result = await ts.call("read_file", {"path": str(tmp_path / "key")})
        assert result.error_kind == "not_permitted"


async def test_a_toolspace_without_references_has_no_such_stage(tmp_path: Path) -> None:
    path = tmp_path / "toolspace.json"
    path.write_text("{}")
    async with Toolspace.open(path, environ={}) as ts:
        assert ts.orchestrator.services.masks_secrets is False


@given(
    st.lists(st.text("abc1", min_size=4, max_size=9), min_size=1, max_size=3),
    st.lists(st.text("abc1 ", max_size=12), max_size=12),
)
def test_a_stream_never_shows_a_long_secret_however_it_is_cut(secrets: list[str], texts: list[str]) -> None:
    values = SecretValues()
    for secret in secrets:
        values.add(secret)
    stream_masking = StreamMasking(values, lambda value: value)
    shown_texts = [part for text in texts for part in stream_masking.add(text)] + list(stream_masking.finish())
    shown_text = "".join(shown_texts).replace("[hidden]", "|")
    assert not any(len(secret) >= 6 and secret in shown_text for secret in secrets)
    if not any(secret in "".join(texts) for secret in secrets):
        assert shown_text == "".join(texts).replace("[hidden]", "|")
