"""`web_search` with every supported service."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from yarl import URL

from tests.http_servers import ReceivedRequest, Respond, http_server
from toolspace.builtin.http_client import GuardedResponse
from toolspace.builtin.network import network_tools
from toolspace.builtin.web_search import SEARCH_SERVICES, UnreadableResults, WebSearchClient
from toolspace.core.tool_context import ToolContext
from toolspace.errors import (
    ToolExecutionError,
    ToolPermissionError,
    ToolTransportError,
    ToolValidationError,
)
from toolspace.toolspace import Toolspace

pytestmark = pytest.mark.spec("10.3")

KEY = "k3y/with+signs"

PAGES = [
    {"title": "Snow & ice", "url": "https://snow.example/a?b=1&c=2", "snippet": "All about snow."},
    {"title": "Ice", "url": "http://ice.example/", "snippet": "All about ice."},
    {"title": "Hail", "url": "https://hail.example/", "snippet": "All about hail."},
]


def tavily_answer(pages: list[dict[str, str]]) -> web.Response:
    results = [
        {
            "title": page["title"],
            "url": page["url"],
            "content": page["snippet"],
            "score": 0.9,
            "raw_content": None,
        }
        for page in pages
    ]
    answer = {"query": "q", "follow_up_questions": None, "answer": None, "images": [], "results": results}
    return web.json_response({**answer, "response_time": 1.2})


def google_answer(pages: list[dict[str, str]]) -> web.Response:
    items = [
        {
            "kind": "customsearch#result",
            "title": page["title"],
            "htmlTitle": f"<b>{page['title']}</b>",
            "link": page["url"],
            "displayLink": "x",
            "snippet": page["snippet"],
        }
        for page in pages
    ]
    answer: dict[str, Any] = {
        "kind": "customsearch#search",
        "queries": {},
        "searchInformation": {"totalResults": "3"},
    }
    return web.json_response({**answer, "items": items} if items else answer)


def bing_answer(pages: list[dict[str, str]]) -> web.Response:
    value = [
        {"id": "x", "name": page["title"], "url": page["url"], "snippet": page["snippet"], "language": "en"}
        for page in pages
    ]
    answer: dict[str, Any] = {"_type": "SearchResponse", "queryContext": {"originalQuery": "q"}}
    response = {"webPages": {"webSearchUrl": "x", "totalEstimatedMatches": 3, "value": value}}
    return web.json_response({**answer, **response} if value else answer)


AD = """
<div class="result results_links results_links_deep result--ad ">
  <h2 class="result__title"><a rel="nofollow" class="result__a"
    href="https://duckduckgo.com/y.js?ad_domain=buy.example&amp;u3=https%3A%2F%2Fx">Buy snow</a></h2>
  <a class="result__snippet" href="https://duckduckgo.com/y.js?ad_domain=buy.example">Cheap snow.</a>
</div>
"""


def escape_html(text: str) -> str:
    return text.replace("&", "&amp;")


def duckduckgo_answer(pages: list[dict[str, str]]) -> web.Response:
    results = "".join(
        f"""
<div class="result results_links results_links_deep web-result ">
  <div class="links_main links_deep result__body">
    <h2 class="result__title">
      <a rel="nofollow" class="result__a" href="{escape_html(page["url"])}">
        {escape_html(page["title"])}
      </a>
    </h2>
    <div class="result__extras"><a class="result__url" href="x">x</a><span>&nbsp; 2025-12-30</span></div>
    <a class="result__snippet" href="x">{page["snippet"].replace("about", "<b>about</b>")}</a>
    <div class="clear"></div>
  </div>
</div>"""
        for page in pages
    )
    results = results or '<div class="no-results">No results.</div>'
    html = f'<html><body><div id="links" class="results">{AD if pages else ""}{results}</div></body></html>'
    return web.Response(text=html, content_type="text/html")


@dataclass
class SearchServiceCase:
    """One search service: its settings, its expected request and its responses."""

    name: str
    answer: Callable[[list[dict[str, str]]], web.Response]
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    sent_parts: Callable[[ReceivedRequest], tuple[Any, ...]] = lambda request: ()
    expected_parts: tuple[Any, ...] = ()
    errors: Any = None


def tavily_request_parts(request: ReceivedRequest) -> tuple[Any, ...]:
    return request.method, request.headers["authorization"], json.loads(request.body)


def google_request_parts(request: ReceivedRequest) -> tuple[Any, ...]:
    return request.method, request.query


def bing_request_parts(request: ReceivedRequest) -> tuple[Any, ...]:
    return request.method, request.headers["ocp-apim-subscription-key"], request.query


def duckduckgo_request_parts(request: ReceivedRequest) -> tuple[Any, ...]:
    return request.method, request.query


SERVICES = [
    SearchServiceCase(
        "tavily",
        tavily_answer,
        {"apiKey": KEY},
        tavily_request_parts,
        ("POST", f"Bearer {KEY}", {"query": "snow & ice?", "max_results": 2}),
        {"detail": {"error": f"Unauthorized: invalid API key {KEY}."}},
    ),
    SearchServiceCase(
        "google",
        google_answer,
        {"apiKey": KEY, "cx": "engine"},
        google_request_parts,
        ("GET", {"key": KEY, "cx": "engine", "q": "snow & ice?", "num": "2"}),
        {"error": {"code": 400, "message": f"API key not valid: {KEY}", "errors": [], "status": "X"}},
    ),
    SearchServiceCase(
        "bing",
        bing_answer,
        {"apiKey": KEY},
        bing_request_parts,
        ("GET", KEY, {"q": "snow & ice?", "count": "2"}),
        {
            "_type": "ErrorResponse",
            "errors": [{"code": "InvalidAuthorization", "message": f"No such key: {KEY}"}],
        },
    ),
    SearchServiceCase("duckduckgo", duckduckgo_answer, {}, duckduckgo_request_parts, ("GET", {"q": "snow & ice?"})),
]
KEYED = [service for service in SERVICES if service.settings]


def service_name(service: SearchServiceCase) -> str:
    return service.name


each_service = pytest.mark.parametrize("service", SERVICES, ids=service_name)
each_keyed_service = pytest.mark.parametrize("service", KEYED, ids=service_name)


def respond_with(response: Callable[[], web.StreamResponse]) -> Respond:
    async def answer(request: web.Request) -> web.StreamResponse:
        return response()

    return answer


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolates toolspaces from the user's state directory."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


async def search(settings: dict[str, Any] | None, query: str = "snow & ice?", **arguments: Any) -> Any:
    """The results of a search; raises the exception of a failure."""
    async with Toolspace(tools=network_tools, context=ToolContext(web_search=settings)) as toolspace:
        return (await toolspace.call("web_search", {"query": query, **arguments})).unwrap()


@each_service
async def test_a_search_sends_the_request_of_the_service_and_returns_results(service: SearchServiceCase):
    async with http_server(respond_with(lambda: service.answer(PAGES))) as server:
        settings = {"provider": service.name, "url": server.url("/search"), **service.settings}
        result = await search(settings, limit=2)
    assert result == {"results": PAGES[:2]}
    assert server.requests[0].path == "/search"
    assert service.sent_parts(server.requests[0]) == service.expected_parts


@each_service
async def test_no_results_are_an_empty_list(service: SearchServiceCase):
    async with http_server(respond_with(lambda: service.answer([]))) as server:
        assert await search({"provider": service.name, "url": server.url(), **service.settings}) == {"results": []}


@each_service
async def test_max_results_limits_the_limit(service: SearchServiceCase):
    async with http_server(respond_with(lambda: service.answer(PAGES))) as server:
        settings = {"provider": service.name, "url": server.url(), "maxResults": 1, **service.settings}
        assert (await search(settings, limit=1000))["results"] == PAGES[:1]
        assert (await search(settings))["results"] == PAGES[:1]


@each_service
@pytest.mark.parametrize(
    "body",
    ["", "[]", "null", "{}", '{"results": 1}', "<html><h1>Welcome</h1></html>", "[" * 100_000, "\xff\x00"],
)
async def test_an_unexpected_response_is_a_clear_error(service: SearchServiceCase, body: str):
    def answer() -> web.StreamResponse:
        return web.Response(body=body.encode("latin-1"))

    async with http_server(respond_with(answer)) as server:
        with pytest.raises(ToolExecutionError, match=rf"{service.name} .*tools\.webSearch\.provider"):
            await search({"provider": service.name, "url": server.url(), **service.settings})


@each_keyed_service
@pytest.mark.parametrize("key", [None, "", "  \n"])
async def test_a_missing_key_names_the_setting(service: SearchServiceCase, key: str | None):
    with pytest.raises(ToolExecutionError, match=r"tools\.webSearch\.apiKey is not set"):
        await search({"provider": service.name, "cx": "engine", "apiKey": key})


@each_keyed_service
async def test_a_rejected_key_is_reported_without_the_key(service: SearchServiceCase):
    def answer() -> web.StreamResponse:
        return web.json_response(service.errors, status=401)

    async with http_server(respond_with(answer)) as server:
        with pytest.raises(ToolExecutionError, match=r"answered 401 \(.*\); check tools\.webSearch\.apiKey") as failure:
            await search({"provider": service.name, "url": server.url(), **service.settings})
    assert "key" in str(failure.value)
    assert KEY not in str(failure.value)


@each_service
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_error_of_the_service_has_its_status(service: SearchServiceCase, status: int):
    async with http_server(respond_with(lambda: web.Response(status=status))) as server:
        with pytest.raises(ToolExecutionError, match=f"{service.name} answered {status}"):
            await search({"provider": service.name, "url": server.url(), **service.settings})


@each_service
async def test_a_redirect_is_not_followed(service: SearchServiceCase):
    async with http_server(respond_with(lambda: service.answer(PAGES))) as second_server:

        def answer() -> web.StreamResponse:
            return web.Response(status=307, headers={"location": second_server.url()})

        async with http_server(respond_with(answer)) as server:
            with pytest.raises(ToolExecutionError, match="redirect"):
                await search({"provider": service.name, "url": server.url(), **service.settings})
    assert second_server.requests == []


@each_keyed_service
async def test_an_unreachable_service_is_a_transport_error_without_the_key(service: SearchServiceCase):
    async with http_server(respond_with(web.Response)) as server:
        pass
    with pytest.raises(ToolTransportError) as failure:
        await search({"provider": service.name, "url": server.url(), **service.settings})
    assert KEY not in str(failure.value)


@each_keyed_service
async def test_a_key_with_a_line_break_at_its_end_works(service: SearchServiceCase):
    async with http_server(respond_with(lambda: service.answer(PAGES))) as server:
        settings = {"provider": service.name, "url": server.url(), **service.settings, "apiKey": f" {KEY}\n"}
        await search(settings, limit=2)
    assert service.sent_parts(server.requests[0]) == service.expected_parts


@pytest.mark.parametrize("provider", ["tavily", "bing"])
async def test_an_invalid_key_is_rejected_and_not_shown(provider: str):
    with pytest.raises(ToolExecutionError, match=r"tools\.webSearch\.apiKey") as failure:
        await search({"provider": provider, "apiKey": "s3cret\r\nX: y"})
    assert "s3cret" not in str(failure.value)


async def test_google_needs_a_search_engine():
    with pytest.raises(ToolExecutionError, match=r"tools\.webSearch\.cx"):
        await search({"provider": "google", "apiKey": KEY})
    async with http_server(respond_with(lambda: google_answer(PAGES))) as server:
        settings = {"provider": "google", "apiKey": KEY, "searchEngineId": "engine", "url": server.url()}
        await search(settings, limit=2)
    assert server.requests[0].query["cx"] == "engine"


async def test_google_requests_have_at_most_ten_results():
    async with http_server(respond_with(lambda: google_answer(PAGES))) as server:
        settings = {"provider": "google", "apiKey": KEY, "cx": "e", "maxResults": 30, "url": server.url()}
        await search(settings, limit=25)
    assert server.requests[0].query["num"] == "10"


def test_the_default_is_ten_results_of_duckduckgo():
    provider = WebSearchClient(None)
    assert (provider.name, provider.max_results) == ("duckduckgo", 10)
    assert SEARCH_SERVICES["duckduckgo"].endpoint == URL("https://html.duckduckgo.com/html/")
    assert not SEARCH_SERVICES["duckduckgo"].needs_key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"provider": "altavista"},
            r"tools\.webSearch\.provider is 'altavista'; use one of tavily, google, bing",
        ),
        ({"maxResults": 0}, r"tools\.webSearch\.maxResults"),
        ({"maxResults": "many"}, r"tools\.webSearch\.maxResults"),
        ({"url": "search.example"}, r"tools\.webSearch\.url"),
        ({"url": "file:///etc/passwd"}, r"tools\.webSearch\.url"),
    ],
)
async def test_an_invalid_setting_is_named(settings: dict[str, Any], message: str):
    with pytest.raises(ToolExecutionError, match=message):
        await search(settings)


@pytest.mark.parametrize("arguments", [{"query": " "}, {"query": "x", "limit": 0}, {"query": "x", "limit": -1}])
async def test_an_empty_query_and_an_invalid_limit_are_rejected(arguments: dict[str, Any]):
    with pytest.raises(ToolValidationError):
        await search(None, **arguments)


async def test_the_configured_endpoint_is_allowed_only_for_searches():
    async with http_server(respond_with(lambda: tavily_answer(PAGES))) as server:
        settings = {"provider": "tavily", "apiKey": KEY, "url": f"http://localhost:{server.port}/"}
        assert await search(settings, limit=1) == {"results": PAGES[:1]}
        with pytest.raises(ToolPermissionError):
            async with Toolspace(tools=network_tools, context=ToolContext(web_search=settings)) as toolspace:
                (await toolspace.call("http_get", {"url": settings["url"]})).unwrap()
    assert len(server.requests) == 1


@pytest.mark.parametrize("status", [200, 202])
async def test_a_captcha_of_duckduckgo_is_reported(status: int):
    html = '<div class="anomaly-modal__title">Unfortunately, bots use DuckDuckGo too.</div>'
    page = web.Response(text=html, content_type="text/html", status=status)
    async with http_server(respond_with(lambda: page)) as server:
        with pytest.raises(ToolExecutionError, match="robot"):
            await search({"url": server.url()})


def page_response(html: str) -> GuardedResponse:
    headers = {"content-type": "text/html; charset=utf-8"}
    body = html.encode("utf-8", "replace")
    return GuardedResponse(status=200, headers=headers, body=body, truncated=False, url=URL("http://x.example/"))


def test_redirect_links_of_duckduckgo_are_resolved():
    results = SEARCH_SERVICES["duckduckgo"].results(
        page_response(
            '<a class="result__a" href="//duckduckgo.com/l/?uddg=https%3A%2F%2Fa.example%2Fx&amp;rut=z">'
            "A</a>"
            '<a class="result__a" href="/l/?uddg=javascript%3Aalert(1)">script</a>'
            '<a class="result__a" href="javascript:alert(1)">script</a>'
        )
    )
    assert results == [{"title": "A", "url": "https://a.example/x", "snippet": ""}]


def test_the_lite_page_of_duckduckgo_is_read():
    results = SEARCH_SERVICES["duckduckgo"].results(
        page_response(
            "<table><tr><td>1.</td>"
            "<td><a rel='nofollow' href='https://a.example/' class='result-link'>A</a></td></tr>"
            "<tr><td></td><td class='result-snippet'>About <b>a</b>.</td></tr><tr><td>other</td></tr></table>"
        )
    )
    assert results == [{"title": "A", "url": "https://a.example/", "snippet": "About a."}]


@hypothesis_settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                '<a class="result__a" href="',
                "https://a.example",
                "//[",
                '">',
                "</a>",
                '<td class="result__snippet">',
                "<",
                "&#",
                "text",
                "<!--",
                "<![CDATA[",
                "\x00",
            ]
        ),
        max_size=30,
    )
)
def test_any_page_has_results_or_is_unreadable(pieces: list[str]):
    try:
        results = SEARCH_SERVICES["duckduckgo"].results(page_response("".join(pieces)))
    except UnreadableResults:
        return
    assert all(item["url"].startswith("http") for item in results)
