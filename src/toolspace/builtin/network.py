"""The built-in network tools: HTTP requests and web search. Says what they take, not how they are done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.function_tool import tool
from toolspace.core.tool import Annotations
from toolspace.errors import ToolValidationError

# The client and the search providers are imported by the calls that need them: importing aiohttp takes longer
# than all of `toolspace list` may take.


@tool(category="network", annotations=Annotations(read_only=True, open_world=True))
async def http_get(url: str, headers: dict[str, str] | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Fetches a URL with GET. Returns {status, headers, body} for any status; follows redirects.

    The body is text; a binary body is base64, marked by "encoding": "base64".

    Args:
        url: An http:// or https:// URL.
        headers: Request headers.
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
    """Sends a POST request. Returns {status, headers, body} for any status; follows redirects.

    The body is text; a binary body is base64, marked by "encoding": "base64".

    Args:
        url: An http:// or https:// URL.
        body: An object or array is sent as JSON, a string as it is.
        headers: Request headers.
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
    """Sends an HTTP request of any method. Returns {status, headers, body} for any status; follows redirects.

    The body is text; a binary body is base64, marked by "encoding": "base64".

    Args:
        method: GET, HEAD, POST, PUT, PATCH, DELETE or OPTIONS.
        url: An http:// or https:// URL.
        body: An object or array is sent as JSON, a string as it is.
        headers: Request headers.
    """
    return await _fetch(method, url, body, headers, context)


@tool(category="network", annotations=Annotations(read_only=True, open_world=True))
async def web_search(query: str, limit: int | None = None, *, context: ToolContext) -> dict[str, Any]:
    """Searches the web. Returns {results: [{title, url, snippet}]}, the best first.

    Args:
        query: What to look for.
        limit: How many results at most.
    """
    from toolspace.builtin.web_search import WebSearchClient

    if not query.strip():
        raise ToolValidationError("query: it is empty; say what to look for")
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

    headers, content = _with_content(headers or {}, body)
    response = await GuardedHttpClient(context.allowed_hosts).send(method, url, headers=headers, body=content)
    result: dict[str, Any] = {"status": response.status, "headers": dict(response.headers)}
    text = decode_body(response.body, response.headers.get("content-type", ""), cut=response.truncated)
    if text is not None:
        result["body"] = text
    else:
        result["body"] = base64.b64encode(response.body).decode()
        result["encoding"] = "base64"
    if response.truncated:
        result["truncated"] = True
    if response.url != parse_url(url):
        result["url"] = str(response.url)  # Links on the page are relative to where it came from.
    return result


def _with_content(headers: Mapping[str, str], body: object) -> tuple[Mapping[str, str], bytes | None]:
    """The body as bytes, and the headers with its type where the caller gave none."""
    if body is None:
        return headers, None
    if isinstance(body, str):
        try:
            content = body.encode()
        except UnicodeEncodeError:
            raise ToolValidationError("body: it holds half of a surrogate pair, which no text can") from None
        kind = "application/json" if _is_json(body) else "text/plain; charset=utf-8"
    else:
        content = json_text.encode_bytes(body)
        kind = "application/json"
    if any(name.lower() == "content-type" for name in headers):
        return headers, content
    return {**headers, "Content-Type": kind}, content


def _is_json(text: str) -> bool:
    """Whether a string is a JSON object or array: models often write a JSON body so."""
    if not text.lstrip().startswith(("{", "[")):
        return False
    try:
        json_text.decode(text)
    except (ValueError, RecursionError):
        return False
    return True
