"""Searches the web with Tavily, Google, Bing or DuckDuckGo, as `tools.webSearch` configures. Knows nothing of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any, ClassVar, cast
from urllib.parse import quote, quote_plus

from yarl import URL

from toolspace.builtin.http_client import GuardedHttpClient, GuardedRequest, GuardedResponse, decode_body, parse_url
from toolspace.core import json_text
from toolspace.errors import ToolError, ToolExecutionError, ToolValidationError

DEFAULT_PROVIDER = "duckduckgo"
"""It needs no API key."""
DEFAULT_MAX_RESULTS = 10
MAX_PAGE_BYTES = 2_000_000

SearchResult = dict[str, str]
"""`{title, url, snippet}`."""


class UnreadableResults(Exception):
    """A response does not have the format of the service."""


class SearchService(ABC):
    """One search service: builds its requests and reads its responses."""

    endpoint: ClassVar[URL]
    needs_key: ClassVar[bool] = True
    max_results_per_request: ClassVar[int]
    """The maximum number of results of one request."""
    fields: ClassVar[tuple[str, str, str]] = ("title", "url", "snippet")
    """The service's names of the title, the URL and the snippet of a result."""

    @abstractmethod
    def request(self, search: WebSearchClient, query: str, limit: int) -> GuardedRequest: ...

    def results(self, response: GuardedResponse) -> list[SearchResult]:
        """The results of a response. Raises `UnreadableResults` if it does not have the format of the service."""
        title, url, snippet = self.fields
        return [
            {"title": _single_line(item.get(title)), "url": link, "snippet": _single_line(item.get(snippet))}
            for item in self.list_items(response)
            if isinstance(link := item.get(url), str) and link.startswith(("http://", "https://"))
        ]

    def list_items(self, response: GuardedResponse) -> Sequence[Mapping[str, object]]:
        """The results as the service describes them."""
        try:
            data: object = json_text.decode(response.body)
        except (ValueError, RecursionError):
            raise UnreadableResults from None
        items = self.find_items(cast("dict[str, object]", data)) if isinstance(data, dict) else None
        if not isinstance(items, list):
            raise UnreadableResults
        return [cast("Mapping[str, object]", item) for item in cast("list[object]", items) if isinstance(item, dict)]

    def find_items(self, data: dict[str, object]) -> object:
        """The list of results in a JSON response."""
        return data.get("results")


class Tavily(SearchService):
    endpoint = URL("https://api.tavily.com/search")
    max_results_per_request = 20
    fields = ("title", "url", "content")

    def request(self, search: WebSearchClient, query: str, limit: int) -> GuardedRequest:
        headers = {"authorization": f"Bearer {search.key}", "content-type": "application/json"}
        body = json_text.encode_bytes({"query": query, "max_results": limit})
        return GuardedRequest(method="POST", url=search.endpoint, headers=headers, body=body)


class Google(SearchService):
    endpoint = URL("https://www.googleapis.com/customsearch/v1")
    max_results_per_request = 10
    fields = ("title", "link", "snippet")

    def request(self, search: WebSearchClient, query: str, limit: int) -> GuardedRequest:
        if not search.engine_id:
            raise ToolExecutionError("tools.webSearch.cx is not set; google needs the id of a search engine")
        parameters = {"key": search.key, "cx": search.engine_id, "q": query, "num": limit}
        return GuardedRequest(method="GET", url=search.endpoint.update_query(parameters), headers={})

    def find_items(self, data: dict[str, object]) -> object:
        # Without results there is no list.
        return data.get("items", [] if {"kind", "searchInformation", "queries"} & data.keys() else None)


class Bing(SearchService):
    endpoint = URL("https://api.bing.microsoft.com/v7.0/search")
    max_results_per_request = 50
    fields = ("name", "url", "snippet")

    def request(self, search: WebSearchClient, query: str, limit: int) -> GuardedRequest:
        headers = {"ocp-apim-subscription-key": search.key}
        return GuardedRequest(
            method="GET", url=search.endpoint.update_query({"q": query, "count": limit}), headers=headers
        )

    def find_items(self, data: dict[str, object]) -> object:
        if "webPages" not in data:  # Bing omits them if there are no results.
            return [] if data.get("_type") == "SearchResponse" else None
        pages = data["webPages"]
        return cast("dict[str, object]", pages).get("value") if isinstance(pages, dict) else None


class DuckDuckGo(SearchService):
    """Reads the result page for browsers without scripts, because there is no API. Also reads the `lite` page."""

    endpoint = URL("https://html.duckduckgo.com/html/")
    needs_key = False
    max_results_per_request = 30

    def request(self, search: WebSearchClient, query: str, limit: int) -> GuardedRequest:
        headers = {"user-agent": "Mozilla/5.0 (compatible; toolspace)", "accept": "text/html"}
        return GuardedRequest(method="GET", url=search.endpoint.update_query({"q": query}), headers=headers)

    def list_items(self, response: GuardedResponse) -> Sequence[Mapping[str, object]]:
        text = decode_body(response.body, response.headers.get("content-type", ""), truncated=response.truncated)
        if text is None:
            raise UnreadableResults
        page = _ResultPage()
        page.feed(text)
        page.close()
        if page.has_challenge or (response.status == 202 and not page.results):
            raise ToolExecutionError(
                "duckduckgo takes this machine for a robot and asks for a captcha; wait a while, "
                "or set another tools.webSearch.provider"
            )
        if not page.results and not page.is_result_page:
            raise UnreadableResults
        return page.results


SEARCH_SERVICES: Mapping[str, SearchService] = {
    "tavily": Tavily(),
    "google": Google(),
    "bing": Bing(),
    "duckduckgo": DuckDuckGo(),
}


class WebSearchClient:
    """Searches with the configured service. Each search is one request."""

    def __init__(
        self, settings: Mapping[str, Any] | None = None, *, allowed_hosts: Sequence[str] | None = None
    ) -> None:
        """`settings` is `tools.webSearch`. Raises `ToolExecutionError` that names a wrong setting, without the key."""
        values = dict(settings or {})
        self.name = str(values.get("provider") or DEFAULT_PROVIDER).lower()
        if self.name not in SEARCH_SERVICES:
            raise ToolExecutionError(
                f"tools.webSearch.provider is {self.name!r}; use one of {', '.join(SEARCH_SERVICES)}"
            )
        self._service = SEARCH_SERVICES[self.name]
        self.key = str(values.get("apiKey") or "").strip()  # A key from a file ends with a line break.
        self.engine_id = str(values.get("cx") or values.get("searchEngineId") or "")
        max_results = values.get("maxResults")
        self.max_results: int = DEFAULT_MAX_RESULTS if max_results is None else max_results
        if type(self.max_results) is not int or self.max_results < 1:
            raise ToolExecutionError(f"tools.webSearch.maxResults is {max_results!r}; use a whole number from 1 on")
        self.endpoint = self._service.endpoint
        host_entries = list(allowed_hosts or ())
        if values.get("url"):
            try:
                self.endpoint = parse_url(str(values["url"]))
            except ToolValidationError as error:
                raise ToolExecutionError(f"tools.webSearch.url: {str(error).removeprefix(error.prefix)}") from None
            # The operator configured the URL, so its host is allowed.
            host = self.endpoint.raw_host or ""
            host_entries.append(f"{f'[{host}]' if ':' in host else host}:{self.endpoint.port}")
        # No redirects: they would send the key to another host.
        self._client = GuardedHttpClient(host_entries, max_redirects=0, max_body_bytes=MAX_PAGE_BYTES)

    async def __call__(self, query: str, limit: int) -> Sequence[SearchResult]:
        """The best results, at most `limit`. No error message contains the key."""
        if self._service.needs_key and not self.key:
            raise ToolExecutionError(
                f"tools.webSearch.apiKey is not set, but {self.name} needs a key; "
                f"the provider {DEFAULT_PROVIDER} needs none"
            )
        query = query.encode("utf-8", "replace").decode()
        limit = min(limit, self.max_results)
        request = self._service.request(self, query, min(limit, self._service.max_results_per_request))
        try:
            response = await self._client.send(request.method, request.url, headers=request.headers, body=request.body)
            if not 200 <= response.status < 300:
                raise ToolExecutionError(self._describe_failure(response))
            return self._service.results(response)[:limit]
        except ToolValidationError:
            # Only the key can be invalid in a request that this module builds.
            raise ToolExecutionError("tools.webSearch.apiKey contains invalid characters") from None
        except ToolError as error:
            raise type(error)(self._hide_key(str(error))) from None
        except UnreadableResults:
            raise ToolExecutionError(
                f"the response of {self.name} is not a list of results; "
                "check tools.webSearch.url, or set another tools.webSearch.provider"
            ) from None

    def _hide_key(self, text: str) -> str:
        for spelling in {self.key, quote(self.key, safe=""), quote_plus(self.key)} - {""}:
            text = text.replace(spelling, "…")
        return text

    def _describe_failure(self, response: GuardedResponse) -> str:
        reason = _find_error_message(response)
        message = f"{self.name} answered {response.status}{f' ({reason})' if reason else ''}"
        if response.status == 429:
            return f"{message}: too many searches; wait a while"
        if 300 <= response.status < 400:
            return f"{message}: redirects are not followed; check tools.webSearch.url"
        if response.status >= 500:
            return f"{message}: the service failed; try again later"
        return f"{message}; check tools.webSearch.apiKey" if self._service.needs_key else message


class _ResultPage(HTMLParser):
    """Collects the titles, links and snippets of a result page, without advertisements."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.results: list[dict[str, str]] = []
        self.has_challenge = False
        self.is_result_page = False
        self._open_field: tuple[str, str] | None = None
        """The open tag whose text is collected, and the field of the result that gets it."""
        self._skips_snippet = False
        """Whether the last link was an advertisement, whose snippet is skipped."""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        classes = set(attributes.get("class", "").split())
        if any(name.startswith("anomaly-modal") for name in classes):
            self.has_challenge = True
        if attributes.get("id") == "links" or {"no-results", "no-result"} & classes:
            self.is_result_page = True
        if tag == "a" and classes & {"result__a", "result-link"}:
            url = _find_target(attributes.get("href", ""))
            self._skips_snippet = url is None
            if url is not None:
                self.results.append({"title": "", "url": url, "snippet": ""})
                self._open_field = (tag, "title")
        elif classes & {"result__snippet", "result-snippet"} and self.results and not self._skips_snippet:
            self._open_field = (tag, "snippet")

    def handle_endtag(self, tag: str) -> None:
        if self._open_field is not None and self._open_field[0] == tag:
            self._open_field = None

    def handle_data(self, data: str) -> None:
        if self._open_field is not None:
            self.results[-1][self._open_field[1]] += data


def _find_target(href: str) -> str | None:
    """The target of a link on a result page; None for an advertisement or an invalid link."""
    try:
        url = URL("https://duckduckgo.com/").join(URL(href))
    except ValueError:
        return None
    if url.raw_host == "duckduckgo.com" or (url.raw_host or "").endswith(".duckduckgo.com"):
        if url.path == "/y.js":
            return None
        return url.query.get("uddg") or (None if url.path in ("/", "/l/") else str(url))
    return href


def _single_line(value: object) -> str:
    return " ".join(value.split()) if isinstance(value, str) else ""


def _find_error_message(response: GuardedResponse) -> str:
    """The error message in a response, wherever the service puts it."""
    try:
        value: object = json_text.decode(response.body)
    except (ValueError, RecursionError):
        return ""
    for _ in range(4):
        if isinstance(value, list):
            value = next(iter(cast("list[object]", value)), "")
        elif isinstance(value, dict):
            members = cast("dict[str, object]", value)
            value = next((members[key] for key in ("message", "error", "errors", "detail") if key in members), "")
    return _single_line(cast("object", value))[:200]
