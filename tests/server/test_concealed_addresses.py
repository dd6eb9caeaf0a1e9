"""Errors for callers who are no operators: without the addresses and paths of this installation."""

from __future__ import annotations

import pytest

from toolspace import ToolResult
from toolspace.server.redaction import conceal_addresses


def fail(error: str) -> ToolResult:
    return ToolResult(ok=False, error=error, error_kind="transport_error")


@pytest.mark.parametrize(
    ("error", "visible_error"),
    [
        ("cannot connect to http://10.0.0.5:8080/mcp?x=1", "cannot connect to …"),
        ("cannot connect to db.internal:5432", "cannot connect to …"),
        ("10.1.2.3:80 refused", "… refused"),
        ("[fd00::1]:443 refused", "… refused"),
        ("fd00:1::2 refused", "… refused"),
        ("cannot open /srv/app/state/toolspace.db", "cannot open …"),
        (r"cannot open C:\app\state.db", "cannot open …"),
        ("the quota of 2 calls per minute (quotas[0]) resets at 2026-11-17T19:14:00Z", None),
        ("tool timed out after 30000ms; 1/2 done", None),
    ],
)
def test_only_addresses_and_paths_are_replaced(error: str, visible_error: str | None) -> None:
    result = fail(error)
    conceal_addresses(result, {})
    assert result.error == (visible_error or error)


def test_what_the_caller_sent_stays() -> None:
    result = fail("cannot connect to http://example.com/x; the proxy is 10.0.0.5:3128")
    conceal_addresses(result, {"url": "http://example.com/x;"})
    assert result.error == "cannot connect to http://example.com/x; the proxy is …"
