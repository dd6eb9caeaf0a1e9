"""Measure: an OpenAPI document of 1,000 operations, read until its tools can be listed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.apidocument import make_document
from benchmarks.harness import Contestant, Ratio, Report, Timings, race, repeat
from benchmarks.subjects import toolspace_of
from toolspace.providers.openapi.provider import OpenApiProvider
from toolspace.providers.openapi.spec import OpenApiSpec

OPERATIONS = 1_000
OURS = "Toolspace, from the file to the list"
FASTMCP = "FastMCP from_openapi and list, from the file"
PARSE = "parse the file"
WALK = "walk the parsed document"


async def measure() -> Report:
    report = Report(f"OpenAPI import of {OPERATIONS:,} operations, ready to list")
    with tempfile.TemporaryDirectory() as folder:
        path = _written(Path(folder, "openapi.json"))
        document = _parsed(path)

        async def ours() -> None:
            provider = OpenApiProvider("shop", OpenApiSpec(spec=str(path)))
            async with toolspace_of([], providers=[provider]) as ts:
                _count([tool.input_schema for tool in ts.list_tools()])

        async def parse() -> None:
            _parsed(path)

        async def walk() -> None:
            _walk(document)

        functions = {OURS: ours, PARSE: parse, WALK: walk}
        try:
            functions[FASTMCP] = _with_fastmcp(path)
        except ImportError as error:
            report.notes.append(f"FastMCP is left out: {error}")
        contestants = [
            Contestant(name, repeat(function), _nothing if name == FASTMCP else None)
            for name, function in functions.items()
        ]
        timings = await race(contestants, rounds=4, slice_ms=250)
    if FASTMCP in timings:
        report.ratio("against FastMCP from_openapi and list", timings.ratio(OURS, FASTMCP), must=0.1)
    report.ratio("after parsing, against a bare walk of the document", _after_parsing(timings), aim=2.0)
    for name in functions:
        report.figure(name, timings.best(name) * 1000, "ms")
    report.notes.append(f"a walk visits each of the document's {_walk(document):,} values once, and does nothing there")
    return report


def _written(path: Path) -> Path:
    path.write_text(json.dumps(make_document(OPERATIONS)))
    return path


def _parsed(path: Path) -> Any:
    return msgspec.json.decode(path.read_bytes())


def _after_parsing(timings: Timings) -> Ratio:
    """What Toolspace adds to the parsing, in walks."""
    value = (timings.best(OURS) - timings.best(PARSE)) / timings.best(WALK)
    whole = timings.ratio(OURS, PARSE)
    scale = value / (whole.value - 1)
    return Ratio(value, (whole.low - 1) * scale, (whole.high - 1) * scale)


def _with_fastmcp(path: Path) -> Any:
    import httpx2
    from fastmcp import FastMCP

    client = httpx2.AsyncClient(base_url="https://api.example.com/v1")

    async def load() -> None:
        server = FastMCP.from_openapi(_parsed(path), client)
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


def _nothing() -> None:
    """Marks a contestant that is run once a round."""
