"""What an agent is told of itself before each cycle: its instructions, and what it has in mind. Takes no decisions."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec

from toolspace.core import json_text
from toolspace.core.line_escaping import quote_name, single_line
from toolspace.core.records import Space
from toolspace.spaces.plans import describe as shown_plan
from toolspace.storage.database import Program
from toolspace.storage.queries import entities, goals_and_memories, plans
from toolspace.storage.queries.goals_and_memories import Goal, Memory
from toolspace.storage.queries.plans import Plan

_MOST_SPACES = 50
_MOST_VALUE = 2_000
_MOST_SECTION = 60_000
"""Characters of what an agent has in mind of one kind: all of it is in each request."""

CYCLE_INSTRUCTIONS = """\
You live in cycles. Each begins with your inbox: messages from spaces, results of tools that took long, plans that are \
due, tasks that ended. You think, use tools, and stop when there is nothing more to do now.
People and other agents hear you only through send_message, in the space that you have entered with enter_space; what \
you write otherwise is your own thought. Tools that show something in a space need you to be in it, too.
A tool that answers {"status": "pending"} will answer later, in your inbox: go on with other things, or stop.
Where nothing needs to be done, call skip."""


class PromptContext(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent has in mind, whatever it is asked."""

    memories: Sequence[Memory] = ()
    goals: Sequence[Goal] = ()
    plans: Sequence[Plan] = ()
    spaces: Sequence[Space] = ()


def load_prompt_context(agent_entity_id: str) -> Program[PromptContext]:
    """What an agent has in mind now."""
    return PromptContext(
        memories=(yield from goals_and_memories.list_memories(agent_entity_id)),
        goals=(yield from goals_and_memories.list_goals(agent_entity_id)),
        plans=(yield from plans.list_plans(agent_entity_id, status="active")),
        spaces=(yield from entities.list_spaces(member=agent_entity_id, limit=_MOST_SPACES)),
    )


def build_system_prompt(
    name: str, instructions: str, mind: PromptContext, *, tools: str = "", entity_id: str = ""
) -> str:
    """All that a model is told before the conversation. `tools` are instructions of servers and services."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    parts = [
        instructions.strip(),
        f'You are the agent "{name}" ({entity_id}). This cycle began at {now}.',
        CYCLE_INSTRUCTIONS,
        render_section("MEMORIES", render_memories(mind)),
        render_section("GOALS", _within([_goal(one) for one in mind.goals], "get_goals")),
        render_section("PLANS", _within([_plan(one) for one in mind.plans], "get_plans")),
        render_section("SPACES", [f"- {quote_name(one.name)} (spaceId: {one.id})" for one in mind.spaces]),
        render_section("TOOLS", [tools]),
    ]
    return "\n\n".join(filter(None, parts))


def render_section(title: str, lines: Sequence[str]) -> str:
    """A part of a prompt; nothing where there is nothing to say in it."""
    said = [line for line in lines if line]
    return f"{title}:\n" + "\n".join(said) if said else ""


def render_memories(mind: PromptContext) -> list[str]:
    """What an agent remembers, as a prompt has it."""
    return _within([f"- {single_line(one.key)}: {_value(one.value)}" for one in mind.memories], "get_memories")


def _within(lines: Sequence[str], tool: str) -> list[str]:
    """As many lines as there is room for; the rest is left to a tool."""
    room, shown = _MOST_SECTION, list[str]()
    for line in lines:
        room -= len(line)
        if room < 0:
            return [*shown, f"… and {len(lines) - len(shown)} more ({tool} has all of them)"]
        shown.append(line)
    return shown


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json_text.encode(value)
    return _cut(text, "get_memories")


def _cut(text: str, tool: str) -> str:
    # What an agent noted may be what somebody else said: it stays in its line.
    cut = single_line(text, _MOST_VALUE)
    return cut if len(text) <= _MOST_VALUE else f"{cut} ({tool} has all of it)"


def _goal(goal: Goal) -> str:
    kind = "long-term, " if goal.is_long_term else ""
    description = _cut(goal.description, "get_goals")
    return f"- [{goal.id}] {description} ({kind}{quote_name(goal.status)}, priority {goal.priority:g})"


def _plan(plan: Plan) -> str:
    when = shown_plan(plan).get("nextRunAt")
    how = f", {plan.cron}" if plan.cron else ""
    return f"- [{plan.id}] {quote_name(plan.name)}: {_cut(plan.instruction, 'get_plans')} (next {when}{how})"
