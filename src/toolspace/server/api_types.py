"""Types that the bodies, queries and responses of several routes share, with their size limits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN

T = TypeVar("T")

MAX_NAME: Final = 200
MAX_TEXT: Final = 100_000
"""Characters of a message."""
MAX_METADATA: Final = 64 * 1024
"""Bytes of JSON in the metadata of an entity, a space or a message."""
MAX_DATA: Final = 256 * 1024
"""Bytes of JSON of an inbox event, a trigger or a usage report."""
DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 500

NEW_ID_PATTERN: Final = "^[A-Za-z0-9_][A-Za-z0-9_.:@~-]{0,99}$"
"""An id that a client may choose: a URL can carry it unescaped, so it starts with no dot, and it is short enough to
derive other ids from it."""


def full_match_pattern(pattern: str) -> str:
    """Converts a JSON Schema pattern that ends in `$` for Python, where `$` would also match before a line break."""
    return pattern.removesuffix("$") + "(?!\\n)$"


Id = Annotated[str, Meta(pattern=full_match_pattern(ID_PATTERN), examples=["spc_01k9x3v7m2q8r4t6w0y5z1a3b7"])]
NewId = Annotated[
    str,
    Meta(
        pattern=full_match_pattern(NEW_ID_PATTERN),
        description="An id of your choice; the server creates one if it is missing.",
    ),
]
ONE_LINE: Final = full_match_pattern("^[^\\u0000-\\u001f\\u007f]+$")
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=ONE_LINE, examples=["Support"])]
Text = Annotated[
    str, Meta(min_length=1, max_length=MAX_TEXT, description="Text without NUL characters.", examples=["Hello!"])
]
Metadata = Annotated[
    dict[str, Any],
    Meta(description=f"Any JSON object of up to {MAX_METADATA} bytes.", examples=[{"ticket": 4711}]),
]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE, description="Maximum number of items.")]
Cursor = Annotated[str, Meta(max_length=400, description="Where to continue: `next` of the previous page.")]
Principal = Annotated[str, Meta(min_length=1, max_length=200, examples=["ent_01k9x3v7m2q8r4t6w0y5z1a3b7"])]
Milliseconds = Annotated[int, Meta(description="Unix milliseconds.")]


class JsonRequestBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The body of a request. Unknown fields are refused, because they would have no effect."""


class BodyWithMetadata(JsonRequestBody, frozen=True, kw_only=True):
    metadata: Metadata = msgspec.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_METADATA)


class QueryParameters(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The query of a request."""


class PageQuery(QueryParameters, frozen=True, kw_only=True):
    """Selects a page of a list."""

    limit: Limit = DEFAULT_PAGE_SIZE
    cursor: Cursor | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A response, or a part of one."""


class ResultPage(ResponseBody, Generic[T], frozen=True, kw_only=True):
    """A page of a list."""

    items: Sequence[T]
    """The items of this page."""
    next: str | None
    """The `cursor` of the next page; null on the last page."""


def check_no_nul(name: str, value: str) -> None:
    """Raises `ValueError` if a text has a NUL character, which PostgreSQL cannot store."""
    if "\0" in value:
        raise ValueError(f"`{name}` contains a NUL character")


def check_cursor(cursor: str | None, pattern: str) -> None:
    """Raises `ValueError` if a cursor is no position in this list."""
    if cursor is not None and re.fullmatch(pattern, cursor, re.ASCII) is None:
        raise ValueError("`cursor` is not from this list; start without one")


def check_json_size(name: str, value: Any, limit: int) -> None:
    """Raises `ValueError` if a value is too large to store. In `__post_init__` this becomes a problem."""
    if value is not None and value is not msgspec.UNSET and (size := json_text.encoded_size(value)) > limit:
        raise ValueError(f"`{name}` has {size} bytes of JSON; at most {limit} are accepted")


def build_page(items: Sequence[T], limit: int, cursor: Callable[[T], str] = operator.attrgetter("id")) -> ResultPage[T]:
    """Builds a page from up to `limit + 1` items; the extra item shows that there is a next page.

    `cursor` returns the cursor that continues after an item: its id, unless it is given.
    """
    if len(items) <= limit:
        return ResultPage(items=items, next=None)
    page_items = items[:limit]
    return ResultPage(items=page_items, next=cursor(page_items[-1]))


def unset_to_none(value: T | msgspec.UnsetType) -> T | None:
    return None if isinstance(value, msgspec.UnsetType) else value
