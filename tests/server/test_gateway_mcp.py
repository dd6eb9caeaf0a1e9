"""`/mcp` behind the gateway's keys, over real HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest

from toolspace import ToolContext, Toolspace, tool
from toolspace.config.server_settings import ServerSettings
from toolspace.config.value_types import RateSetting
from toolspace.core.extension_points import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.server import api_keys
from toolspace.server.api_keys import KeyUsage
from toolspace.server.authentication import Authenticator
from toolspace.server.mcp import sessions
from toolspace.server.mcp.http_endpoint import McpMount, serve_mcp
from toolspace.server.rate_limit import RequestLimiter
from toolspace.server.tool_permissions import ToolKeyPolicy
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.queries import keys as key_rows
from toolspace.storage.queries.keys import KeyScope
from toolspace.storage.sqlite.database import SqliteDatabase

VERSION = "2026-07-28"
META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientCapabilities": {},
    "io.modelcontextprotocol/clientInfo": {"name": "test", "version": "1"},
}
JWT_SECRET = "a-secret-for-tokens-with-32-characters"


class Vault(ToolProvider):
    """A tool whose instructions only allowed keys may read."""

    kind = "vault"
    namespace = "vault"

    def list_tools(self) -> list[Tool]:
        return [Tool("open")]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(ok=True, result="gold")

    def get_instructions(self) -> str:
        return "The vault is behind the picture."


@tool
async def notes_read(context: ToolContext) -> dict[str, Any]:
    """Reads a note."""
    return {"user": context.user_id, "session": context.session_id, "agent": context.agent_entity_id}


@tool
async def notes_drop() -> str:
    """Drops a note."""
    return "dropped"


@tool
async def notes_long() -> str:
    """Reads a long note."""
    return "a long line of words\n" * 20_000


@tool
async def notes_inside(name: str, context: ToolContext) -> Any:
    """Calls another tool."""
    result = await context.call(name)
    return result.result if result.ok else {"refused": result.error}


@dataclass
class McpFixture:
    """A served MCP endpoint and its parts."""

    url: str
    http: aiohttp.ClientSession
    ledger: Ledger
    authenticator: Authenticator
    usage: KeyUsage

    async def key(self, kind: Any = "tools", **scope: Any) -> str:
        _, key = await api_keys.create_key(self.ledger, kind, "test", KeyScope(**scope))
        return key

    async def ask(
        self, key: str | None, method: str, params: Mapping[str, Any] | None = None, **more: str
    ) -> tuple[int, Any]:
        """Sends a stateless MCP request."""
        params = dict(params or {})
        headers = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": VERSION,
            "mcp-method": method,
            **({"authorization": f"Bearer {key}"} if key is not None else {}),
            **more,
        }
        if name := params.get("name") or params.get("uri"):
            headers["mcp-name"] = name
        body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": {"_meta": META, **params}})
        async with self.http.post(self.url, data=io.BytesIO(body.encode()), headers=headers) as answer:
            return answer.status, await _message(answer)

    async def tools(self, key: str) -> set[str]:
        _, answer = await self.ask(key, "tools/list")
        return {listed_tool["name"] for listed_tool in answer["result"]["tools"]}

    async def call(self, key: str, name: str, /, **arguments: Any) -> dict[str, Any]:
        _, answer = await self.ask(key, "tools/call", {"name": name, "arguments": arguments})
        return answer

    async def session(self, key: str) -> dict[str, Any]:
        """Opens a handshake session; returns its headers and the server's response."""
        headers = {
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
        }
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
        body = json.dumps({"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
        async with self.http.post(self.url, data=io.BytesIO(body.encode()), headers=headers) as answer:
            assert answer.status == 200
            return {**headers, "mcp-session-id": answer.headers["mcp-session-id"], "response": await _message(answer)}


async def _message(answer: aiohttp.ClientResponse) -> Any:
    text = await answer.text()
    if answer.content_type == "text/event-stream":
        text = [line[6:] for line in text.splitlines() if line.startswith("data: ")][-1]
    return json.loads(text)


def text_of(answer: dict[str, Any]) -> str:
    return answer["result"]["content"][0]["text"]


async def open_mcp(tmp_path: Path, server: ServerSettings) -> AsyncIterator[McpFixture]:
    ledger = Ledger(await SqliteDatabase.open(tmp_path / "toolspace.db"))
    authenticator = await Authenticator.open(ledger, server)
    tool_keys, usage = ToolKeyPolicy(), KeyUsage(ledger)
    authenticator.on_key_used = usage.record_use
    toolspace = Toolspace([notes_read, notes_drop, notes_long, notes_inside], providers=[Vault()])
    toolspace.orchestrator.configure(permissions=(tool_keys,))
    toolspace.orchestrator.add_stage(usage.stage)
    mount = McpMount(
        toolspace, authenticator=authenticator, limits=RequestLimiter(server), tool_keys=tool_keys, server=server
    )
    async with (
        toolspace,
        usage,
        serve_mcp(mount) as url,
        mount,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(20)) as http,
    ):
        yield McpFixture(url, http, ledger, authenticator, usage)
    await ledger.aclose()


@pytest.fixture
async def mcp(tmp_path: Path) -> AsyncIterator[McpFixture]:
    async for fixture in open_mcp(tmp_path, ServerSettings(public_key="pk_0123456789abcdef", jwt_secret=JWT_SECRET)):
        yield fixture


@pytest.mark.spec("12.3")
async def test_a_secret_key_sees_and_calls_every_tool(mcp: McpFixture) -> None:
    key = await mcp.key("secret")
    assert await mcp.tools(key) >= {"notes_read", "notes_drop", "notes_inside", "vault__open"}
    assert text_of(await mcp.call(key, "vault__open")) == "gold"


@pytest.mark.spec("12.3")
async def test_a_tool_key_sees_and_calls_only_its_allowed_tools(mcp: McpFixture) -> None:
    key = await mcp.key(tools_allowed=("notes_*",), tools_denied=("*_drop",))
    assert await mcp.tools(key) == {"notes_read", "notes_inside", "notes_long"}
    assert "result" in await mcp.call(key, "notes_read")
    for name in ("notes_drop", "vault__open"):
        answer = await mcp.call(key, name)
        assert answer["result"]["isError"]
        assert "this key may not use" in text_of(answer)
        assert "gold" not in json.dumps(answer)


@pytest.mark.spec("12.3")
async def test_a_denied_tool_cannot_be_called_through_another_tool(mcp: McpFixture) -> None:
    key = await mcp.key(tools_denied=("vault__*",))
    for name in ("vault__open", "vault.open", "open", "VAULT__OPEN"):
        inner_result = text_of(await mcp.call(key, "notes_inside", name=name))
        assert "gold" not in inner_result
        assert "gold" not in json.dumps(await mcp.call(key, name))
        batch = {"calls": [{"id": "1", "tool": name, "parameters": {}}]}
        assert "gold" not in json.dumps(await mcp.call(key, "agent__batch", **batch))
    matches = await mcp.call(key, "agent__find_tools", query="open the vault")
    assert "vault__open" not in json.dumps(matches)


@pytest.mark.spec("12.3")
async def test_list_changes_are_sent_only_for_tools_that_the_key_may_use(mcp: McpFixture) -> None:
    notes_key, vault_key = await mcp.key(tools_allowed=("notes_*",)), await mcp.key(tools_allowed=("vault__*",))
    assert "picture" in json.dumps((await mcp.session(vault_key))["response"])
    assert "picture" not in json.dumps((await mcp.session(notes_key))["response"])
    assert "picture" in json.dumps((await mcp.ask(vault_key, "server/discover"))[1])
    assert "picture" not in json.dumps((await mcp.ask(notes_key, "server/discover"))[1])
    unknown = await mcp.call(notes_key, "vault__opne")
    assert "vault__open" not in json.dumps(unknown)


@pytest.mark.spec("12.3")
async def test_each_key_is_its_own_user_and_may_act_for_an_agent(mcp: McpFixture) -> None:
    first_key, second_key = await mcp.key(), await mcp.key(agent_entity_id="ent_agent")
    first, second = [json.loads(text_of(await mcp.call(key, "notes_read"))) for key in (first_key, second_key)]
    assert first["user"] != second["user"]
    assert first["session"] != second["session"]
    assert first["agent"] is None
    assert second["agent"] == "ent_agent"


async def test_stored_outputs_of_a_key_are_only_its_own(mcp: McpFixture) -> None:
    first_key, second_key = await mcp.key("secret"), await mcp.key("secret")
    answer = await mcp.call(first_key, "notes_long")
    (link,) = (part for part in answer["result"]["content"] if part["type"] == "resource_link")
    status, read = await mcp.ask(first_key, "resources/read", {"uri": link["uri"]})
    assert status == 200
    assert "a long line" in json.dumps(read)
    _, refusal = await mcp.ask(second_key, "resources/read", {"uri": link["uri"]})
    assert "error" in refusal
    assert "a long line" not in json.dumps(refusal)
    assert (await mcp.ask(second_key, "resources/list"))[1]["result"]["resources"] == []
    handle = link["uri"].removeprefix("toolspace://outputs/")
    assert "a long line" not in json.dumps(await mcp.call(second_key, "agent__read_output", handle=handle))


async def test_a_session_is_for_the_key_that_opened_it(mcp: McpFixture) -> None:
    first_key, second_key = await mcp.key(), await mcp.key()
    session = await mcp.session(first_key)
    session.pop("response")
    listing = json.dumps({"jsonrpc": "2.0", "id": 5, "method": "tools/list"})
    async with mcp.http.post(mcp.url, data=io.BytesIO(listing.encode()), headers=session) as answer:
        assert answer.status == 200
    stolen = {**session, "authorization": f"Bearer {second_key}"}
    async with mcp.http.post(mcp.url, data=io.BytesIO(listing.encode()), headers=stolen) as answer:
        assert answer.status == 404
    async with mcp.http.delete(mcp.url, headers=stolen) as answer:
        assert answer.status == 404


@pytest.mark.spec("8.1")
async def test_other_credentials_are_refused(mcp: McpFixture) -> None:
    await mcp.ledger.write(entities_and_spaces.create_entity, "ent_1", "human", "Ann", {})
    token = jwt.encode({"sub": "ent_1", "exp": int(time.time()) + 60}, JWT_SECRET, algorithm="HS256")
    assert (await mcp.ask(None, "tools/list"))[0] == 401
    assert (await mcp.ask("sk_wrong", "tools/list"))[0] == 401
    assert (await mcp.ask(token, "tools/list"))[0] == 401
    status, answer = await mcp.ask(token, "tools/list", **{"x-public-key": "pk_0123456789abcdef"})
    assert status == 403
    assert "public" in answer["error"]["message"]
    revoked_key = await mcp.key()
    (record,) = await mcp.ledger.read(key_rows.list_keys)
    await api_keys.revoke_key(mcp.ledger, record.id, has_other_access=True)
    assert (await mcp.ask(revoked_key, "tools/list"))[0] == 401


async def test_a_stream_ends_when_its_key_is_revoked(mcp: McpFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    key = await mcp.key()
    (record,) = await mcp.ledger.read(key_rows.list_keys)
    session = await mcp.session(key)
    session.pop("response")
    async with mcp.http.get(mcp.url, headers={**session, "accept": "text/event-stream"}) as stream:
        assert stream.status == 200
        await api_keys.revoke_key(mcp.ledger, record.id, has_other_access=True)
        mcp.authenticator.invalidate()
        async with asyncio.timeout(15):
            await stream.content.read()


async def test_calls_are_counted_for_their_key(mcp: McpFixture) -> None:
    first_key, second_key = await mcp.key(), await mcp.key(tools_denied=("notes_drop",))
    for _ in range(3):
        await mcp.call(first_key, "notes_read")
    await mcp.call(first_key, "notes_inside", name="notes_read")
    await mcp.call(second_key, "notes_drop")
    await mcp.usage.flush()
    records = {record.hint: record for record in await mcp.ledger.read(key_rows.list_keys)}
    assert (records[api_keys.key_hint(first_key)].calls, records[api_keys.key_hint(first_key)].failed) == (4, 0)
    assert (records[api_keys.key_hint(second_key)].calls, records[api_keys.key_hint(second_key)].failed) == (1, 1)
    assert records[api_keys.key_hint(first_key)].last_used_at is not None


@pytest.mark.spec("8.3")
async def test_rate_limits_apply_to_the_mcp_endpoint(tmp_path: Path) -> None:
    server = ServerSettings(secret_rate_limit=RateSetting(count=1, seconds=60.0), max_body_bytes=2000)
    async for mcp in open_mcp(tmp_path, server):
        key = await mcp.key("secret")
        assert (await mcp.ask(key, "tools/call", {"name": "notes_read", "arguments": {"x": "y" * 3000}}))[0] == 413
        assert (await mcp.ask(key, "tools/list"))[0] == 200
        status, answer = await mcp.ask(key, "tools/list")
        assert status == 429
        assert "secretRateLimit" in answer["error"]["message"]


@pytest.mark.spec("8.3")
async def test_a_session_beyond_the_share_of_a_key_ends_its_least_recently_used_one(
    mcp: McpFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_CALLER", 3)
    greedy, second_key = await mcp.key(), await mcp.key()
    other_session = await open_session(mcp, second_key)
    first, second, third = [await open_session(mcp, greedy) for _ in range(3)]
    assert await list_tools_status(mcp, first) == 200  # Now the second one is the least recently used.
    fourth = await open_session(mcp, greedy)
    assert await list_tools_status(mcp, second) == 404
    assert [await list_tools_status(mcp, session) for session in (first, third, fourth, other_session)] == [200] * 4
    for _ in range(20):
        await open_session(mcp, greedy)
    assert await list_tools_status(mcp, other_session) == 200


@pytest.mark.spec("8.3")
async def test_sessions_with_an_open_stream_or_a_running_call_are_not_ended(
    mcp: McpFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_CALLER", 2)
    greedy = await mcp.key()
    streaming, unused = [await open_session(mcp, greedy) for _ in range(2)]
    async with mcp.http.get(mcp.url, headers=streaming) as stream:
        assert stream.status == 200
        third = await open_session(mcp, greedy)
        assert await list_tools_status(mcp, unused) == 404
        async with mcp.http.get(mcp.url, headers=third) as other_stream:
            assert other_stream.status == 200
            async with mcp.http.post(mcp.url, json=INITIALIZE, headers=without_session(streaming)) as response:
                assert response.status == 429
                assert "DELETE" in await response.text()
            assert (await mcp.ask(greedy, "tools/list"))[0] == 200  # Without a session.
        async with mcp.http.delete(mcp.url, headers=third) as response:
            assert response.status == 200
        await open_session(mcp, greedy)


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 0,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


async def open_session(mcp: McpFixture, key: str) -> dict[str, str]:
    """Opens a session of the handshake era; returns the headers of its requests."""
    headers = await mcp.session(key)
    headers.pop("response")
    return headers


def without_session(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name != "mcp-session-id"}


async def list_tools_status(mcp: McpFixture, headers: dict[str, str]) -> int:
    request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
    async with mcp.http.post(mcp.url, json=request, headers=headers) as response:
        return response.status


def test_expired_sessions_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_CALLER", 2)
    handshake_sessions = sessions.HandshakeSessions(idle_seconds=30)
    open_mcpessions = [sessions.HandshakeSession(name, "someone", None, can_answer=False) for name in (b"one", b"two")]
    for session in open_mcpessions:
        handshake_sessions.add(session)
    assert handshake_sessions.has_too_many("someone")
    assert not handshake_sessions.has_too_many("another")
    assert not handshake_sessions.has_too_many(None)
    open_mcpessions[0].last_sdk_request_at -= 60
    assert not handshake_sessions.has_too_many("someone")


async def test_a_foreign_origin_is_refused_and_an_allowed_one_gets_a_preflight_response(mcp: McpFixture) -> None:
    key = await mcp.key()
    assert (await mcp.ask(key, "tools/list", origin="https://evil.example"))[0] == 403
    assert (await mcp.ask(key, "tools/list", host="evil.example"))[0] == 421
    headers = {"origin": "http://localhost:3000", "access-control-request-method": "POST"}
    async with mcp.http.options(mcp.url, headers=headers) as answer:
        assert answer.status == 204
        assert answer.headers.getall("access-control-allow-origin") == ["http://localhost:3000"]
