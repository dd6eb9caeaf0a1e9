"""Which service to import, and how to reach it. Data only: nothing here reads a document or connects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class OpenApiSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One service described by an OpenAPI document.

    `OpenApiSpec(spec="https://example.com/openapi.json", auth={"bearerAuth": token}, methods=("GET",))`
    """

    spec: str
    """The document: a URL, or the path of a file."""
    base_url: str | None = None
    """Where the service is, if not where the document says."""
    headers: Mapping[str, str] = {}
    """Sent with every call. A parameter of one of these names is not offered to the model."""
    auth: Mapping[str, Any] = {}
    """Credentials by the name of the document's security scheme.

    A text is the key or the token, and `user:password` for basic. A mapping has `username` and `password`, or `token`,
    or `clientId`, `clientSecret` and perhaps `scopes`, `tokenUrl` and `clientAuth` (`basic` or `body`).
    """
    tags: tuple[str, ...] | None = None
    """Only operations with one of these tags. Globs, as in all filters; their case does not matter."""
    methods: tuple[str, ...] | None = None
    paths: tuple[str, ...] | None = None
    """Only operations at or below these paths."""
    operations: tuple[str, ...] | None = None
    """Only these operations, by `operationId`, else by their name."""

    def __repr__(self) -> str:
        return "OpenApiSpec(…)"  # A URL, a header and a credential may each carry a key.
