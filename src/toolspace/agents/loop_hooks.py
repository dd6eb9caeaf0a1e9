"""What a loop of model and tools tells its caller: `LoopHooks` stores and stops it, `LoopObserver` only watches it.

`loop.py` calls them. Both base classes do nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.language_model import ModelCall, ModelListener, ModelStreamPart, ModelTurn, Turn, UserTurn
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.orchestrator import call as call_module


class PlannedCall(msgspec.Struct, frozen=True):
    """A call of the model's turn, with the id that it is executed under."""

    call: ModelCall
    call_id: str
    tool: Tool | None
    """None: there is no tool of that name."""


class LoopHooks:
    """What a loop calls so that its caller can store, stream and stop it. This base class does nothing."""

    should_stop = False
    """Whether to stop before the next step."""

    async def preview_inbox(self) -> UserTurn | None:
        """A note for the model's next step that does not become part of the conversation."""
        return None

    def new_listener(self) -> ModelListener | None:
        """Creates the listener that receives the model's next turn while the model writes it."""
        return None

    def get_call_id(self, index: int) -> str:
        """The id of a call in the turn that the model has just written."""
        return next(call_module.call_ids)

    async def save_step(self, turns: Sequence[Turn], calls: Sequence[PlannedCall], step: int) -> None:
        """Stores turns, the last of them the model's, before its calls are executed."""

    async def before_call(self) -> None:
        """Runs before each call. Raises if this loop must not execute it."""

    def after_call(self, call: PlannedCall) -> None:
        """Runs after each call. Raises if another process has executed it."""


class LoopObserver:
    """Receives what happens in a loop, at once. This base class ignores it. Its methods must not raise."""

    def on_agent_started(self, name: str) -> None:
        """An agent starts to work on the request."""

    def on_model_output(self, part: ModelStreamPart) -> None:
        """A piece of the model's response."""

    def on_call_started(self, call: PlannedCall) -> None: ...

    def on_call_finished(self, call: PlannedCall, result: ToolResult) -> None: ...

    def on_step_finished(self, step: int, turn: ModelTurn) -> None:
        """The model has had a turn, and its calls have results."""
