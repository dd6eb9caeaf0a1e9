"""Measure: an OpenAPI document of 1,000 operations, read until its tools can be listed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.harness import Contestant, Report, race, repeat
from benchmarks.openapi_document import make_document
from benchmarks.workloads import create_toolspace
from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec

OPERATIONS = 1_000
OURS = "Toolspace, from the file to the list"
FASTMCP = "FastMCP from_openapi and list, from the file"
PARSE = "parse the file"
WALK = "walk the parsed document"


async def measure() -> Report:
    report = Report(f"OpenAPI import of {OPERATIONS:,} operations, ready to list")
    with tempfile.TemporaryDirectory() as folder:
        path = _write_document(Path(folder, "openapi.json"))
        document = _parse(path)

        async def load_and_list() -> None:
            provider = OpenApiProvider("shop", OpenApiSpec(spec=str(path)))
            async with create_toolspace([], providers=[provider]) as ts:
                _count([tool.input_schema for tool in ts.list_tools()])

        async def parse() -> None:
            _parse(path)

        async def walk() -> None:
            _walk(document)

        contestants = [
            Contestant(OURS, repeat(load_and_list)),
            Contestant(PARSE, repeat(parse)),
            Contestant(WALK, repeat(walk)),
        ]
        timings = await race(contestants, rounds=12, slice_ms=100)
        # What Toolspace adds to the parsing, in walks.
        walks = (timings.best(OURS) - timings.best(PARSE)) / timings.best(WALK)
        try:
            fastmcp = Contestant(FASTMCP, repeat(_with_fastmcp(path)), _once_per_round)
        except ImportError as error:
            report.notes.append(f"FastMCP is left out: {error}")
        else:
            rivals = await race([contestants[0], fastmcp], rounds=3, slice_ms=300)
            report.ratio("against FastMCP from_openapi and list", rivals.ratio(OURS, FASTMCP), must=0.1)
            report.figure(FASTMCP, rivals.best(FASTMCP) * 1000, "ms")
    report.figure("after parsing, against a bare walk of the document", walks, "×", aim=2.0)
    for contestant in contestants:
        report.figure(contestant.name, timings.best(contestant.name) * 1000, "ms")
    report.notes.append(f"a walk visits each of the document's {_walk(document):,} values once, and does nothing there")
    return report


def _write_document(path: Path) -> Path:
    path.write_text(json.dumps(make_document(OPERATIONS)))
    return path


def _parse(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


def _with_fastmcp(path: Path) -> Any:
    import httpx2
    from fastmcp import FastMCP

    client = httpx2.AsyncClient(base_url="https://api.example.com/v1")

    async def load() -> None:
        server = FastMCP.from_openapi(_parse(path), client)
        _count([tool.parameters for tool in await server.list_tools()])

    return load


def _count(schemas: list[Any]) -> None:
    if len(schemas) != OPERATIONS:
        raise RuntimeError(f"{len(schemas)} tools for {OPERATIONS} operations")


def _walk(document: Any) -> int:
    count = 0
    rest = [document]
    while rest:
        value = rest.pop()
        count += 1
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
    return count


def _once_per_round() -> None:
    """Marks a contestant that is run once a round."""
