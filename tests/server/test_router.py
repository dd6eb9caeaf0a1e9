"""The router."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace.server.authorization import Access
from toolspace.server.routing import Route, Router


async def handler(_: Any) -> None: ...


def route(method: str, path: str) -> Route:
    return Route(method=method, path=path, handler=handler, access=Access.OPEN, summary="", tag="test")


ROUTER = Router(
    [
        route("GET", "/api/tools"),
        route("GET", "/api/tools/stats"),
        route("GET", "/api/tools/{name}"),
        route("POST", "/api/tools/{name}/call"),
        route("GET", "/api/spaces/{spaceId}/members/{entityId}"),
    ]
)


def find_route(path: str, raw: bytes | None = None) -> tuple[set[str], tuple[str, ...]] | None:
    match = ROUTER.find(path, path.encode() if raw is None else raw)
    return None if match is None else ({matched_route.path for matched_route in match.routes.values()}, match.values)


def test_a_path_matches_its_route_with_the_values_of_its_parameters() -> None:
    assert find_route("/api/tools") == ({"/api/tools"}, ())
    assert find_route("/api/tools/echo/call") == ({"/api/tools/{name}/call"}, ("echo",))
    assert find_route("/api/spaces/s1/members/e1") == ({"/api/spaces/{spaceId}/members/{entityId}"}, ("s1", "e1"))


def test_a_fixed_segment_takes_precedence_over_a_parameter_and_hides_nothing() -> None:
    assert find_route("/api/tools/stats") == ({"/api/tools/stats"}, ())
    assert find_route("/api/tools/stats/call") == ({"/api/tools/{name}/call"}, ("stats",))


def test_an_encoded_slash_is_part_of_a_segment() -> None:
    assert find_route("/api/tools/a/b", b"/api/tools/a%2Fb") == ({"/api/tools/{name}"}, ("a/b",))
    assert find_route("/api/tools/a%2Fb", b"/api/tools/a%252Fb") == ({"/api/tools/{name}"}, ("a%2Fb",))


@pytest.mark.parametrize(
    "path", ["", "/", "/api", "/api/tools/", "/api//stats", "/api/tools//call", "/api/tools/a/b/c", "*"]
)
def test_other_paths_match_no_route(path: str) -> None:
    assert find_route(path) is None


def test_a_path_that_is_not_utf8_matches_no_route() -> None:
    assert find_route("/api/tools/?", b"/api/tools/%ff") is None


def test_a_path_matches_the_same_route_every_time() -> None:
    for _ in range(2):
        assert find_route("/api/tools/echo/call") == ({"/api/tools/{name}/call"}, ("echo",))
        assert find_route("/api/tools/a/call", b"/api/tools/a%2Fcall") == ({"/api/tools/{name}"}, ("a/call",))
        assert find_route("/api/tools/a/call") == ({"/api/tools/{name}/call"}, ("a",))
    long = "x" * 100_000
    assert find_route(f"/api/tools/{long}") == ({"/api/tools/{name}"}, (long,))


def test_two_routes_with_the_same_path_are_refused() -> None:
    with pytest.raises(ValueError, match="two routes"):
        Router([route("GET", "/api/{a}"), route("GET", "/api/{b}")])
