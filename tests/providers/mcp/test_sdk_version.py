"""Pins the MCP SDK: the few places that use its private parts are known to work with these versions only."""

from __future__ import annotations

import inspect
from importlib.metadata import requires, version

from mcp.client.auth import OAuthClientProvider
from mcp.client.session import ClientSession
from mcp.server.session import ServerSession
from packaging.requirements import Requirement


def test_sdk_version_is_in_the_tested_range() -> None:
    (requirement,) = (r for r in map(Requirement, requires("toolspace") or ()) if r.name == "mcp")
    assert str(requirement.specifier) == "<3,>=2.3"
    assert version("mcp") in requirement.specifier


def test_login_flow_overrides_methods_that_the_sdk_calls() -> None:
    flow = inspect.getsource(OAuthClientProvider.async_auth_flow) + inspect.getsource(OAuthClientProvider)
    for name in ("_select_authorization_server", "_perform_authorization", "_get_token_endpoint"):
        assert f"self.{name}(" in flow


def test_change_notifier_finds_the_connection_of_a_session() -> None:
    assert "self._connection = connection" in inspect.getsource(ServerSession.__init__)


def test_session_overrides_a_method_that_the_sdk_calls() -> None:
    for method in (ClientSession.initialize, ClientSession.send_discover):
        assert "self._build_capabilities(" in inspect.getsource(method)
