"""`@prebuilt("name")`: actions that a program or a plugin registers for tools with `executionType: prebuilt`.

`agents/prebuilt` finds them by name; it also has Toolspace's own actions, whose names are reserved here.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final, TypedDict, Unpack

from toolspace.core.tool import Annotations, FunctionTool, ToolCategory, caller_locals
from toolspace.errors import ToolDefinitionError, ToolNameConflict

RESERVED_ACTION_NAMES: Final = frozenset(
    (
        "create_plan", "delete_goals", "delete_memories", "delete_plans", "enter_space", "get_goals", "get_memories",
        "get_memory", "get_plan", "get_plans", "get_space_context", "leave_space", "peek_inbox", "query_knowledge",
        "read_messages", "search_knowledge", "send_message", "send_notification", "set_goals", "set_memories",
        "set_memory", "set_plans", "skip", "update_space_metadata",
    )
)  # fmt: skip
"""Toolspace's own actions. Each has a camelCase name, too."""
_WORD_BOUNDARY = re.compile(r"(?<=[a-z])(?=[A-Z])")
_actions: dict[str, PrebuiltAction] = {}


class PrebuiltAction:
    """A function that was registered as an action. It can still be called like the function."""

    def __init__(self, tool: FunctionTool) -> None:
        self.tool = tool
        """Has the name, description and schema of the action, and runs it."""
        self._file_version = _find_file_version(tool.function)

    @property
    def name(self) -> str:
        return self.tool.name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tool(*args, **kwargs)

    def __repr__(self) -> str:
        return f"PrebuiltAction({self.name!r})"

    @property
    def origin(self) -> str:
        """The function with its file and line, for error messages."""
        function = inspect.unwrap(self.tool.function)
        code = getattr(function, "__code__", None)
        name = getattr(function, "__qualname__", self.name)
        return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name

    def can_be_replaced_by(self, action: PrebuiltAction) -> bool:
        """Whether another action is this one after a reload, or this one is of code that is not loaded any more."""
        function, new_function = inspect.unwrap(self.tool.function), inspect.unwrap(action.tool.function)
        if _identity(function) == _identity(new_function):
            return True
        module = sys.modules.get(str(getattr(function, "__module__", None)))
        is_loaded = module is not None and vars(module) is getattr(function, "__globals__", vars(module))
        return not is_loaded or self._file_version != _find_file_version(function)


class ActionOptions(TypedDict, total=False):
    """The options of `@prebuilt(name, …)`; as those of `@tool`."""

    description: str
    input_schema: Mapping[str, Any]
    output_schema: Mapping[str, Any]
    category: ToolCategory | str
    annotations: Annotations


def prebuilt(name: str, **options: Unpack[ActionOptions]) -> Callable[[Callable[..., Any]], PrebuiltAction]:
    """Registers a function as the prebuilt action `name`, for all toolspaces of this process.

    The description and the schema come from the function, as with `@tool`. A tool of the configuration offers the
    action: `{name: lookUpOrder, executionType: prebuilt, execution: {action: lookUpOrder}}`. Raises `ToolNameConflict`
    if another function, or Toolspace itself, has an action of this name.
    """
    if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]: `@prebuilt` without a name
        raise ToolDefinitionError('an action needs a name: write @prebuilt("name")')

    def decorate(function: Callable[..., Any]) -> PrebuiltAction:
        tool = FunctionTool(
            function,
            name=name,
            namespace=caller_locals(function),
            execution_type="prebuilt",
            visible=False,
            **options,
        )
        _ = tool.input_schema  # Built now: an unsupported type hint is reported where the function is.
        action = PrebuiltAction(tool)
        _register(action)
        return action

    return decorate


def find_registered_action(name: str) -> PrebuiltAction | None:
    return _actions.get(name)


def list_registered_names() -> list[str]:
    return sorted(_actions)


def to_snake_case(name: str) -> str:
    """The name of an action as Toolspace's own actions are written: `set_goals` for `setGoals`."""
    return _WORD_BOUNDARY.sub("_", name).lower()


def _register(action: PrebuiltAction) -> None:
    if to_snake_case(action.name) in RESERVED_ACTION_NAMES:
        raise ToolNameConflict(
            f'the prebuilt action "{action.name}" is offered by Toolspace and by {action.origin}; rename yours'
        )
    existing_action = _actions.get(action.name)
    if existing_action is not None and not existing_action.can_be_replaced_by(action):
        raise ToolNameConflict(
            f'the prebuilt action "{action.name}" is offered by {existing_action.origin} and by {action.origin}; '
            "rename one of them"
        )
    _actions[action.name] = action


def _identity(function: Any) -> tuple[str | None, str | None]:
    return getattr(function, "__module__", None), getattr(function, "__qualname__", None)


def _find_file_version(function: Any) -> tuple[int, int] | None:
    """When the file of a function was changed, and its size; None without a file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    try:
        status = os.stat(code.co_filename) if code is not None else None
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if status is not None else None
