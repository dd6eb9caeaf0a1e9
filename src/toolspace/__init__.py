"""Toolspace: the tool system for AI agents. This package exports the public API; names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from toolspace.agents.agent import Agent as Agent
    from toolspace.agents.agent import LoopSettings as LoopSettings
    from toolspace.agents.agent import RunLimits as RunLimits
    from toolspace.agents.agent_events import AgentCallFinished as AgentCallFinished
    from toolspace.agents.agent_events import AgentCallStarted as AgentCallStarted
    from toolspace.agents.agent_events import AgentEvent as AgentEvent
    from toolspace.agents.agent_events import AgentFinished as AgentFinished
    from toolspace.agents.agent_events import AgentStarted as AgentStarted
    from toolspace.agents.agent_events import AgentStepFinished as AgentStepFinished
    from toolspace.agents.agent_events import AgentStream as AgentStream
    from toolspace.agents.agent_events import AgentText as AgentText
    from toolspace.agents.agent_events import AgentTextRestarted as AgentTextRestarted
    from toolspace.agents.agent_events import AgentThinking as AgentThinking
    from toolspace.agents.subagents import AgentResult as AgentResult
    from toolspace.client.client import ToolspaceClient as ToolspaceClient
    from toolspace.client.worker import ToolWorker as ToolWorker
    from toolspace.composition.settings import Settings as Settings
    from toolspace.core.approvals import ApprovalDecision as ApprovalDecision
    from toolspace.core.approvals import ApprovalRequest as ApprovalRequest
    from toolspace.core.call_statistics import ToolStats as ToolStats
    from toolspace.core.events import EventType as EventType
    from toolspace.core.extension_points import Allow as Allow
    from toolspace.core.extension_points import Ask as Ask
    from toolspace.core.extension_points import ConversationStore as ConversationStore
    from toolspace.core.extension_points import Deny as Deny
    from toolspace.core.extension_points import OutputStore as OutputStore
    from toolspace.core.extension_points import Policy as Policy
    from toolspace.core.extension_points import ResultCache as ResultCache
    from toolspace.core.extension_points import ToolProvider as ToolProvider
    from toolspace.core.hooks import Hook as Hook
    from toolspace.core.hooks import HookCall as HookCall
    from toolspace.core.hooks import HookDecision as HookDecision
    from toolspace.core.language_model import ModelCall as ModelCall
    from toolspace.core.language_model import ModelToolResult as ModelToolResult
    from toolspace.core.language_model import ModelTurn as ModelTurn
    from toolspace.core.language_model import ResultsTurn as ResultsTurn
    from toolspace.core.language_model import Turn as Turn
    from toolspace.core.language_model import Usage as Usage
    from toolspace.core.language_model import UserTurn as UserTurn
    from toolspace.core.language_model import decode_turns as decode_turns
    from toolspace.core.language_model import encode_turns as encode_turns
    from toolspace.core.prebuilt_actions import prebuilt as prebuilt
    from toolspace.core.quotas import Quota as Quota
    from toolspace.core.result import AudioPart as AudioPart
    from toolspace.core.result import ImagePart as ImagePart
    from toolspace.core.result import JsonPart as JsonPart
    from toolspace.core.result import ResourcePart as ResourcePart
    from toolspace.core.result import TextPart as TextPart
    from toolspace.core.result import ToolResult as ToolResult
    from toolspace.core.tool import Annotations as Annotations
    from toolspace.core.tool import FunctionTool as FunctionTool
    from toolspace.core.tool import Tool as Tool
    from toolspace.core.tool import ToolCategory as ToolCategory
    from toolspace.core.tool import tool as tool
    from toolspace.core.tool_context import CallerClient as CallerClient
    from toolspace.core.tool_context import ElicitationResult as ElicitationResult
    from toolspace.core.tool_context import ToolContext as ToolContext
    from toolspace.core.tool_export import explain_export as explain_export
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
    from toolspace.orchestrator.effective_settings import ToolRules as ToolRules
    from toolspace.orchestrator.event_bus import EventBus as EventBus
    from toolspace.orchestrator.orchestrator import ToolOrchestrator as ToolOrchestrator
    from toolspace.orchestrator.run import Run as Run
    from toolspace.orchestrator.stages.queue import QueueSpec as QueueSpec
    from toolspace.orchestrator.stages.queue import RateLimit as RateLimit
    from toolspace.providers.functions import ToolRegistry as ToolRegistry
    from toolspace.providers.mcp.provider import McpProvider as McpProvider
    from toolspace.providers.mcp.server_spec import FORWARD_TO_CALLER as FORWARD_TO_CALLER
    from toolspace.providers.mcp.server_spec import ElicitationRequest as ElicitationRequest
    from toolspace.providers.mcp.server_spec import McpCallbacks as McpCallbacks
    from toolspace.providers.mcp.server_spec import ServerSpec as ServerSpec
    from toolspace.providers.mcp.server_spec import ServerStatus as ServerStatus
    from toolspace.providers.openapi.provider import OpenApiProvider as OpenApiProvider
    from toolspace.providers.openapi.provider import OpenApiSpec as OpenApiSpec
    from toolspace.providers.rest.provider import RestProvider as RestProvider
    from toolspace.providers.rest.provider import RestSpec as RestSpec
    from toolspace.storage.disk_conversations import DiskConversations as DiskConversations
    from toolspace.toolspace import Toolspace as Toolspace

_EXPORTS = {
    "toolspace.agents.agent": "Agent LoopSettings RunLimits",
    "toolspace.agents.agent_events": (
        "AgentCallFinished AgentCallStarted AgentEvent AgentFinished AgentStarted AgentStepFinished AgentStream "
        "AgentText AgentTextRestarted AgentThinking"
    ),
    "toolspace.agents.subagents": "AgentResult",
    "toolspace.client.client": "ToolspaceClient",
    "toolspace.client.worker": "ToolWorker",
    "toolspace.composition.settings": "Settings",
    "toolspace.core.tool_context": "CallerClient ElicitationResult ToolContext",
    "toolspace.core.events": "EventType",
    "toolspace.core.approvals": "ApprovalDecision ApprovalRequest",
    "toolspace.core.extension_points": ("Allow Ask ConversationStore Deny OutputStore Policy ResultCache ToolProvider"),
    "toolspace.core.hooks": "Hook HookCall HookDecision",
    "toolspace.core.language_model": (
        "ModelCall ModelToolResult ModelTurn ResultsTurn Turn Usage UserTurn decode_turns encode_turns"
    ),
    "toolspace.core.prebuilt_actions": "prebuilt",
    "toolspace.core.quotas": "Quota",
    "toolspace.core.result": "AudioPart ImagePart JsonPart ResourcePart TextPart ToolResult",
    "toolspace.core.call_statistics": "ToolStats",
    "toolspace.core.tool": "Annotations FunctionTool Tool ToolCategory tool",
    "toolspace.core.tool_export": "explain_export",
    "toolspace.errors": (
        "ConfigError ProviderError ToolCanceledError ToolDefinitionError ToolError ToolExecutionError "
        "ToolLimitError ToolNameConflict ToolNotFoundError ToolPermissionError ToolTimeoutError "
        "ToolTransportError ToolValidationError ToolspaceError"
    ),
    "toolspace.orchestrator.event_bus": "EventBus",
    "toolspace.orchestrator.orchestrator": "ToolOrchestrator",
    "toolspace.orchestrator.run": "Run",
    "toolspace.orchestrator.effective_settings": "ToolRules",
    "toolspace.orchestrator.stages.queue": "QueueSpec RateLimit",
    "toolspace.providers.functions": "ToolRegistry",
    "toolspace.providers.mcp.provider": "McpProvider",
    "toolspace.providers.mcp.server_spec": "ElicitationRequest FORWARD_TO_CALLER McpCallbacks ServerSpec ServerStatus",
    "toolspace.providers.openapi.provider": "OpenApiProvider OpenApiSpec",
    "toolspace.providers.rest.provider": "RestProvider RestSpec",
    "toolspace.storage.disk_conversations": "DiskConversations",
    "toolspace.toolspace": "Toolspace",
}
"""The exported names of each module."""
_MODULES = {name: module for module, names in _EXPORTS.items() for name in names.split()}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports an exported name on first use, so that `import toolspace` alone is fast."""
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'toolspace' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
