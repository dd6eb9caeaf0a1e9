"""The network tools: HTTP requests and web search. `http_client` and `web_search` do the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.tool import Annotations, tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolValidationError

# The first call imports the client and the search services: importing aiohttp takes longer than `toolspace list` may.


@tool(category="network", annotations=Annotations(read_only=True, open_world=True))
async def http_get(url: str, headers: dict[str, str] | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Fetches a URL with GET. Returns {status, headers, body} for any status. Follows redirects.

    The body is text. A binary body is base64, marked by "encoding": "base64".

    Args:
        url: An http:// or https:// URL.
        headers: The request headers.
    """
    return await _fetch("GET", url, None, headers, context)


@tool(category="network", annotations=Annotations(read_only=False, open_world=True))
async def http_post(
    url: str,
    body: str | dict[str, Any] | list[Any] | None = None,
    headers: dict[str, str] | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Sends a POST request. Returns {status, headers, body} for any status. Follows redirects.

    The body is text. A binary body is base64, marked by "encoding": "base64".

    Args:
        url: An http:// or https:// URL.
        body: An object or array is sent as JSON, a string unchanged.
        headers: The request headers.
    """
    return await _fetch("POST", url, body, headers, context)


@tool(category="network", annotations=Annotations(read_only=False, destructive=True, open_world=True))
async def http_request(
    method: str,
    url: str,
    body: str | dict[str, Any] | list[Any] | None = None,
    headers: dict[str, str] | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Sends an HTTP request with any method. Returns {status, headers, body} for any status. Follows redirects.

    The body is text. A binary body is base64, marked by "encoding": "base64".

    Args:
        method: GET, HEAD, POST, PUT, PATCH, DELETE or OPTIONS.
        url: An http:// or https:// URL.
        body: An object or array is sent as JSON, a string unchanged.
        headers: The request headers.
    """
    return await _fetch(method, url, body, headers, context)


@tool(category="network", annotations=Annotations(read_only=True, open_world=True))
async def web_search(query: str, limit: int | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Searches the web. Returns {results: [{title, url, snippet}]}, best results first.

    Args:
        query: The search query.
        limit: The maximum number of results.
    """
    from toolspace.builtin.web_search import WebSearchClient

    if not query.strip():
        raise ToolValidationError("query: it is empty; give a search query")
    if limit is not None and limit < 1:
        raise ToolValidationError(f"limit: expected 1 or more, got {limit}")
    search = WebSearchClient(context.web_search, allowed_hosts=context.allowed_hosts)
    return {"results": await search(query, search.max_results if limit is None else limit)}


network_tools = (http_get, http_post, http_request, web_search)


async def _fetch(
    method: str, url: str, body: object, headers: Mapping[str, str] | None, context: ToolContext
) -> dict[str, Any]:
    import base64

    from toolspace.builtin.http_client import GuardedHttpClient, decode_body, parse_url

    headers, content = _encode_body(headers or {}, body)
    response = await GuardedHttpClient(context.allowed_hosts).send(method, url, headers=headers, body=content)
    result: dict[str, Any] = {"status": response.status, "headers": dict(response.headers)}
    text = decode_body(response.body, response.headers.get("content-type", ""), truncated=response.truncated)
    if text is not None:
        result["body"] = text
    else:
        result["body"] = base64.b64encode(response.body).decode()
        result["encoding"] = "base64"
    if response.truncated:
        result["truncated"] = True
    if response.url != parse_url(url):
        result["url"] = str(response.url)  # Links on the page are relative to this URL.
    return result


def _encode_body(headers: Mapping[str, str], body: object) -> tuple[Mapping[str, str], bytes | None]:
    """The headers, with a content type if the caller gave none, and the body as bytes."""
    if body is None:
        return headers, None
    if isinstance(body, str):
        try:
            content = body.encode()
        except UnicodeEncodeError:
            raise ToolValidationError("body: it contains half of a surrogate pair, which cannot be encoded") from None
        content_type = "application/json" if _is_json(body) else "text/plain; charset=utf-8"
    else:
        content = json_text.encode_bytes(body)
        content_type = "application/json"
    if any(name.lower() == "content-type" for name in headers):
        return headers, content
    return {**headers, "Content-Type": content_type}, content


def _is_json(text: str) -> bool:
    """Whether a string is a JSON object or array, as models often write a JSON body."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json_text.decode(text)
    except (ValueError, RecursionError):
        return False
    return True
