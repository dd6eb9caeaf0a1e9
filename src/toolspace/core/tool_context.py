"""The context of a call: what a tool knows about its caller, and what it can do while it runs.

Programs pass a `ToolContext` with a call; tools receive one that is bound to their call. The protocols are the parts of
a run, a call, an agent and a gateway that tools may use. `CallerClient` has the requests of a tool to its caller:
elicitation, sampling and roots, as MCP defines them.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.argument_validation import compile_schema, find_issues
from toolspace.errors import ToolCanceledError, ToolError

if TYPE_CHECKING:
    from toolspace.core.approvals import ApprovalDecision, ApprovalRequest
    from toolspace.core.extension_points import Policy
    from toolspace.core.result import ToolResult
    from toolspace.core.tool import Tool
    from toolspace.core.trace_context import TraceContext

ELICITATION_CALL: Final = "elicitation"
"""The name of the call that shows a question in a space. A frontend has a component for it."""
LOCAL_PRINCIPAL: Final = "local"
"""The principal of calls that name no user: those of a program, or of a person at a terminal."""
SECRET_KEY_PREFIX: Final = "key/"
"""The start of the user ids of secret keys. Ids of entities have no slash, so nobody looks like a key."""
_MAX_ISSUES = 5
_EXPECTED_RESULT: Final = '{"action": "accept", "content": {…}}, or "decline" or "cancel" as the action'


class RunHandle(Protocol):
    """The part of a run that its own tools read and change."""

    id: str
    final_report: Mapping[str, Any] | None
    report_format: str | None
    report_schema: Mapping[str, Any] | None
    check_report: Callable[[Any], None] | None
    task_status: Mapping[str, Any] | None
    discovered_tools: dict[str, None]

    @property
    def policy(self) -> Policy | None: ...

    @property
    def final_report_reminder(self) -> str | None: ...


class CallHandle(Protocol):
    """The part of a running call that its tool uses."""

    has_final_result: bool
    """Whether the hooks have seen its outcome already."""

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
    """The agent that makes a call."""

    @property
    def name(self) -> str: ...


class TaskHost(Protocol):
    """The agent that makes a call, for the task tools: its background tasks, and its channels to people."""

    async def list_tasks(self, date: str | None, context: ToolContext) -> Sequence[Mapping[str, Any]]: ...
    async def replay_task(self, task_id: str, context: ToolContext) -> Sequence[Mapping[str, Any]]: ...
    async def spawn_task(self, description: str, input: str, context: ToolContext) -> str: ...
    async def reply(
        self, text: str, channel_id: str, reply_to: str | None, context: ToolContext
    ) -> Mapping[str, Any]: ...


class CallHost(Protocol):
    """The gateway that a call came through. It waits for the results of pending calls, and has the stored data."""

    @property
    def ledger(self) -> Any:
        """The stored data: `toolspace.spaces.ledger.Ledger`."""
        ...

    async def wait_for_result(self, tool: Tool, parameters: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """Makes the call pending, and waits for its result as long as the tool allows."""
        ...

    def has_approval(self, call_id: str) -> bool:
        """Whether a person approved the call with exactly its arguments, so that hooks do not change them again."""
        ...

    async def request_approval(
        self, request: ApprovalRequest, *, timeout: float
    ) -> ApprovalDecision | ToolResult | None:
        """Asks whoever may approve the call. Returns the decision, or the result that the caller gets instead.

        None if nobody can be asked here.
        """
        ...

    async def ask_space(self, name: str, args: Mapping[str, Any], context: ToolContext, *, timeout: float) -> Any:
        """Asks the people in the call's space by a visible call of this name. Raises `ToolError` if nobody answers."""
        ...


class ToolContext:
    """Who makes a call, and what the call may use.

    Pass one to `Toolspace.call(..., context=…)` to identify the caller. A function that declares a parameter of this
    type receives the context of its call. The model never sees it.
    """

    __slots__ = (
        "agent", "agent_entity_id", "agent_id", "allowed_env", "allowed_hosts", "allowed_paths", "caller_client",
        "handle", "host", "memory_dir", "private_paths", "protected_paths", "run_id", "session_dir", "session_id",
        "space_id", "task_id", "tasks", "trace", "user_id", "web_search", "writable_code",
    )  # fmt: skip

    def __init__(
        self,
        *,
        task_id: str = "",
        user_id: str | None = None,
        allowed_paths: Sequence[str | Path] | None = None,
        protected_paths: Sequence[str | Path] | None = None,
        private_paths: Sequence[str | Path] | None = None,
        writable_code: Sequence[str | Path] | None = None,
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
        trace: TraceContext | None = None,
    ) -> None:
        self.task_id = task_id
        self.user_id = user_id
        """For whom the call is made. See `principal`."""
        self.allowed_paths = allowed_paths
        self.protected_paths = protected_paths
        """Files that no tool may change: the configuration, because it decides what tools may do."""
        self.private_paths = private_paths
        """Files and folders that no file tool may read or change: the state, because it contains keys and results."""
        self.writable_code = writable_code
        """Patterns of paths where file tools may write modules beside code that is loaded."""
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
        """Sends the tool's requests to the caller; None if the caller takes none."""
        self.host = host
        """The gateway that the call came through; None in the library and in commands."""
        self.agent = agent
        """The agent whose run the call belongs to; None if no agent calls."""
        self.trace = trace
        """The trace context that providers pass on: the caller's, or that of the call's own span."""
        self.handle: CallHandle | None = None

    def with_defaults(self, base: ToolContext) -> ToolContext:
        """Returns a copy of this context in which `base` fills in what is not set."""
        # Field by field, as in `bind`: every call with a context of its own pays for this.
        copy = ToolContext.__new__(ToolContext)
        copy.task_id = self.task_id or base.task_id
        copy.user_id = self.user_id or base.user_id
        copy.allowed_paths = base.allowed_paths if self.allowed_paths is None else self.allowed_paths
        copy.protected_paths = base.protected_paths if self.protected_paths is None else self.protected_paths
        copy.private_paths = base.private_paths if self.private_paths is None else self.private_paths
        copy.writable_code = base.writable_code if self.writable_code is None else self.writable_code
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
        copy.trace = base.trace if self.trace is None else self.trace
        copy.handle = base.handle if self.handle is None else self.handle
        return copy

    def bind(self, handle: CallHandle, *, run_id: str | None, session_id: str) -> ToolContext:
        """Returns a copy that belongs to one call."""
        # Field by field: every call of a provider's tool pays for this, and a loop over the names costs ten times more.
        copy = ToolContext.__new__(ToolContext)
        copy.task_id = self.task_id
        copy.user_id = self.user_id
        copy.allowed_paths = self.allowed_paths
        copy.protected_paths = self.protected_paths
        copy.private_paths = self.private_paths
        copy.writable_code = self.writable_code
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
        copy.trace = self.trace
        copy.handle = handle
        copy.run_id = run_id
        copy.session_id = session_id
        return copy

    @property
    def principal(self) -> str:
        """For whom the call is made: an entity, an API key (`key/…`, `tools/…`), or `local` for a program's own calls.

        Results, outputs, limits and approvals of different principals are kept apart.
        """
        return self.user_id or LOCAL_PRINCIPAL

    @property
    def limited_principal(self) -> str | None:
        """The principal if it may use only a share of what all use: a tool key, a person, or a user of a program.

        None for a program's own calls, for secret keys, and for an agent that works for itself.
        """
        user = self.user_id
        if user is None or user == self.agent_entity_id or user.startswith(SECRET_KEY_PREFIX):
            return None
        return user

    @property
    def run(self) -> RunHandle | None:
        """The run that the call belongs to."""
        return self.handle.run if self.handle is not None else None

    @property
    def call_id(self) -> str:
        return self.handle.id if self.handle is not None else ""

    @property
    def canceled(self) -> bool:
        """Whether the call was cancelled or timed out, so that nobody waits for its result."""
        return self.handle is not None and self.handle.canceled

    @property
    def has_progress_listener(self) -> bool:
        """Whether anyone receives progress events. If not, a tool need not compute them."""
        return self.handle is not None and self.handle.has_progress_listener

    @property
    def remaining_seconds(self) -> float:
        """About how long the call may still take."""
        return self.handle.remaining_seconds if self.handle is not None else float("inf")

    def check_canceled(self) -> None:
        """Raises if the call was cancelled. For loops in plain functions, which cannot be interrupted."""
        if self.canceled:
            raise ToolCanceledError("canceled")

    def report_progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Emits a progress event."""
        if self.handle is not None:
            self.handle.progress(progress, total, message)

    def emit_partial(self, value: object) -> None:
        """Emits a part of the result before the call ends."""
        if self.handle is not None:
            self.handle.partial(value)

    async def collect(
        self, values: AsyncGenerator[Any, None], *, emit_partials: bool = True, is_json: bool = False
    ) -> ToolResult:
        """Returns the result of a stream: its text, or the list of its values. Stores a large one while it runs.

        Each value is emitted as a partial result if `emit_partials`. `is_json`: the texts together are one JSON text.
        """
        return await self._get_handle().collect(values, emit_partials=emit_partials, is_json=is_json)

    async def call(self, name: str, arguments: Mapping[str, Any] | str | None = None) -> ToolResult:
        """Calls another tool as a child of this call: in its run, under its limits, below it in the trace."""
        return await self._get_handle().call(name, arguments)

    async def elicit(
        self, message: str, schema: Mapping[str, Any] | None = None, *, url: str | None = None, key: str | None = None
    ) -> ElicitationResult:
        """Asks the user who called to fill in a form, or to open `url`. The content of the result fits the schema.

            colour = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}
            result = await context.elicit("Which colour?", colour)

        Raises `ToolError` if nobody can be asked. The wait counts: give the tool a long enough timeout.
        """
        form = ElicitationForm(schema) if schema is not None else None
        if self.caller_client is None and self.host is not None:
            # Nobody but the people in the call's space: they see a call that asks them.
            args = {"message": message, **({"url": url} if url is not None else {"requestedSchema": schema})}
            data = await self.host.ask_space(ELICITATION_CALL, args, self, timeout=self.remaining_seconds)
            result = parse_elicitation_result(data)
        else:
            result = await self._get_caller_client().elicit(message, schema=schema, url=url, key=key)
        return result if form is None else form.validate(result)

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        """Asks the caller's model, as in MCP: `{messages: […], maxTokens: …}` gives `{role, content, model}`."""
        return await self._get_caller_client().sample(params, key=key)

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        """Returns the folders that the caller works in, as URIs."""
        return await self._get_caller_client().roots(key=key)

    def _get_handle(self) -> CallHandle:
        if self.handle is None:
            raise ToolError("this context belongs to no call; call the tool through a Toolspace")
        return self.handle

    def _get_caller_client(self) -> CallerClient:
        if self.caller_client is None:
            raise ToolError("nobody can be asked: the caller of this tool accepts no requests")
        return self.caller_client

    @property
    def logger(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger whose records have the ids of this call."""
        ids = {"callId": self.call_id, "runId": self.run_id, "taskId": self.task_id}
        return logging.LoggerAdapter(logging.getLogger("toolspace.tool"), ids)


class ElicitationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The user's reaction to a question; `content` if the user accepted."""

    action: Literal["accept", "decline", "cancel"]
    content: Mapping[str, Any] | None = None


def parse_elicitation_result(data: object) -> ElicitationResult:
    """Returns the result that people in a space submitted. Raises `ToolError` if it is none."""
    try:
        return msgspec.convert(data, ElicitationResult)
    except (msgspec.ValidationError, TypeError):
        raise ToolError(
            f"the answer to a question is {_EXPECTED_RESULT}; this was {json_text.describe(data)}"
        ) from None


class CallerClient(Protocol):
    """Sends requests of a running call to its caller. Every method raises `ToolError` if the caller cannot be asked.

    `key` identifies a request, for callers that store results by name.
    """

    async def elicit(
        self,
        message: str,
        *,
        schema: Mapping[str, Any] | None = None,
        url: str | None = None,
        key: str | None = None,
    ) -> ElicitationResult:
        """Asks the user to fill in `schema`, an object of flat fields, or to open the page `url`."""
        ...

    async def sample(self, params: Mapping[str, Any], *, key: str | None = None) -> Mapping[str, Any]:
        """Asks the caller's model. Takes `{messages, maxTokens, …}`, returns `{role, content, model, …}`."""
        ...

    async def roots(self, *, key: str | None = None) -> Sequence[str]:
        """Returns the folders that the caller works in, as URIs."""
        ...


class ElicitationForm:
    """A form for the user. Its schema is compiled before it is shown, and validates what comes back."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._validator = compile_schema(schema, owner="a question to the user")

    def validate(self, result: ElicitationResult) -> ElicitationResult:
        """Returns the result. Raises `ToolError` if its content does not fit the form: clients are not trusted."""
        if result.action != "accept":
            return ElicitationResult(action=result.action)
        content = dict(result.content or {})
        try:
            is_valid = self._validator.is_valid(content)
            issues = [] if is_valid else [str(issue) for issue in find_issues(self._validator, content, self._schema)]
        except (ValueError, TypeError) as error:
            issues = [str(error)]
        if issues:
            raise ToolError(f"the user's answer does not fit the question: {'; '.join(issues[:_MAX_ISSUES])}")
        return ElicitationResult(action="accept", content=content)
