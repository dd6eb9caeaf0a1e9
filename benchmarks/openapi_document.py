"""A made-up OpenAPI document of any size, shaped like those of real services. Knows nothing of who reads it."""

from __future__ import annotations

from typing import Any

_KINDS = ("user", "order", "invoice", "shipment", "product", "review", "ticket", "device", "report", "session")
_DETAILS = ("owner", "region", "channel", "currency", "language", "origin", "warehouse", "carrier", "campaign", "batch")
_PER_KIND = 5
"""Operations on one kind of thing: list, create, read, change, remove."""


def make_document(operations: int) -> dict[str, Any]:
    """References, also in circles; parameters of all places, half of them shared; bodies, answers and examples."""
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Shop", "version": "1.0.0", "description": "Everything that a shop does."},
        "servers": [{"url": "https://api.example.com/v1"}],
        "paths": {},
        "components": {
            "schemas": {"Error": _ERROR, "Page": _PAGE},
            "parameters": {"limit": _LIMIT, "cursor": _CURSOR, "locale": _LOCALE},
            "responses": {"NotFound": _failed("There is no such thing."), "Invalid": _failed("It is not valid.")},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }
    for number in range(operations // _PER_KIND):
        kind = f"{_KINDS[number % len(_KINDS)]}_{number}"
        document["components"]["schemas"].update(_schemas(kind, number))
        document["paths"][f"/{kind}s"] = {"get": _list(kind), "post": _write(kind, "create")}
        document["paths"][f"/{kind}s/{{id}}"] = {
            "parameters": [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}],
            "get": _read(kind),
            "patch": _write(kind, "change"),
            "delete": _remove(kind),
        }
    return document


def _schemas(kind: str, number: int) -> dict[str, Any]:
    """A thing, what is sent to make one, and a part of it; things refer to one another, five of them in a circle."""
    other_number = number - number % 5 + (number + 1) % 5
    other_kind = f"{_KINDS[other_number % len(_KINDS)]}_{other_number}"
    fields: dict[str, Any] = {
        "name": {"type": "string", "description": f"What the {kind} is called.", "maxLength": 200},
        "amount": {"type": "number", "minimum": 0, "description": "In the currency of the shop."},
        "state": {"type": "string", "enum": ["new", "open", "held", "done"], "default": "new"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 20},
        "part": {"$ref": f"#/components/schemas/{kind}_part"},
        "note": {"type": ["string", "null"], "description": "Free text, which nobody reads."},
    }
    return {
        f"{kind}_new": {"type": "object", "properties": fields, "required": ["name", "amount"]},
        f"{kind}_part": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z0-9-]+$"},
                "count": {"type": "integer", "minimum": 1},
                "of": {"$ref": f"#/components/schemas/{kind}_part"},
            },
            "required": ["sku"],
        },
        kind: {
            "allOf": [{"$ref": f"#/components/schemas/{kind}_new"}],
            "type": "object",
            "properties": {
                **{name: _detail(name) for name in _DETAILS},
                "id": {"type": "string", "format": "uuid"},
                "created": {"type": "string", "format": "date-time"},
                "other": {"$ref": f"#/components/schemas/{other_kind}"},
                "links": {"type": "object", "additionalProperties": {"type": "string", "format": "uri"}},
            },
            "required": ["id"],
        },
    }


def _detail(name: str) -> dict[str, Any]:
    return {
        "type": ["string", "null"],
        "description": f"The {name}, as it was when the thing was made. It does not change afterwards.",
        "examples": [f"{name}-1"],
        "readOnly": True,
    }


def _list(kind: str) -> dict[str, Any]:
    return {
        "operationId": f"list_{kind}s",
        "summary": f"List every {kind}",
        "description": f"Gives the {kind}s that fit, the newest first, a page at a time.",
        "tags": [kind.partition("_")[0]],
        "parameters": [
            {"$ref": "#/components/parameters/limit"},
            {"$ref": "#/components/parameters/cursor"},
            {"$ref": "#/components/parameters/locale"},
            {
                "name": "state",
                "in": "query",
                "description": "Only those in one of these states.",
                "explode": False,
                "schema": {"type": "array", "items": {"type": "string", "enum": ["new", "open", "held", "done"]}},
            },
            {"name": "since", "in": "query", "schema": {"type": "string", "format": "date-time"}},
        ],
        "responses": {
            "200": _answer(
                {
                    "type": "object",
                    "properties": {
                        "items": {"type": "array", "items": {"$ref": f"#/components/schemas/{kind}"}},
                        "page": {"$ref": "#/components/schemas/Page"},
                    },
                },
                {"items": [_example(kind), _example(kind)], "page": {"next": "c2", "size": 2}},
            ),
            "400": {"$ref": "#/components/responses/Invalid"},
        },
    }


def _write(kind: str, verb: str) -> dict[str, Any]:
    return {
        "operationId": f"{verb}_{kind}",
        "summary": f"{verb.capitalize()} a {kind}",
        "description": f"Needs the right to write {kind}s.",
        "tags": [kind.partition("_")[0]],
        "parameters": [
            {"$ref": "#/components/parameters/locale"},
            {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 64}},
        ],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind}_new"}}},
        },
        "responses": {
            "201": _answer({"$ref": f"#/components/schemas/{kind}"}, _example(kind)),
            "400": {"$ref": "#/components/responses/Invalid"},
            "404": {"$ref": "#/components/responses/NotFound"},
        },
    }


def _read(kind: str) -> dict[str, Any]:
    return {
        "operationId": f"read_{kind}",
        "summary": f"Read one {kind}",
        "tags": [kind.partition("_")[0]],
        "parameters": [
            {"$ref": "#/components/parameters/locale"},
            {
                "name": "fields",
                "in": "query",
                "description": "Only these fields.",
                "schema": {"type": "array", "items": {"type": "string"}},
            },
        ],
        "responses": {
            "200": _answer({"$ref": f"#/components/schemas/{kind}"}, _example(kind)),
            "404": {"$ref": "#/components/responses/NotFound"},
        },
    }


def _remove(kind: str) -> dict[str, Any]:
    return {
        "operationId": f"remove_{kind}",
        "summary": f"Remove a {kind}",
        "description": "It cannot be had back.",
        "tags": [kind.partition("_")[0]],
        "responses": {"204": {"description": "Removed."}, "404": {"$ref": "#/components/responses/NotFound"}},
    }


def _answer(schema: dict[str, Any], example: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": schema, "examples": {"usual": {"value": example}}}}
    return {"description": "As asked for.", "content": content}


def _failed(description: str) -> dict[str, Any]:
    return {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }


def _example(kind: str) -> dict[str, Any]:
    return {
        "id": "7c0b2f0e-9f8c-4b1f-8a53-6f1d5d1a2b3c",
        "created": "2026-03-01T09:30:00Z",
        "name": f"A usual {kind}",
        "amount": 12.5,
        "state": "open",
        "tags": ["red", "small"],
        "part": {"sku": "AB-12", "count": 2},
        **{name: f"{name}-1" for name in _DETAILS},
        "links": {"self": f"https://api.example.com/v1/{kind}s/7c0b2f0e"},
    }


_ERROR = {
    "type": "object",
    "properties": {"code": {"type": "string"}, "message": {"type": "string"}, "field": {"type": "string"}},
    "required": ["code", "message"],
}
_PAGE = {"type": "object", "properties": {"next": {"type": "string"}, "size": {"type": "integer"}}}
_LIMIT = {
    "name": "limit",
    "in": "query",
    "description": "How many at most.",
    "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 30},
}
_CURSOR = {"name": "cursor", "in": "query", "description": "Where to go on.", "schema": {"type": "string"}}
_LOCALE = {"name": "Accept-Language", "in": "header", "schema": {"type": "string", "example": "en"}}
