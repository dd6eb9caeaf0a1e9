"""Approvals: what is asked before a call runs, and what a person decides.

The policy stage creates an `ApprovalRequest`. The callback of a program, a terminal, an MCP client or the gateway
decides it. Asks nobody itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from toolspace.core import json_text

if TYPE_CHECKING:
    from toolspace.core.tool import Tool
    from toolspace.core.tool_context import ToolContext

OPERATORS: Final = "operators"
"""Approvers: secret keys and the console."""
MEMBERS: Final = "members"
"""Approvers: the members of the call's space."""
CALLER: Final = "caller"
"""Approvers: whoever makes the call."""

ApprovalScope = Literal["run", "session", "always"]
"""For which later calls of the same tool and principal a decision is remembered."""


class ApprovalRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call that waits for a decision. The decision holds for exactly this call."""

    call_id: str
    tool: Tool
    arguments: Mapping[str, Any]
    """The validated arguments that the tool will get."""
    context: ToolContext
    reason: str
    """Why a person is asked; may be empty."""
    approvers: tuple[str, ...]
    source: str
    """The policy, or the line of configuration, that asks."""
    policy_version: str
    """Changes with the rules that apply to the tool."""
    expires_after: float | None = None
    """Seconds; None: as long as a pending call waits."""
    is_nested: bool = False
    """Whether another call makes it: a batch, or a tool that calls tools."""

    @property
    def principal(self) -> str:
        return self.context.principal

    @property
    def tool_version(self) -> str:
        """Changes with the definition of the tool."""
        tool = self.tool
        definition = (tool.version, tool.description, tool.input_schema, tool.execution_type)
        return _hash(definition)[:16]

    @property
    def digest(self) -> str:
        """Identifies the exact arguments."""
        return _hash(self.arguments)

    @property
    def message(self) -> str:
        """The question, for a person."""
        reason = f" ({self.reason})" if self.reason else ""
        arguments = json_text.describe(self.arguments, 2_000)
        return f'May the tool "{self.tool.name}"{reason} run for {self.principal}? Arguments: {arguments}'


class ApprovalDecision(msgspec.Struct, frozen=True):
    """What a person decides about a call."""

    is_approved: bool
    reason: str | None = None
    remember: ApprovalScope | None = None
    """Decide later calls of the same tool and principal in the same way: in this run, this session, or always."""


ApprovalCallback = Callable[[ApprovalRequest], "ApprovalDecision | bool | Awaitable[ApprovalDecision | bool]"]
"""Decides a request: True approves the call, False denies it. The call waits for it up to its timeout."""


def _hash(data: object) -> str:
    import hashlib  # Imported here: programs that only call tools do not need it.

    return hashlib.sha256(json_text.encode_canonical(data)).hexdigest()
