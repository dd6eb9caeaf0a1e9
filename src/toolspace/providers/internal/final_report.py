"""`agent__final_report`: ends the run with an answer, in one of the known formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.function import FunctionTool, tool
from toolspace.core.schema import compile_schema, issues_of
from toolspace.core.tool import ToolCategory
from toolspace.errors import ToolValidationError

Status = Literal["success", "failure", "partial"]
Format = Literal["markdown", "markdown+mermaid", "json", "tty", "pipe", "slack-block-kit", "sub-agent"]
FORMATS: tuple[str, ...] = get_args(Format)
_JSON_FORMATS = frozenset(("json", "slack-block-kit"))
_SLACK_MAX_BLOCKS = 50


def final_report_tool() -> FunctionTool:
    return tool(name="final_report", category=ToolCategory.AGENT)(_final_report)


async def _final_report(
    status: Status,
    format: Format,
    content: str | None = None,
    content_json: Any = None,
    metadata: dict[str, Any] | None = None,
    *,
    context: ToolContext,
) -> dict[str, Any]:
    """Delivers the final answer and ends the run. Call it once, when the task is done or cannot be done.

    Args:
        status: Whether the task succeeded, failed, or was done in part.
        format: The format of the answer.
        content: The answer, for text formats.
        content_json: The answer, for the formats json and slack-block-kit.
        metadata: Anything else worth keeping with the answer.
    """
    run = context.run
    if run is not None and run.report_format not in (None, format):
        raise ToolValidationError(f'format: this run asks for "{run.report_format}", got "{format}"')
    report: dict[str, Any] = {"status": status, "format": format}
    if format in _JSON_FORMATS:
        report["content_json"] = _json_content(content, content_json, format)
        if format == "json" and run is not None and run.report_schema is not None:
            _check(report["content_json"], run.report_schema)
        if format == "slack-block-kit":
            _check_blocks(report["content_json"])
    else:
        if not content:
            raise ToolValidationError(f'content: required, but missing: the format "{format}" is text')
        report["content"] = content
    if metadata is not None:
        report["metadata"] = metadata
    if run is not None:
        run.final_report = report
    return {"accepted": True, **report}


def _json_content(content: str | None, content_json: Any, format: str) -> Any:
    if content_json is not None:
        return content_json
    if not content:
        raise ToolValidationError(f'content_json: required, but missing: the format is "{format}"')
    try:
        return json_text.decode(content)  # Models like to write JSON as text.
    except ValueError as error:
        raise ToolValidationError(f"content: not JSON ({error}); give the answer as content_json") from None


def _check(value: Any, schema: Mapping[str, Any]) -> None:
    check = compile_schema(schema, owner="the final report")
    if not check.is_valid(value):
        issues = (issue._replace(path=f"content_json.{issue.path}".rstrip(".")) for issue in issues_of(check, value))
        raise ToolValidationError("; ".join(map(str, issues)))


def _check_blocks(value: Any) -> None:
    """What Slack would refuse: `{blocks: […]}`, a list of blocks, or a list of such messages."""
    items = cast("list[Any]", value) if isinstance(value, list) else [value]
    messages: list[Any] = items if items and _blocks_of(items[0]) is not None else [value]
    for index, message in enumerate(messages):
        place = f"content_json[{index}]" if len(messages) > 1 else "content_json"
        blocks = cast("list[Any] | None", message if isinstance(message, list) else _blocks_of(message))
        if not isinstance(blocks, list) or not blocks:
            raise ToolValidationError(f"{place}: expected a list of blocks, or an object with blocks")
        if len(blocks) > _SLACK_MAX_BLOCKS:
            raise ToolValidationError(f"{place}: Slack takes at most {_SLACK_MAX_BLOCKS} blocks, got {len(blocks)}")
        for position, block in enumerate(blocks):
            if not isinstance(block, dict) or not isinstance(cast("dict[str, Any]", block).get("type"), str):
                raise ToolValidationError(f"{place}.blocks[{position}]: expected a block with a type")


def _blocks_of(message: Any) -> Any:
    return cast("dict[str, Any]", message).get("blocks") if isinstance(message, dict) else None
