"""Prints the OpenTelemetry spans of every call as a tree. Replace the provider by your own."""

import asyncio

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from toolspace import ToolContext, Toolspace, tool
from toolspace.integrations.opentelemetry import instrument


@tool
async def double(number: int) -> int:
    """Doubles a number."""
    return number * 2


@tool
async def quadruple(number: int, context: ToolContext) -> int:
    """Doubles a number twice."""
    once = await context.call("double", {"number": number})
    twice = await context.call("double", {"number": once.unwrap()})
    return twice.unwrap()


async def main() -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with Toolspace(tools=[double, quadruple]) as ts:
        instrument(ts, provider)  # Without an argument, the global provider is used.
        async with ts.run() as run:
            await run.call("quadruple", {"number": 3})
            run.next_turn()
            await run.call("double", {"number": "three"})
    print_spans(exporter.get_finished_spans())


def print_spans(spans: tuple[ReadableSpan, ...], parent: int | None = None, depth: int = 0) -> None:
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent:
            print("  " * depth + span.name, span.status.status_code.name)
            print_spans(spans, span.context.span_id, depth + 1)


if __name__ == "__main__":
    asyncio.run(main())
