"""A program with its own model loop: a run adds limits, a budget and a trace to the calls."""

import asyncio
import json
from typing import Any

from toolspace import EventType, Toolspace, tool


@tool(cache=60, timeout=10)
async def look_up(city: str) -> dict[str, Any]:
    """Looks up the weather of a city."""
    return {"city": city, "degrees": 21}


def model(turn: int) -> list[dict[str, str]]:
    """Replaces your model: returns the tool calls of each turn in the format of its API."""
    turns = [
        [
            {"id": "c1", "name": "look_up", "arguments": '{"city": "Lisbon"}'},
            {"id": "c2", "name": "look_up", "arguments": '{"city": "Oslo"}'},
        ],
        [
            {
                "id": "c3",
                "name": "agent__final_report",
                "arguments": '{"status": "success", "format": "markdown", "content": "Both have 21 degrees."}',
            }
        ],
    ]
    return turns[turn]


async def main() -> None:
    async with Toolspace(tools=[look_up]) as ts:
        ts.bus.subscribe(lambda event: print("failed:", event.result.error), EventType.TOOL_CALL_FAILED)
        async with ts.run(max_tool_calls_per_turn=8, context_window=100_000, deadline=60) as run:
            tools = ts.to_llm_tools("anthropic", run=run)
            print(len(tools), "tools for the model")
            for turn in range(10):
                calls = model(turn)
                results = await asyncio.gather(
                    *(run.call(call["name"], call["arguments"], call_id=call["id"]) for call in calls)
                )
                print([result.text for result in results])
                if run.final_report is not None:
                    break
                run.next_turn()
        print(run.final_report)
        print(json.dumps(run.trace.to_dict())[:60], "…")


asyncio.run(main())
