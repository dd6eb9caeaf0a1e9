"""Agents that call agents, and a router that hands requests to other agents."""

import asyncio

from toolspace import Agent, LoopSettings, RunLimits, Toolspace, tool
from toolspace.testing import ScriptedModel, call


@tool
async def search(words: str) -> list[str]:
    """Searches the archive."""
    return [f"{words}: see shelf 4"]


researcher = Agent(
    "researcher",
    description="Finds things in the archive.",
    system="Search until you are sure.",
    model=ScriptedModel([call("search", {"words": "tides"}), "The tables of tides are on shelf 4."]),
    tools=[search],  # Only this agent has the tool.
    settings=LoopSettings(max_steps=5),
    limits=RunLimits(max_cost=0.10, timeout=60),
)
editor = Agent(
    "editor",
    description="Writes answers for readers.",
    model=ScriptedModel(
        [
            call("agent__researcher", {"prompt": "Where are the tables of tides?", "reason": "A reader asks."}),
            "You find the tables of tides on shelf 4.",
        ]
    ),
    agents=[researcher],  # It may call only this agent.
    limits=RunLimits(max_tokens=50_000),  # Includes what the researcher uses.
)
desk = Agent(
    "desk",
    system="Hand each question to the agent that should answer it.",
    model=ScriptedModel([call("router__handoff-to", {"agent": "editor", "message": "They are in a hurry."})]),
    destinations=[editor],
)


async def main() -> None:
    async with Toolspace(agents=[desk]) as ts:
        result = await ts.run_agent("desk", "Where are the tables of tides?")
    print(result.text)
    print(" → ".join(result.path), "in", result.steps, "steps,", result.usage.requests, "requests")


asyncio.run(main())
