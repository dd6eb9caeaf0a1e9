"""Searches the web through tavily, google, bing or duckduckgo, as configured. Knows nothing of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any, ClassVar, cast
from urllib.parse import quote, quote_plus

from yarl import URL

from toolspace.builtin.http_client import GuardedHttpClient, GuardedRequest, GuardedResponse, decode_body, parse_url
from toolspace.core import json_text
from toolspace.errors import ToolError, ToolExecutionError, ToolValidationError

DEFAULT_PROVIDER = "duckduckgo"
"""It needs no key."""
DEFAULT_MAX_RESULTS = 10
MAX_PAGE_BYTES = 2_000_000

SearchResult = dict[str, str]
"""`{title, url, snippet}`."""


class UnreadableResults(Exception):
    """An answer that does not look like one of this provider's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings:
    """`tools.webSearch`, read. The key is kept out of every message."""

    provider: str
    key: str
    engine_id: str
    max_results: int
    url: URL | None

    @staticmethod
    def read(settings: Mapping[str, Any] | None) -> SearchSettings:
        values = dict(settings or {})
        provider = str(values.get("provider") or DEFAULT_PROVIDER).lower()
        if provider not in SEARCH_SERVICES:
            raise ToolExecutionError(
                f"tools.webSearch.provider is {provider!r}; use one of {', '.join(SEARCH_SERVICES)}"
            )
        most = values.get("maxResults")
        most = DEFAULT_MAX_RESULTS if most is None else most
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise ToolExecutionError(f"tools.webSearch.maxResults is {most!r}; use a whole number from 1 on")
        try:
            url = parse_url(str(values["url"])) if values.get("url") else None
        except ToolValidationError as error:
            raise ToolExecutionError(f"tools.webSearch.url: {str(error).removeprefix(error.prefix)}") from None
        return SearchSettings(
            provider=provider,
            key=str(values.get("apiKey") or "").strip(),  # Keys from files end in a line break.
            engine_id=str(values.get("cx") or values.get("searchEngineId") or ""),
            max_results=most,
            url=url,
        )

    def hide_key(self, text: str) -> str:
        for spelling in {self.key, quote(self.key, safe=""), quote_plus(self.key)} - {""}:
            text = text.replace(spelling, "…")
        return text


class SearchService(ABC):
    """One search service: how to ask it, and how to read what it says."""

    endpoint: ClassVar[URL]
    needs_key: ClassVar[bool] = True
    max_results_per_request: ClassVar[int]
    """How many results it gives to one question."""

    @abstractmethod
    def request(self, endpoint: URL, query: str, limit: int, settings: SearchSettings) -> GuardedRequest: ...

    @abstractmethod
    def results(self, response: GuardedResponse) -> list[SearchResult]:
        """Raises `UnknownShape` where the answer is not one of this service's."""


class Tavily(SearchService):
    endpoint = URL("https://api.tavily.com/search")
    max_results_per_request = 20

    def request(self, endpoint: URL, query: str, limit: int, settings: SearchSettings) -> GuardedRequest:
        headers = {"authorization": f"Bearer {settings.key}", "content-type": "application/json"}
        body = json_text.encode_bytes({"query": query, "max_results": limit})
        return GuardedRequest(method="POST", url=endpoint, headers=headers, body=body)

    def results(self, response: GuardedResponse) -> list[SearchResult]:
        items = _items(_json_object(response).get("results"))
        return _results(items, title="title", url="url", snippet="content")


class Google(SearchService):
    endpoint = URL("https://www.googleapis.com/customsearch/v1")
    max_results_per_request = 10

    def request(self, endpoint: URL, query: str, limit: int, settings: SearchSettings) -> GuardedRequest:
        if not settings.engine_id:
            raise ToolExecutionError("tools.webSearch.cx is not set; google needs the id of a search engine there")
        parameters = {"key": settings.key, "cx": settings.engine_id, "q": query, "num": limit}
        return GuardedRequest(method="GET", url=endpoint.update_query(parameters), headers={})

    def results(self, response: GuardedResponse) -> list[SearchResult]:
        answer = _json_object(response)
        if "items" not in answer and not {"kind", "searchInformation", "queries"} & answer.keys():
            raise UnreadableResults
        # Where nothing was found there is no list at all.
        return _results(_items(answer.get("items", [])), title="title", url="link", snippet="snippet")


_NO_PAGES: dict[str, list[object]] = {"value": []}
"""What bing means where it found nothing: it leaves the whole part out."""


class Bing(SearchService):
    endpoint = URL("https://api.bing.microsoft.com/v7.0/search")
    max_results_per_request = 50

    def request(self, endpoint: URL, query: str, limit: int, settings: SearchSettings) -> GuardedRequest:
        headers = {"ocp-apim-subscription-key": settings.key}
        return GuardedRequest(method="GET", url=endpoint.update_query({"q": query, "count": limit}), headers=headers)

    def results(self, response: GuardedResponse) -> list[SearchResult]:
        answer = _json_object(response)
        if "webPages" not in answer and answer.get("_type") != "SearchResponse":
            raise UnreadableResults
        pages = answer.get("webPages", _NO_PAGES)
        if not isinstance(pages, dict):
            raise UnreadableResults
        items = _items(cast("dict[str, object]", pages).get("value"))
        return _results(items, title="name", url="url", snippet="snippet")


class DuckDuckGo(SearchService):
    """The page for browsers without scripts, since there is no API; the `lite` page is read as well."""

    endpoint = URL("https://html.duckduckgo.com/html/")
    needs_key = False
    max_results_per_request = 30

    def request(self, endpoint: URL, query: str, limit: int, settings: SearchSettings) -> GuardedRequest:
        headers = {"user-agent": "Mozilla/5.0 (compatible; toolspace)", "accept": "text/html"}
        return GuardedRequest(method="GET", url=endpoint.update_query({"q": query}), headers=headers)

    def results(self, response: GuardedResponse) -> list[SearchResult]:
        page = _ResultPage()
        page.feed(_text(response))
        page.close()
        if page.challenge or (response.status == 202 and not page.found):
            raise ToolExecutionError(
                "duckduckgo takes this machine for a robot and wants a puzzle solved; wait a while, "
                "or set another tools.webSearch.provider"
            )
        if not page.found and not page.is_result_page:
            raise UnreadableResults
        return _results(page.found, title="title", url="url", snippet="snippet")


SEARCH_SERVICES: Mapping[str, SearchService] = {
    "tavily": Tavily(),
    "google": Google(),
    "bing": Bing(),
    "duckduckgo": DuckDuckGo(),
}


class WebSearchClient:
    """A `SearchProvider` for the configured service. Asks with one request, and keeps nothing."""

    def __init__(
        self, settings: Mapping[str, Any] | None = None, *, allowed_hosts: Sequence[str] | None = None
    ) -> None:
        self._settings = SearchSettings.read(settings)
        self.name = self._settings.provider
        self._provider = SEARCH_SERVICES[self.name]
        self._endpoint = self._settings.url or self._provider.endpoint
        allowed = list(allowed_hosts or ())
        if self._settings.url is not None:
            # Who wrote the URL into the configuration meant it, wherever it leads.
            allowed.append(f"{_bracketed(self._endpoint)}:{self._endpoint.port}")
        # No redirects: they would carry the key to who knows where.
        self._client = GuardedHttpClient(allowed, max_redirects=0, max_body_bytes=MAX_PAGE_BYTES)

    @property
    def max_results(self) -> int:
        return self._settings.max_results

    async def __call__(self, query: str, limit: int) -> Sequence[SearchResult]:
        """The best results, at most `limit` of them."""
        settings = self._settings
        if self._provider.needs_key and not settings.key:
            raise ToolExecutionError(
                f"tools.webSearch.apiKey is not set, but {self.name} needs a key; "
                f"the provider {DEFAULT_PROVIDER} needs none"
            )
        query = query.encode("utf-8", "replace").decode()
        limit = min(limit, settings.max_results)
        asked = self._provider.request(
            self._endpoint, query, min(limit, self._provider.max_results_per_request), settings
        )
        try:
            response = await self._client.send(asked.method, asked.url, headers=asked.headers, body=asked.body)
            if not 200 <= response.status < 300:
                raise ToolExecutionError(self._rejection(response))
            return self._provider.results(response)[:limit]
        except ToolValidationError:
            # Only the key can be wrong in a request that this module wrote.
            raise ToolExecutionError("tools.webSearch.apiKey holds characters that no key has") from None
        except ToolError as error:
            raise type(error)(settings.hide_key(str(error))) from None
        except UnreadableResults:
            raise ToolExecutionError(
                f"{self.name} answered with something that is not its list of results; "
                "check tools.webSearch.url, or set another tools.webSearch.provider"
            ) from None

    def _rejection(self, response: GuardedResponse) -> str:
        said = _complaint(response)
        message = f"{self.name} answered {response.status}{f' ({said})' if said else ''}"
        if response.status == 429:
            return f"{message}: too many searches; wait a while"
        if 300 <= response.status < 400:
            return f"{message}: a redirect, which is not followed; check tools.webSearch.url"
        if response.status >= 500:
            return f"{message}: it has a fault of its own; try again later"
        return f"{message}; check tools.webSearch.apiKey" if self._provider.needs_key else message


class _ResultPage(HTMLParser):
    """Collects the links and snippets of a result page, without advertisements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[dict[str, str]] = []
        self.challenge = False
        self.is_result_page = False
        self._collecting: tuple[str, str] | None = None
        """The tag that ends what is being collected, and what that is."""
        self._skipping = False
        """Whether the last link was an advertisement, whose snippet is none of ours."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        classes = set(attributes.get("class", "").split())
        if any(name.startswith("anomaly-modal") for name in classes):
            self.challenge = True
        if attributes.get("id") == "links" or {"no-results", "no-result"} & classes:
            self.is_result_page = True
        if tag == "a" and classes & {"result__a", "result-link"}:
            url = _unwrapped(attributes.get("href", ""))
            self._skipping = url is None
            if url is not None:
                self.found.append({"title": "", "url": url, "snippet": ""})
                self._collecting = (tag, "title")
        elif classes & {"result__snippet", "result-snippet"} and self.found and not self._skipping:
            self._collecting = (tag, "snippet")

    def handle_endtag(self, tag: str) -> None:
        if self._collecting is not None and self._collecting[0] == tag:
            self._collecting = None

    def handle_data(self, data: str) -> None:
        if self._collecting is not None:
            self.found[-1][self._collecting[1]] += data


def _unwrapped(href: str) -> str | None:
    """Where a link of a result page leads; None for an advertisement and for what leads nowhere."""
    try:
        url = URL("https://duckduckgo.com/").join(URL(href))
    except ValueError:
        return None
    if url.raw_host == "duckduckgo.com" or (url.raw_host or "").endswith(".duckduckgo.com"):
        if url.path == "/y.js":
            return None
        return url.query.get("uddg") or (None if url.path in ("/", "/l/") else str(url))
    return href


def _results(items: Sequence[Mapping[str, object]], *, title: str, url: str, snippet: str) -> list[SearchResult]:
    results: list[SearchResult] = []
    for item in items:
        link = item.get(url)
        if isinstance(link, str) and link.startswith(("http://", "https://")):
            results.append({"title": _line(item.get(title)), "url": link, "snippet": _line(item.get(snippet))})
    return results


def _line(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _items(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list):
        raise UnreadableResults
    return [cast("Mapping[str, object]", item) for item in cast("list[object]", value) if isinstance(item, dict)]


def _json_object(response: GuardedResponse) -> dict[str, object]:
    try:
        value = json_text.decode(response.body)
    except (ValueError, RecursionError):
        raise UnreadableResults from None
    if not isinstance(value, dict):
        raise UnreadableResults
    return cast("dict[str, object]", value)


def _text(response: GuardedResponse) -> str:
    text = decode_body(response.body, response.headers.get("content-type", ""), cut=response.truncated)
    if text is None:
        raise UnreadableResults
    return text


def _complaint(response: GuardedResponse) -> str:
    """What a service says is wrong, wherever in its answer it says so."""
    try:
        value: object = json_text.decode(response.body)
    except (ValueError, RecursionError):
        return ""
    for _ in range(4):
        if isinstance(value, list):
            value = next(iter(cast("list[object]", value)), "")
        elif isinstance(value, dict):
            known = cast("dict[str, object]", value)
            value = next((known[key] for key in ("message", "error", "errors", "detail") if key in known), "")
    return _line(cast("object", value))[:200]


def _bracketed(url: URL) -> str:
    host = url.raw_host or ""
    return f"[{host}]" if ":" in host else host
