"""The result of a call, `ToolResult`, and its typed content parts. Runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core import json_text
from toolspace.errors import ERROR_CLASSES, ErrorKind, ToolExecutionError

PENDING_CALL_KEY = "pendingToolCallId"
PAUSES_RUN_KEY = "pausesRun"
"""In the extras of a pending result: the run waits for it, although the tool itself does not pause runs."""
"""The key in `extras` of the result of a pending call. Its value is the id of the call whose result comes later."""


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel", tag_field="type"):
    """The base of typed content."""

    fields: Mapping[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Further fields of the content as an MCP server sent it: `annotations`, `_meta`, the `title` of a link and others.

    Those of an embedded resource itself are under `resource`.
    """

    @property
    def placeholder(self) -> str:
        """The text of the part, for models that accept only text."""
        raise NotImplementedError


class TextPart(ContentPart, frozen=True, tag="text"):
    text: str

    @property
    def placeholder(self) -> str:
        return self.text


class JsonPart(ContentPart, frozen=True, tag="json"):
    value: Any

    @property
    def placeholder(self) -> str:
        return json_text.encode(self.value)


class ImagePart(ContentPart, frozen=True, tag="image", omit_defaults=False):
    data: str
    """Base64."""
    mime_type: str = "image/png"

    @property
    def placeholder(self) -> str:
        return f"[image {self.mime_type}, {_binary_size(self.data)} bytes]"


class AudioPart(ContentPart, frozen=True, tag="audio", omit_defaults=False):
    data: str
    mime_type: str = "audio/wav"

    @property
    def placeholder(self) -> str:
        return f"[audio {self.mime_type}, {_binary_size(self.data)} bytes]"


class ResourcePart(ContentPart, frozen=True, tag="resource"):
    uri: str
    name: str | None = None
    mime_type: str | None = None
    text: str | None = None
    blob: str | None = None
    """Base64, if the resource is binary and embedded."""

    @property
    def placeholder(self) -> str:
        if self.text is not None:
            return self.text
        kind = f" {self.mime_type}" if self.mime_type else ""
        return f"[resource {self.uri}{kind}]"


Content = TextPart | JsonPart | ImagePart | AudioPart | ResourcePart


class ToolResult(msgspec.Struct, weakref=False, eq=False):
    """The result of one call: a value, or an error with its kind.

    Times are Unix milliseconds. `result` is JSON data, `content` the same as typed parts, and `text` what a model
    reads.
    """

    ok: bool
    result: Any = None
    error: str | None = None
    error_kind: ErrorKind | None = None
    executed: bool = True
    """Whether the effect may have happened, so that a repeated call might cause it twice."""
    started_at: float = 0.0
    completed_at: float = 0.0
    duration_ms: float = 0.0
    kind: str = "custom"
    namespace: str = ""
    parts: tuple[Content, ...] = ()
    extras: dict[str, Any] = {}
    tool: str = ""
    """The full name of the tool that ran."""
    call_id: str = ""
    encoded: str | None = None
    """The cached value of `text`."""
    issues: Sequence[Mapping[str, str]] = ()
    """What is wrong with the arguments, if they did not fit the schema: `{"path": …, "message": …}` each."""
    structured_content: Any = msgspec.UNSET
    """The structured content for MCP clients, if `result` is not it, as with the handle of a stored output.

    A result with it and without parts has no other content.
    """

    @property
    def content(self) -> tuple[Content, ...]:
        """The typed parts that the tool returned, else its result as one part."""
        if self.parts or not self.ok:
            return self.parts
        return (TextPart(text=self.result),) if isinstance(self.result, str) else (JsonPart(value=self.result),)

    @property
    def text(self) -> str:
        """What a model reads: the text, compact JSON, or `(tool failed: …)`."""
        if self.encoded is None:
            self.encoded = self._encode()
        return self.encoded

    def unwrap(self) -> Any:
        """Returns the value. Raises the exception of its error kind if the call failed."""
        if self.ok:
            return self.result
        # A provider may have set a kind that does not exist.
        error = ERROR_CLASSES.get(self.error_kind or "internal_error", ToolExecutionError)
        cause = list(self.issues) or None
        raise error(self.error or "unknown error", tool=self.tool, executed=self.executed, cause=cause)

    def to_dict(self) -> dict[str, Any]:
        """Returns the wire form: camelCase, JSON data only."""
        wire: dict[str, Any] = {
            "ok": self.ok,
            "result": json_text.to_json_data(self.result),
            "error": json_text.to_json_data(self.error),
            "errorKind": self.error_kind,
            "executed": self.executed,
            "startedAt": round(self.started_at),
            "completedAt": round(self.completed_at),
            "durationMs": round(self.duration_ms, 3),
            "kind": self.kind,
            "namespace": self.namespace,
            "content": json_text.to_json_data(self.content),
            "extras": json_text.to_json_data(self.extras),
            "tool": self.tool,
            "callId": self.call_id,
        }
        for key in ("error", "errorKind") if self.ok else ("result",):
            del wire[key]
        return wire

    def _encode(self) -> str:
        if not self.ok:
            return json_text.valid_text(f"(tool failed: {failure_reason(self.error_kind, self.error)})")
        if self.parts:
            return json_text.valid_text("\n".join(part.placeholder for part in self.parts))
        value = self.result
        if isinstance(value, str):
            return json_text.valid_text(value if type(value) is str else str.__str__(value))
        return str(value) if type(value) is int and value.bit_length() < 64 else json_text.encode(value)


def failure_reason(kind: ErrorKind | None, error: str | None) -> str:
    """Returns the reason that a model reads: `timeout`, or the error's text."""
    return "timeout" if kind == "timeout" else (error or "unknown error")


def get_content_parts(value: object) -> tuple[Content, ...]:
    """Returns the typed parts of a return value; empty if it is something else."""
    if isinstance(value, ContentPart):
        return (cast("Content", value),)
    if isinstance(value, list | tuple) and value:
        items = cast("Sequence[object]", value)
        if all(isinstance(item, ContentPart) for item in items):
            return tuple(cast("Sequence[Content]", items))
    return ()


def join_parts(parts: Sequence[Content]) -> Any:
    """Returns the plain value of typed parts: the value of a single JSON part, else their text."""
    if len(parts) == 1 and isinstance(parts[0], JsonPart):
        return parts[0].value
    return "\n".join(part.placeholder for part in parts)


def join_error(parts: Sequence[Content]) -> str:
    """Returns the reason in the content of a failure."""
    return "\n".join(part.placeholder for part in parts).strip()


def _binary_size(base64_text: str) -> int:
    return len(base64_text) * 3 // 4 - base64_text[-2:].count("=")
