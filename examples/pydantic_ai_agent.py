"""A Pydantic AI agent with the tools of a toolspace. Put your model's name in the place of the scripted one."""

import asyncio

from pydantic_ai import Agent
from pydantic_ai.models.test import TestModel

from toolspace import Toolspace, tool
from toolspace.integrations.pydantic_ai import ToolspaceToolset


@tool(timeout=5, cache=60)
async def weather(city: str) -> dict[str, object]:
    """The weather of a city, now.

    Args:
        city: Its name.
    """
    return {"city": city, "celsius": 21}


async def main() -> None:
    async with Toolspace(tools=[weather]) as ts:
        toolset = ToolspaceToolset(ts)
        agent = Agent(TestModel(call_tools=["weather"]), toolsets=[toolset])  # Or: Agent("openai:gpt-5", …)
        answer = await agent.run("How warm is it in Lisbon?")
        print(answer.output)


if __name__ == "__main__":
    asyncio.run(main())
