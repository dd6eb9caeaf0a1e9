"""Reaching people outside of any space: a notification goes to a webhook, by mail, or both, as is configured."""

from __future__ import annotations

from typing import Any

from toolspace.agents.prebuilt.action import NO_NUL, Action, Actor, takes
from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.errors import ToolExecutionError
from toolspace.spaces.services import Notification
from toolspace.storage.queries import entities

MOST_TITLE, MOST_BODY = 200, 20_000


async def _send_notification(actor: Actor, given: dict[str, Any]) -> Any:
    notifier = actor.room.services.notifier_of(actor.agent_id)
    if notifier is None:
        raise ToolExecutionError(
            "no way to notify anyone is configured; an operator sets notifications.webhook or notifications.smtp",
            executed=False,
        )
    agent = await actor.ledger.read(entities.entity, actor.agent_id)
    sent = await notifier.send(
        Notification(
            title=" ".join(json_text.valid_text(given["title"]).split()),
            body=json_text.valid_text(given["body"]),
            to=given.get("to"),
            agent_id=actor.agent_id,
            agent_name=agent.name if agent is not None else "",
            id=new_id("ntf") if actor.call_id is None else derived_id("ntf", actor.agent_id, actor.call_id),
        )
    )
    answer: dict[str, Any] = {"success": True, "channels": list(sent.channels), "recipients": list(sent.recipients)}
    return {**answer, "failed": dict(sent.failed)} if sent.failed else answer


ACTIONS = (
    Action(
        name="send_notification",
        description=(
            "Notify people who are in no space with you. It cannot be taken back; without `to` it goes to whoever is "
            "configured."
        ),
        input_schema=takes(
            {
                "title": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MOST_TITLE,
                    "pattern": "^[^\\u0000]*[^\\s\\u0000][^\\u0000]*$",
                    "description": "One line.",
                },
                "body": {"type": "string", "minLength": 1, "maxLength": MOST_BODY, "pattern": NO_NUL},
                "to": {
                    "type": "string",
                    "minLength": 3,
                    "maxLength": 254,
                    "pattern": NO_NUL,
                    "description": "A mail address, if you may choose one.",
                },
            },
            "title",
            "body",
        ),
        run=_send_notification,
        category=ToolCategory.AGENT,
        # Neither harmless nor to be done twice: mail has no way to say that it was sent already.
        annotations=Annotations(read_only=False, idempotent=False, open_world=True),
    ),
)
