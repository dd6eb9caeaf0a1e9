"""What the tools of agents use besides the database: the document library, and notifications to people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from toolspace.spaces.document_library import DocumentLibrary


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """A notification of an agent to a person, outside of any space."""

    title: str
    body: str
    to: str | None = None
    """A mail address; None: the configured recipients."""
    agent_id: str
    agent_name: str
    id: str
    """Identifies the notification if it is sent twice."""


class NotificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """Which channels sent a notification."""

    channels: Sequence[str]
    """The channels that accepted it: `webhook`, `email`."""
    recipients: Sequence[str]
    """The mail addresses that it was sent to."""
    failed: Mapping[str, str]
    """The channels that failed, and why."""


class Notifier(Protocol):
    """Sends notifications to people."""

    async def send(self, notification: Notification) -> NotificationResult:
        """Raises a `ToolError` if every channel failed."""
        ...


class AgentServices:
    """The services of all agents of a process."""

    def __init__(
        self,
        library: DocumentLibrary | None = None,
        *,
        notifier: Notifier | None = None,
        notifiers: Mapping[str, Notifier] | None = None,
    ) -> None:
        self.library = library
        """None: documents are searched by words alone, without embeddings."""
        self.notifier = notifier
        self.notifiers = dict(notifiers or {})
        """Notifiers of single agents, by the id of their entity."""

    def find_notifier(self, agent_id: str) -> Notifier | None:
        return self.notifiers.get(agent_id, self.notifier)
