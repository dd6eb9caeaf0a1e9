"""The OpenAPI document is valid, and every response conforms to it."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from openapi_spec_validator import validate
from schemathesis import GenerationMode, checks
from schemathesis.specs.openapi import checks as openapi_checks

from tests.server.gateway_api import SECRET, ApiClient, open_api, write_config
from toolspace.core.ids import is_id
from toolspace.server.authorization import Access
from toolspace.server.gateway import Gateway
from toolspace.server.openapi import encode_document
from toolspace.server.routes import ROUTES

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = 10
KNOWN = {
    "spaceId": "den",
    "entityId": "ann",
    "agentId": "bot",
    "agentEntityId": "bot",
    "runId": "run-1",
    "messageId": "m1",
    "eventId": "e1",
    "name": "echo",
}
"""Ids of existing records, so that not every generated request is a 404."""
SCHEMA_NAMES = """
AcknowledgeCallsBody AcknowledgedCalls RefusedCall
    AgentEntity ApprovalResponse ApprovalRule DecisionBody Page_AgentEntity_
    Call CallAnswer CallBody CallSaid Claim Claimed Deleted DeletedPlans Document DocumentBody Done DoneAnswer
    Entity EntityChange Goal Health History InboxEvent KeyShape Leave Me Member Memory Message NewDocument
    NewEntity NewGoal NewGoals NewInboxEvent NewKeyBody NewMember NewMemories NewMemory NewMessage NewRun
    NewSpace Plan PlanBodies PlanBody ProblemBody Pushed Ready ResultBody ResultSaid Returned ReturnedAnswer
    RunCall RunCallBody RunEnd RunRecord RunResultBody RunShape ServerStatus Space SpaceChange SpaceResultBody
    TaskRecord TokenBody TokenShape ToolCategory ToolShape ToolStats TurnRecord WholeDocument WholeTask
    Page_ApprovalResponse_ Page_ApprovalRule_
    WorkerShape Page_Call_ Page_Document_ Page_Entity_ Page_Goal_ Page_InboxEvent_ Page_KeyShape_ Page_Member_
    Page_Memory_ Page_Message_ Page_Plan_ Page_RunCall_ Page_RunRecord_ Page_ServerStatus_ Page_Space_
    Page_TaskRecord_ Page_ToolShape_ Page_WorkerShape_
"""
CHECKS = (
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.response_headers_conformance,
)


@pytest.mark.spec("12.1")
def test_the_document_is_valid_openapi() -> None:
    validate(msgspec.json.decode(encode_document(ROUTES)))


@pytest.mark.spec("12.1")
async def test_the_served_document_describes_every_route(api: ApiClient) -> None:
    document = (await api.with_headers().get("/openapi.json")).data
    described_operations = {
        (method.upper(), path) for path, path_item in document["paths"].items() for method in path_item
    }
    assert described_operations == {(route.method, route.path) for route in ROUTES} | {("GET", "/openapi.json")}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            names = {parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"}
            assert names == set(re.findall(r"{(\w+)}", path))
    for name, answer in document["components"]["responses"].items():
        assert list(answer["content"]) == ["application/problem+json"], name


def test_schema_names_are_stable() -> None:
    """Clients are generated from the document, so a renamed class must keep its schema name."""
    document = msgspec.json.decode(encode_document(ROUTES))
    assert set(document["components"]["schemas"]) == set(SCHEMA_NAMES.split())


def test_operation_ids_are_unique() -> None:
    document = msgspec.json.decode(encode_document(ROUTES))
    names = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(set(names)) == len(names)


def test_every_field_and_parameter_has_a_description() -> None:
    document = msgspec.json.decode(encode_document(ROUTES))
    silent: list[str] = []
    for name, schema in document["components"]["schemas"].items():
        silent += [
            f"{name}.{member}" for member, property_schema in _members(schema).items() if not _says(property_schema)
        ]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            silent += [
                f"{path} {parameter['name']}"
                for parameter in operation.get("parameters", ())
                if not parameter.get("description")
            ]
    assert not silent


def _members(schema: dict[str, Any]) -> dict[str, Any]:
    return schema.get("properties", {})


def _says(schema: dict[str, Any]) -> bool:
    return "description" in schema or any("description" in option for option in schema.get("anyOf", ()))


def test_the_responses_of_call_routes_are_described_by_their_fields() -> None:
    document = msgspec.json.decode(encode_document(ROUTES))
    for path in ("/api/tools/{name}/call", "/api/runs/{runId}/calls"):
        for status in ("200", "202"):
            answer = document["paths"][path]["post"]["responses"][status]["content"]["application/json"]["schema"]
            members = document["components"]["schemas"][answer["$ref"].rpartition("/")[2]]["properties"]
            assert {"ok", "result", "error", "errorKind", "executed", "callId", "pendingToolCallId"} <= set(members)
    for path in ("/api/runs/{runId}/tool-results", "/api/spaces/{spaceId}/tool-results", "/api/calls/{callId}/result"):
        answer = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert answer == {"$ref": "#/components/schemas/Call"}


def test_every_route_names_its_credentials() -> None:
    document = msgspec.json.decode(encode_document(ROUTES))
    for route in ROUTES:
        security = document["paths"][route.path][route.method.lower()]["security"]
        assert bool(security) == (route.access is not Access.OPEN), route.name
        schemes = {name for requirement in security for name in requirement}
        assert ("token" in schemes) == (route.access in (Access.MEMBER, Access.ANY)), route.name


@pytest.mark.spec("12.1")
def test_the_docs_page_has_one_line_for_every_route() -> None:
    page = (ROOT / "docs" / "http-api.md").read_text()
    credentials = {
        Access.OPEN: "anyone",
        Access.SECRET: "secret",
        Access.MEMBER: "secret, member",
        Access.TOOLS: "secret, tool key",
        Access.ANY: "any key",
    }
    lines = re.findall(r"^\| `((?:GET|POST|PUT|PATCH|DELETE) [^`]+)` \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    expected = [(route.name, credentials[route.access], route.summary) for route in ROUTES]
    assert sorted(lines) == sorted([*expected, ("GET /openapi.json", "anyone", "Get the OpenAPI document")])


class _Background:
    """A gateway in its own thread: the fuzzer blocks during a request."""

    def __init__(self, config: Path) -> None:
        self._config = config
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)
        self.url = ""
        self.fault: BaseException | None = None

    def __enter__(self) -> str:
        self._thread.start()
        self._ready.wait(60)
        if self.fault is not None:
            raise self.fault
        return self.url

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self.fault = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _serve(self) -> None:
        async with Gateway.open(self._config) as gateway, open_api(gateway) as api:
            for entity, kind in (("ann", "human"), ("bot", "agent")):
                await api.create("/api/entities", id=entity, type=kind, name=entity)
            await api.create("/api/spaces", id="den", name="den", members=["ann", "bot"])
            await api.create("/api/spaces/den/messages", id="m1", content="Hello", entityId="ann")
            await api.create("/api/runs", id="run-1", agentEntityId="bot", spaceId="den")
            await api.create("/api/agents/bot/inbox", eventId="e1", data=1)
            self.url = api.url
            self._ready.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def fuzzed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway for the generated requests."""
    folder = tmp_path_factory.mktemp("fuzzed")
    echo = {"name": "echo", "description": "Again.", "executionType": "internal", "inputSchema": {"type": "object"}}
    with _Background(write_config(folder, tools=[echo], storage={"url": f"sqlite:///{folder}/fuzzed.db"})) as url:
        yield url


def operations() -> list[Any]:
    """The fuzzed operations: all but streams."""
    schema = schemathesis.openapi.from_dict(msgspec.json.decode(encode_document(ROUTES)))
    streaming = {(route.method.lower(), route.path) for route in ROUTES if route.is_stream}
    all_operations = [operation.ok() for operation in schema.get_all_operations()]
    return [operation for operation in all_operations if (operation.method, operation.path) not in streaming]


@pytest.mark.spec("12.1")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["fitting", "unfitting"])
@pytest.mark.parametrize("operation", operations(), ids=lambda item: item.label)
def test_every_response_conforms_to_the_document(operation: Any, mode: GenerationMode, fuzzed_url: str) -> None:
    if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query or operation.path_parameters):
        return  # Nothing in the request could be invalid.

    @settings(
        max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        _use_what_is_there(case)
        response = case.call(base_url=fuzzed_url, headers={"x-secret-key": SECRET}, timeout=30)
        case.validate_response(response, checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE  # No invalid request exists.


def _use_what_is_there(case: Any) -> None:
    for name, value in dict(case.path_parameters or {}).items():
        # Replaces half of the valid ids by existing ones.
        if case.method != "DELETE" and name in KNOWN and is_id(str(value)) and len(str(value)) % 2:
            case.path_parameters[name] = KNOWN[name]
    for part in (case.query, case.body):
        if isinstance(part, dict):
            part.pop("wait", None)  # No event would end the wait.
