"""The OpenAPI document, built from the routes. `GET /openapi.json` returns it.

Schemas come from the structs of bodies, queries and responses. The description of a field is the docstring below it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from http import HTTPStatus
from itertools import pairwise
from typing import Any, Final, cast

import msgspec

from toolspace import __version__
from toolspace.core import json_text, stored_records
from toolspace.core.ids import ID_PATTERN
from toolspace.server.api_types import ResultPage
from toolspace.server.authorization import Access
from toolspace.server.responses import MEDIA_TYPE, ProblemBody
from toolspace.server.routes import agents, calls, documents, inbox, keys, tools_and_servers, workers
from toolspace.server.routing import Route

_REF: Final = "#/components/schemas/{name}"
_PROBLEM_MEDIA_TYPE: Final = MEDIA_TYPE.decode()
_SCHEMA_NAMES: Final[dict[type, str]] = {
    ResultPage: "Page",
    calls.CallResponse: "Call",
    calls.RunCallResponse: "RunCall",
    documents.NewDocumentBody: "NewDocument",
    agents.DeletedResponse: "Deleted",
    inbox.AcknowledgeBody: "Done",
    inbox.AcknowledgeResponse: "DoneAnswer",
    inbox.ClaimBody: "Claim",
    inbox.ClaimResponse: "Claimed",
    inbox.PushResponse: "Pushed",
    inbox.ReleaseBody: "Returned",
    inbox.ReleaseResponse: "ReturnedAnswer",
    keys.CallerResponse: "Me",
    agents.DeletedPlansResponse: "DeletedPlans",
    stored_records.AgentHistory: "History",
    stored_records.DocumentWithText: "WholeDocument",
    stored_records.TaskWithMessages: "WholeTask",
    stored_records.TurnCall: "CallSaid",
    stored_records.TurnResult: "ResultSaid",
    tools_and_servers.CallToolResponse: "CallAnswer",
    workers.LeaveBody: "Leave",
}
"""Names of schemas that differ from those of their classes: clients are generated from the document."""
_SECRET: Final[list[dict[str, list[str]]]] = [{"secretKey": []}, {"secretBearer": []}]
_ENTITY: Final[list[dict[str, list[str]]]] = [{"publicKey": [], "token": []}]
_TOOLS: Final[list[dict[str, list[str]]]] = [{"toolBearer": []}]
_SECURITY: Final = {
    Access.OPEN: [],
    Access.SECRET: _SECRET,
    Access.MEMBER: _SECRET + _ENTITY,
    Access.TOOLS: _SECRET + _TOOLS,
    Access.ANY: _SECRET + _ENTITY + _TOOLS,
}
_API_KEY: Final = {"type": "apiKey", "in": "header"}
_BEARER: Final = {"type": "http", "scheme": "bearer"}
_SECRET_KEY: Final = "A secret key, `sk_…`. It may do everything."
_SECURITY_SCHEMES: Final[dict[str, Any]] = {
    "secretKey": {**_API_KEY, "name": "x-secret-key", "description": _SECRET_KEY},
    "secretBearer": {**_BEARER, "description": _SECRET_KEY},
    "publicKey": {
        **_API_KEY,
        "name": "x-public-key",
        "description": "A public key, `pk_…`. It requires a token.",
    },
    "token": {
        **_BEARER,
        "bearerFormat": "JWT",
        "description": "Names the entity that sends the request. It sees only the spaces of which it is a member.",
    },
    "toolBearer": {
        **_BEARER,
        "description": "A tool key, `tk_…`. It lists and calls the tools that it allows.",
    },
}
_ERROR_DESCRIPTIONS: Final[dict[int, str]] = {
    400: "The request is invalid; the detail names the value and what was expected",
    401: "Credentials are missing or invalid",
    403: "The caller may not do this",
    404: "The resource does not exist",
    408: "The request body did not arrive in time",
    409: "The resource exists already, or its state does not allow this",
    413: "The request body is too large",
    415: "The request body is not JSON",
    421: "The Host header is not allowed",
    422: "The Idempotency-Key was used for another request",
    429: "Too many requests; Retry-After says when to try again",
    500: "Internal error; the server's log has the details under the errorId",
    503: "Temporarily unavailable; Retry-After says when to try again",
}


def encode_document(routes: Sequence[Route]) -> bytes:
    """Returns the document as JSON."""
    return json_text.encode_bytes(build_document(routes))


def build_document(routes: Sequence[Route]) -> dict[str, Any]:
    schemas = _Schemas(routes)
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _build_operation(route, schemas)
    statuses = {
        int(status) for path in paths.values() for operation in path.values() for status in operation["responses"]
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Toolspace gateway",
            "version": __version__,
            "description": "Entities, spaces, runs, and the tools that agents call. Times are Unix milliseconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": _SECURITY_SCHEMES,
            "responses": {
                str(status): _build_error_response(status, schemas) for status in sorted(statuses) if status >= 400
            },
        },
    }


def list_error_statuses(route: Route) -> list[int]:
    """Returns the statuses of all errors that a route may respond with."""
    statuses = {*route.error_statuses, 400, 421, 429, 500, 503}
    if route.access is not Access.OPEN:
        statuses |= {401, 403}
    if route.parameters:
        statuses.add(404)
    if route.body is not None:
        statuses |= {408, 413, 415}
    if route.accepts_idempotency_key:
        statuses |= {408, 409, 413, 422}
    return sorted(statuses)


class _Schemas:
    """The schemas of all bodies, queries and responses."""

    def __init__(self, routes: Sequence[Route]) -> None:
        types: list[Any] = [ProblemBody]
        for route in routes:
            types += [
                type
                for type in (route.body, route.query, route.response, *route.other_responses.values())
                if type is not None
            ]
        schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
        for struct in _walk_structs(msgspec.inspect.multi_type_info(types)):
            _describe_fields(struct, components[_component_name(struct.cls)])
        names = {type.__name__: name for type, name in _SCHEMA_NAMES.items()}
        self._types = types
        self._schemas: list[dict[str, Any]] = [_rename(schema, names) for schema in schemas]
        self.components: dict[str, Any] = {
            _rename_text(name, names): _rename(schema, names) for name, schema in components.items()
        }
        query_names = {route.query.__name__ for route in routes if route.query is not None}
        self._queries = {name: self.components.pop(name) for name in query_names}  # They become parameters.

    def get(self, type: Any) -> dict[str, Any]:
        return self._schemas[next(index for index, value in enumerate(self._types) if value is type)]

    def is_required(self, body: Any) -> bool:
        """Whether a body has required fields."""
        return bool(self.components[self.get(body)["$ref"].rpartition("/")[2]].get("required"))

    def get_query(self, type: Any) -> dict[str, Any]:
        return self._queries[type.__name__]


def _walk_structs(types: Sequence[Any]) -> Iterator[msgspec.inspect.StructType]:
    """Yields the structs in these types, each once."""
    classes: set[Any] = set()
    pending = list(types)
    while pending:
        type_info = pending.pop()
        if isinstance(type_info, msgspec.inspect.StructType):
            if type_info.cls in classes:
                continue
            classes.add(type_info.cls)
            yield type_info
            pending += [field.type for field in type_info.fields]
        for attribute in ("type", "item_type", "key_type", "value_type"):
            if isinstance(inner := getattr(type_info, attribute, None), msgspec.inspect.Type):
                pending.append(inner)
        for attribute in ("types", "item_types"):
            pending += getattr(type_info, attribute, ())


def _component_name(struct: Any) -> str:
    """Returns the name that msgspec gives the schema of a struct: `ResultPage_Entity_` for a generic one."""
    arguments = getattr(struct, "__args__", ())
    if not arguments:
        return struct.__name__
    return f"{struct.__origin__.__name__}_{'_'.join(_component_name(argument) for argument in arguments)}_"


def _describe_fields(struct: msgspec.inspect.StructType, schema: dict[str, Any]) -> None:
    """Adds the docstrings of the fields to the schema of a struct."""
    docstrings = _field_docstrings(getattr(struct.cls, "__origin__", struct.cls))
    for field in struct.fields:
        if (description := docstrings.get(field.name)) is not None:
            property_schema = schema["properties"][field.encode_name]
            for option in property_schema.get("anyOf", ()):
                option.pop("description", None)
            property_schema["description"] = description


def _field_docstrings(struct: type) -> dict[str, str]:
    """Returns the docstrings below the fields of a struct and its bases."""
    docstrings: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__module__.startswith("toolspace."):
            docstrings |= _module_docstrings(base.__module__).get(base.__qualname__, {})
    return docstrings


@cache
def _module_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Returns class → field → docstring, parsed from the source: Python does not keep the docstrings of fields."""
    docstrings: dict[str, dict[str, str]] = {}
    for node in ast.parse(inspect.getsource(sys.modules[module])).body:
        if isinstance(node, ast.ClassDef):
            fields = docstrings[node.name] = {}
            for statement, next_statement in pairwise(node.body):
                match statement, next_statement:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        fields[name] = " ".join(text.split())
                    case _:
                        pass
    return docstrings


def _rename(schema: Any, names: dict[str, str]) -> Any:
    """Replaces the names of schemas in references and titles."""
    if isinstance(schema, dict):
        members = cast("dict[str, Any]", schema)
        return {
            key: _rename_text(value, names) if key in ("$ref", "title") else _rename(value, names)
            for key, value in members.items()
        }
    if isinstance(schema, list):
        return [_rename(item, names) for item in cast("list[Any]", schema)]
    return schema


def _rename_text(text: Any, names: dict[str, str]) -> Any:
    if not isinstance(text, str):  # A property of this name.
        return _rename(text, names)
    return re.sub("[A-Za-z]+", lambda match: names.get(match[0], match[0]), text)


def _build_operation(route: Route, schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "summary": route.summary,
        "tags": [route.tag],
        "security": _SECURITY[route.access],
        "responses": _build_responses(route, schemas),
    }
    if route.description:
        operation["description"] = route.description
    if parameters := _build_parameters(route, schemas):
        operation["parameters"] = parameters
    if route.body is not None:
        operation["requestBody"] = {
            "required": schemas.is_required(route.body),
            "content": {"application/json": {"schema": schemas.get(route.body)}},
        }
    return operation


def _build_responses(route: Route, schemas: _Schemas) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, type in {route.status: route.response, **route.other_responses}.items():
        response: dict[str, Any] = {"description": HTTPStatus(status).phrase}
        if type is not None:
            response["content"] = {"application/json": {"schema": schemas.get(type)}}
        if route.media_type != "application/json" and status == route.status:
            response["content"] = {**response.get("content", {}), route.media_type: {"schema": {"type": "string"}}}
        responses[str(status)] = response
    for status in list_error_statuses(route):
        responses[str(status)] = {"$ref": f"#/components/responses/{status}"}
    return responses


def _build_parameters(route: Route, schemas: _Schemas) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    for name in route.parameters:
        schema: dict[str, Any] = {"type": "string", "minLength": 1}
        description = route.parameter_descriptions.get(name)
        if name.endswith("Id"):
            schema = {"type": "string", "pattern": ID_PATTERN}
            description = f"The id of the {name.removesuffix('Id')}."
        parameters.append({"name": name, "in": "path", "required": True, "description": description, "schema": schema})
    if route.query is not None:
        query = schemas.get_query(route.query)
        for name, schema in query.get("properties", {}).items():
            is_required = name in query.get("required", ())
            schema = _remove_null(dict(schema))
            parameter: dict[str, Any] = {"name": name, "in": "query", "required": is_required, "schema": schema}
            if description := schema.pop("description", None):
                parameter["description"] = description
            parameters.append(parameter)
    for name, description in route.headers.items():
        parameters.append(_build_header(name, description))
    if route.accepts_idempotency_key:
        description = "A request with the same key gets the first response again and has no second effect."
        parameters.append(_build_header("Idempotency-Key", description))
    return parameters


def _build_header(name: str, description: str) -> dict[str, Any]:
    schema = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[!-~]+$"}
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


def _remove_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Removes null from the schema of a query parameter, which a text cannot be."""
    options: list[dict[str, Any]] = [option for option in schema.get("anyOf", ()) if option != {"type": "null"}]
    if schema.get("default", 0) is None:
        schema.pop("default")
    if len(options) == 1:
        schema.pop("anyOf")
        return {**options[0], **schema}
    return schema


def _build_error_response(status: int, schemas: _Schemas) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": _ERROR_DESCRIPTIONS.get(status, HTTPStatus(status).phrase),
        "content": {_PROBLEM_MEDIA_TYPE: {"schema": schemas.get(ProblemBody)}},
    }
    if status in (429, 503):
        response["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return response


def _operation_id(route: Route) -> str:
    """Returns `getSpacesBySpaceIdMessages` for `GET /api/spaces/{spaceId}/messages`."""
    parts = [part for part in route.path.strip("/").replace(".", "-").split("/") if part != "api"]
    words: list[str] = []
    for part in parts:
        words += ["by", part[1:-1]] if part.startswith("{") else part.split("-")
    return route.method.lower() + "".join(word[:1].upper() + word[1:] for word in words if word)
