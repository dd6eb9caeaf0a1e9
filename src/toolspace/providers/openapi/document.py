"""An OpenAPI document: where it is, what it says, and what its references mean. Knows nothing of tools."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast
from urllib.parse import unquote

from yarl import URL

from toolspace.core import json_text
from toolspace.core.yaml_text import parse_yaml_as_json
from toolspace.errors import ProviderError, ToolError
from toolspace.providers.rest.client import HttpClient, HttpRequest

if TYPE_CHECKING:
    from toolspace.providers.openapi.provider import OpenApiSpec

MAX_DOCUMENT_BYTES = 64 << 20
MAX_FILES = 500
FETCH_TIMEOUT = 60.0
_LONGEST_CHAIN = 32
"""References that lead to references."""

OpenApiVersion = Literal["3.0", "3.1"]
JsonObject = dict[str, Any]


def as_object(value: Any) -> JsonObject | None:
    """The value, if it is a mapping."""
    return cast("JsonObject", value) if isinstance(value, dict) else None


def as_list(value: Any) -> list[Any]:
    """The members of a list; of anything else, none."""
    return cast("list[Any]", value) if isinstance(value, list) else []


class OpenApiError(Exception):
    """A part of the document cannot be used; the text says what is wrong with it."""


class ResolvedReference(NamedTuple):
    """What a reference means."""

    node: Any
    source: DocumentFile
    key: str
    """The one spelling of this place: `#/components/schemas/Pet`, or `pets.yaml#/Pet` in another file."""


class DocumentFile:
    """One file of the document. References inside it are relative to it."""

    __slots__ = ("data", "document", "file", "known", "name")

    def __init__(self, document: OpenApiDocument, data: Any, name: str, file: Path | None) -> None:
        self.document = document
        self.data = data
        self.name = name
        """Empty for the document itself."""
        self.file = file
        self.known: dict[str, ResolvedReference | OpenApiError] = {}

    def resolve(self, ref: object) -> ResolvedReference:
        """The place that a `$ref` names. Raises `Broken` where there is none, or where it must not be followed."""
        if not isinstance(ref, str):
            raise OpenApiError(f"a $ref is no text: {json_text.describe(ref)}")
        found = self.known.get(ref)
        if found is None:
            try:
                found = self._find(ref)
            except OpenApiError as error:
                found = error
            self.known[ref] = found
        if isinstance(found, OpenApiError):
            raise found
        return found

    def follow(self, node: Any) -> ResolvedReference:
        """What stands there, after all references that lead to references. Raises `Broken`."""
        target = ResolvedReference(node, self, "")
        for _ in range(_LONGEST_CHAIN):
            node = as_object(target.node)
            if node is None or "$ref" not in node:
                return target
            target = target.source.resolve(node["$ref"])
        raise OpenApiError(f"the reference {target.key!r} leads to itself")

    def _find(self, ref: str) -> ResolvedReference:
        file, _, pointer = ref.partition("#")
        source = self if not file else self.document.open_file(self, file, ref)
        if pointer and not pointer.startswith("/"):
            raise OpenApiError(f"the reference {ref!r} names an anchor; only paths such as #/components/… are followed")
        node: Any = source.data
        steps = [step.replace("~1", "/").replace("~0", "~") for step in unquote(pointer).split("/")[1:]]
        for step in steps:
            if (named := as_object(node)) is not None and step in named:
                node = named[step]
            elif step.isdecimal() and len(step) < 9 and int(step) < len(as_list(node)):
                node = as_list(node)[int(step)]
            else:
                raise OpenApiError(f"the reference {ref!r} leads nowhere: {step!r} is missing")
        return ResolvedReference(node, source, f"{source.name}#{unquote(pointer)}")


class OpenApiDocument:
    """The whole description: one file, and those beside it that it refers to."""

    def __init__(self, data: Any, *, file: Path | None = None, url: URL | None = None) -> None:
        self.data: JsonObject = _checked(data)
        self.version: OpenApiVersion = "3.0" if str(data["openapi"]).startswith("3.0") else "3.1"
        self.url = url
        self.root = DocumentFile(self, data, "", file)
        self._sources = {"": self.root}

    def open_file(self, source: DocumentFile, file: str, ref: str) -> DocumentFile:
        """Another file that a reference names, if it lies in the document's own folder or below it."""
        if source.file is None or self.root.file is None or "://" in file:
            raise OpenApiError(
                f"the reference {ref!r} leaves the document; only files beside a document on disk are read"
            )
        folder = self.root.file.resolve().parent
        try:
            path = (source.file.parent / unquote(file)).resolve()
        except (OSError, ValueError):
            raise OpenApiError(f"the reference {ref!r} names no file") from None
        if not path.is_relative_to(folder):
            raise OpenApiError(f"the reference {ref!r} leaves the document's folder; put the file into it")
        name = path.relative_to(folder).as_posix()
        if path == self.root.file.resolve():
            return self.root
        if name not in self._sources:
            if len(self._sources) >= MAX_FILES:
                raise OpenApiError(f"the reference {ref!r} is one too many: at most {MAX_FILES} files are read")
            try:
                self._sources[name] = DocumentFile(self, parse_document(read_document_file(path)), name, path)
            except (OSError, ValueError) as error:
                raise OpenApiError(f"the file behind the reference {ref!r} cannot be read: {_reason(error)}") from None
        return self._sources[name]


async def fetch_document(spec: OpenApiSpec, client: HttpClient) -> tuple[bytes, URL]:
    """The bytes of a document that is a URL, and that URL. Raises `ProviderError`."""
    try:
        url = URL(spec.spec)
    except ValueError as error:
        raise ProviderError(f"the document's URL is none: {error}") from None
    shown = url.with_query(None).with_user(None).with_fragment(None)
    # The service's headers may carry its key: they go only to where the operator says that the service is.
    known = spec.base_url is not None and _origin(spec.base_url) == _origin(spec.spec)
    request = HttpRequest("GET", url.with_fragment(None), dict(spec.headers) if known else {}, None, True, True)
    try:
        async with asyncio.timeout(FETCH_TIMEOUT):
            answer = await client.fetch(request, max_bytes=MAX_DOCUMENT_BYTES)
    except TimeoutError:
        raise ProviderError(f"the document {shown} did not arrive within {FETCH_TIMEOUT:.0f} s") from None
    except ToolError as error:
        raise ProviderError(f"the document {shown} cannot be fetched: {error}") from None
    if answer.status != 200:
        raise ProviderError(f"the document {shown} cannot be fetched: the server answers {answer.status}")
    return answer.body, url


def load_document(content: bytes | None, spec: str, url: URL | None) -> OpenApiDocument:
    """The document in these bytes, or in the file that `spec` names. Slow where it is large. Raises `ProviderError`."""
    file = Path(spec) if url is None else None
    shown = file if url is None else url.with_query(None).with_user(None).with_fragment(None)
    try:
        data = parse_document(content if file is None else read_document_file(file))
    except (OSError, ValueError) as error:
        raise ProviderError(f"the document {shown} cannot be read: {_reason(error)}") from None
    try:
        return OpenApiDocument(data, file=file, url=url)
    except OpenApiError as error:
        raise ProviderError(f"the document {shown} cannot be used: {error}") from None


def is_url(spec: str) -> bool:
    return spec.lower().startswith(("http://", "https://"))


def read_document_file(file: Path) -> bytes:
    if not file.is_file():  # A pipe or a device would never end.
        raise FileNotFoundError("there is no such file")
    with file.open("rb") as opened:
        content = opened.read(MAX_DOCUMENT_BYTES + 1)
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
                return parse_yaml_as_json(text.decode())  # YAML may be written with braces too.
            except ValueError:
                raise error from None
    try:
        return parse_yaml_as_json(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from None


def _checked(data: Any) -> JsonObject:
    said = as_object(data)
    if said is None:
        raise OpenApiError("it is no OpenAPI document: expected a mapping with the key openapi")
    version = str(said.get("openapi") or "")
    if version.startswith(("3.0", "3.1")):
        return said
    if "swagger" in said or version.startswith("2"):
        raise OpenApiError(
            f"it is Swagger {said.get('swagger') or version}, and OpenAPI 3.0 and 3.1 are read; "
            "convert it, for example with `npx swagger2openapi`"
        )
    raise OpenApiError(
        f"openapi: {version!r} is not known; 3.0 and 3.1 are read" if version else "it has no openapi: version"
    )


def _origin(url: str) -> URL | None:
    try:
        return URL(url).origin()
    except ValueError:
        return None


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
