"""The operations of a document: found, named, filtered, and read. Builds no requests, makes no tools.

What is wrong with one operation is said of that one, and leaves the others alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import msgspec
from yarl import URL

from toolspace.core import json_text
from toolspace.core.names import sanitise, short_hash
from toolspace.errors import ProviderError
from toolspace.providers.openapi.bodies import RequestBody, read_request_body
from toolspace.providers.openapi.document import (
    DocumentFile,
    JsonObject,
    OpenApiDocument,
    OpenApiError,
    as_list,
    as_object,
)
from toolspace.providers.openapi.parameters import LOCATIONS, OpenApiParameter, implied_path_parameter, read_parameter
from toolspace.providers.openapi.schemas import Refs, SchemaConverter, add_definitions
from toolspace.providers.openapi.security import SecurityRequirements, SecuritySchemes

if TYPE_CHECKING:
    from toolspace.providers.openapi.provider import OpenApiSpec

# MERGED from servers: Where an operation is sent: the document's servers, or what the configuration says instead.

_VARIABLE = re.compile(r"\{([^{}]+)\}")


class OperationServer(NamedTuple):
    """The start of every URL, without a slash at its end; or why there is none."""

    url: URL | None
    reason: str = ""


class ServerResolver:
    """Finds the server of each operation: its own, else its path's, else the document's."""

    def __init__(self, document: OpenApiDocument, base_url: str | None) -> None:
        self._document = document
        self._base = OperationServer(_base(base_url)) if base_url is not None else None
        self._resolved: dict[int, OperationServer] = {}

    def resolve(self, operation: JsonObject, item: JsonObject) -> OperationServer:
        """Raises `Broken` where the document describes a server that cannot be."""
        if self._base is not None:
            return self._base
        listed: Any = operation.get("servers") or item.get("servers") or self._document.data.get("servers")
        key = id(listed)
        if key not in self._resolved:
            self._resolved[key] = self._first(listed)
        return self._resolved[key]

    def _first(self, listed: Any) -> OperationServer:
        # A document that says nothing means the place where it is.
        said = as_object(as_list(listed)[0]) if as_list(listed) else {"url": "/"}
        if said is None or not isinstance(said.get("url"), str):
            raise OpenApiError("its first server has no url")
        text = _fill(said["url"], said.get("variables"))
        try:
            url = URL(text)
            if not url.absolute:
                if self._document.url is None:
                    return OperationServer(None, f'the document says "{text}", which has no host')
                url = self._document.url.join(url)
        except ValueError:
            raise OpenApiError(f"its server {text!r} is no URL") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise OpenApiError(f"its server {text!r} is no http or https URL")
        return OperationServer(_bare(url.with_user(None)))


def _fill(text: str, variables: Any) -> str:
    known = as_object(variables) or {}

    def value(match: re.Match[str]) -> str:
        default = (as_object(known.get(match[1])) or {}).get("default")
        if default is None:
            raise OpenApiError(f"its server {text!r} has the variable {match[1]!r}, which has no default; set baseUrl")
        return str(default)

    return _VARIABLE.sub(value, text)


def _base(text: str) -> URL:
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ProviderError("baseUrl: expected an absolute URL such as https://api.example.com/v1")
    return _bare(url)


def _bare(url: URL) -> URL:
    url = url.with_query(None).with_fragment(None)
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)


# MERGED from inputs: The arguments of a tool: every parameter and the body of an operation in one object. Sends no…


class OperationInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Which argument goes where."""

    parameters: tuple[tuple[str, OpenApiParameter], ...]
    """Each with the name of its argument."""
    body: RequestBody | None
    body_argument: str | None
    """The argument that is the whole body; None where each field of the body is an argument."""
    schema: JsonObject


def combine_inputs(
    parameters: Iterable[OpenApiParameter], body: RequestBody | None, schemas: SchemaConverter
) -> OperationInputs:
    """The arguments, and the schema that describes them. Raises `Broken`."""
    named = _named(parameters)
    properties: JsonObject = {argument: parameter.schema for argument, parameter in named.items()}
    required = [argument for argument, parameter in named.items() if parameter.required]
    refs: Refs = {name: None for parameter in named.values() for name in parameter.refs}
    schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": False}
    body_argument = None
    if body is not None:
        if body.fields is not None and properties.keys().isdisjoint(body.fields):
            properties.update(body.fields)
            refs |= body.field_refs
            if body.required:
                required += body.required_fields
            elif body.required_fields:
                # The body may be left out, but whoever gives a part of it gives all that it needs.
                schema["dependentRequired"] = {field: list(body.required_fields) for field in body.fields}
        else:
            body_argument = "body"
            while body_argument in properties:
                body_argument = f"request_{body_argument}"
            properties[body_argument] = body.schema
            refs |= body.refs
            if body.required:
                required.append(body_argument)
    if required:
        schema["required"] = required
    return OperationInputs(
        parameters=tuple(named.items()),
        body=body,
        body_argument=body_argument,
        schema=add_definitions(schema, schemas.collect_definitions(refs)) if refs else schema,
    )


def _named(parameters: Iterable[OpenApiParameter]) -> dict[str, OpenApiParameter]:
    """Parameters by the names of their arguments: two of one name in different places have to differ."""
    given = list(parameters)
    names = [parameter.name for parameter in given]
    if len(set(names)) == len(names):
        return dict(zip(names, given, strict=True))
    named: dict[str, OpenApiParameter] = {}
    taken: set[Any] = set(names)
    for parameter in sorted(given, key=lambda one: LOCATIONS.index(one.location)):
        argument = parameter.name
        if argument in named:
            argument = f"{argument}_{parameter.location}"
            while argument in taken:
                argument += "_"
            taken.add(argument)
        named[argument] = parameter
    return named


METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
MAX_DESCRIPTION = 1000

_HOLE = re.compile(r"\{([^{}/]+)\}")


class OpenApiOperation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation, read."""

    name: str
    method: str
    """In capitals."""
    path: str
    description: str
    tags: tuple[str, ...]
    inputs: OperationInputs
    server: OperationServer
    security: SecurityRequirements
    responses: Any
    """As the document has them, with the file that they stand in."""
    source: DocumentFile


class OperationEntry(NamedTuple):
    """An operation as it stands in the document."""

    method: str
    path: str
    node: JsonObject
    path_item: JsonObject
    source: DocumentFile

    @property
    def id(self) -> str:
        said = self.node.get("operationId")
        return said if isinstance(said, str) and said else f"{self.method}_{self.path}"


class OperationList(NamedTuple):
    operations: list[OpenApiOperation]
    warnings: list[str]


def read_operations(document: OpenApiDocument, spec: OpenApiSpec, security: SecuritySchemes) -> OperationList:
    """Every operation that the filters let through, and what has to be said of the others."""
    warnings: list[str] = []
    found = list(_walk(document, warnings))
    names = _operation_names(found)
    wanted = [(name, one) for name, one in zip(names, found, strict=True) if _is_wanted(one, spec)]
    if found and not wanted:
        warnings.append(f"the filters let none of its {len(found)} operations through")
    reader = _Reader(document, spec, security)
    operations: list[OpenApiOperation] = []
    for name, one in wanted:
        try:
            operations.append(reader.read(name, one))
        except OpenApiError as error:
            warnings.append(f'operation "{name}" ({one.method.upper()} {one.path}) is left out: {error}')
        except RecursionError:
            warnings.append(f'operation "{name}" ({one.method.upper()} {one.path}) is left out: nested too deeply')
    return OperationList(operations, warnings)


def _walk(document: OpenApiDocument, warnings: list[str]) -> Iterator[OperationEntry]:
    for path, item in (as_object(document.data.get("paths")) or {}).items():
        if path.startswith("x-"):
            continue
        try:
            target = document.root.follow(item)
        except OpenApiError as error:
            warnings.append(f'path "{path}" is left out: {error}')
            continue
        node = as_object(target.node)
        if node is None:
            warnings.append(f'path "{path}" is left out: expected a mapping, got {json_text.describe(target.node)}')
            continue
        for method in METHODS:
            if (operation := as_object(node.get(method))) is not None:
                yield OperationEntry(method, path, operation, node, target.source)


def _operation_names(found: list[OperationEntry]) -> list[str]:
    """A name for each, before any filter: it never depends on which others are wanted."""
    ids = [one.id for one in found]
    clean = [sanitise(one) for one in ids]
    shared = {name for name, count in Counter(clean).items() if count > 1}
    if not shared:
        return ids
    return [
        f"{name}_{short_hash(f'{one.method} {one.path}')}" if plain in shared else name
        for name, plain, one in zip(ids, clean, found, strict=True)
    ]


def _is_wanted(found: OperationEntry, spec: OpenApiSpec) -> bool:
    if spec.methods is not None and found.method not in {method.lower() for method in spec.methods}:
        return False
    if spec.operations is not None and not _fits([found.id], spec.operations):
        return False
    if spec.tags is not None and not _fits(_texts(found.node.get("tags")), spec.tags):
        return False
    if spec.paths is not None:
        below = [f"{pattern.rstrip('/')}/*" for pattern in spec.paths]
        return _fits([found.path], (*spec.paths, *below))
    return True


def _fits(names: Iterable[str], patterns: Iterable[str]) -> bool:
    folded = [name.casefold() for name in names]
    return any(fnmatchcase(name, pattern.casefold()) for pattern in patterns for name in folded)


def _texts(value: Any) -> list[str]:
    return [one for one in as_list(value) if isinstance(one, str)]


class _Reader:
    """Reads operations, and remembers the parameters that they share."""

    def __init__(self, document: OpenApiDocument, spec: OpenApiSpec, security: SecuritySchemes) -> None:
        self._schemas = SchemaConverter(document, "request")
        self._security = security
        self._servers = ServerResolver(document, spec.base_url)
        self._set = {("header", name.lower()) for name in spec.headers}
        self._parameters: dict[tuple[str, str], OpenApiParameter | None] = {}

    def read(self, name: str, found: OperationEntry) -> OpenApiOperation:
        node = found.node
        security = self._security.requirements(node)
        # Neither what the operator has set nor a credential is the model's to give.
        taken = self._set | self._security.credential_locations(security) if security else self._set
        parameters = self._all(found)
        if taken:
            parameters = [one for one in parameters if _parameter_key(one) not in taken]
        body = node.get("requestBody")
        return OpenApiOperation(
            name=name,
            method=found.method.upper(),
            path=found.path,
            description=_description(node),
            tags=tuple(_texts(node.get("tags"))),
            inputs=combine_inputs(
                parameters,
                read_request_body(body, found.source, self._schemas) if body is not None else None,
                self._schemas,
            ),
            server=self._servers.resolve(node, found.path_item),
            security=security,
            responses=node.get("responses"),
            source=found.source,
        )

    def _all(self, found: OperationEntry) -> Iterable[OpenApiParameter]:
        """The operation's parameters over the path's, and what the path needs and neither has."""
        parameters: dict[tuple[str, str], OpenApiParameter] = {}
        for node in (found.path_item, found.node):
            for one in as_list(node.get("parameters")):
                parameter = self._parameter(one, found.source)
                if parameter is not None:
                    parameters[_parameter_key(parameter)] = parameter
        path, _, query = found.path.partition("?")
        holes = dict.fromkeys(_HOLE.findall(path))
        if _HOLE.search(query):
            raise OpenApiError("its path has a parameter behind the question mark, where it cannot be filled in")
        if any(segment in (".", "..") for segment in unquote(path).replace("\\", "/").split("/")):
            raise OpenApiError('its path has the segment "." or "..", which leads out of the service')
        for hole in holes:
            if ("path", hole) not in parameters:
                parameters[("path", hole)] = implied_path_parameter(hole)
        return [one for one in parameters.values() if one.location != "path" or one.name in holes]

    def _parameter(self, node: Any, source: DocumentFile) -> OpenApiParameter | None:
        said = as_object(node)
        if said is None or "$ref" not in said:
            return read_parameter(node, source, self._schemas)
        key = (source.name, str(said["$ref"]))
        if key not in self._parameters:
            target = source.follow(node)
            self._parameters[key] = read_parameter(target.node, target.source, self._schemas)
        return self._parameters[key]


def _parameter_key(parameter: OpenApiParameter) -> tuple[str, str]:
    name = parameter.name
    return parameter.location, name.lower() if parameter.location == "header" else name


def _description(node: JsonObject) -> str:
    texts = [text.strip() for key in ("summary", "description") if isinstance(text := node.get(key), str)]
    if len(texts) == 2 and texts[1].startswith(texts[0].rstrip(".")):
        del texts[0]
    text = "\n\n".join(filter(None, texts))
    if node.get("deprecated") is True:
        text = f"Deprecated. {text}".strip()
    return text if len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1].rstrip()}…"
