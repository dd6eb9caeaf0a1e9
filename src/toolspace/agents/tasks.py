"""Tasks: work that an agent has done in the background, in a session of its own. How it thinks, a cycle knows.

A task and its conversation are made in one transaction, and end in one: whatever dies in between, it is worked on once
more from its last step, by whichever process finds it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from toolspace.agents.cycle_transactions import WriteProgram, estimate_turn_tokens
from toolspace.agents.loop import RunOutcome
from toolspace.agents.prompt_builder import PromptContext, render_memories, render_section
from toolspace.core import json_text
from toolspace.core.ids import derived_id
from toolspace.core.line_escaping import single_line
from toolspace.core.model import Turn, UserTurn
from toolspace.core.records import ENDED_RUN, RunRecord, TaskRecord, TaskStatus
from toolspace.core.tool import Tool
from toolspace.errors import RefusedError
from toolspace.spaces import runs
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, inbox, sessions
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import tasks as rows
from toolspace.storage.queries.sessions import NewTurn, SessionKind, StoredTurn

MAX_RUNNING_TASKS = 20
"""Tasks of one agent at once: an agent that goes round in circles must not fill a process."""
_MOST_TOLD = 20_000
"""Characters of a result that its agent is told; `task_replay` has all of it."""
_NOT_FOR_TASKS = frozenset(("spawn_task", "reply", "session_archive_read", "router__handoff-to"))

_HOW_TASKS_WORK = """\
You work in the background: nobody reads along, and nobody can be asked. Work on the task with your tools until it is \
done, or until it is plain that it cannot be. Then call agent__final_report, or say the answer as your last words: \
that, and nothing else, goes to the agent that you work for. Say what you could not do or find out, and why."""


class NewTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task that is to be begun."""

    agent_entity_id: str
    description: str
    input: str
    call_id: str
    """The call that asks for it. Made again, it asks for the same task."""
    run_id: str | None = None
    """The run that it is asked for in."""
    space_id: str | None = None
    """Where the agent is: what the task shows, it shows there."""


# What happens to tasks, each as one transaction


def spawn(effects: Effects, new: NewTask) -> Program[str]:
    """Begins a task, for whoever lets agents think to take up. Gives its id."""
    task_id = derived_id("task", new.call_id)
    agent = new.agent_entity_id
    known = yield from rows.find(task_id)
    if known is not None:
        return known.id
    if (yield from rows.count_running(agent)) >= MAX_RUNNING_TASKS:
        raise RefusedError(
            "conflict", f"{MAX_RUNNING_TASKS} tasks of yours are under way; wait until one of them has ended"
        )
    if not (yield from rows.create(task_id, agent, new.description, new.input)):
        return task_id  # Made at the same moment, by the same call.
    space_id = new.space_id
    if space_id is not None and not (yield from entities.is_member(space_id, agent)):
        space_id = None
    trigger = {"type": "task", "taskId": task_id, "description": new.description, "runId": new.run_id}
    told = UserTurn(f"TASK: {new.description}\n\n{new.input}")
    yield from start_session(effects, task_id, agent, "task", told, trigger=trigger, space_id=space_id)
    return task_id


def start_session(
    effects: Effects,
    session_id: str,
    agent_entity_id: str,
    kind: SessionKind,
    told: Turn,
    *,
    trigger: Mapping[str, Any],
    space_id: str | None = None,
) -> Program[None]:
    """Makes a session with a run that nobody has taken up yet: as if it had been cut off before its first step."""
    run = yield from runs.open_run(
        effects, agent_entity_id, run_id=rows.run_id_of(session_id), space_id=space_id, trigger=trigger
    )
    yield from sessions.create(session_id, agent_entity_id, kind)
    cycle = yield from sessions.start_cycle(session_id, run.id, agent_turns=0)
    first = NewTurn(stored=StoredTurn(told), tokens=estimate_turn_tokens(told), run_id=run.id)
    yield from sessions.append_turns(session_id, cycle, [first])
    effects.wake_keys.append("sessions")


def completion(
    task_id: str, outcome: RunOutcome | None, reflect: Callable[[Effects, TaskRecord], Program[None]]
) -> WriteProgram:
    """What else happens in the moment that the run of a task ends, however it does: the task ends, and its agent is
    told. `reflect` begins to look back on it."""

    def end(effects: Effects) -> Program[None]:
        run = yield from run_rows.find(rows.run_id_of(task_id))
        task = yield from end_task(effects, task_id, _status(run, outcome), result_of(run, outcome))
        if task is not None and task.status != "canceled":
            yield from reflect(effects, task)

    return end


def end_task(effects: Effects, task_id: str, status: TaskStatus, result: Any) -> Program[TaskRecord | None]:
    """Ends a task, and tells its agent. None where it had ended."""
    task = yield from rows.finish(task_id, status, result)
    if task is None:
        return None
    data = {"taskId": task.id, "description": task.description, "status": status, "result": _told(result)}
    yield from inbox.add(task.agent_entity_id, f"task:{task.id}", "task", data, priority=inbox.TOOL_RESULT)
    effects.notify_inbox(task.agent_entity_id)
    return task


def cancel(effects: Effects, agent_entity_id: str, task_id: str) -> Program[TaskRecord]:
    """Stops a task, wherever it is worked on."""
    task = yield from get_task(agent_entity_id, task_id)
    if task.status == "canceled":
        return task
    if task.status != "running":
        raise RefusedError("conflict", f'the task "{task_id}" has ended already: it is {task.status}')
    run = yield from run_rows.find(task.run_id)
    if run is not None and run.status not in ENDED_RUN:
        yield from runs.cancel_run(effects, task.run_id)
    done = yield from end_task(effects, task_id, "canceled", "the task was canceled")
    return done if done is not None else (yield from get_task(agent_entity_id, task_id))


def get_task(agent_entity_id: str, task_id: str) -> Program[TaskRecord]:
    """A task of this agent. Raises `RefusedError` where it has none of this id."""
    task = yield from rows.find(task_id, agent_entity_id)
    if task is None:
        raise RefusedError("not_found", f'the agent has no task "{task_id}"; task_list shows those that it has')
    return task


def day_range(date: str) -> tuple[int, int]:
    """When a day begins and ends, in UTC. Raises `ValueError` where it is none."""
    begin = datetime.datetime.combine(datetime.date.fromisoformat(date), datetime.time(), datetime.UTC)
    since = round(begin.timestamp() * 1000)
    return since, since + 86_400_000


def _status(run: RunRecord | None, outcome: RunOutcome | None) -> TaskStatus:
    if run is None or run.status == "canceled":
        return "canceled"
    report = outcome.report if outcome is not None else None
    failed = run.status == "failed" or (report is not None and report.get("status") == "failure")
    return "failed" if failed else "completed"


def result_of(run: RunRecord | None, outcome: RunOutcome | None) -> Any:
    """What came of a run: what it reported or said last; where it failed, why."""
    said: Any = ""
    if outcome is not None:
        said = outcome.report.get("content_json") if outcome.report is not None else None
        said = outcome.answer if said is None else said
    if run is None or run.status == "canceled":
        return "the task was canceled"
    if run.error is None:
        return said
    return f"{run.error}\nWhat it said last: {said}" if said else run.error


def _told(result: Any) -> Any:
    text = result if isinstance(result, str) else json_text.encode(result)
    if len(text) <= _MOST_TOLD:
        return result
    return f"{text[:_MOST_TOLD]}… (cut off after {_MOST_TOLD} of {len(text)} characters: task_replay has all of it)"


# What a task is given


def is_allowed_tool(tool: Tool) -> bool:
    """Whether a task is given a tool of its agent: all but those to speak to people, and to begin more tasks."""
    return tool.execution_type != "prebuilt" and tool.name not in _NOT_FOR_TASKS


def is_allowed_outside_spaces(tool: Tool) -> bool:
    """The same for a task that is in no space, where nothing could be shown."""
    return is_allowed_tool(tool) and not tool.visible and tool.execution_type != "space"


def build_prompt(task: TaskRecord, name: str, instructions: str, mind: PromptContext, *, tools: str = "") -> str:
    """What a task is told of itself before the conversation. `tools` are instructions of servers and services."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    parts = [
        f'You work on a task for the agent "{name}". It is: {single_line(task.description)}\nNow it is {now}.',
        _HOW_TASKS_WORK,
        render_section("INSTRUCTIONS OF THE AGENT, as far as they concern the task", [instructions.strip()]),
        render_section("MEMORIES OF THE AGENT", render_memories(mind)),
        render_section("TOOLS", [tools]),
    ]
    return "\n\n".join(filter(None, parts))
