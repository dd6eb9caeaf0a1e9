"""The parts that bodies, queries and answers of several routes are made of, and how large each may be."""

from __future__ import annotations

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
"""Bytes of JSON that an entity, a space or a message may carry beside what it is."""
MAX_DATA: Final = 256 * 1024
"""Bytes of JSON of an inbox event, a trigger or a usage report."""
DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 500

NEW_ID_PATTERN: Final = "^[A-Za-z0-9_][A-Za-z0-9_.:@~-]{0,99}$"
"""An id that someone may choose: one that an address can carry as it is, so none that begins with a dot, and one that
other ids can be made of."""


def full_match_pattern(pattern: str) -> str:
    """A pattern that ends in `$`, for Python: there `$` alone would also take a line break behind the text."""
    return pattern.removesuffix("$") + "(?!\\n)$"


Id = Annotated[str, Meta(pattern=full_match_pattern(ID_PATTERN), examples=["spc_01k9x3v7m2q8r4t6w0y5z1a3b7"])]
NewId = Annotated[
    str,
    Meta(pattern=full_match_pattern(NEW_ID_PATTERN), description="An id of your own; one is made where none is given."),
]
ONE_LINE: Final = full_match_pattern("^[^\\u0000-\\u001f\\u007f]+$")
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=ONE_LINE, examples=["Support"])]
Text = Annotated[
    str, Meta(min_length=1, max_length=MAX_TEXT, description="Without NUL characters.", examples=["Hello!"])
]
Metadata = Annotated[
    dict[str, Any], Meta(description=f"Anything, up to {MAX_METADATA} bytes of JSON.", examples=[{"ticket": 4711}])
]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE, description="How many at most.")]
Milliseconds = Annotated[int, Meta(description="Unix milliseconds.")]


class JsonRequestBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a request brings. A member that is not known is refused: it would be a wish that nobody hears."""


class QueryParameters(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a request asks in its address."""


class PageQuery(QueryParameters, frozen=True, kw_only=True):
    """A part of a list."""

    limit: Limit = DEFAULT_PAGE_SIZE
    cursor: Annotated[str, Meta(max_length=300, description="Where to go on: `next` of the page before.")] | None = None


class ResponseBody(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """An answer, or a part of one."""


class ResultPage(ResponseBody, Generic[T], frozen=True, kw_only=True):
    """A part of a list, and where the next part begins; null where this was the last."""

    items: Sequence[T]
    next: str | None


def check_no_nul(name: str, value: str) -> None:
    """Raises `ValueError` where a text has a NUL, which not every database and no terminal takes."""
    if "\0" in value:
        raise ValueError(f"`{name}` has a NUL character; leave it out")


def check_json_size(name: str, value: Any, limit: int) -> None:
    """Raises `ValueError` where a value is larger than what is kept. For `__post_init__`: it becomes a problem."""
    if value is not None and value is not msgspec.UNSET and (size := json_text.encoded_size(value)) > limit:
        raise ValueError(f"`{name}` has {size} bytes of JSON; at most {limit} are kept")


def build_page(items: Sequence[T], limit: int, cursor: Callable[[T], str]) -> ResultPage[T]:
    """A page of what was read with one more than asked for: that one says whether there is a next page.

    `cursor` makes the cursor behind an item.
    """
    if len(items) <= limit:
        return ResultPage(items=items, next=None)
    shown = items[:limit]
    return ResultPage(items=shown, next=cursor(shown[-1]))


def unset_to_none(value: T | msgspec.UnsetType) -> T | None:
    """What a change brings; None where it says nothing."""
    return None if isinstance(value, msgspec.UnsetType) else value
