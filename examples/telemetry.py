"""OpenTelemetry spans of every call, printed as a tree. Give your own provider in the place of this one."""

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
    finished = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(finished))
    async with Toolspace(tools=[double, quadruple]) as ts:
        instrument(ts, provider)  # Without a provider: the one that the program has set.
        async with ts.run() as run:
            await run.call("quadruple", {"number": 3})
            run.next_turn()
            await run.call("double", {"number": "three"})
    show(finished.get_finished_spans())


def show(spans: tuple[ReadableSpan, ...], parent: int | None = None, depth: int = 0) -> None:
    for span in sorted(spans, key=lambda span: span.start_time or 0):
        if (span.parent.span_id if span.parent else None) == parent:
            print("  " * depth + span.name, span.status.status_code.name)
            show(spans, span.context.span_id, depth + 1)


if __name__ == "__main__":
    asyncio.run(main())
