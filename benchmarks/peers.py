"""The same trivial call through other libraries, each in the way that costs it least."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.workloads import ARGUMENTS, add

Call = Callable[[], Awaitable[Any]]


async def pydantic_ai() -> Call:
    from pydantic_ai import FunctionToolset, RunContext
    from pydantic_ai.messages import ToolCallPart
    from pydantic_ai.models.test import TestModel
    from pydantic_ai.tool_manager import ToolManager
    from pydantic_ai.usage import RunUsage

    context = RunContext(deps=None, model=TestModel(), usage=RunUsage(), run_step=1)
    manager = await ToolManager(FunctionToolset([add])).for_run_step(context)
    part = ToolCallPart("add", ARGUMENTS)
    return lambda: manager.handle_call(part)


async def langchain() -> Call:
    from langchain_core.tools import StructuredTool

    tool = StructuredTool.from_function(coroutine=add)
    return lambda: tool.ainvoke(json.loads(ARGUMENTS))


async def mcp_sdk() -> Call:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("bench")
    server.add_tool(add)
    return lambda: server.call_tool("add", json.loads(ARGUMENTS))


async def fastmcp() -> Call:
    from fastmcp import FastMCP

    server = FastMCP("bench")
    server.tool(add)
    return lambda: server.call_tool("add", json.loads(ARGUMENTS))


async def openai_agents() -> Call:
    from agents import function_tool
    from agents.tool_context import ToolContext

    tool = function_tool(add)
    context = ToolContext(context=None, tool_name="add", tool_call_id="call_1", tool_arguments=ARGUMENTS)
    return lambda: tool.on_invoke_tool(context, ARGUMENTS)


PYDANTIC_AI = "pydantic-ai ToolManager.handle_call"
LANGCHAIN = "LangChain StructuredTool.ainvoke"

PEERS: dict[str, Callable[[], Awaitable[Call]]] = {
    PYDANTIC_AI: pydantic_ai,
    LANGCHAIN: langchain,
    "MCP SDK MCPServer.call_tool": mcp_sdk,
    "FastMCP FastMCP.call_tool": fastmcp,
    "openai-agents FunctionTool.on_invoke_tool": openai_agents,
}
