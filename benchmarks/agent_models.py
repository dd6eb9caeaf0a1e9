"""Measure: what a streamed request to a model costs beyond the bare HTTP request, here and in other clients.

A server in a process of its own streams an answer of 200 pieces. Overhead is the time of a client minus the time of the
bare HTTP client that it is made with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import httpx2

from benchmarks.harness import Contestant, Report, Timings, race, repeat
from benchmarks.model_server import TEXT, WORDS
from benchmarks.processes import start_server
from toolspace.core.language_model import ModelRequest, ModelStreamPart, UserTurn
from toolspace.models.registry import open_model

OURS = "Toolspace, listening to each piece"
SDK = "the openai SDK"
PYDANTIC_AI = "pydantic-ai direct"
AIOHTTP = "bare aiohttp"
HTTPX = "bare httpx2"
_ASKED = "Tell me about kettles. " * 40
_BODY = {"model": "gpt-4.1", "messages": [{"role": "user", "content": _ASKED}], "stream": True}

Ask = Callable[[], Awaitable[Any]]


async def measure() -> Report:
    report = Report(f"A streamed model request of {WORDS} pieces, beyond the bare HTTP request")
    async with AsyncExitStack() as stack:
        url = stack.enter_context(start_server("chat")).url
        asks: dict[str, Ask] = {}
        for name, make in {
            OURS: toolspace_client,
            SDK: openai_client,
            PYDANTIC_AI: pydantic_ai_client,
            AIOHTTP: plain_aiohttp,
            HTTPX: plain_httpx,
        }.items():
            try:
                ask = await make(stack, f"{url}/v1")
                answer = await ask()
            except ImportError as error:
                report.notes.append(f"{name} is left out: {error}")
                continue
            if answer != TEXT:
                raise RuntimeError(f"{name} does not give the answer")
            asks[name] = ask
        timings = await race([Contestant(name, repeat(ask)) for name, ask in asks.items()], rounds=30, slice_ms=60)
    if SDK in asks:
        ours_over, sdk_over = _overhead(timings, OURS, AIOHTTP), _overhead(timings, SDK, HTTPX)
        must = {"must": 1.0, "aim": 0.5}
        report.figure("overhead, against the openai SDK's over its own bare client", ours_over / sdk_over, "×", **must)
        report.figure("the same, both over bare aiohttp", ours_over / _overhead(timings, SDK, AIOHTTP), "×", **must)
    if PYDANTIC_AI in asks:
        report.figure(
            "overhead, against pydantic-ai's",
            _overhead(timings, OURS, AIOHTTP) / _overhead(timings, PYDANTIC_AI, HTTPX),
            "×",
        )
    report.ratio("against the bare request that it is made with", timings.ratio(OURS, AIOHTTP))
    report.times(timings, list(asks))
    return report


def _overhead(timings: Timings, name: str, bare: str) -> float:
    return max(timings.best(name) - timings.best(bare), 1e-7)


async def toolspace_client(stack: AsyncExitStack, url: str) -> Ask:
    model = open_model("openai", "gpt-4.1", base_url=url, api_key="k", environ={})
    stack.push_async_callback(model.aclose)
    request = ModelRequest(system="", turns=[UserTurn(_ASKED)])

    def listen(part: ModelStreamPart) -> None:
        pass

    async def ask() -> str:
        return (await model.respond(request, listen)).text

    return ask


async def openai_client(stack: AsyncExitStack, url: str) -> Ask:
    from openai import AsyncOpenAI

    client = await stack.enter_async_context(AsyncOpenAI(base_url=url, api_key="k"))

    async def ask() -> str:
        stream = await client.chat.completions.create(
            model="gpt-4.1",
            messages=[{"role": "user", "content": _ASKED}],
            stream=True,
            stream_options={"include_usage": True},
        )
        deltas = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        return "".join(filter(None, deltas))

    return ask


async def pydantic_ai_client(stack: AsyncExitStack, url: str) -> Ask:
    from pydantic_ai.direct import model_request_stream
    from pydantic_ai.messages import ModelRequest as Request
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("gpt-4.1", provider=OpenAIProvider(base_url=url, api_key="k"))

    async def ask() -> str:
        async with model_request_stream(model, [Request.user_text_prompt(_ASKED)]) as stream:
            async for _ in stream:
                pass
            return stream.get().parts[0].content

    return ask


async def plain_aiohttp(stack: AsyncExitStack, url: str) -> Ask:
    session = await stack.enter_async_context(aiohttp.ClientSession())

    async def ask() -> str:
        async with session.post(f"{url}/chat/completions", json=_BODY) as response:
            async for _ in response.content.iter_any():
                pass
        return TEXT

    return ask


async def plain_httpx(stack: AsyncExitStack, url: str) -> Ask:
    client = await stack.enter_async_context(httpx2.AsyncClient())

    async def ask() -> str:
        async with client.stream("POST", f"{url}/chat/completions", json=_BODY) as response:
            async for _ in response.aiter_bytes():
                pass
        return TEXT

    return ask
