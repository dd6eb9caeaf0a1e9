"""What a tool may know of its call, and what it may say while it runs."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolspace.core.elicitation import (
    ELICITATION_CALL,
    CallerClient,
    ElicitationForm,
    ElicitationResult,
    parse_elicitation_result,
)
from toolspace.errors import ToolCanceledError, ToolError

if TYPE_CHECKING:
    from toolspace.core.result import ToolResult
    from toolspace.core.tool import Tool


class RunHandle(Protocol):
    """The side of a run that its own tools write to."""

    id: str
    final_report: Mapping[str, Any] | None
    report_format: str | None
    report_schema: Mapping[str, Any] | None
    task_status: Mapping[str, Any] | None
    discovered_tools: dict[str, None]

    @property
    def final_report_reminder(self) -> str | None: ...


class CallHandle(Protocol):
    """The side of a running call that its tool talks to."""

    @property
    def id(self) -> str: ...
    @property
    def tool(self) -> Tool: ...
    @property
    def canceled(self) -> bool: ...
    @property
    def run(self) -> RunHandle | None: ...
    @property
    def remaining_seconds(self) -> float: ...
    @property
    def allowed_seconds(self) -> float: ...
    @property
    def has_progress_listener(self) -> bool: ...
    def report_status(self, status: Mapping[str, Any]) -> None: ...
    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...
    def partial(self, value: object) -> None: ...
    async def call(self, name: str, arguments: Mapping[str, Any] | str | None) -> ToolResult: ...
    async def collect(self, values: AsyncGenerator[Any, None], *, emit_partials: bool, is_json: bool) -> ToolResult: ...


class AgentHandle(Protocol):
    """The agent around a call, as others see it."""

    @property
    def name(self) -> str: ...


class TaskHost(Protocol):
    """The agent around a call, as the task tools see it: its tasks, and the people it talks to."""

    async def list_tasks(self, date: str | None, context: ToolContext) -> Sequence[Mapping[str, Any]]: ...
    async def replay_task(self, task_id: str, context: ToolContext) -> Sequence[Mapping[str, Any]]: ...
    async def spawn_task(self, description: str, input: str, context: ToolContext) -> str: ...
    async def reply(
        self, text: str, channel_id: str, reply_to: str | None, context: ToolContext
    ) -> Mapping[str, Any]: ...


class CallHost(Protocol):
    """The gateway around a call: it has someone else answer what no code here can, and keeps what agents have."""

    @property
    def ledger(self) -> Any:
        """What is kept: `toolspace.spaces.ledger.Ledger`."""
        ...

    async def wait_for_result(self, tool: Tool, parameters: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Offers the call to whoever executes the tool, and waits as long as the tool says."""
        ...

    async def ask_space(self, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float) -> Any:
        """Asks the people in the call's space, by a visible call of that name. `ToolError` where nobody answers."""
        ...


class ToolContext:
    """Who calls, from where, and within which bounds.

    Give one to `Toolspace.call(..., context=…)` to say who calls; a function that declares a parameter of this
    type gets its own, bound to the call. The model never sees it.
    """

    __slots__ = (
        "agent",
        "agent_entity_id",
        "agent_id",
        "allowed_env",
        "allowed_hosts",
        "allowed_paths",
        "caller_client",
        "handle",
        "host",
        "memory_dir",
        "protected_paths",
        "run_id",
        "session_dir",
        "session_id",
        "space_id",
        "task_id",
        "tasks",
        "user_id",
        "web_search",
    )

    def __init__(
        self,
        *,
        task_id: str = "",
        user_id: str | None = None,
        allowed_paths: Sequence[str | Path] | None = None,
        protected_paths: Sequence[str | Path] | None = None,
        allowed_env: Sequence[str] | None = None,
        allowed_hosts: Sequence[str] | None = None,
        memory_dir: str | Path | None = None,
        session_dir: str | Path | None = None,
        session_id: str | None = None,
        web_search: Mapping[str, Any] | None = None,
        tasks: TaskHost | None = None,
        run_id: str | None = None,
        agent_id: str | None = None,
        agent_entity_id: str | None = None,
        space_id: str | None = None,
        caller_client: CallerClient | None = None,
        host: CallHost | None = None,
        agent: AgentHandle | None = None,
    ) -> None:
        self.task_id = task_id
        self.user_id = user_id
        self.allowed_paths = allowed_paths
        self.protected_paths = protected_paths
        """Files that no tool may change: what configures the toolspace decides what its tools may do."""
        self.allowed_env = allowed_env
        self.allowed_hosts = allowed_hosts
        self.memory_dir = memory_dir
        self.session_dir = session_dir
        self.session_id = session_id
        self.web_search = web_search
        self.tasks = tasks
        self.run_id = run_id
        self.agent_id = agent_id
        self.agent_entity_id = agent_entity_id
        self.space_id = space_id
        self.caller_client = caller_client
        """Leads what the tool asks to whoever called; None where they cannot be asked."""
        self.host = host
        """The gateway that the call came through; None in a library or a command."""
        self.agent = agent
        """The agent whose run the call belongs to; None where no agent calls."""
        self.handle: CallHandle | None = None

    def with_defaults(self, base: ToolContext) -> ToolContext:
        """This context, with what it leaves open taken from `base`."""
        # One by one, as in `bind`: every call that brings a context takes this way.
        copy = ToolContext.__new__(ToolContext)
        copy.task_id = self.task_id or base.task_id
        copy.user_id = self.user_id or base.user_id
        copy.allowed_paths = base.allowed_paths if self.allowed_paths is None else self.allowed_paths
        copy.protected_paths = base.protected_paths if self.protected_paths is None else self.protected_paths
        copy.allowed_env = base.allowed_env if self.allowed_env is None else self.allowed_env
        copy.allowed_hosts = base.allowed_hosts if self.allowed_hosts is None else self.allowed_hosts
        copy.memory_dir = base.memory_dir if self.memory_dir is None else self.memory_dir
        copy.session_dir = base.session_dir if self.session_dir is None else self.session_dir
        copy.session_id = self.session_id or base.session_id
        copy.web_search = base.web_search if self.web_search is None else self.web_search
        copy.tasks = base.tasks if self.tasks is None else self.tasks
        copy.run_id = self.run_id or base.run_id
        copy.agent_id = self.agent_id or base.agent_id
        copy.agent_entity_id = self.agent_entity_id or base.agent_entity_id
        copy.space_id = self.space_id or base.space_id
        copy.caller_client = base.caller_client if self.caller_client is None else self.caller_client
        copy.host = base.host if self.host is None else self.host
        copy.agent = base.agent if self.agent is None else self.agent
        copy.handle = base.handle if self.handle is None else self.handle
        return copy

    def bind(self, handle: CallHandle, *, run_id: str | None, session_id: str) -> ToolContext:
        """A copy that belongs to one call."""
        # One by one: every call of a provider's tool takes this way, and a loop over the names costs ten times more.
        copy = ToolContext.__new__(ToolContext)
        copy.task_id = self.task_id
        copy.user_id = self.user_id
        copy.allowed_paths = self.allowed_paths
        copy.protected_paths = self.protected_paths
        copy.allowed_env = self.allowed_env
        copy.allowed_hosts = self.allowed_hosts
        copy.memory_dir = self.memory_dir
        copy.session_dir = self.session_dir
        copy.web_search = self.web_search
        copy.tasks = self.tasks
        copy.agent_id = self.agent_id
        copy.agent_entity_id = self.agent_entity_id
        copy.space_id = self.space_id
        copy.caller_client = self.caller_client
        copy.host = self.host
        copy.agent = self.agent
        copy.handle = handle
        copy.run_id = run_id
        copy.session_id = session_id
        return copy

    @property
    def run(self) -> RunHandle | None:
        """The run that the call belongs to."""
        return self.handle.run if self.handle is not None else None

    @property
    def call_id(self) -> str:
        return self.handle.id if self.handle is not None else ""

    @property
    def canceled(self) -> bool:
        """Whether nobody waits for this call any more: it was canceled, or it timed out."""
        return self.handle is not None and self.handle.canceled

    @property
    def has_progress_listener(self) -> bool:
        """Whether anyone listens for progress: where asking for it costs something, nobody need."""
        return self.handle is not None and self.handle.has_progress_listener

    @property
    def remaining_seconds(self) -> float:
        """How long the call may still take, roughly."""
        return self.handle.remaining_seconds if self.handle is not None else float("inf")

    def check_canceled(self) -> None:
        """Raises if the call was canceled. For loops in plain functions, which no one can interrupt."""
        if self.canceled:
            raise ToolCanceledError("canceled")

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Says how far the call is, as an event."""
        if self.handle is not None:
            self.handle.progress(progress, total, message)

    def emit_partial(self, value: object) -> None:
        """Gives a part of the result out early, as an event."""
        if self.handle is not None:
            self.handle.partial(value)

    async def collect(
        self, values: AsyncGenerator[Any, None], *, emit_partials: bool = True, is_json: bool = False
    ) -> ToolResult:
        """The result of a stream: its text, or the list of its values. What is large goes to disk as it comes.

        Each value is given out early, unless it is not to be `announced`. `is_json`: the texts together are JSON.
        """
        if self.handle is None:
            raise ToolError("this context belongs to no call; call the tool through a Toolspace")
        return await self.handle.collect(values, emit_partials=emit_partials, is_json=is_json)

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> ToolResult:
        """Calls another tool inside this call: under its run, its limits and its place in the trace."""
        if self.handle is None:
            raise ToolError("this context belongs to no call; call the tool through a Toolspace")
        return await self.handle.call(name, arguments)

    async def elicit(
        self, message: str, schema: Mapping[str, Any] | None = None, *, url: str | None = None, key: str | None = None
    ) -> ElicitationResult:
        """Asks the user who called to fill in a form, or to open `url`. What they say fits the schema.

            colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
            answer = await context.elicit("Which colour?", colour)

        Raises `ToolError` where nobody can be asked. Waiting for them counts: give the tool a time-out for it.
        """
        form = ElicitationForm(schema) if schema is not None else None
        if self.caller_client is None and self.host is not None:
            answer = await self._ask_the_space(message, schema, url)
        else:
            answer = await self._asking().elicit(message, schema=schema, url=url, key=key)
        return answer if form is None else form.validate(answer)

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        """Asks the caller's model, as MCP has it: `{messages: […], maxTokens: …}` gives `{role, content, model}`."""
        return await self._asking().sample(params, key=key)

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        """The folders that the caller works in, as URIs."""
        return await self._asking().roots(key=key)

    async def _ask_the_space(
        self, message: str, schema: Mapping[str, Any] | None, url: str | None
    ) -> ElicitationResult:
        """Asks the people in the space of the call, as a call of its own that they see there."""
        assert self.host is not None
        asked = {"message": message, **({"url": url} if url is not None else {"requestedSchema": schema})}
        said = await self.host.ask_space(ELICITATION_CALL, asked, self, timeout=self.remaining_seconds)
        return parse_elicitation_result(said)

    def _asking(self) -> CallerClient:
        if self.caller_client is None:
            raise ToolError("nobody can be asked: whoever called this tool does not take questions")
        return self.caller_client

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that carries the ids of this call."""
        ids = {"callId": self.call_id, "runId": self.run_id, "taskId": self.task_id}
        return logging.LoggerAdapter(logging.getLogger("toolspace.tool"), ids)
