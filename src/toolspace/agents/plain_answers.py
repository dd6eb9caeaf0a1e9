"""Delivers the text of an agent's last turn to people, and finds the space in which a cycle begins.

A model may answer with plain text instead of `send_message`. If its run has sent no message and a person's message
triggered it, the text is sent in the commit that ends the run. Text of turns with calls is never sent: `live_answer.py`
publishes text while the model writes it, and withdraws it if a call follows.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.agents.handoff import as_mapping, event_data
from toolspace.agents.loop import RunOutcome
from toolspace.core import json_text
from toolspace.core.extension_points import Allow
from toolspace.core.hooks import HookCall
from toolspace.core.ids import new_id
from toolspace.core.inbox_text import HANDOFF_PREFIX
from toolspace.core.stored_records import InboxEvent, RunRecord
from toolspace.core.tool_context import ToolContext
from toolspace.errors import RefusedError
from toolspace.orchestrator.effective_settings import matches_name
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.policy_rules import compile_policy
from toolspace.spaces import messaging, session_scope
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import inbox, messages
from toolspace.storage.queries import runs as run_rows

_log = logging.getLogger("toolspace.agents")
ANSWER_SPACE_KEY = "answerSpaceId"
"""The key in the trigger of a run: the space of the newest message of a person that triggered it."""


def find_common_space(events: Sequence[InboxEvent]) -> str | None:
    """The space of all events; None if there are several, or if an event is not a message."""
    space_ids = {_space_id(event) if event.type == "space_message" else None for event in events}
    return space_ids.pop() if len(space_ids) == 1 else None


def find_answer_space(agent_entity_id: str, events: Sequence[InboxEvent]) -> Program[str | None]:
    """The space of the newest message of a person among the events; None if there is none.

    A request of a person that another agent has handed off counts, too.
    """
    answer: tuple[int, int, str] | None = None
    for event in events:
        space_id = _space_id(event)
        if space_id is not None and (yield from _is_of_person(agent_entity_id, event)):
            place = (event.timestamp, int(event_data(event).get("seq") or 0), space_id)
            answer = place if answer is None else max(answer, place)
    return answer[2] if answer is not None else None


def plain_answer(outcome: RunOutcome) -> str | None:
    """The text that may be delivered when a run ends: that of a last turn without calls. None if there is none."""
    text = json_text.storable_text(outcome.text).strip() if outcome.end == "answered" and outcome.report is None else ""
    return text[: messaging.MAX_TEXT_LENGTH] or None


def may_send_text(tools: ToolOrchestrator, context: ToolContext) -> bool:
    """Whether no policy may ask for or deny the messages of an agent. Otherwise its text must not be sent without
    `send_message`, which the policies see."""
    explanation = tools.explain("send_message")
    if explanation is None:
        return True
    entry, settings = explanation
    policy = compile_policy(tools.services.policy_rules, entry, settings.approval)
    if policy.approval is not None:
        return False
    names = tuple(filter(None, (context.agent_id, context.agent_entity_id)))
    for rule in policy.rules:
        if rule.agents is not None and not any(matches_name(pattern, names) for pattern in rule.agents):
            continue
        if rule.decision != "allow":
            return False
        if rule.principals is None and rule.condition is None:
            break  # It decides; the rules after it do not matter.
    return all(isinstance(item.decide(entry.tool, context), Allow) for item in tools.services.policies)


async def apply_hooks(tools: ToolOrchestrator, run: RunRecord, message_id: str, text: str) -> str | None:
    """The answer of a run after the before-hooks of `send_message`, which may change it. None if they deny it."""
    registry = tools.services.hooks
    match = tools.explain("send_message") if registry.hooks else None
    if match is None:
        return text
    entry = match[0]
    for hook in registry.select(entry.spellings).before:
        hook_call = HookCall(
            on="before",
            tool=entry.tool,
            arguments={"text": text},
            principal=run.principal or run.agent_entity_id,
            call_id=message_id,
            run_id=run.id,
            agent_entity_id=run.agent_entity_id,
            space_id=answer_space_of(run),
        )
        decision = await registry.ask(hook, hook_call)
        if decision.deny is not None:
            _log.warning("run %s: the hook %s denies its answer: %s", run.id, hook.label, decision.deny)
            return None
        if decision.arguments is not msgspec.UNSET:
            new_text = decision.arguments.get("text")
            if not isinstance(new_text, str) or not new_text.strip():
                _log.warning("run %s: the hook %s replaced its answer by something without text", run.id, hook.label)
                return None
            text = new_text[: messaging.MAX_TEXT_LENGTH]
    return text


def start_answer(
    effects: Effects, run_id: str, agent_entity_id: str, space_id: str, message_id: str, *, session_id: str
) -> Program[bool]:
    """Starts the message of an answer. Returns False, and does nothing, if the run has sent a message, or may not.

    The message is provisional until `deliver_answer` completes it.
    """
    if (yield from messages.is_sent_by_run(run_id)):
        return False
    try:
        yield from session_scope.check_space(session_id, space_id)
        yield from messaging.start_message(effects, space_id, agent_entity_id, message_id, run_id, is_provisional=True)
    except RefusedError:
        return False  # The space is gone, or the agent or the person is not a member any more.
    return True


def deliver_answer(
    effects: Effects, run_id: str, agent_entity_id: str, text: str, *, message_id: str | None = None
) -> Program[None]:
    """Sends the answer of a run, if a person waits for one and the run has sent no message.

    `message_id`: the message in which the text was published while the model wrote it. It is completed, or withdrawn.
    """
    run = yield from run_rows.find(run_id)
    space_id = answer_space_of(run) if run is not None else None
    if run is None or space_id is None:
        return
    message_id = message_id or new_id("msg")
    session_id = run.session_id or agent_entity_id
    if (yield from messages.find_in_progress(message_id)) is None:
        start = start_answer(effects, run_id, agent_entity_id, space_id, message_id, session_id=session_id)
        if not (yield from start):
            return
        yield from messaging.append_to_message(effects, message_id, text)
    elif not (yield from _may_complete(run_id, session_id, space_id)):
        yield from messaging.abandon_message(effects, message_id, "it could not be sent")
        return
    yield from messaging.send_message(effects, space_id, agent_entity_id, text, message_id=message_id, run_id=run_id)


def _may_complete(run_id: str, session_id: str, space_id: str) -> Program[bool]:
    """Whether the answer that was started may still be sent."""
    if (yield from messages.is_sent_by_run(run_id)):
        return False
    try:
        yield from session_scope.check_space(session_id, space_id)
    except RefusedError:
        return False
    return True


def answer_space_of(run: RunRecord) -> str | None:
    """The space to which the text of the run's last turn is sent; None if no person waits for an answer."""
    space_id = as_mapping(run.trigger).get(ANSWER_SPACE_KEY)
    return space_id if isinstance(space_id, str) else None


def _space_id(event: InboxEvent) -> str | None:
    space_id = event_data(event).get("spaceId")
    return space_id if isinstance(space_id, str) and space_id else None


def _is_of_person(agent_entity_id: str, event: InboxEvent) -> Program[bool]:
    data = event_data(event)
    if event.type == "space_message":
        return _has_human_sender(data)
    if not event.event_id.startswith(HANDOFF_PREFIX):
        return False
    requests = cast("list[Any]", data["request"]) if isinstance(data.get("request"), list) else []
    if any(_has_human_sender(as_mapping(as_mapping(request).get("data"))) for request in requests):
        return True
    for event_id in data.get("heard") or ():
        shared_event = yield from inbox.find(agent_entity_id, str(event_id))
        if shared_event is not None and _has_human_sender(event_data(shared_event)):
            return True
    return False


def _has_human_sender(data: Mapping[str, Any]) -> bool:
    return data.get("senderType") == "human"
