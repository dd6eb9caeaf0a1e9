"""What sessions do besides an agent's own life: its tasks, and looking back on them. Prepares and ends them."""

from __future__ import annotations

import msgspec

from toolspace.agents import reflection, tasks
from toolspace.agents.cycle import Cycle, Thinker
from toolspace.agents.cycle_transactions import Write
from toolspace.agents.loop import Outcome, Ways
from toolspace.agents.prompt_builder import mind_of
from toolspace.core.context import ToolContext
from toolspace.core.records import TaskRecord
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.queries import tasks as rows
from toolspace.storage.queries.sessions import Session

_KINDS_OF_CHOICE = ("auto", "required", "none")


async def prepare(ledger: Ledger, thinker: Thinker, session: Session) -> Thinker:
    """The thinker of a task, or of looking back on one: the agent's model and limits, tools and instructions of its
    own."""
    context = ToolContext(agent_id=thinker.name, agent_entity_id=session.agent_entity_id)
    task_id = rows.task_of(session.id)
    if session.kind == "reflection":
        return msgspec.structs.replace(
            thinker,
            brief=await reflection.brief(thinker.name, thinker.tools, context),
            offered=reflection.offered,
            ways=msgspec.structs.replace(thinker.ways, tool_choice="auto"),
            task_id=task_id,
        )
    task = await ledger.read(tasks.the_task, session.agent_entity_id, task_id)
    known = await ledger.read(mind_of, session.agent_entity_id)
    run = await ledger.read(run_rows.one, task.run_id)
    is_somewhere = run is not None and run.space_id is not None
    instructions = thinker.tools.instructions(context=context)
    return msgspec.structs.replace(
        thinker,
        brief=tasks.brief(task, thinker.name, thinker.system, known, tools=instructions),
        offered=tasks.offered if is_somewhere else tasks.offered_nowhere,
        ways=_ways(thinker.ways),
        task_id=task_id,
    )


def after(session: Session, outcome: Outcome | None, cycle: Cycle | None) -> Write:
    """What else happens in the moment that such a session's run ends."""
    if session.kind == "reflection":
        return reflection.ended(session.id, outcome)
    reflects = cycle is not None and reflection.is_possible(cycle.thinker.tools)
    return tasks.ended(session.id, outcome, reflection.begin if reflects else _leave)


def _leave(effects: Effects, task: TaskRecord) -> Program[None]:
    """Nobody looks back: what was learned could not be kept anywhere."""
    return
    yield  # A program, though it asks for nothing itself.


def _ways(ways: Ways) -> Ways:
    """As the agent's; but the one tool that the agent has to call is not the task's."""
    return ways if ways.tool_choice in _KINDS_OF_CHOICE else msgspec.structs.replace(ways, tool_choice="auto")
