"""What a key may do with tools: in whose name its calls run, and which tools it is shown and may call."""

from __future__ import annotations

import fnmatch
from typing import Final

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import Allow, Decision, Deny
from toolspace.core.tool import Tool
from toolspace.server.callers import Caller, Secret, ToolKey
from toolspace.server.problems import Problem
from toolspace.spaces.call_host import CallRoom
from toolspace.spaces.pending_calls import CallDesk

_SECRET_USER: Final = "key/"
_TOOLS_USER: Final = "tools/"
"""Calls in runs have their agent as user. No id has a slash, so no agent is ever taken for a key."""
_SEARCH: Final = "agent__find_tools"
_ALLOW: Final = Allow()


def key_of(user_id: str) -> str | None:
    """The id of the key that a user is; None for other users."""
    kind, slash, key_id = user_id.partition("/")
    return key_id if slash and kind in ("key", "tools") else None


class ToolKeys:
    """The policy that holds tool keys to their tools. Give it to the orchestrator, and ask it for contexts.

    Calls of one key run as a user of their own: what one of them stored, cached or opened, no other key reads. The
    policy goes by that user, so it holds for calls inside calls too.
    """

    rule = "what the key allows (toolsAllowed, toolsDenied)"

    def __init__(self) -> None:
        self.desk: CallDesk | None = None
        """Hands out calls that someone else answers; without one such calls fail."""
        self._contexts: dict[Caller, ToolContext] = {}
        self._keys: dict[str, _Filter] = {}

    def context(self, caller: Caller) -> ToolContext:
        """The context of calls that this caller makes outside of a run. The same one every time."""
        known = self._contexts.get(caller)
        if known is None:
            known = self._make(caller)
            if len(self._contexts) < 10_000:
                self._contexts[caller] = known
        return known

    def permits(self, caller: Caller, name: str) -> bool:
        """Whether this caller may use the tool of this full name, as far as its key says."""
        return not isinstance(caller, ToolKey) or self._filter(caller).refusal(name) is None

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        user = context.user_id
        if user is None or not user.startswith(_TOOLS_USER):
            return _ALLOW
        known = self._keys.get(user)
        if known is None:
            return Deny("the key of this call is not known any more")
        return known.decide(tool.name)

    def _make(self, caller: Caller) -> ToolContext:
        if isinstance(caller, ToolKey):
            self._filter(caller)
            user, agent = _TOOLS_USER + caller.key_id, caller.agent_entity_id
        elif isinstance(caller, Secret):
            user, agent = _SECRET_USER + caller.key_id, None
        else:
            raise Problem(403, f"{caller.kind} credentials call no tools; use a secret key or a tool key")
        return ToolContext(
            user_id=user, session_id=f"session-{caller.key_id}", agent_entity_id=agent, host=self._room(agent)
        )

    def _room(self, agent_entity_id: str | None) -> CallRoom | None:
        if self.desk is None:
            return None
        return CallRoom(self.desk, agent_entity_id=agent_entity_id, confirms=False)

    def _filter(self, key: ToolKey) -> _Filter:
        user = _TOOLS_USER + key.key_id
        known = self._keys.get(user)
        if known is None:
            known = self._keys[user] = _Filter(key)
        return known


class _Filter:
    """One key's patterns, each tool looked at once."""

    def __init__(self, key: ToolKey) -> None:
        self._allowed = None if key.tools_allowed is None else tuple(map(str.casefold, key.tools_allowed))
        self._denied = tuple(map(str.casefold, key.tools_denied))
        self._known: dict[str, Decision] = {}

    def decide(self, name: str) -> Decision:
        decision = self._known.get(name)
        if decision is None:
            reason = self.refusal(name)
            decision = _ALLOW if reason is None else Deny(reason)
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[name] = decision
        return decision

    def refusal(self, name: str) -> str | None:
        """Why the key may not use a tool, or None. Deny wins."""
        folded = name.casefold()
        if any(fnmatch.fnmatchcase(folded, pattern) for pattern in self._denied):
            return f'this key may not use the tool "{name}" (toolsDenied)'
        if self._allowed is not None and not any(fnmatch.fnmatchcase(folded, pattern) for pattern in self._allowed):
            return f'this key may not use the tool "{name}" (toolsAllowed)'
        if name == _SEARCH and (self._denied or self._allowed is not None):
            return f'this key may not use the tool "{name}": it would describe tools that the key may not use'
        return None
