"""Toolspace: the tool system for AI agents. Names are loaded when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolspace.agents.definition import Agent as Agent
    from toolspace.agents.in_process import AgentResult as AgentResult
    from toolspace.agents.loop import Ways as Ways
    from toolspace.agents.run_budget import Bounds as Bounds
    from toolspace.client.client import ToolspaceClient as ToolspaceClient
    from toolspace.client.worker import ToolWorker as ToolWorker
    from toolspace.core.context import ToolContext as ToolContext
    from toolspace.core.events import EventType as EventType
    from toolspace.core.function import FunctionTool as FunctionTool
    from toolspace.core.function import tool as tool
    from toolspace.core.interfaces import Allow as Allow
    from toolspace.core.interfaces import Deny as Deny
    from toolspace.core.interfaces import OutputStore as OutputStore
    from toolspace.core.interfaces import Policy as Policy
    from toolspace.core.interfaces import ResultCache as ResultCache
    from toolspace.core.interfaces import ToolProvider as ToolProvider
    from toolspace.core.questions import Answer as Answer
    from toolspace.core.questions import Questions as Questions
    from toolspace.core.result import AudioPart as AudioPart
    from toolspace.core.result import ImagePart as ImagePart
    from toolspace.core.result import JsonPart as JsonPart
    from toolspace.core.result import ResourcePart as ResourcePart
    from toolspace.core.result import TextPart as TextPart
    from toolspace.core.result import ToolResult as ToolResult
    from toolspace.core.statistics import ToolStats as ToolStats
    from toolspace.core.tool import Annotations as Annotations
    from toolspace.core.tool import Tool as Tool
    from toolspace.core.tool import ToolCategory as ToolCategory
    from toolspace.errors import ConfigError as ConfigError
    from toolspace.errors import ProviderError as ProviderError
    from toolspace.errors import ToolCanceledError as ToolCanceledError
    from toolspace.errors import ToolDefinitionError as ToolDefinitionError
    from toolspace.errors import ToolError as ToolError
    from toolspace.errors import ToolExecutionError as ToolExecutionError
    from toolspace.errors import ToolLimitError as ToolLimitError
    from toolspace.errors import ToolNameConflict as ToolNameConflict
    from toolspace.errors import ToolNotFoundError as ToolNotFoundError
    from toolspace.errors import ToolPermissionError as ToolPermissionError
    from toolspace.errors import ToolspaceError as ToolspaceError
    from toolspace.errors import ToolTimeoutError as ToolTimeoutError
    from toolspace.errors import ToolTransportError as ToolTransportError
    from toolspace.errors import ToolValidationError as ToolValidationError
    from toolspace.orchestrator.event_bus import EventBus as EventBus
    from toolspace.orchestrator.orchestrator import ToolOrchestrator as ToolOrchestrator
    from toolspace.orchestrator.queues import QueueSpec as QueueSpec
    from toolspace.orchestrator.queues import Rate as Rate
    from toolspace.orchestrator.run import Run as Run
    from toolspace.orchestrator.settings import Rules as Rules
    from toolspace.providers.mcp.callbacks import ASK_THE_CALLER as ASK_THE_CALLER
    from toolspace.providers.mcp.callbacks import Callbacks as Callbacks
    from toolspace.providers.mcp.callbacks import Question as Question
    from toolspace.providers.mcp.provider import McpProvider as McpProvider
    from toolspace.providers.mcp.spec import ServerSpec as ServerSpec
    from toolspace.providers.mcp.status import ServerStatus as ServerStatus
    from toolspace.providers.openapi.provider import OpenApiProvider as OpenApiProvider
    from toolspace.providers.openapi.spec import OpenApiSpec as OpenApiSpec
    from toolspace.providers.registry import ToolRegistry as ToolRegistry
    from toolspace.providers.rest.provider import RestProvider as RestProvider
    from toolspace.providers.rest.spec import RestSpec as RestSpec
    from toolspace.toolspace import Settings as Settings
    from toolspace.toolspace import Toolspace as Toolspace

_PLACES = {
    "toolspace.core.interfaces": ("Allow", "Deny", "OutputStore", "Policy", "ResultCache", "ToolProvider"),
    "toolspace.agents.definition": ("Agent",),
    "toolspace.agents.run_budget": ("Bounds",),
    "toolspace.agents.in_process": ("AgentResult",),
    "toolspace.agents.loop": ("Ways",),
    "toolspace.client.client": ("ToolspaceClient",),
    "toolspace.client.worker": ("ToolWorker",),
    "toolspace.core.context": ("ToolContext",),
    "toolspace.core.events": ("EventType",),
    "toolspace.core.function": ("FunctionTool", "tool"),
    "toolspace.core.questions": ("Answer", "Questions"),
    "toolspace.core.result": ("AudioPart", "ImagePart", "JsonPart", "ResourcePart", "TextPart", "ToolResult"),
    "toolspace.core.statistics": ("ToolStats",),
    "toolspace.core.tool": ("Annotations", "Tool", "ToolCategory"),
    "toolspace.errors": (
        "ConfigError",
        "ProviderError",
        "ToolCanceledError",
        "ToolDefinitionError",
        "ToolError",
        "ToolExecutionError",
        "ToolLimitError",
        "ToolNameConflict",
        "ToolNotFoundError",
        "ToolPermissionError",
        "ToolspaceError",
        "ToolTimeoutError",
        "ToolTransportError",
        "ToolValidationError",
    ),
    "toolspace.orchestrator.event_bus": ("EventBus",),
    "toolspace.orchestrator.orchestrator": ("ToolOrchestrator",),
    "toolspace.orchestrator.queues": ("QueueSpec", "Rate"),
    "toolspace.orchestrator.run": ("Run",),
    "toolspace.orchestrator.settings": ("Rules",),
    "toolspace.providers.mcp.callbacks": ("ASK_THE_CALLER", "Callbacks", "Question"),
    "toolspace.providers.mcp.provider": ("McpProvider",),
    "toolspace.providers.mcp.spec": ("ServerSpec",),
    "toolspace.providers.mcp.status": ("ServerStatus",),
    "toolspace.providers.openapi.provider": ("OpenApiProvider",),
    "toolspace.providers.openapi.spec": ("OpenApiSpec",),
    "toolspace.providers.registry": ("ToolRegistry",),
    "toolspace.providers.rest.provider": ("RestProvider",),
    "toolspace.providers.rest.spec": ("RestSpec",),
    "toolspace.toolspace": ("Settings", "Toolspace"),
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = list(_PLACE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: `import toolspace` alone costs next to nothing."""
    module = _PLACE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'toolspace' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACE_OF})
