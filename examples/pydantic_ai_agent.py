"""A Pydantic AI agent with the tools of a toolspace. Replace the test model by the name of your model."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

from toolspace import Toolspace, tool
from toolspace.integrations.pydantic_ai import ToolspaceToolset


@tool(timeout=5, cache=60)
async def weather(city: str) -> dict[str, object]:
    """Returns the current weather of a city.

    Args:
        city: The name of the city.
    """
    return {"city": city, "celsius": 21}


async def main() -> None:
    async with Toolspace(tools=[weather]) as ts:
        toolset = ToolspaceToolset(ts)
        agent = Agent(TestModel(call_tools=["weather"]), toolsets=[toolset])  # Or: Agent("openai:gpt-5", …)
        result = await agent.run("How warm is it in Lisbon?")
        print(result.output)


if __name__ == "__main__":
    asyncio.run(main())
