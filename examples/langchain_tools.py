"""The tools of a toolspace as LangChain tools, for `model.bind_tools(tools)` or an agent."""

import asyncio

from langchain_core.messages import AIMessage

from toolspace import Toolspace, tool
from toolspace.integrations.langchain import to_langchain_tools


@tool(timeout=5)
async def divide(a: float, b: float) -> float:
    """Divides one number by another."""
    if b == 0:
        raise ValueError("nothing can be divided by zero")
    return a / b


async def main() -> None:
    async with Toolspace(tools=[divide]) as ts:
        tools = {tool_.name: tool_ for tool_ in to_langchain_tools(ts)}
        # What a chat model answers once it knows the tools:
        answer = AIMessage(
            "",
            tool_calls=[
                {"name": "divide", "args": {"a": 1, "b": 4}, "id": "c1"},
                {"name": "divide", "args": {"a": 1, "b": 0}, "id": "c2"},
            ],
        )
        for call in answer.tool_calls:
            message = await tools[call["name"]].ainvoke(call)
            print(message.status, message.content, message.artifact.error_kind)


if __name__ == "__main__":
    asyncio.run(main())
