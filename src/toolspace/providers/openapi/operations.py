"""Reads the operations of a document: names, filters, arguments, server and security. Builds no requests.

An invalid operation becomes a warning and does not affect the others. `provider` uses it.
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
from toolspace.core.schema_size import SchemaTooLarge, measure_schema
from toolspace.errors import ProviderError
from toolspace.providers.openapi.document import (
    DocumentFile,
    JsonObject,
    OpenApiDocument,
    OpenApiError,
    as_list,
    as_object,
)
from toolspace.providers.openapi.inputs import (
    OpenApiParameter,
    OperationInputs,
    combine_inputs,
    implied_path_parameter,
    read_parameter,
    read_request_body,
)
from toolspace.providers.openapi.schemas import SchemaConverter
from toolspace.providers.openapi.security import SecurityRequirements, SecuritySchemes

if TYPE_CHECKING:
    from toolspace.providers.openapi.provider import OpenApiSpec

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
MAX_DESCRIPTION = 1000
PATH_PLACEHOLDER = re.compile(r"\{([^{}/]+)\}")

_SERVER_VARIABLE = re.compile(r"\{([^{}]+)\}")


class OperationServer(NamedTuple):
    """The start of every URL of an operation, without a slash at its end; or why it is unknown."""

    url: URL | None
    reason: str = ""


class OpenApiOperation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the document."""

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
    """The unread `responses` of the document."""
    file: DocumentFile


class OperationEntry(NamedTuple):
    """An operation before it is read: its node in the document."""

    method: str
    path: str
    node: JsonObject
    path_item: JsonObject
    file: DocumentFile

    @property
    def id(self) -> str:
        """Its `operationId`, otherwise method and path."""
        operation_id = self.node.get("operationId")
        return operation_id if isinstance(operation_id, str) and operation_id else f"{self.method}_{self.path}"


class OperationList(NamedTuple):
    operations: list[OpenApiOperation]
    warnings: list[str]


def read_operations(document: OpenApiDocument, spec: OpenApiSpec, security: SecuritySchemes) -> OperationList:
    """Reads every operation that the filters accept. Invalid ones become warnings."""
    warnings: list[str] = []
    entries = list(_list_entries(document, warnings))
    accepted_entries = [
        (name, entry)
        for name, entry in zip(_operation_names(entries), entries, strict=True)
        if _is_accepted(entry, spec)
    ]
    if entries and not accepted_entries:
        warnings.append(f"the filters accept none of its {len(entries)} operations")
    reader = _OperationReader(document, spec, security)
    operations: list[OpenApiOperation] = []
    for name, entry in accepted_entries:
        try:
            operation = reader.read(name, entry)
            measure_schema(operation.inputs.schema)
            operations.append(operation)
        except (OpenApiError, SchemaTooLarge, RecursionError) as error:
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            warnings.append(f'operation "{name}" ({entry.method.upper()} {entry.path}) is left out: {reason}')
    return OperationList(operations, warnings)


def _list_entries(document: OpenApiDocument, warnings: list[str]) -> Iterator[OperationEntry]:
    for path, item in (as_object(document.data.get("paths")) or {}).items():
        if path.startswith("x-"):
            continue
        try:
            reference = document.root.follow(item)
        except OpenApiError as error:
            warnings.append(f'path "{path}" is left out: {error}')
            continue
        path_item = as_object(reference.node)
        if path_item is None:
            description = json_text.describe(reference.node)
            warnings.append(f'path "{path}" is left out: expected a mapping, got {description}')
            continue
        for method in METHODS:
            if (node := as_object(path_item.get(method))) is not None:
                yield OperationEntry(method, path, node, path_item, reference.file)


def _operation_names(entries: list[OperationEntry]) -> list[str]:
    """A name for each operation. Computed before filtering, so that it does not depend on the filters."""
    ids = [entry.id for entry in entries]
    clean_ids = [sanitise(operation_id) for operation_id in ids]
    duplicates = {name for name, count in Counter(clean_ids).items() if count > 1}
    if not duplicates:
        return ids
    return [
        f"{operation_id}_{short_hash(f'{entry.method} {entry.path}')}" if clean_id in duplicates else operation_id
        for operation_id, clean_id, entry in zip(ids, clean_ids, entries, strict=True)
    ]


def _is_accepted(entry: OperationEntry, spec: OpenApiSpec) -> bool:
    if spec.methods is not None and entry.method not in {method.lower() for method in spec.methods}:
        return False
    if spec.operations is not None and not _matches_any([entry.id], spec.operations):
        return False
    if spec.tags is not None and not _matches_any(_list_texts(entry.node.get("tags")), spec.tags):
        return False
    if spec.paths is not None:
        paths_below = [f"{pattern.rstrip('/')}/*" for pattern in spec.paths]
        return _matches_any([entry.path], (*spec.paths, *paths_below))
    return True


def _matches_any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    folded_names = [name.casefold() for name in names]
    return any(fnmatchcase(name, pattern.casefold()) for pattern in patterns for name in folded_names)


def _list_texts(value: Any) -> list[str]:
    return [item for item in as_list(value) if isinstance(item, str)]


class _OperationReader:
    """Reads operations, and caches the parameters that they share."""

    def __init__(self, document: OpenApiDocument, spec: OpenApiSpec, security: SecuritySchemes) -> None:
        self._schemas = SchemaConverter(document, "request")
        self._security = security
        self._document = document
        self._configured_server = OperationServer(_parse_base_url(spec.base_url)) if spec.base_url is not None else None
        self._configured_headers = {("header", name.lower()) for name in spec.headers}
        self._shared_parameters: dict[tuple[str, str], OpenApiParameter | None] = {}

    def read(self, name: str, entry: OperationEntry) -> OpenApiOperation:
        node = entry.node
        security = self._security.requirements(node)
        # The model gives neither credentials nor what the operator has configured.
        excluded_keys = self._configured_headers
        if security:
            excluded_keys = excluded_keys | self._security.credential_locations(security)
        parameters = [parameter for parameter in self._read_parameters(entry) if parameter.key not in excluded_keys]
        servers = node.get("servers") or entry.path_item.get("servers") or self._document.data.get("servers")
        body_node = node.get("requestBody")
        body = read_request_body(body_node, entry.file, self._schemas) if body_node is not None else None
        return OpenApiOperation(
            name=name,
            method=entry.method.upper(),
            path=entry.path,
            description=_description(node),
            tags=tuple(_list_texts(node.get("tags"))),
            inputs=combine_inputs(parameters, body, self._schemas),
            server=self._configured_server or _resolve_server(self._document, servers),
            security=security,
            responses=node.get("responses"),
            file=entry.file,
        )

    def _read_parameters(self, entry: OperationEntry) -> list[OpenApiParameter]:
        """The parameters of the path and the operation, and those that only the path's placeholders imply."""
        parameters: dict[tuple[str, str], OpenApiParameter] = {}
        for node in (entry.path_item, entry.node):
            for item in as_list(node.get("parameters")):
                parameter = self._read_parameter(item, entry.file)
                if parameter is not None:
                    parameters[parameter.key] = parameter
        path, _, query = entry.path.partition("?")
        placeholders = dict.fromkeys(PATH_PLACEHOLDER.findall(path))
        if PATH_PLACEHOLDER.search(query):
            raise OpenApiError("its path has a parameter after the question mark, which is not supported")
        if any(segment in (".", "..") for segment in unquote(path).replace("\\", "/").split("/")):
            raise OpenApiError('its path has the segment "." or "..", which leads out of the service')
        for placeholder in placeholders:
            parameters.setdefault(("path", placeholder), implied_path_parameter(placeholder))
        return [item for item in parameters.values() if item.location != "path" or item.name in placeholders]

    def _read_parameter(self, node: Any, file: DocumentFile) -> OpenApiParameter | None:
        parameter = as_object(node)
        if parameter is None or "$ref" not in parameter:
            return read_parameter(node, file, self._schemas)
        key = (file.name, str(parameter["$ref"]))
        if key not in self._shared_parameters:
            reference = file.follow(node)
            self._shared_parameters[key] = read_parameter(reference.node, reference.file, self._schemas)
        return self._shared_parameters[key]


def _description(node: JsonObject) -> str:
    texts = [text.strip() for key in ("summary", "description") if isinstance(text := node.get(key), str)]
    if len(texts) == 2 and texts[1].startswith(texts[0].rstrip(".")):
        del texts[0]
    text = "\n\n".join(filter(None, texts))
    if node.get("deprecated") is True:
        text = f"Deprecated. {text}".strip()
    return text if len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1].rstrip()}…"


def _resolve_server(document: OpenApiDocument, servers: Any) -> OperationServer:
    """The first of several servers. Raises `OpenApiError` if the document describes it wrongly."""
    # Without servers, OpenAPI defines the root of the document's own URL.
    server = as_object(as_list(servers)[0]) if as_list(servers) else {"url": "/"}
    if server is None or not isinstance(server.get("url"), str):
        raise OpenApiError("its first server has no url")
    text = _fill_variables(server["url"], server.get("variables"))
    try:
        url = URL(text)
        if not url.absolute:
            if document.url is None:
                return OperationServer(None, f'the server of the document is "{text}", which has no host')
            url = document.url.join(url)
    except ValueError:
        raise OpenApiError(f"its server {text!r} is no URL") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise OpenApiError(f"its server {text!r} is no http or https URL")
    return OperationServer(_strip_url(url.with_user(None)))


def _fill_variables(text: str, variables: Any) -> str:
    definitions = as_object(variables) or {}

    def default_value(match: re.Match[str]) -> str:
        default = (as_object(definitions.get(match[1])) or {}).get("default")
        if default is None:
            raise OpenApiError(f"its server {text!r} has the variable {match[1]!r} without a default; set baseUrl")
        return str(default)

    return _SERVER_VARIABLE.sub(default_value, text)


def _parse_base_url(text: str) -> URL:
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ProviderError("baseUrl: expected an absolute URL such as https://api.example.com/v1")
    return _strip_url(url)


def _strip_url(url: URL) -> URL:
    url = url.with_query(None).with_fragment(None)
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)
