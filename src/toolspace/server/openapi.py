"""The OpenAPI document, made from the table of routes: what is not in the table is not in the document, nor served."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN
from toolspace.server.authorization import Access
from toolspace.server.field_descriptions import meaning
from toolspace.server.problems import MEDIA_TYPE, ProblemBody
from toolspace.server.routing import Route

_REF: Final = "#/components/schemas/{name}"
_PROBLEM: Final = MEDIA_TYPE.decode()
_SECURITY: Final[dict[Access, list[dict[str, list[str]]]]] = {
    Access.OPEN: [],
    Access.SECRET: [{"secretKey": []}, {"secretBearer": []}],
    Access.MEMBER: [{"secretKey": []}, {"secretBearer": []}, {"publicKey": [], "token": []}],
    Access.TOOLS: [{"secretKey": []}, {"secretBearer": []}, {"toolBearer": []}],
    Access.ANY: [{"secretKey": []}, {"secretBearer": []}, {"publicKey": [], "token": []}, {"toolBearer": []}],
}
_SCHEMES: Final[dict[str, Any]] = {
    "secretKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-secret-key",
        "description": "A secret key, `sk_…`: everything.",
    },
    "secretBearer": {"type": "http", "scheme": "bearer", "description": "A secret key, `sk_…`: everything."},
    "publicKey": {
        "type": "apiKey",
        "in": "header",
        "name": "x-public-key",
        "description": "A public key, `pk_…`; it needs a token beside it.",
    },
    "token": {
        "type": "http",
        "scheme": "bearer",
        "bearerFormat": "JWT",
        "description": "Names the entity that asks: it sees the spaces that it is in, and nothing else.",
    },
    "toolBearer": {"type": "http", "scheme": "bearer", "description": "A tool key, `tk_…`: some tools."},
}
_DESCRIPTIONS: Final[dict[int, str]] = {
    400: "The request is not as it should be; the detail names the value and what was expected",
    401: "No credentials, or wrong ones",
    403: "Not yours",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    409: "It is there already, or its state does not allow this",
    413: "The body is too large",
    415: "The body is not JSON",
    421: "The server does not answer to this name",
    422: "The Idempotency-Key was used for another request",
    429: "Too many requests; Retry-After says when to come back",
    500: "A fault in the server; its log says more under the errorId",
    503: "Not now; Retry-After says when to come back",
}


def encode_document(routes: Sequence[Route]) -> bytes:
    """The document as JSON."""
    return json_text.encode_bytes(build_document(routes))


def build_document(routes: Sequence[Route]) -> dict[str, Any]:
    """The document as data."""
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    used = sorted({int(status) for path in paths.values() for one in path.values() for status in one["responses"]})
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Toolspace gateway",
            "version": _version(),
            "description": "Entities, spaces, runs and the tools that agents call. Times are Unix milliseconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": _SCHEMES,
            "responses": {str(status): _problem(status, schemas) for status in used if status >= 400},
        },
    }


def list_error_statuses(route: Route) -> list[int]:
    """Every failure that a route may answer with."""
    found = {*route.error_statuses, 400, 421, 429, 500, 503}
    if route.access is not Access.OPEN:
        found |= {401, 403}
    if route.parameters:
        found.add(404)
    if route.body is not None:
        found |= {408, 413, 415}
    if route.accepts_idempotency_key:
        found |= {408, 409, 413, 422}
    return sorted(found)


class _Schemas:
    """The schemas of all that goes in and out, each named once."""

    def __init__(self, routes: Sequence[Route]) -> None:
        kinds: list[Any] = [ProblemBody]
        for route in routes:
            kinds += [
                kind
                for kind in (route.body, route.query, route.response, *route.other_responses.values())
                if kind is not None
            ]
        self._kinds = kinds
        schemas, self.components = msgspec.json.schema_components(kinds, ref_template=_REF)
        self._schemas = list(schemas)
        for name, schema in self.components.items():
            for member, one in schema.get("properties", {}).items():
                if not _is_described(one) and (said := meaning(member, name)) is not None:
                    one["description"] = said
        queries = {route.query.__name__ for route in routes if route.query is not None}
        self._queries = {name: self.components.pop(name) for name in queries}  # Shown as parameters instead.

    def of(self, kind: Any) -> dict[str, Any]:
        return next(schema for own, schema in zip(self._kinds, self._schemas, strict=True) if own is kind)

    def query(self, kind: Any) -> dict[str, Any]:
        return self._queries[kind.__name__]


def _operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.tag],
        "security": _SECURITY[route.access],
        "responses": _responses(route, schemas),
    }
    if route.description:
        operation["description"] = route.description
    if parameters := _parameters(route, schemas):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": bool(schemas.components[route.body.__name__].get("required")),
            "content": {"application/json": {"schema": schemas.of(route.body)}},
        }
    return operation


def _responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in {route.status: route.response, **route.other_responses}.items():
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if kind is not None:
            response["content"] = {"application/json": {"schema": schemas.of(kind)}}
        if route.media_type != "application/json" and status == route.status:
            response["content"] = {**response.get("content", {}), route.media_type: {"schema": {"type": "string"}}}
        responses[str(status)] = response
    for status in list_error_statuses(route):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for name in route.parameters:
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        if name.endswith("Id"):
            schema = {"type": "string", "pattern": ID_PATTERN}
        said = "The name of it." if name == "name" else meaning(name)
        found.append({"name": name, "in": "path", "required": True, "description": said, "schema": schema})
    if route.query is not None:
        shape = schemas.query(route.query)
        for name, schema in shape.get("properties", {}).items():
            schema = dict(schema)
            required = name in shape.get("required", ())
            one: dict[str, Any] = {"name": name, "in": "query", "required": required, "schema": _without_null(schema)}
            if description := one["schema"].pop("description", None):
                one["description"] = description
            found.append(one)
    for name, description in route.headers.items():
        found.append(_header(name, description))
    if route.accepts_idempotency_key:
        found.append(
            _header("Idempotency-Key", "The same key gives the first answer again, and nothing happens twice.")
        )
    return found


def _is_described(schema: dict[str, Any]) -> bool:
    return "description" in schema or any("description" in one for one in schema.get("anyOf", ()))


def _header(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """What may be left out of a query is not null there: a text has no way to say so."""
    options: list[dict[str, Any]] = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    if schema.get("default", 0) is None:
        schema.pop("default")
    if len(options) == 1:
        schema.pop("anyOf")
        return {**options[0], **schema}
    return schema


def _problem(status: int, schemas: _Schemas) -> dict[str, Any]:
    shown = schemas.of(ProblemBody)
    response: dict[str, Any] = {
        "description": _DESCRIPTIONS.get(status, HTTPStatus(status).phrase),
        "content": {_PROBLEM: {"schema": shown}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}}}
    return response


def _operation_id(route: Route) -> str:
    """`GET /api/spaces/{spaceId}/messages` is `getSpacesBySpaceIdMessages`."""
    parts = [part for part in route.path.strip("/").replace(".", "-").split("/") if part != "api"]
    words: list[str] = []
    for part in parts:
        words += ["by", part[1:-1]] if part.startswith("{") else part.split("-")
    return route.method.lower() + "".join(word[:1].upper() + word[1:] for word in words if word)


def _version() -> str:
    from importlib.metadata import version

    return version("toolspace")
