"""Background tasks: work of an agent in a session of its own. The cycle runner runs it like a cycle.

A task and its session are created in one transaction, and end in one. If a process dies in between, another one
continues the task from its last stored step.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from toolspace.agents.agent_run import PreparedAgent, TaskInstructions
from toolspace.agents.cycle_transactions import WriteProgram, new_turn
from toolspace.agents.loop import RunOutcome
from toolspace.agents.prompt_builder import PromptContext, load_prompt_context, render_memories, render_section
from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.ids import derived_id
from toolspace.core.line_escaping import single_line
from toolspace.core.model import UserTurn
from toolspace.core.records import ENDED_RUN, RunRecord, TaskRecord, TaskStatus
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError
from toolspace.spaces import runs
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, inbox, sessions
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import tasks as rows
from toolspace.storage.queries.sessions import SessionKind, SessionRecord

MAX_RUNNING_TASKS = 20
"""Running tasks of one agent: a faulty agent must not fill a process with tasks."""
_MAX_REPORTED_RESULT = 20_000
"""Characters of a result in the agent's inbox; `task_replay` has all of it."""
_EXCLUDED_TOOLS = frozenset(("spawn_task", "reply", "session_archive_read", "router__handoff-to"))

_TASK_INSTRUCTIONS = """\
You work in the background: no person reads along or answers questions. Work on the task with your tools until it is \
done, or until it is clear that it cannot be done. Then call agent__final_report, or write the answer as your last \
text: only that goes to the agent that you work for. Say what you could not do or find out, and why."""


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task to be started."""

    agent_entity_id: str
    description: str
    input: str
    call_id: str
    """The call that starts it: executed again, it starts no second task."""
    run_id: str | None = None
    """The run of that call."""
    space_id: str | None = None
    """The space of that run: visible calls of the task show there."""


# Transactions


def spawn(effects: Effects, new: NewTask) -> Program[str]:
    """Starts a task. Returns its id. Raises `RefusedError` if the agent has too many."""
    task_id = derived_id("task", new.call_id)
    agent_id = new.agent_entity_id
    if (yield from rows.find(task_id)) is not None:
        return task_id
    if (yield from rows.count_running(agent_id)) >= MAX_RUNNING_TASKS:
        raise RefusedError(
            "conflict", f"{MAX_RUNNING_TASKS} tasks of yours are under way; wait until one of them has ended"
        )
    if not (yield from rows.create(task_id, agent_id, new.description, new.input)):
        return task_id  # The same call has created it at the same moment.
    space_id = new.space_id
    if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, agent_id)):
        space_id = None
    trigger = {"type": "task", "taskId": task_id, "description": new.description, "runId": new.run_id}
    prompt = UserTurn(f"TASK: {new.description}\n\n{new.input}")
    yield from start_session(effects, task_id, agent_id, "task", prompt, trigger=trigger, space_id=space_id)
    return task_id


def start_session(
    effects: Effects,
    session_id: str,
    agent_entity_id: str,
    kind: SessionKind,
    prompt: UserTurn,
    *,
    trigger: Mapping[str, Any],
    space_id: str | None = None,
) -> Program[None]:
    """Creates a session with a run that no process has started yet, as if it had been interrupted at its start."""
    run = yield from runs.open_run(
        effects, agent_entity_id, run_id=rows.run_id_of(session_id), space_id=space_id, trigger=trigger
    )
    yield from sessions.create(session_id, agent_entity_id, kind)
    cycle = yield from sessions.start_cycle(session_id, run.id, agent_turns=0)
    yield from sessions.append_turns(session_id, cycle, [new_turn(prompt, run.id)])
    effects.wake_keys.append("sessions")


def completion(
    task_id: str, outcome: RunOutcome | None, reflect: Callable[[Effects, TaskRecord], Program[None]] | None
) -> WriteProgram:
    """Builds the writes that end a task together with its run: they notify its agent and start the reflection."""

    def write(effects: Effects) -> Program[None]:
        run = yield from run_rows.find(rows.run_id_of(task_id))
        task = yield from end_task(effects, task_id, _task_status(run, outcome), _task_result(run, outcome))
        if reflect is not None and task is not None and task.status != "canceled":
            yield from reflect(effects, task)

    return write


def end_task(effects: Effects, task_id: str, status: TaskStatus, result: Any) -> Program[TaskRecord | None]:
    """Ends a task and notifies its agent. Returns None if it had already ended."""
    task = yield from rows.finish(task_id, status, result)
    if task is None:
        return None
    data = {"taskId": task.id, "description": task.description, "status": status, "result": _shorten_result(result)}
    yield from inbox.add(task.agent_entity_id, f"task:{task.id}", "task", data, priority=inbox.TOOL_RESULT)
    effects.notify_inbox(task.agent_entity_id)
    return task


def cancel(effects: Effects, agent_entity_id: str, task_id: str) -> Program[TaskRecord]:
    """Cancels a task, in whichever process it runs. Raises `RefusedError` if it has ended."""
    task = yield from get_task(agent_entity_id, task_id)
    if task.status == "canceled":
        return task
    if task.status != "running":
        raise RefusedError("conflict", f'the task "{task_id}" has already ended: it is {task.status}')
    run = yield from run_rows.find(task.run_id)
    if run is not None and run.status not in ENDED_RUN:
        yield from runs.cancel_run(effects, task.run_id)
    canceled_task = yield from end_task(effects, task_id, "canceled", "the task was canceled")
    return canceled_task if canceled_task is not None else (yield from get_task(agent_entity_id, task_id))


def get_task(agent_entity_id: str, task_id: str) -> Program[TaskRecord]:
    """Returns a task of this agent. Raises `RefusedError`."""
    task = yield from rows.find(task_id, agent_entity_id)
    if task is None:
        raise RefusedError("not_found", f'the agent has no task "{task_id}"; task_list shows its tasks')
    return task


def _task_status(run: RunRecord | None, outcome: RunOutcome | None) -> TaskStatus:
    if run is None or run.status == "canceled":
        return "canceled"
    report = outcome.report if outcome is not None else None
    has_failed = run.status == "failed" or (report is not None and report.get("status") == "failure")
    return "failed" if has_failed else "completed"


def _task_result(run: RunRecord | None, outcome: RunOutcome | None) -> Any:
    """The result of a task: its report or its last text; the error if its run failed."""
    answer: Any = ""
    if outcome is not None:
        answer = outcome.report.get("content_json") if outcome.report is not None else None
        answer = outcome.answer if answer is None else answer
    if run is None or run.status == "canceled":
        return "the task was canceled"
    if run.error is None:
        return answer
    return f"{run.error}\nWhat it said last: {answer}" if answer else run.error


def _shorten_result(result: Any) -> Any:
    text = result if isinstance(result, str) else json_text.encode(result)
    limit = _MAX_REPORTED_RESULT
    if len(text) <= limit:
        return result
    return f"{text[:limit]}… (cut off after {limit} of {len(text)} characters: task_replay has all of it)"


# Instructions and tools


async def prepare(ledger: Ledger, prepared: PreparedAgent, session: SessionRecord) -> PreparedAgent:
    """Changes a prepared agent for a background task: another prompt, fewer tools, no forced tool."""
    agent, settings = prepared.agent, prepared.settings
    task_id = rows.task_id_of(session.id)
    context = ToolContext(agent_id=agent.name, agent_entity_id=session.agent_entity_id)
    task = await ledger.read(get_task, session.agent_entity_id, task_id)
    stored = await ledger.read(load_prompt_context, session.agent_entity_id)
    run = await ledger.read(run_rows.find, task.run_id)
    is_in_space = run is not None and run.space_id is not None
    instructions = prepared.tools.instructions(context=context)
    if settings.tool_choice not in ("auto", "required", "none"):
        settings = msgspec.structs.replace(settings, tool_choice="auto")
    return msgspec.structs.replace(
        prepared,
        settings=settings,
        task=TaskInstructions(
            task_id=task_id,
            prompt=_build_prompt(task, agent.name, agent.system, stored, tool_instructions=instructions),
            is_allowed_tool=is_allowed_tool if is_in_space else is_allowed_outside_spaces,
        ),
    )


def is_allowed_tool(tool: Tool) -> bool:
    """Whether a task may use a tool of its agent: all but those that address people or start more tasks."""
    return tool.execution_type != "prebuilt" and tool.name not in _EXCLUDED_TOOLS


def is_allowed_outside_spaces(tool: Tool) -> bool:
    """The same for a task without a space, where visible calls could not be shown."""
    return is_allowed_tool(tool) and not tool.visible and tool.execution_type != "space"


def _build_prompt(
    task: TaskRecord, name: str, instructions: str, stored: PromptContext, *, tool_instructions: str
) -> str:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    parts = [
        f'You work on a task for the agent "{name}". It is: {single_line(task.description)}\nNow it is {now}.',
        _TASK_INSTRUCTIONS,
        render_section("INSTRUCTIONS OF THE AGENT, as far as they concern the task", [instructions.strip()]),
        render_section("MEMORIES OF THE AGENT", render_memories(stored)),
        render_section("TOOLS", [tool_instructions]),
    ]
    return "\n\n".join(filter(None, parts))


def day_range(date: str) -> tuple[int, int]:
    """The start and the end of a day in UTC, in milliseconds. Raises `ValueError`."""
    start = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time(), datetime.UTC)
    start_ms = round(start.timestamp() * 1000)
    return start_ms, start_ms + 86_400_000
