"""`toolspace call`: calls one tool and prints its result.

The arguments are `key=value`, converted by the schema of the tool, `key:=json`, and `--args`. Values that do not fit
the schema stay as they are: the validation of the call reports them.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import click
import msgspec

from toolspace.cli.approval_prompt import ApprovalPrompt
from toolspace.cli.event_loop import Interrupts, run
from toolspace.cli.local_toolspace import complete_tool_name, find_tool, started_toolspace
from toolspace.cli.logs import mute_provider_warnings
from toolspace.cli.options import Command, Options
from toolspace.cli.output import CommandOutput, StatusLine, WriteError, show_status
from toolspace.core import json_text
from toolspace.core.argument_validation import coerce, resolve_reference
from toolspace.core.events import CallPartial, CallProgress
from toolspace.core.result import JsonPart, ToolResult
from toolspace.core.times import parse_duration
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.effective_settings import ToolRules
from toolspace.orchestrator.stages.call_events import VERBOSE
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.cli")
Schema = Mapping[str, Any]
_USAGE_ERRORS = ("unknown_tool", "invalid_parameters")
"""The error kinds that the user fixes with another command line."""
_MAX_DEPTH = 16
_ANY_TYPE: frozenset[str] = frozenset()
_JSON_TYPES: Mapping[type[Any], str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
}
_MAX_BYTES = 64 * 1024 * 1024


@click.command("call", cls=Command)
@click.argument("name", shell_complete=complete_tool_name)
@click.argument("words", nargs=-1, metavar="[KEY=VALUE]...")
@click.option("--args", metavar="JSON", help="Arguments as a JSON object; @FILE reads a file, - standard input.")
@click.option("--timeout", metavar="DURATION", help='Timeout of the call, such as "250ms", "5s" or "2m".')
@click.pass_obj
def command(options: Options, name: str, words: tuple[str, ...], args: str | None, timeout: str | None) -> int:
    """Call the tool NAME and print its result.

    The schema of the tool decides the type of a value: n=5 is a number where the tool expects one. Repeat a key for a
    list. key:=JSON passes the JSON unchanged.
    """
    seconds = _parse_timeout(timeout)
    base_arguments = read_args(args)
    return run(lambda interrupts: _call(options, name, words, base_arguments, seconds, interrupts))


async def _call(
    options: Options,
    name: str,
    words: tuple[str, ...],
    base_arguments: Mapping[str, Any],
    seconds: float | None,
    interrupts: Interrupts,
) -> int:
    mute_provider_warnings(options, of_tool=name)
    prompt = ApprovalPrompt(options.output)
    async with started_toolspace(options, show_warnings=False, single_tool=name, on_approval=prompt) as ts:
        match = find_tool(ts, name)
        entry = match[0] if match is not None else None
        schema: Mapping[str, Any] = entry.tool.input_schema if entry is not None else {}
        arguments = combine_arguments(base_arguments, words, schema)
        if seconds is not None and entry is not None:
            _set_timeout(ts, entry, seconds)
        is_stream = entry is not None and getattr(entry.tool, "style", "") == "stream"
        result, printer = await _execute(ts, options.output, name, arguments, interrupts, prompt, is_stream=is_stream)
        is_printed = printer.has_printed(result)
        stored_text = await _read_stored(ts, options, result) if not is_printed else None
    if printer.error is not None:
        raise printer.error
    if options.json:
        options.output.document({**result.to_dict(), "stored": bool(result.extras.get("stored"))})
    elif not result.ok:
        kind = result.error_kind if result.error_kind != "canceled" else None  # The message says it already.
        options.output.error(result.error or "unknown error", kind)
    elif stored_text is not None:
        options.output.text(stored_text, end="" if stored_text.endswith("\n") else "\n")
    elif not is_printed:
        print_result(options.output, result)
    if result.ok:
        return 0
    return 2 if result.error_kind in _USAGE_ERRORS else 1


async def _execute(
    ts: Toolspace,
    output: CommandOutput,
    name: str,
    arguments: Mapping[str, Any],
    interrupts: Interrupts,
    prompt: ApprovalPrompt,
    *,
    is_stream: bool,
) -> tuple[ToolResult, PartialPrinter]:
    call_id = f"call_{secrets.token_hex(9)}"

    def cancel() -> bool:
        return ts.cancel(call_id)

    interrupts.stop = cancel
    async with show_status(output, name) as status:
        prompt.before_question = status.hide
        printer = PartialPrinter(output, call_id, on_first=status.hide, on_error=cancel)
        if is_stream and not output.json:  # Partial values of other tools are not parts of their results.
            ts.bus.subscribe(printer, CallPartial)
        ts.bus.subscribe(lambda event: _show_progress(event, call_id, status), CallProgress)
        result = await ts.call(name, arguments, call_id=call_id)
    interrupts.stop = None
    printer.end_line()
    return result, printer


def _show_progress(event: CallProgress, call_id: str, status: StatusLine) -> None:
    share = f"{event.progress:g}/{event.total:g}" if event.total else f"{event.progress:g}"
    text = f"{share} {event.message or ''}".rstrip()
    _log.log(VERBOSE, "tool progress … %s\n    %s", event.tool_name, text)
    if event.call_id == call_id:
        status.detail = text


def _set_timeout(ts: Toolspace, entry: CatalogEntry, seconds: float) -> None:
    """Gives `--timeout` precedence over every setting of the tool."""
    rules = entry.rules.overrides.get(entry.local_name, ToolRules())
    override = {entry.local_name: msgspec.structs.replace(rules, timeout=seconds, source="--timeout")}
    changed_rules = msgspec.structs.replace(entry.rules, overrides={**entry.rules.overrides, **override})
    ts.orchestrator.configure(rules={entry.provider: changed_rules})


def _parse_timeout(timeout: str | None) -> float | None:
    if timeout is None:
        return None
    if timeout.strip().isdecimal():
        raise click.UsageError(f"--timeout {timeout}: add the unit: {timeout}s or {timeout}ms")
    try:
        seconds = parse_duration(timeout)
    except ValueError as error:
        raise click.UsageError(f"--timeout: {error}") from None
    if seconds <= 0:
        raise click.UsageError("--timeout: it must be greater than zero")
    return seconds


# Arguments


class TypedArgument(NamedTuple):
    """One argument of the command line."""

    key: str
    text: str
    is_json: bool
    """Whether it is written `key:=json`."""


def read_args(text: str | None) -> dict[str, Any]:
    """Returns the arguments of `--args`: a JSON object, `@file`, or `-` for standard input."""
    if text is None:
        return {}
    content: str | bytes = text
    if text == "-":
        content = sys.stdin.buffer.read(_MAX_BYTES + 1)
    elif text.startswith("@"):
        try:
            with Path(text[1:]).open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise click.UsageError(f"--args: {text[1:]} cannot be read: {reason}") from None
    if len(content) > _MAX_BYTES:
        raise click.UsageError(f"--args: more than {_MAX_BYTES:,} bytes")
    try:
        return json_text.parse_arguments(
            content.removeprefix(b"\xef\xbb\xbf") if isinstance(content, bytes) else content
        )
    except ValueError as error:
        raise click.UsageError(f"--args: {error}") from None


def combine_arguments(args: Mapping[str, Any], words: Sequence[str], schema: Schema) -> dict[str, Any]:
    """Returns all arguments of a call. A `key=value` replaces the same key of `--args`."""
    pairs_by_key: dict[str, list[TypedArgument]] = {}
    for word in words:
        pair = _parse_word(word, schema, {*args, *pairs_by_key})
        pairs_by_key.setdefault(pair.key, []).append(pair)
    return {**args, **{key: _convert(pairs, schema) for key, pairs in pairs_by_key.items()}}


def _parse_word(word: str, schema: Schema, present_keys: set[str]) -> TypedArgument:
    key, equals, text = word.partition("=")
    is_json = key.endswith(":")
    key = key.removesuffix(":")
    if equals and key:
        return TypedArgument(key, text, is_json)
    names = list(_properties(schema))
    missing_names = [name for name in schema.get("required") or () if name not in present_keys]
    hint = f"; the parameters are {', '.join(names)}" if names else ""
    if missing_names and not equals:
        hint = f"; did you mean {missing_names[0]}={word}?"
    raise click.UsageError(f"{word!r} is not key=value{hint}")


def _convert(pairs: Sequence[TypedArgument], schema: Schema) -> object:
    """Returns the value of one key, which may occur several times for a list."""
    key = pairs[0].key
    node = _properties(schema).get(key, schema.get("additionalProperties"))
    types = _types(node, schema)
    if len(pairs) == 1:
        return _convert_value(pairs[0], node, types, schema)
    if "array" not in types:
        raise click.UsageError(f"{key} is given {len(pairs)} times, but it takes one value")
    items = _items(node, schema)
    return [_convert_value(pair, items, _types(items, schema), schema) for pair in pairs]


def _convert_value(pair: TypedArgument, node: object, types: frozenset[str], root: Schema) -> object:
    key, text, is_json = pair
    if is_json:
        return _parse_json(f"{key}:={text}", text)
    if "string" in types:
        return text
    if not types:
        try:
            return json_text.decode(text)
        except ValueError:
            return text
    if (text[:1] == "[" and "array" in types) or (text[:1] == "{" and "object" in types):
        return _parse_json(f"{key}={text}", text)
    if "array" in types:
        items = _items(node, root)
        return [_convert_value(pair, items, _types(items, root), root)]
    value = coerce({"type": sorted(types)}, text)
    return _parse_large_number(text) if isinstance(value, str) and types & {"integer", "number"} else value


def _parse_json(word: str, text: str) -> object:
    try:
        return json_text.decode(text)
    except ValueError as error:
        raise click.UsageError(f"{word!r} is not JSON: {error}") from None


def _parse_large_number(text: str) -> object:
    """Returns a number that is too large for `coerce`; other text stays as it is."""
    try:
        value = json_text.decode(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float) and not isinstance(value, bool) else text


def _properties(schema: Schema) -> Schema:
    properties = schema.get("properties")
    return cast("Schema", properties) if isinstance(properties, Mapping) else {}


def _types(node: object, root: Schema, depth: int = 0) -> frozenset[str]:
    """Returns the JSON types that a part of a schema accepts; empty if it accepts any type."""
    if not isinstance(node, Mapping) or depth > _MAX_DEPTH:
        return _ANY_TYPE
    schema = resolve_reference(cast("Schema", node), root)
    if isinstance(kind := schema.get("type"), str):
        return frozenset((kind,))
    if isinstance(kind, list):
        return frozenset(map(str, cast("list[object]", kind)))
    for keyword in ("anyOf", "oneOf"):
        if options := _list(schema, keyword):
            option_types = [_types(option, root, depth + 1) for option in options]
            return _ANY_TYPE.union(*option_types) if all(option_types) else _ANY_TYPE
    values = [schema["const"]] if "const" in schema else _list(schema, "enum")
    if values:
        return frozenset(_JSON_TYPES.get(cast("type[Any]", type(value)), "object") for value in values)
    return next((types for part in _list(schema, "allOf") if (types := _types(part, root, depth + 1))), _ANY_TYPE)


def _items(node: object, root: Schema) -> object:
    """Returns the schema of the items of an array."""
    return next((schema["items"] for schema in _parts(node, root, 0) if "items" in schema), None)


def _parts(node: object, root: Schema, depth: int) -> Iterator[Schema]:
    if isinstance(node, Mapping) and depth <= _MAX_DEPTH:
        schema = resolve_reference(cast("Schema", node), root)
        yield schema
        for keyword in ("anyOf", "oneOf", "allOf"):
            for option in _list(schema, keyword):
                yield from _parts(option, root, depth + 1)


def _list(node: Schema, keyword: str) -> list[object]:
    value = node.get(keyword)
    return cast("list[object]", value) if isinstance(value, list) else []


# Results


def print_result(output: CommandOutput, result: ToolResult) -> None:
    """Prints a successful result: text unchanged, data as indented JSON, a stored output as its preview."""
    handle = _stored_output(result)
    if handle is not None:
        output.text(handle["preview"])
        output.note(
            f"The whole result is stored: {handle['bytes']:,} bytes, {handle['tokens']:,} tokens. Read it with:\n"
            f"  toolspace call agent__read_output handle={handle['handle']}"
        )
        return
    is_json = len(result.parts) == 1 and isinstance(result.parts[0], JsonPart)
    if isinstance(result.result, str) or (result.parts and not is_json):
        text = result.text
        output.text(text, end="" if text.endswith("\n") else "\n")
    else:
        output.value(result.result)


async def _read_stored(ts: Toolspace, options: Options, result: ToolResult) -> str | None:
    """Returns the whole text of a stored output, which is above `maxInlineBytes`; None if there is none to print."""
    handle = _stored_output(result) if result.ok else None
    if handle is None or options.json:
        return None
    stored_file = await ts.outputs.find(handle["handle"], session=ts.orchestrator.session, owner=None)
    return await ts.outputs.text(stored_file, limit=stored_file.bytes) if stored_file is not None else None


def _stored_output(result: ToolResult) -> Mapping[str, Any] | None:
    value: Any = result.result
    return value["tool_output"] if result.extras.get("stored") and "tool_output" in value else None


class PartialPrinter:
    """Prints the partial values of a streaming call as they arrive.

    Keeps hashes of what it printed, not the text, because a stream may be larger than memory.
    """

    def __init__(
        self, output: CommandOutput, call_id: str, *, on_first: Callable[[], None], on_error: Callable[[], object]
    ) -> None:
        self._output = output
        self._call_id = call_id
        self._on_first = on_first
        self._on_error = on_error
        self.error: Exception | None = None
        """Why nothing can be printed any more: the reader is gone, or the disk is full."""
        self._count = 0
        self._is_all_text = True
        self._text_hash, self._text_size = hashlib.sha256(), 0
        self._values_hash, self._values_size = hashlib.sha256(), 0
        self._is_mid_line = False

    def __call__(self, event: CallPartial) -> None:
        if event.call_id != self._call_id or self.error is not None:
            return
        if not self._count:
            self._on_first()
        self._count += 1
        try:
            self._print(event.value)
        except (BrokenPipeError, WriteError) as error:
            self.error = error
            self._on_error()

    def end_line(self) -> None:
        if self._is_mid_line and self.error is None:
            self._output.text("")
        self._is_mid_line = False

    def has_printed(self, result: ToolResult) -> bool:
        """Whether the partial values that were printed are the whole result."""
        value: Any = result.result
        if not self._count or not result.ok:
            return False
        if isinstance(value, str):
            return self._is_all_text and self._text_hash.digest() == hashlib.sha256(_encode_text(value)).digest()
        if isinstance(value, list):
            items_hash = hashlib.sha256()
            for item in cast("list[object]", value):
                items_hash.update(_encode_item(item))
            return self._values_hash.digest() == items_hash.digest()
        if result.extras.get("stored"):
            # A stored list has two brackets and one comma less than there are values.
            size = self._text_size if self._is_all_text else self._values_size + 1
            return value["tool_output"]["bytes"] == size
        return False

    def _print(self, value: object) -> None:
        item = _encode_item(value)
        self._values_hash.update(item)
        self._values_size += len(item)
        if isinstance(value, str):
            text = _encode_text(value)
            self._text_hash.update(text)
            self._text_size += len(text)
            self._is_mid_line = not value.endswith("\n") if value else self._is_mid_line
            self._output.text(value, end="")
            return
        self._is_all_text = False
        self.end_line()
        self._output.text(json_text.encode(value))


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _encode_item(value: object) -> bytes:
    return json_text.encode_bytes(value) + b","
