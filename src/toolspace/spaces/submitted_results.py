"""Checks what a person or a worker submits against the output schema of the call. Stores nothing.

`call_transactions` uses it before it resolves a call.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from toolspace.core import json_text
from toolspace.core.argument_validation import Issue, compile_schema, find_issues
from toolspace.core.schema_size import SchemaTooLarge, measure_schema
from toolspace.core.stored_records import CallRecord
from toolspace.errors import RefusedError, ToolDefinitionError

_log = logging.getLogger("toolspace.calls")


def check_result(call: CallRecord, result: Any) -> None:
    """Raises `RefusedError` with the paths if a result does not match the output schema of its call."""
    if call.output_schema is None:
        return
    issues = _find_issues(call.output_schema, result, call.tool_name)
    if issues:
        reasons = "; ".join(map(str, issues))
        raise RefusedError(
            "unprocessable",
            f'the result does not match the output schema of "{call.tool_name}": {reasons}. '
            "The call stays open; submit a result that matches",
            errors=[{"path": issue.path, "message": str(issue._replace(path=""))} for issue in issues],
        )


def _find_issues(schema: Mapping[str, Any], result: Any, tool_name: str) -> Sequence[Issue]:
    validator = _compile(json_text.encode(schema), tool_name)
    if validator is None:
        return ()
    try:
        return () if validator.is_valid(result) else find_issues(validator, result, schema)
    except (ValueError, TypeError) as error:  # Too deep for the library.
        return (Issue("", f"the result is not plain JSON: {error}"),)


@lru_cache(maxsize=256)
def _compile(schema_text: str, tool_name: str) -> Any:
    """A compiled validator; None if the schema cannot be used, which is not the fault of those who submit."""
    schema = json_text.decode(schema_text)
    try:
        measure_schema(schema)
        return compile_schema(schema, owner=f"the results of {tool_name!r}")
    except (SchemaTooLarge, ToolDefinitionError) as error:
        _log.warning('tool "%s": results are not checked: %s', tool_name, error)
        return None
