"""Builds the system prompt of a cycle: the agent's instructions, memories, goals, plans, spaces and tool instructions.

Used by `durable_loop`; `background_tasks` uses its sections for prompts of its own.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import msgspec

from toolspace.agents.agent import Agent, LoopSettings
from toolspace.agents.prebuilt.spaces_and_inbox import load_messages
from toolspace.core import json_text
from toolspace.core.ids import agent_of_session
from toolspace.core.json_text import quote_name, single_line
from toolspace.core.stored_records import Space
from toolspace.errors import RefusedError
from toolspace.spaces import session_scope
from toolspace.spaces.plans import describe as describe_plan
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories, plans, sessions
from toolspace.storage.queries.goals_and_memories import Goal, Memory
from toolspace.storage.queries.plans import Plan

_MAX_SPACES = 50
_ACTIVE_SPACE_MESSAGES = 50
_MAX_VALUE = 2_000
_MAX_SECTION = 60_000
"""Characters. Each section is limited, because every request to the model contains all of them."""

_CYCLE_INSTRUCTIONS = """\
You run in cycles. Each cycle starts with your inbox: messages from spaces, results of slow tools, plans that are due, \
and tasks that have ended. Work with your tools, and stop when there is nothing more to do now.
People and other agents see only what you send with send_message, in the space that you have entered with enter_space. \
{text} Tools that show something in a space need you to be in it, too.{space}
If a tool returns {{"status": "pending"}}, its result comes to your inbox later: continue with other work, or stop.
If there is nothing to do, call skip."""
_PRIVATE_TEXT = "Other text that you write is private."
_DELIVERED_TEXT = """\
There is one exception: if a message of a person started the cycle and you send none, the text of your last turn is \
sent to the space of that message, unless you call skip. All other text that you write is private."""
_ENTERS_SPACE = " A cycle that messages of one space started begins in that space: you need not enter it."


class PromptContext(msgspec.Struct, frozen=True, kw_only=True):
    """What a session of an agent has stored, and which spaces it reaches: a part of each of its prompts."""

    memories: Sequence[Memory] = ()
    shared_memories: Sequence[Memory] = ()
    """Those that all sessions of the agent see."""
    goals: Sequence[Goal] = ()
    plans: Sequence[Plan] = ()
    spaces: Sequence[Space] = ()
    """The first of them, by id."""
    space_count: int = 0
    """How many spaces it is a member of, if there are more than `spaces` has; else 0."""


def load_prompt_context(session_id: str) -> Program[PromptContext]:
    agent_id = agent_of_session(session_id)
    shared_memories: Sequence[Memory] = ()
    if session_id != agent_id and (yield from sessions.find_scope(agent_id)).shares_memories:
        shared_memories = yield from goals_and_memories.list_memories(agent_id)
    spaces = yield from session_scope.list_spaces(session_id, limit=_MAX_SPACES + 1)
    has_more_spaces = len(spaces) > _MAX_SPACES
    return PromptContext(
        memories=(yield from goals_and_memories.list_memories(session_id)),
        shared_memories=shared_memories,
        goals=(yield from goals_and_memories.list_goals(session_id)),
        plans=(yield from plans.list_plans(session_id, status="active")),
        spaces=spaces[:_MAX_SPACES],
        space_count=(yield from session_scope.count_spaces(session_id)) if has_more_spaces else 0,
    )


def build_system_prompt(
    agent: Agent,
    context: PromptContext,
    *,
    tool_instructions: str = "",
    entity_id: str = "",
    settings: LoopSettings | None = None,
) -> str:
    """Builds the system prompt of a cycle. `tool_instructions` are those of MCP servers and services.

    `settings`: those of this cycle, if they are not the agent's.
    """
    settings = settings or agent.settings
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()
    parts = [
        agent.system.strip(),
        f'You are the agent "{agent.name}" ({entity_id}). This cycle began at {now}.',
        _CYCLE_INSTRUCTIONS.format(
            text=_DELIVERED_TEXT if settings.plain_text == "deliver" else _PRIVATE_TEXT,
            space=_ENTERS_SPACE if agent.enters_space else "",
        ),
        render_section("MEMORIES", render_memories(context)),
        render_section("GOALS", _limit_lines([_render_goal(goal) for goal in context.goals], "get_goals")),
        render_section("PLANS", _limit_lines([_render_plan(plan) for plan in context.plans], "get_plans")),
        render_section("SPACES", _render_spaces(context)),
        render_section("TOOLS", [tool_instructions]),
    ]
    return "\n\n".join(filter(None, parts))


def render_active_space(session_id: str, space_id: str) -> Program[str]:
    """Renders the space that a run is in, with its latest messages, as `enter_space` returns them."""
    try:
        space, history, total = yield from load_messages(session_id, space_id, limit=_ACTIVE_SPACE_MESSAGES)
    except RefusedError:
        return ""  # The space is gone, or the agent is not a member any more.
    lines = _limit_lines([single_line(json_text.encode(message)) for message in reversed(history)], "read_messages")[
        ::-1
    ]
    heading = f"You are in {quote_name(space.name)} (spaceId: {space.id}). It has {total} messages; the latest are:"
    return render_section("ACTIVE SPACE", [heading, *lines])


def render_section(title: str, lines: Sequence[str]) -> str:
    """Renders a section of a prompt; an empty text if it has no lines."""
    text = "\n".join(filter(None, lines))
    return f"{title}:\n{text}" if text else ""


def render_memories(context: PromptContext) -> list[str]:
    lines = [f"- {single_line(memory.key)}: {_render_value(memory.value)}" for memory in context.memories]
    lines += [
        f"- {single_line(memory.key)} (shared): {_render_value(memory.value)}" for memory in context.shared_memories
    ]
    return _limit_lines(lines, "get_memories")


def _render_spaces(context: PromptContext) -> list[str]:
    lines = [f"- {quote_name(space.name)} (spaceId: {space.id})" for space in context.spaces]
    more = context.space_count - len(lines)
    return [*lines, f"… and {more} more: events of your inbox have their spaceId"] if more > 0 else lines


def _limit_lines(lines: Sequence[str], tool: str) -> list[str]:
    """The first lines of a section, and a note that names the tool for the rest."""
    available = _MAX_SECTION
    for index, line in enumerate(lines):
        available -= len(line)
        if available < 0:
            return [*lines[:index], f"… and {len(lines) - index} more ({tool} has all of them)"]
    return list(lines)


def _render_value(value: object) -> str:
    return _shorten(value if isinstance(value, str) else json_text.encode(value), "get_memories")


def _shorten(text: str, tool: str) -> str:
    # One line: what an agent stores may come from others, and must not look like another part of the prompt.
    line = single_line(text, _MAX_VALUE)
    return line if len(text) <= _MAX_VALUE else f"{line} ({tool} has all of it)"


def _render_goal(goal: Goal) -> str:
    kind = "long-term, " if goal.is_long_term else ""
    description = _shorten(goal.description, "get_goals")
    return f"- [{goal.id}] {description} ({kind}{quote_name(goal.status)}, priority {goal.priority:g})"


def _render_plan(plan: Plan) -> str:
    next_run = describe_plan(plan).get("nextRunAt")
    schedule = f", {plan.cron}" if plan.cron else ""
    instruction = _shorten(plan.instruction, "get_plans")
    return f"- [{plan.id}] {quote_name(plan.name)}: {instruction} (next {next_run}{schedule})"
