"""What the agents of a process may use besides what is kept: a library to look things up in, ways to reach people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from toolspace.spaces.document_library import DocumentLibrary


class Notification(msgspec.Struct, frozen=True, kw_only=True):
    """What someone is told, outside of any space."""

    title: str
    body: str
    to: str | None = None
    """A mail address; None: whoever is configured."""
    agent_id: str
    agent_name: str
    id: str
    """The same for the same notification, also if it should come twice."""


class NotificationResult(msgspec.Struct, frozen=True, kw_only=True):
    """How far a notification got."""

    channels: Sequence[str]
    """Those that took it: `webhook`, `email`."""
    recipients: Sequence[str]
    """The mail addresses that it went to."""
    failed: Mapping[str, str]
    """The channels that did not take it, and why."""


class Notifier(Protocol):
    """Reaches people."""

    async def send(self, notification: Notification) -> NotificationResult:
        """Raises a `ToolError` where nobody was reached."""
        ...


class AgentServices:
    """One for each process, for all of its agents."""

    def __init__(
        self,
        library: DocumentLibrary | None = None,
        *,
        notifier: Notifier | None = None,
        notifiers: Mapping[str, Notifier] | None = None,
    ) -> None:
        self.library = library
        """None: documents are found by their words alone."""
        self.notifier = notifier
        self.notifiers = dict(notifiers or {})
        """Of agents that have ways of their own, by the id of their entity."""

    def find_notifier(self, agent_id: str) -> Notifier | None:
        return self.notifiers.get(agent_id, self.notifier)
