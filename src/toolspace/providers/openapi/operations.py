"""The operations of a document: found, named, filtered, and read. Builds no requests, makes no tools.

What is wrong with one operation is said of that one, and leaves the others alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from toolspace.core import json_text
from toolspace.core.names import digest, sanitise
from toolspace.providers.openapi.bodies import read_body
from toolspace.providers.openapi.document import Broken, Document, Json, Source, mapping, members
from toolspace.providers.openapi.inputs import Inputs, inputs_of
from toolspace.providers.openapi.parameters import Parameter, implied, read_parameter
from toolspace.providers.openapi.schemas import Schemas
from toolspace.providers.openapi.security import Requirements, Security
from toolspace.providers.openapi.servers import Server, Servers
from toolspace.providers.openapi.spec import OpenApiSpec

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
MAX_DESCRIPTION = 1000

_HOLE = re.compile(r"\{([^{}/]+)\}")


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One operation, read."""

    name: str
    method: str
    """In capitals."""
    path: str
    description: str
    tags: tuple[str, ...]
    inputs: Inputs
    server: Server
    security: Requirements
    responses: Any
    """As the document has them, with the file that they stand in."""
    source: Source


class Found(NamedTuple):
    """An operation as it stands in the document."""

    method: str
    path: str
    node: Json
    item: Json
    source: Source

    @property
    def id(self) -> str:
        said = self.node.get("operationId")
        return said if isinstance(said, str) and said else f"{self.method}_{self.path}"


class Reading(NamedTuple):
    operations: list[Operation]
    warnings: list[str]


def read_operations(document: Document, spec: OpenApiSpec, security: Security) -> Reading:
    """Every operation that the filters let through, and what has to be said of the others."""
    warnings: list[str] = []
    found = list(_walk(document, warnings))
    names = _names(found)
    wanted = [(name, one) for name, one in zip(names, found, strict=True) if _is_wanted(one, spec)]
    if found and not wanted:
        warnings.append(f"the filters let none of its {len(found)} operations through")
    reader = _Reader(document, spec, security)
    operations: list[Operation] = []
    for name, one in wanted:
        try:
            operations.append(reader.read(name, one))
        except Broken as error:
            warnings.append(f'operation "{name}" ({one.method.upper()} {one.path}) is left out: {error}')
        except RecursionError:
            warnings.append(f'operation "{name}" ({one.method.upper()} {one.path}) is left out: nested too deeply')
    return Reading(operations, warnings)


def _walk(document: Document, warnings: list[str]) -> Iterator[Found]:
    for path, item in (mapping(document.data.get("paths")) or {}).items():
        if path.startswith("x-"):
            continue
        try:
            target = document.root.follow(item)
        except Broken as error:
            warnings.append(f'path "{path}" is left out: {error}')
            continue
        node = mapping(target.node)
        if node is None:
            warnings.append(f'path "{path}" is left out: expected a mapping, got {json_text.describe(target.node)}')
            continue
        for method in METHODS:
            if (operation := mapping(node.get(method))) is not None:
                yield Found(method, path, operation, node, target.source)


def _names(found: list[Found]) -> list[str]:
    """A name for each, before any filter: it never depends on which others are wanted."""
    ids = [one.id for one in found]
    clean = [sanitise(one) for one in ids]
    shared = {name for name, count in Counter(clean).items() if count > 1}
    if not shared:
        return ids
    return [
        f"{name}_{digest(f'{one.method} {one.path}')}" if plain in shared else name
        for name, plain, one in zip(ids, clean, found, strict=True)
    ]


def _is_wanted(found: Found, spec: OpenApiSpec) -> bool:
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
    return [one for one in members(value) if isinstance(one, str)]


class _Reader:
    """Reads operations, and remembers the parameters that they share."""

    def __init__(self, document: Document, spec: OpenApiSpec, security: Security) -> None:
        self._schemas = Schemas(document, "request")
        self._security = security
        self._servers = Servers(document, spec.base_url)
        self._set = {("header", name.lower()) for name in spec.headers}
        self._parameters: dict[tuple[str, str], Parameter | None] = {}

    def read(self, name: str, found: Found) -> Operation:
        node = found.node
        security = self._security.requirements(node)
        # Neither what the operator has set nor a credential is the model's to give.
        taken = self._set | self._security.carried(security) if security else self._set
        parameters = self._all(found)
        if taken:
            parameters = [one for one in parameters if _place(one) not in taken]
        body = node.get("requestBody")
        return Operation(
            name=name,
            method=found.method.upper(),
            path=found.path,
            description=_description(node),
            tags=tuple(_texts(node.get("tags"))),
            inputs=inputs_of(
                parameters, read_body(body, found.source, self._schemas) if body is not None else None, self._schemas
            ),
            server=self._servers.of(node, found.item),
            security=security,
            responses=node.get("responses"),
            source=found.source,
        )

    def _all(self, found: Found) -> Iterable[Parameter]:
        """The operation's parameters over the path's, and what the path needs and neither has."""
        parameters: dict[tuple[str, str], Parameter] = {}
        for node in (found.item, found.node):
            for one in members(node.get("parameters")):
                parameter = self._parameter(one, found.source)
                if parameter is not None:
                    parameters[_place(parameter)] = parameter
        path, _, query = found.path.partition("?")
        holes = dict.fromkeys(_HOLE.findall(path))
        if _HOLE.search(query):
            raise Broken("its path has a parameter behind the question mark, where it cannot be filled in")
        if any(segment in (".", "..") for segment in unquote(path).replace("\\", "/").split("/")):
            raise Broken('its path has the segment "." or "..", which leads out of the service')
        for hole in holes:
            if ("path", hole) not in parameters:
                parameters[("path", hole)] = implied(hole)
        return [one for one in parameters.values() if one.place != "path" or one.name in holes]

    def _parameter(self, node: Any, source: Source) -> Parameter | None:
        said = mapping(node)
        if said is None or "$ref" not in said:
            return read_parameter(node, source, self._schemas)
        key = (source.name, str(said["$ref"]))
        if key not in self._parameters:
            target = source.follow(node)
            self._parameters[key] = read_parameter(target.node, target.source, self._schemas)
        return self._parameters[key]


def _place(parameter: Parameter) -> tuple[str, str]:
    name = parameter.name
    return parameter.place, name.lower() if parameter.place == "header" else name


def _description(node: Json) -> str:
    texts = [text.strip() for key in ("summary", "description") if isinstance(text := node.get(key), str)]
    if len(texts) == 2 and texts[1].startswith(texts[0].rstrip(".")):
        del texts[0]
    text = "\n\n".join(filter(None, texts))
    if node.get("deprecated") is True:
        text = f"Deprecated. {text}".strip()
    return text if len(text) <= MAX_DESCRIPTION else f"{text[: MAX_DESCRIPTION - 1].rstrip()}…"
