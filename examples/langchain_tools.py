"""Converts the tools of a toolspace to LangChain tools, for `model.bind_tools(tools)` or an agent."""

import asyncio

from langchain_core.messages import AIMessage

from toolspace import Toolspace, tool
from toolspace.integrations.langchain import to_langchain_tools


@tool(timeout=5)
async def divide(a: float, b: float) -> float:
    """Divides one number by another."""
    if b == 0:
        raise ValueError("division by zero")
    return a / b


async def main() -> None:
    async with Toolspace(tools=[divide]) as ts:
        tools = {langchain_tool.name: langchain_tool for langchain_tool in to_langchain_tools(ts)}
        # The response of a chat model that has these tools:
        response = AIMessage(
            "",
            tool_calls=[
                {"name": "divide", "args": {"a": 1, "b": 4}, "id": "c1"},
                {"name": "divide", "args": {"a": 1, "b": 0}, "id": "c2"},
            ],
        )
        for call in response.tool_calls:
            message = await tools[call["name"]].ainvoke(call)
            print(message.status, message.content, message.artifact.error_kind)


if __name__ == "__main__":
    asyncio.run(main())
