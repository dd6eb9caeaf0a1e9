"""Which tools an API key may call: the policy that restricts tool keys, and the context of the calls of each key.

The tool routes and the MCP endpoint take the context of a call from here; the orchestrator asks the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

from toolspace.config.find_and_watch import key_memory_root
from toolspace.core.extension_points import Allow, Decision, Deny
from toolspace.core.tool import Tool
from toolspace.core.tool_collections import expand_collections
from toolspace.core.tool_context import SECRET_KEY_PREFIX, ToolContext
from toolspace.orchestrator.effective_settings import ToolSpellings, matches_name
from toolspace.server.authorization import Caller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.responses import Problem
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import keys
from toolspace.storage.queries.keys import KeyRecord

_TOOLS_USER: Final = "tools/"
"""The start of the user ids of tool keys. Ids of entities have no slash, so nobody looks like a key."""
_SEARCH_TOOL: Final = "agent__find_tools"
_MAX_CACHED: Final = 10_000
_ALLOW: Final = Allow()


def find_key_id(user_id: str) -> str | None:
    """Returns the id of the key whose user this is; None for other users."""
    kind, slash, key_id = user_id.partition("/")
    return key_id if slash and kind in ("key", "tools") else None


def is_tool_key_user(user_id: str | None) -> bool:
    """Whether this is the user of a tool key."""
    return user_id is not None and user_id.startswith(_TOOLS_USER)


class ToolKeyPolicy:
    """The orchestrator's policy that restricts tool keys to their tools. It also creates the contexts of calls.

    Each key has its own user id, so no key reads what calls of another key stored, cached or opened. The policy
    identifies the key by the user id, and therefore also covers calls that a tool makes.
    """

    rule = "what the key allows (toolsAllowed, toolsDenied)"

    def __init__(self) -> None:
        self.get_spellings: Callable[[str], ToolSpellings] = _listed_name_only
        """Returns all names of the tool with this full name; the gateway sets it."""
        self.get_base_context: Callable[[], ToolContext] = ToolContext
        """Returns the context that fills in what a caller's context does not set; the gateway sets it."""
        self.shares_memory = False
        """Whether all keys use one memory directory."""
        self.pending_calls: PendingCalls | None = None
        """Handles pending calls. Without it, tools whose result comes later fail."""
        self._base_context = ToolContext()
        self._contexts: dict[Caller, ToolContext] = {}
        self._filters: dict[str, _ToolFilter] = {}

    def context_for(self, caller: Caller) -> ToolContext:
        """Returns the context of calls that this caller makes outside a run, the same one every time."""
        base_context = self.get_base_context()
        if base_context is not self._base_context:  # The configuration was reloaded.
            self._base_context = base_context
            self._contexts = {}
        context = self._contexts.get(caller)
        if context is None:
            context = self._create_context(caller)
            if len(self._contexts) < _MAX_CACHED:
                self._contexts[caller] = context
        return context

    async def load_key(self, ledger: Ledger, user_id: str | None) -> None:
        """Loads the tool key of a user, for a call that another process received. Nothing if it was revoked."""
        if user_id is None or not user_id.startswith(_TOOLS_USER) or user_id in self._filters:
            return
        record = await ledger.read(keys.find, user_id.removeprefix(_TOOLS_USER))
        if record is not None and record.revoked_at is None:
            self._filter(create_tool_key_caller(record))

    def may_use(self, caller: Caller, tool_name: str) -> bool:
        """Whether the caller's key allows the tool with this full name."""
        return (
            not isinstance(caller, ToolKeyCaller)
            or self._filter(caller).decide(self.get_spellings(tool_name)) is _ALLOW
        )

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        user = context.user_id
        if user is None or not user.startswith(_TOOLS_USER):
            return _ALLOW
        tool_filter = self._filters.get(user)
        if tool_filter is None:
            return Deny("the key of this call is unknown")
        return tool_filter.decide(self.get_spellings(tool.name))

    def _create_context(self, caller: Caller) -> ToolContext:
        if isinstance(caller, ToolKeyCaller):
            self._filter(caller)
            user, agent_id = _TOOLS_USER + caller.key_id, caller.agent_entity_id
        elif isinstance(caller, SecretKeyCaller):
            user, agent_id = SECRET_KEY_PREFIX + caller.key_id, None
        else:
            raise Problem(403, f"{caller.kind} credentials cannot call tools; use a secret key or a tool key")
        host = None
        if self.pending_calls is not None:
            host = GatewayCallHost(self.pending_calls, agent_entity_id=agent_id, confirms_delivery=False)
        memory_dir = self._base_context.memory_dir
        return ToolContext(
            user_id=user,
            session_id=f"session-{caller.key_id}",
            agent_entity_id=agent_id,
            host=host,
            memory_dir=None
            if memory_dir is None or self.shares_memory
            else key_memory_root(memory_dir) / caller.key_id,
        )

    def _filter(self, caller: ToolKeyCaller) -> _ToolFilter:
        user = _TOOLS_USER + caller.key_id
        tool_filter = self._filters.get(user)
        if tool_filter is None:
            tool_filter = self._filters[user] = _ToolFilter(caller)
        return tool_filter


def create_tool_key_caller(record: KeyRecord) -> ToolKeyCaller:
    """The caller that uses a tool key."""
    scope = record.scope
    return ToolKeyCaller(
        key_id=record.id,
        tools_allowed=scope.tools_allowed,
        tools_denied=scope.tools_denied,
        agent_entity_id=scope.agent_entity_id,
    )


def principal_of(caller: Caller) -> str:
    """The principal of the calls that a caller makes, and its name as an approver."""
    if isinstance(caller, SecretKeyCaller):
        return SECRET_KEY_PREFIX + caller.key_id
    return _TOOLS_USER + caller.key_id if isinstance(caller, ToolKeyCaller) else caller.subject


def _listed_name_only(name: str) -> ToolSpellings:
    return ToolSpellings((name,), (name,))


def is_allowed_by(pattern: str, spellings: ToolSpellings) -> bool:
    """Whether a pattern of `toolsAllowed` means a tool: by a full name or an alias of one.

    Not by the name without namespace: a server could offer a tool that is named like an allowed one.
    """
    return matches_name(pattern, (*spellings.full, *spellings.aliases))


def is_denied_by(pattern: str, spellings: ToolSpellings) -> bool:
    """Whether a pattern of `toolsDenied` means a tool, by any of its names."""
    return matches_name(pattern, spellings.names)


class _ToolFilter:
    """Matches the names of tools against the patterns of one key, and caches the decisions."""

    def __init__(self, key: ToolKeyCaller) -> None:
        self._allowed = expand_collections(key.tools_allowed) if key.tools_allowed is not None else None
        self._denied = expand_collections(key.tools_denied)
        self.decide = lru_cache(maxsize=_MAX_CACHED)(self._decide)

    def _decide(self, spellings: ToolSpellings) -> Decision:
        """A denied pattern wins over an allowed one."""
        name = spellings.full[0]
        if any(is_denied_by(pattern, spellings) for pattern in self._denied):
            reason = " (toolsDenied)"
        elif self._allowed is not None and not any(is_allowed_by(pattern, spellings) for pattern in self._allowed):
            reason = " (toolsAllowed)"
        elif name == _SEARCH_TOOL and (self._denied or self._allowed is not None):
            reason = ": it would describe tools that the key may not use"
        else:
            return _ALLOW
        return Deny(f'this key may not use the tool "{name}"{reason}')
