"""Builds the tools that a configuration defines under `tools.definitions`. Used by `parts`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from toolspace.config.configuration import Config
from toolspace.config.tool_definitions import ToolDefinition
from toolspace.core.context import ToolContext
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, ToolCategory
from toolspace.errors import ConfigError, ToolDefinitionError, ToolExecutionError
from toolspace.providers.configured_tools import ToolExecution, build_execution

if TYPE_CHECKING:
    from toolspace.providers.rest.client import HttpClient

AgentCaller = Callable[[str, Mapping[str, Any], ToolContext, str], Awaitable[ToolResult]]
"""Lets an agent answer a call: its name, the arguments, the context, and the prompt if the arguments have none."""
_AGENT_KEYS = ("agent", "agentName", "name", "agentId")
_NAME_THE_AGENT = "say which under execution.agent"
_IMAGE_MARGIN_SECONDS = 20
"""The timeout of an image tool is longer than the model's own timeout, whose error message is better."""


class SharedHttpClient:
    """The client of defined tools that are HTTP requests. The first of them creates it."""

    def __init__(self, client: HttpClient | None) -> None:
        self.client = client

    def __call__(self) -> HttpClient:
        if self.client is None:
            from toolspace.providers.rest.client import HttpClient

            self.client = HttpClient()
        return self.client


def build_defined_tools(config: Config, http_client: SharedHttpClient, call_agent: AgentCaller | None) -> list[Tool]:
    """The enabled tools. Raises `ConfigError` with all problems."""
    tools: list[Tool] = []
    problems: list[str] = []
    for definition in config.tools.definitions.values():
        if definition.enabled:
            try:
                if definition.execution_type == "agent" and call_agent is not None:
                    tools.append(_build_tool(definition, _build_agent_execution(definition, config, call_agent)))
                else:
                    tools.append(_build_defined_tool(definition, http_client))
            except ToolDefinitionError as error:
                key, _, reason = str(error).removeprefix(f"REST tool {definition.name!r}: ").partition(": ")
                place = config.source("tools", "definitions", definition.name, "execution", key)
                problems.append(f"{place}: {reason}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tools


def list_tools_without_agent(config: Config) -> list[str]:
    """A warning for each tool of the type `agent` that names no agent."""
    return [
        f"{config.source('tools', 'definitions', tool.name)}: it names no agent, and calls of it fail; "
        f"{_NAME_THE_AGENT}"
        for tool in config.tools.definitions.values()
        if tool.enabled and tool.execution_type == "agent" and _find_agent_key(tool) is None
    ]


def _build_defined_tool(definition: ToolDefinition, http_client: SharedHttpClient) -> Tool:
    description, category = definition.description, definition.category
    if definition.execution_type == "prebuilt":
        # Imported here: it imports the whole storage.
        from toolspace.agents.prebuilt.provider import build_handler, get_action

        action = get_action(str(definition.execution["action"]))
        input_schema = definition.input_schema or action.input_schema
        execution = ToolExecution(handler=build_handler(action), input_schema=input_schema)
        description = description or action.description
        category = action.category if category is ToolCategory.CUSTOM else category
    elif definition.execution_type == "image":
        from toolspace.models.images import PROMPT_SCHEMA, create_image_handler

        handler = create_image_handler(definition.name, definition.execution)
        execution = ToolExecution(handler=handler, input_schema=definition.input_schema or PROMPT_SCHEMA)
        description = description or "Draws a picture of what the prompt says."
    else:
        execution = build_execution(
            definition.name,
            definition.execution_type,
            definition.execution,
            input_schema=definition.input_schema,
            client=http_client,
        )
    return _build_tool(definition, execution, description=description, category=category)


def _build_agent_execution(definition: ToolDefinition, config: Config, call_agent: AgentCaller) -> ToolExecution:
    from toolspace.agents.subagents import AGENT_INPUT  # Imported here: it imports the whole agent runtime.

    key = _find_agent_key(definition)
    name = str(definition.execution[key]) if key is not None else ""
    agents = (config.parent or config).agents
    if key is not None and name not in agents:
        hint = did_you_mean(name, agents) or (f"; there are {', '.join(agents)}" if agents else "; there is none")
        raise ToolDefinitionError(f'{key}: there is no agent "{name}"{hint}')

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if not name:
            raise ToolExecutionError(f'tool "{definition.name}" names no agent; {_NAME_THE_AGENT}', executed=False)
        return await call_agent(name, parameters, context, definition.description)

    return ToolExecution(handler=handle, input_schema=definition.input_schema or AGENT_INPUT)


def _find_agent_key(definition: ToolDefinition) -> str | None:
    """The key of `execution` that names the agent."""
    return next((key for key in _AGENT_KEYS if definition.execution.get(key)), None)


def _build_tool(
    definition: ToolDefinition,
    execution: ToolExecution,
    *,
    description: str | None = None,
    category: ToolCategory | None = None,
) -> Tool:
    timeout = definition.timeout
    if timeout is None and definition.execution_type == "agent":
        timeout = math.inf  # The agent has its own limits.
    elif timeout is None and definition.execution_type == "image":
        from toolspace.models.images import IMAGE_TIMEOUT_SECONDS

        timeout = IMAGE_TIMEOUT_SECONDS + _IMAGE_MARGIN_SECONDS
    return Tool(
        definition.name,
        definition.description if description is None else description,
        execution.input_schema,
        handler=execution.handler,
        output_schema=definition.output_schema,
        category=definition.category if category is None else category,
        execution_type=definition.execution_type,
        visible=definition.visible and definition.execution_type != "prebuilt",
        is_async=definition.is_async,
        timeout=timeout,
        execution=definition.execution,
        queue=definition.queue,
        cache=definition.cache,
        cache_per_user=definition.cache_per_user,
        annotations=definition.annotations,
        tags=definition.tags,
        version=definition.version,
        expires_after=definition.expires_after,
        pauses_run=definition.pauses_run,
    )
