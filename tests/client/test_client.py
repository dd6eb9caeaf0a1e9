"""The client against a real gateway: responses, errors and retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

import toolspace
from tests.server.gateway_api import PUBLIC, SECRET
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import (
    ApiError,
    BadRequest,
    Conflict,
    Forbidden,
    GatewayUnreachable,
    NotFound,
    TooLarge,
    Unauthorized,
    Unavailable,
    UnexpectedResponse,
)
from toolspace.core.stored_records import CallRecord, Entity, Message, RunRecord, Space
from toolspace.errors import ToolspaceError

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    """A server that answers as the test says: for what a gateway does only when something goes wrong."""
    runners: list[web.AppRunner] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.spec("18")
def test_client_and_worker_are_exported_from_the_package() -> None:
    assert toolspace.ToolspaceClient is ToolspaceClient
    assert toolspace.ToolWorker.__name__ == "ToolWorker"


@pytest.mark.spec("13.1")
async def test_spaces_entities_and_messages_are_records(client: ToolspaceClient) -> None:
    ada = await client.entities.create("human", "Ada", metadata={"team": "a"})
    bot = await client.entities.create("agent", "Bot", id="agent_bot")
    assert isinstance(ada, Entity)
    assert (ada.name, ada.metadata, bot.id) == ("Ada", {"team": "a"}, "agent_bot")
    space = await client.spaces.create("Support", members=[ada.id])
    assert isinstance(space, Space)
    await client.spaces.add_member(space.id, bot.id)
    assert {member.entity_id for member in await client.spaces.list_members(space.id)} == {ada.id, bot.id}
    message = await client.spaces.send_message(space.id, "Hello!", entity_id=ada.id)
    assert isinstance(message, Message)
    page = await client.spaces.list_messages(space.id)
    assert [message.content for message in page.items] == ["Hello!"]
    assert (await client.spaces.get_message(space.id, message.id)).seq == 1
    assert (await client.spaces.update(space.id, name="Help")).name == "Help"
    assert [listed_space.id async for listed_space in client.spaces.all()] == [space.id]
    await client.spaces.remove_member(space.id, ada.id)
    await client.spaces.delete(space.id)
    with pytest.raises(NotFound):
        await client.spaces.get(space.id)


async def test_all_iterates_over_pages(client: ToolspaceClient) -> None:
    entity_ids = {(await client.entities.create("human", f"Person {number}")).id for number in range(5)}
    page = await client.entities.list(limit=2)
    assert len(page.items) == 2
    assert page.next is not None
    assert {entity.id async for entity in client.entities.all()} >= entity_ids


@pytest.mark.spec("13.1")
async def test_a_program_opens_a_run_calls_tools_and_closes_it(client: ToolspaceClient) -> None:
    agent = await client.entities.create("agent", "Bot")
    run = await client.runs.open(agent.id, trigger={"why": "test"})
    assert isinstance(run, RunRecord)
    result = await client.runs.call(run.id, "hello")
    assert (result.ok, result.result, result.is_pending) == (True, "hello", False)
    assert result.unwrap() == "hello"
    pending = await client.runs.call(run.id, "later", {"to": "left"})
    assert pending.is_pending
    calls = await client.runs.list_calls(run.id)
    assert [(call.tool_name, call.status) for call in calls] == [("hello", "completed"), ("later", "pending")]
    closed = await client.runs.close(run.id, usage={"tokens": 3})
    assert (closed.status, closed.usage) == ("completed", {"tokens": 3})
    assert (await client.runs.close(run.id)).status == "completed"
    assert [listed_run.id for listed_run in (await client.agents.list_runs(agent.id)).items] == [run.id]


@pytest.mark.spec("13.1")
async def test_results_are_submitted_to_a_run_and_to_a_space(client: ToolspaceClient) -> None:
    agent = await client.entities.create("agent", "Bot")
    space = await client.spaces.create("Support", members=[agent.id])
    run = await client.runs.open(agent.id, space_id=space.id)
    first = await client.runs.call(run.id, "confirm", {"what": "this"})
    second = await client.runs.call(run.id, "later")
    assert first.pending_tool_call_id
    assert second.pending_tool_call_id
    resolved_call = await client.tools.submit_result(space.id, run.id, first.pending_tool_call_id, {"yes": True})
    assert isinstance(resolved_call, CallRecord)
    assert (resolved_call.status, resolved_call.result) == ("resolved", {"yes": True})
    failed = await client.tools.submit_run_result(run.id, second.pending_tool_call_id, "no arm", is_error=True)
    assert (failed.status, failed.is_error) == ("resolved", True)
    claim = await client.agents.claim(agent.id, count=10, wait=5)
    assert {event.data["callId"] for event in claim.items} == {resolved_call.call_id, failed.call_id}
    acknowledged_ids = await client.agents.acknowledge(
        agent.id, [event.event_id for event in claim.items], claim=claim.claim
    )
    assert len(acknowledged_ids) == 2


@pytest.mark.spec("6.5")
async def test_a_second_result_is_a_conflict_with_the_first_result(client: ToolspaceClient) -> None:
    call = await client.tools.call("later")
    assert call.pending_tool_call_id
    await client.tools.submit_call_result(call.pending_tool_call_id, "first", idempotency_key="one")
    repetition = await client.tools.submit_call_result(call.pending_tool_call_id, "first", idempotency_key="one")
    assert repetition.result == "first"
    with pytest.raises(Conflict) as refusal:
        await client.tools.submit_call_result(call.pending_tool_call_id, "second")
    assert refusal.value.problem["result"] == "first"


async def test_null_and_false_are_results(client: ToolspaceClient) -> None:
    for result in (None, False):
        call = await client.tools.call("later")
        assert call.pending_tool_call_id
        await client.tools.submit_call_result(call.pending_tool_call_id, result)
        stored_call = await client.calls.get(call.pending_tool_call_id)
        assert (stored_call.status, stored_call.result) == ("resolved", result)


async def test_large_results_are_accepted(client: ToolspaceClient) -> None:
    call = await client.tools.call("later")
    assert call.pending_tool_call_id
    result = "x" * 2_000_000
    assert (await client.tools.submit_call_result(call.pending_tool_call_id, result)).result == result
    with pytest.raises(TooLarge):
        await client.tools.submit_call_result(call.pending_tool_call_id, "x" * 5_000_000)


async def test_inbox_events_are_pushed_claimed_and_released(client: ToolspaceClient) -> None:
    agent = await client.entities.create("agent", "Bot")
    assert await client.agents.push_event(agent.id, {"order": 1}, event_id="order_1")
    assert not await client.agents.push_event(agent.id, {"order": 1}, event_id="order_1")
    claim = await client.agents.claim(agent.id)
    (back,) = await client.agents.release(agent.id, ["order_1"], claim=claim.claim, error="not now")
    assert (back.status, back.attempts) == ("pending", 1)
    assert [event.event_id for event in await client.agents.list_inbox(agent.id)] == ["order_1"]


async def test_tools_are_listed_and_a_failing_one_is_a_result(client: ToolspaceClient) -> None:
    assert {tool.name async for tool in client.tools.all()} >= {"move", "hello"}
    assert (await client.tools.get("move")).execution_type == "external"
    result = await client.tools.call("move")
    assert not result.ok
    assert "no worker serves" in (result.error or "")
    with pytest.raises(toolspace.ToolError):
        result.unwrap()


async def test_an_entity_with_a_token_sees_only_its_own_spaces(client: ToolspaceClient, url: str) -> None:
    ada = await client.entities.create("human", "Ada")
    own_space = await client.spaces.create("Own", members=[ada.id])
    other_space = await client.spaces.create("Other")
    token_requests = 0

    async def token() -> str:
        nonlocal token_requests
        token_requests += 1
        return "expired" if token_requests == 1 else await client.entities.create_token(ada.id)

    async with ToolspaceClient(url, public_key=PUBLIC, token=token) as member:
        assert [space.id for space in (await member.spaces.list()).items] == [own_space.id]
        assert token_requests == 2, "a token that is not taken is renewed, once"
        assert (await member.spaces.send_message(own_space.id, "It is me.")).sender_id == ada.id
        with pytest.raises(Forbidden):
            await member.spaces.get(other_space.id)
        with pytest.raises(Forbidden):
            async for _ in member.spaces.subscribe(other_space.id):
                pass
        assert (await member.me())["kind"] == "public"


async def test_keys_are_created_listed_and_revoked(client: ToolspaceClient, url: str) -> None:
    api_key = await client.keys.create("tools", "for a friend", tools_allowed=["hello"])
    assert api_key.key
    assert api_key.key not in repr(api_key)
    async with ToolspaceClient(url, secret_key=api_key.key) as friend:
        assert [tool.name async for tool in friend.tools.all()] == ["hello"]
        assert (await friend.tools.call("hello")).result == "hello"
        await client.keys.revoke(api_key.id)
        with pytest.raises(Unauthorized):
            await friend.tools.call("hello")
    assert api_key.id in {key.id async for key in client.keys.all() if key.revoked_at}


async def test_refusals_are_exceptions_with_the_problem_document(client: ToolspaceClient, url: str) -> None:
    with pytest.raises(NotFound, match='404 Not Found: Space "spc_none" not found') as refusal:
        await client.spaces.get("spc_none")
    assert (refusal.value.status, refusal.value.problem["status"]) == (404, 404)
    assert isinstance(refusal.value, ApiError | ToolspaceError)
    with pytest.raises(BadRequest):
        await client.entities.create("robot", "R2")  # pyright: ignore[reportArgumentType]
    async with ToolspaceClient(url, secret_key="sk_wrong") as stranger:
        with pytest.raises(Unauthorized):
            await stranger.spaces.list()
        with pytest.raises(Unauthorized):
            async for _ in stranger.spaces.subscribe("spc_none"):
                pass


@pytest.mark.parametrize("odd", ["..", "a/b", "a?b=c", "a%2Fb", "ü"])
async def test_ids_with_special_characters_stay_one_path_segment(client: ToolspaceClient, odd: str) -> None:
    with pytest.raises(NotFound, match=r"(?i)space"):
        await client.spaces.get(odd)


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ({"secret_key": "sk_a", "public_key": "pk_a", "token": "t"}, "not both"),
        ({"public_key": "pk_a"}, "go together"),
    ],
)
def test_contradicting_credentials_are_refused(credentials: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ToolspaceClient("http://127.0.0.1:1", **credentials)  # pyright: ignore[reportArgumentType]


def test_an_invalid_url_is_refused() -> None:
    with pytest.raises(ValueError, match="such as http"):
        ToolspaceClient("localhost:8787", secret_key=SECRET)


async def test_reads_are_retried_until_the_gateway_responds(serve: Callable[[Handler], Awaitable[str]]) -> None:
    requests: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append(request.method)
        if len(requests) == 1:
            request.transport.abort()  # type: ignore[union-attr]
        if len(requests) == 2:
            return web.json_response({"title": "no", "detail": "later"}, status=503, headers={"Retry-After": "0"})
        return web.json_response({"items": [], "next": None})

    async with ToolspaceClient(await serve(handler), secret_key=SECRET) as client:
        assert (await client.spaces.list()).items == []
    assert requests == ["GET"] * 3


async def test_a_call_that_may_have_been_executed_is_not_retried(serve: Callable[[Handler], Awaitable[str]]) -> None:
    requests: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append(await request.text())
        request.transport.abort()  # type: ignore[union-attr]
        return web.Response()

    async with ToolspaceClient(await serve(handler), secret_key=SECRET) as client:
        with pytest.raises(GatewayUnreachable) as failure:
            await client.tools.call("hello")
    assert len(requests) == 1
    assert failure.value.was_sent


@pytest.mark.spec("13.1")
async def test_a_lost_submission_is_retried_with_the_same_idempotency_key(
    serve: Callable[[Handler], Awaitable[str]],
) -> None:
    keys: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Idempotency-Key"])
        if len(keys) < 3:
            request.transport.abort()  # type: ignore[union-attr]
        return web.json_response({"title": "taken", "result": 1}, status=409)

    async with ToolspaceClient(await serve(handler), secret_key=SECRET) as client:
        with pytest.raises(Conflict):
            await client.tools.submit_run_result("run_a", "call_a", 1)
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_an_unreachable_gateway_is_an_error_with_its_url() -> None:
    async with ToolspaceClient("http://127.0.0.1:9", secret_key=SECRET, attempts=2) as client:
        with pytest.raises(GatewayUnreachable, match="cannot be reached"):
            await client.spaces.list()


async def test_a_gateway_that_does_not_respond_is_an_error_with_the_time(
    serve: Callable[[Handler], Awaitable[str]],
) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        return web.Response()

    async with ToolspaceClient(await serve(handler), secret_key=SECRET, attempts=1, timeout=0.05) as client:
        with pytest.raises(GatewayUnreachable, match=r"it did not respond within 0\.05 s"):
            await client.spaces.list()


async def test_responses_of_another_server_are_unexpected(serve: Callable[[Handler], Awaitable[str]]) -> None:
    async def handler(_: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>", content_type="text/html")

    async with ToolspaceClient(await serve(handler), secret_key=SECRET) as client:
        with pytest.raises(UnexpectedResponse, match="not JSON"):
            await client.spaces.list()
        with pytest.raises(UnexpectedResponse, match="text/html"):
            await anext(client.subscribe())


async def test_a_redirect_is_not_followed_with_the_key(serve: Callable[[Handler], Awaitable[str]]) -> None:
    requests: list[str] = []

    async def handler(request: web.Request) -> web.StreamResponse:
        requests.append(request.path)
        raise web.HTTPFound("/elsewhere")

    async with ToolspaceClient(await serve(handler), secret_key=SECRET) as client:
        with pytest.raises(ApiError, match="302"):
            await client.spaces.list()
    assert requests == ["/api/spaces"]


async def test_a_closed_client_raises(url: str) -> None:
    async with ToolspaceClient(url, secret_key=SECRET) as client:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        await client.spaces.list()


async def test_an_unavailable_gateway_is_retried_a_limited_number_of_times(
    serve: Callable[[Handler], Awaitable[str]],
) -> None:
    request_count = 0

    async def handler(_: web.Request) -> web.StreamResponse:
        nonlocal request_count
        request_count += 1
        return web.json_response({"detail": "starting"}, status=503)

    async with ToolspaceClient(await serve(handler), secret_key=SECRET, attempts=3) as client:
        async with asyncio.timeout(20):
            with pytest.raises(Unavailable, match="starting"):
                await client.spaces.list()
    assert request_count == 3
