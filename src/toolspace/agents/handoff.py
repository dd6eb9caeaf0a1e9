"""Hand-offs between agents: the tool `router__handoff-to`, and how the gateway stores a handoff.

A handoff ends the run of the agent that calls the tool; the other agent answers the request. On the gateway, the
request goes to the other agent's inbox in the commit that ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from toolspace.agents.agent_run import AgentRun, Handoff, find_agent_run
from toolspace.core.extension_points import ToolProvider
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.stored_records import InboxEvent, RunRecord
from toolspace.core.tool import Tool, ToolCategory
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolExecutionError, ToolNotFoundError, ToolValidationError
from toolspace.spaces import session_scope
from toolspace.storage.queries import entities_and_spaces, inbox, messages, sessions
from toolspace.storage.queries import runs as run_rows

if TYPE_CHECKING:
    from toolspace.spaces.ledger import Effects
    from toolspace.storage.database import Program

HANDOFF_TOOL = "handoff-to"
_HANDOFF_INPUT: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "agent": {"type": "string", "description": "The agent that is to answer."},
        "message": {"type": "string", "description": "Advice for it. It sees what you were asked, as you do."},
    },
    "required": ["agent"],
    "additionalProperties": False,
}
_MAX_HANDOFFS = 16
"""How many handoffs `is_answer_to_handoff` follows back. Configuration rejects routers that form a circle."""


class RouterProvider(ToolProvider):
    """Provides `router__handoff-to` to agents that have destinations."""

    kind = "router"
    circuit_scope = "none"
    namespace = "router"
    exact_names = True

    def __init__(self) -> None:
        super().__init__()
        self._tools = [
            Tool(
                HANDOFF_TOOL,
                "Hands the request that you were given to another agent, which answers in your place. Ends your run.",
                _HANDOFF_INPUT,
                category=ToolCategory.AGENT,
                visible=False,
            )
        ]

    def list_tools(self) -> Sequence[Tool]:
        return self._tools

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        run = find_agent_run(context)
        return run is not None and bool(run.agent.destinations)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name != HANDOFF_TOOL:
            raise ToolNotFoundError(f'Tool "router__{name}" not found')
        run = find_agent_run(context)
        if run is None or not run.agent.destinations:
            raise ToolExecutionError(
                "only an agent that has destinations can hand a request off (router.destinations)", executed=False
            )
        destination, message = parameters["agent"], parameters.get("message")
        _check_handoff(run, destination)
        run.handoff = Handoff(destination, message or None)
        return ToolResult(ok=True, result={"handedTo": destination})


def _check_handoff(run: AgentRun, destination: str) -> None:
    """Raises `ToolError` if a run may not hand its request off to that agent."""
    destinations = run.agent.destinations
    if destination not in destinations:
        hint = did_you_mean(destination, destinations)
        raise ToolValidationError(
            f'agent: "{destination}" is not a destination of "{run.name}"{hint or ""}; '
            f"it may hand over to {', '.join(destinations)}"
        )
    path = (*run.previous_agents, run.name)
    if destination in path:
        raise ToolValidationError(
            f"agent: a cycle: {' → '.join((*path, destination))}; answer it yourself, or hand it to another agent"
        )
    run.check_recursion(destination)
    if run.handoff is not None:
        raise ToolExecutionError(f'the request was handed to "{run.handoff.agent}" already', executed=False)


# Storing it


def build_handoff(
    agent_run: AgentRun, handoff: Handoff, *, run_id: str, agent_id: str, destination_id: str
) -> Callable[[Effects], Program[None]]:
    """Builds the writes that give the destination the request and the advice, and add it to the request's space.

    `agent_id` and `destination_id` are the entities of the two agents.
    """

    def write(effects: Effects) -> Program[None]:
        run = yield from run_rows.find(run_id)
        event_ids = trigger_event_ids(run) if run is not None else []
        space_id = run.space_id if run is not None else None
        priority = inbox.PLAN_OR_SERVICE
        events: list[dict[str, Any]] = []
        shared_ids: list[str] = []
        """Events that are in the destination's own inbox, too: sent in full, they would be answered twice."""
        for event_id in event_ids:
            event = yield from inbox.find(agent_id, event_id)
            if event is None:
                continue
            priority = min(priority, event.priority)
            if (yield from inbox.find(destination_id, event_id)) is None:
                events.append({"eventId": event.event_id, "type": event.type, "data": event.data})
            else:
                shared_ids.append(event_id)
            event_space_id = event_data(event).get("spaceId")
            if isinstance(event_space_id, str) and event_space_id:
                space_id = event_space_id
        if space_id is not None and not (yield from entities_and_spaces.is_member(space_id, agent_id)):
            space_id = None  # An agent cannot add another agent to a space that it is not a member of itself.
        if space_id is not None:
            # The destination answers in that space.
            yield from entities_and_spaces.add_member(space_id, destination_id)
        data = {
            "handoff": {"from": agent_run.name, "message": handoff.message},
            "spaceId": space_id,
            "request": events or (None if shared_ids else agent_run.request),
            "heard": shared_ids,
            "path": [*agent_run.previous_agents, agent_run.name],
        }
        scope = (yield from sessions.find_scope(destination_id)).scope
        session_id = yield from session_scope.open_session(
            destination_id, scope, space_id=space_id, person_id=run.principal if run is not None else None
        )
        yield from inbox.add(session_id, f"{HANDOFF_PREFIX}{run_id}", "service", data, priority=priority)
        effects.notify_inbox(session_id)

    return write


def trigger_event_ids(run: RunRecord) -> list[str]:
    """The ids of the inbox events that triggered a run."""
    ids = as_mapping(run.trigger).get("events")
    return [str(event_id) for event_id in cast("list[Any]", ids)] if isinstance(ids, list) else []


def handoff_path(run: RunRecord) -> Program[tuple[str, ...]]:
    """The agents that had the request of a run before and handed it off."""
    for event_id in trigger_event_ids(run):
        if event_id.startswith(HANDOFF_PREFIX):
            event = yield from inbox.find(run.agent_entity_id, event_id)
            path = event_data(event).get("path") if event is not None else None
            return tuple(map(str, path or ()))
    return ()


def is_answer_to_handoff(agent_entity_id: str, event: InboxEvent) -> Program[bool]:
    """Whether an event is a message about a request that this agent has handed off, directly or through others."""
    message_id = str(event_data(event).get("messageId", ""))
    message = (yield from messages.find(message_id)) if event.type == "space_message" else None
    run_id = message.run_id if message is not None else None
    for _ in range(_MAX_HANDOFFS):
        run = (yield from run_rows.find(run_id)) if run_id is not None else None
        if run is None:
            return False
        handoff_ids = [event_id for event_id in trigger_event_ids(run) if event_id.startswith(HANDOFF_PREFIX)]
        previous_id = handoff_ids[0].removeprefix(HANDOFF_PREFIX) if handoff_ids else None
        previous_run = (yield from run_rows.find(previous_id)) if previous_id is not None else None
        if previous_run is None:
            return False
        if previous_run.agent_entity_id == agent_entity_id:
            return True
        run_id = previous_run.id
    return False


def event_data(event: InboxEvent) -> Mapping[str, Any]:
    """The data of an event; empty if it is not an object."""
    return as_mapping(event.data)


def as_mapping(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}
