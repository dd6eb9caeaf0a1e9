"""Loads an OpenAPI document and resolves its references. Knows nothing of operations or tools.

A reference may lead to another file in the document's folder or below it, and nowhere else.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import unquote

from yarl import URL

from toolspace.core import json_text
from toolspace.core.http_messages import display_url
from toolspace.core.yaml_text import parse_yaml_as_json
from toolspace.errors import ProviderError, ToolError
from toolspace.providers.rest.client import HttpClient, HttpRequest

if TYPE_CHECKING:
    from toolspace.providers.openapi.provider import OpenApiSpec

MAX_DOCUMENT_BYTES = 64 << 20
MAX_FILES = 500
FETCH_TIMEOUT = 60.0
_MAX_REFERENCE_CHAIN = 32

OpenApiVersion = Literal["3.0", "3.1"]
JsonObject = dict[str, Any]


def as_object(value: Any) -> JsonObject | None:
    """The value if it is an object, otherwise None."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any]:
    """The value if it is a list, otherwise an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


class OpenApiError(Exception):
    """A part of the document is invalid or not supported. The message says why."""


class ResolvedReference(NamedTuple):
    """The node that a reference leads to."""

    node: Any
    file: DocumentFile
    key: str
    """Identifies the node: `#/components/schemas/Pet`, or `pets.yaml#/Pet` in another file. Empty without a `$ref`."""


class DocumentFile:
    """One file of the document. References in it are relative to it."""

    __slots__ = ("_references", "data", "document", "name", "path")

    def __init__(self, document: OpenApiDocument, data: Any, name: str, path: Path | None) -> None:
        self.document = document
        self.data = data
        self.name = name
        """The path relative to the document's folder; empty for the document itself."""
        self.path = path
        self._references: dict[str, ResolvedReference | OpenApiError] = {}

    def resolve(self, ref: object) -> ResolvedReference:
        """The node that a `$ref` leads to. Raises `OpenApiError` if there is none, or the reference is not allowed."""
        if not isinstance(ref, str):
            raise OpenApiError(f"a $ref is not text: {json_text.describe(ref)}")
        reference = self._references.get(ref)
        if reference is None:
            try:
                reference = self._resolve(ref)
            except OpenApiError as error:
                reference = error
            self._references[ref] = reference
        if isinstance(reference, OpenApiError):
            raise reference
        return reference

    def follow(self, node: Any) -> ResolvedReference:
        """The node itself, or what its chain of references leads to. Raises `OpenApiError`."""
        reference = ResolvedReference(node, self, "")
        for _ in range(_MAX_REFERENCE_CHAIN):
            node = as_object(reference.node)
            if node is None or "$ref" not in node:
                return reference
            reference = reference.file.resolve(node["$ref"])
        raise OpenApiError(f"the reference {reference.key!r} leads to itself")

    def _resolve(self, ref: str) -> ResolvedReference:
        path, _, pointer = ref.partition("#")
        file = self if not path else self.document.open_file(self, path, ref)
        if pointer and not pointer.startswith("/"):
            raise OpenApiError(f"the reference {ref!r} names an anchor; use a path such as #/components/…")
        node: Any = file.data
        steps = [step.replace("~1", "/").replace("~0", "~") for step in unquote(pointer).split("/")[1:]]
        for step in steps:
            if (members := as_object(node)) is not None and step in members:
                node = members[step]
            elif step.isdecimal() and len(step) < 9 and int(step) < len(as_list(node)):
                node = as_list(node)[int(step)]
            else:
                raise OpenApiError(f"the reference {ref!r} leads nowhere: {step!r} is missing")
        return ResolvedReference(node, file, f"{file.name}#{unquote(pointer)}")


class OpenApiDocument:
    """The whole document: its main file, and the files that it refers to."""

    def __init__(self, data: Any, *, path: Path | None = None, url: URL | None = None) -> None:
        """Raises `OpenApiError` unless it is OpenAPI 3.0 or 3.1."""
        self.data: JsonObject = _check_version(data)
        self.version: OpenApiVersion = "3.0" if str(data["openapi"]).startswith("3.0") else "3.1"
        self.url = url
        self.root = DocumentFile(self, data, "", path)
        self._files = {"": self.root}

    def open_file(self, source: DocumentFile, path_text: str, ref: str) -> DocumentFile:
        """Another file that a reference names, relative to `source`. Raises `OpenApiError`."""
        if source.path is None or self.root.path is None or "://" in path_text:
            raise OpenApiError(
                f"the reference {ref!r} leaves the document; only files beside a document on disk are read"
            )
        folder = self.root.path.resolve().parent
        try:
            path = (source.path.parent / unquote(path_text)).resolve()
        except (OSError, ValueError):
            raise OpenApiError(f"the reference {ref!r} names no file") from None
        if not path.is_relative_to(folder):
            raise OpenApiError(f"the reference {ref!r} leaves the document's folder; put the file into it")
        name = path.relative_to(folder).as_posix()
        if path == self.root.path.resolve():
            return self.root
        if name not in self._files:
            if len(self._files) >= MAX_FILES:
                raise OpenApiError(f"the reference {ref!r} is one too many: at most {MAX_FILES} files are read")
            try:
                self._files[name] = DocumentFile(self, parse_document(read_document_file(path)), name, path)
            except (OSError, ValueError) as error:
                raise OpenApiError(f"the file behind the reference {ref!r} cannot be read: {_reason(error)}") from None
        return self._files[name]


async def fetch_document(spec: OpenApiSpec, client: HttpClient) -> tuple[bytes, URL]:
    """Downloads a document whose `spec` is a URL; returns its bytes and the URL. Raises `ProviderError`."""
    try:
        url = URL(spec.spec)
    except ValueError as error:
        raise ProviderError(f"the URL of the document is invalid: {error}") from None
    # The headers may hold the key of the service. They are sent only to the origin that the operator configured.
    is_service_origin = spec.base_url is not None and _origin(spec.base_url) == _origin(spec.spec)
    request = HttpRequest("GET", url.with_fragment(None), dict(spec.headers) if is_service_origin else {})
    try:
        async with asyncio.timeout(FETCH_TIMEOUT):
            response = await client.fetch(request, max_bytes=MAX_DOCUMENT_BYTES)
    except TimeoutError:
        raise ProviderError(f"the document {display_url(url)} did not arrive within {FETCH_TIMEOUT:.0f} s") from None
    except ToolError as error:
        raise ProviderError(f"the document {display_url(url)} cannot be fetched: {error}") from None
    if response.status != 200:
        raise ProviderError(f"the document {display_url(url)} cannot be fetched: the server answers {response.status}")
    return response.body, url


def load_document(content: bytes | None, spec: str, url: URL | None) -> OpenApiDocument:
    """Parses the document in these bytes, or in the file that `spec` names. Slow if large. Raises `ProviderError`."""
    path = Path(spec) if url is None else None
    name = path if url is None else display_url(url)
    try:
        data = parse_document(content if path is None else read_document_file(path))
    except (OSError, ValueError) as error:
        raise ProviderError(f"the document {name} cannot be read: {_reason(error)}") from None
    try:
        return OpenApiDocument(data, path=path, url=url)
    except OpenApiError as error:
        raise ProviderError(f"the document {name} cannot be used: {error}") from None


def is_url(spec: str) -> bool:
    return spec.lower().startswith(("http://", "https://"))


def read_document_file(path: Path) -> bytes:
    """The bytes of a regular file. Raises `OSError`, or `ValueError` if it is too large."""
    if not path.is_file():  # Reading a pipe or a device might never end.
        raise FileNotFoundError("there is no such file")
    with path.open("rb") as file:
        content = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(content) > MAX_DOCUMENT_BYTES:
        raise ValueError(f"it is larger than {MAX_DOCUMENT_BYTES >> 20} MiB")
    return content


def parse_document(content: bytes | None) -> Any:
    """The data of a JSON or YAML text. Raises `ValueError`."""
    text = (content or b"").removeprefix(b"\xef\xbb\xbf")
    if text.lstrip()[:1] in (b"{", b"["):
        try:
            return json_text.decode(text)
        except ValueError as error:
            try:
                return parse_yaml_as_json(text.decode())  # YAML may start with a brace too.
            except ValueError:
                raise error from None
    try:
        return parse_yaml_as_json(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _check_version(data: Any) -> JsonObject:
    document = as_object(data)
    if document is None:
        raise OpenApiError("it is not an OpenAPI document: expected a mapping with the key openapi")
    version = str(document.get("openapi") or "")
    if version.startswith(("3.0", "3.1")):
        return document
    if "swagger" in document or version.startswith("2"):
        raise OpenApiError(
            f"it is Swagger {document.get('swagger') or version}, but only OpenAPI 3.0 and 3.1 are supported; "
            "convert it, for example with `npx swagger2openapi`"
        )
    raise OpenApiError(
        f"openapi: {version!r} is not supported; use 3.0 or 3.1" if version else "it has no openapi: version"
    )


def _origin(url: str) -> URL | None:
    try:
        return URL(url).origin()
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
