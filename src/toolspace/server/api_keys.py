"""API keys: creates and revokes them, restricts tool keys to their tools, and counts their calls.

`authentication` verifies keys; this module knows nothing of requests.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import logging
import secrets
import string
from collections.abc import Coroutine
from typing import Any, Final, Self

import msgspec

from toolspace.config.server_settings import ServerSettings
from toolspace.core.context import ToolContext
from toolspace.core.ids import new_id, now_ms
from toolspace.core.interfaces import Allow, Decision, Deny
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.errors import StorageError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.server.authorization import Caller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.responses import Problem
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope, KeyUse, NewKey, Revocation

_log = logging.getLogger("toolspace.access")

PREFIXES: Final[dict[KeyKind, str]] = {"secret": "sk_", "public": "pk_", "tools": "tk_"}
_ALPHABET: Final = string.ascii_letters + string.digits
_KEY_LENGTH: Final = 40
_JWT_SECRET: Final = "jwt_secret"
_JWT_SECRET_LENGTH: Final = 64
_SECRET_USER: Final = "key/"
_TOOLS_USER: Final = "tools/"
"""Prefixes of user ids. The user of a call in a run is its agent; ids have no slash, so no agent looks like a key."""
_SEARCH_TOOL: Final = "agent__find_tools"
_MAX_CACHED: Final = 10_000
_ALLOW: Final = Allow()
_FLUSH_SECONDS: Final = 10.0


class InitialKeys(msgspec.Struct, frozen=True):
    """The keys that the first start created, to be shown once; None for keys that existed before."""

    secret: str | None
    public: str | None
    jwt_secret: str | None


def generate_key(kind: KeyKind) -> str:
    """Returns a random key: the prefix of its kind and 238 bits."""
    return PREFIXES[kind] + _random_text(_KEY_LENGTH)


def hash_key(key: str) -> str:
    """Returns the stored form of a key. One round of SHA-256 is enough, because keys are random."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_hint(key: str) -> str:
    """Returns the part of a key that may be shown later: `sk_…a1b2`."""
    return f"{key[:3]}…{key[-4:]}"


async def create_key(ledger: Ledger, kind: KeyKind, name: str, scope: KeyScope | None = None) -> tuple[KeyRecord, str]:
    """Creates a key. Returns the record and the key itself, of which only the hash is stored."""
    key = generate_key(kind)
    return await ledger.write(rows.create, _new_record(kind, key, name, scope or KeyScope())), key


async def revoke_key(ledger: Ledger, key_id: str, *, has_other_access: bool) -> Revocation:
    """Revokes a key. The last secret key is kept unless there is other access, such as a configured key."""
    return await ledger.write(rows.revoke, key_id, spare_last_secret=not has_other_access)


async def create_missing_keys(ledger: Ledger, server: ServerSettings) -> InitialKeys | None:
    """Creates the keys that are missing on the first start. Returns None if nothing was missing.

    If several processes start at once, one of them creates the keys and gets them.
    """
    missing_kinds: list[KeyKind] = []
    if server.secret_key is None:
        missing_kinds.append("secret")
    if server.public_key is None:
        missing_kinds.append("public")
    keys: dict[KeyKind, str] = {kind: generate_key(kind) for kind in missing_kinds}
    records = [_new_record(kind, key, "first", KeyScope()) for kind, key in keys.items()]
    created_kinds = await ledger.write(rows.create_first, records)
    jwt_secret = None
    if server.jwt_secret is None and server.jwks_url is None:
        secret, is_new = await ledger.write(rows.get_or_create_secret, _JWT_SECRET, _random_text(_JWT_SECRET_LENGTH))
        jwt_secret = secret if is_new else None
    if not created_kinds and jwt_secret is None:
        return None
    created = {kind: keys[kind] for kind in created_kinds}
    return InitialKeys(secret=created.get("secret"), public=created.get("public"), jwt_secret=jwt_secret)


async def load_jwt_secret(ledger: Ledger, server: ServerSettings) -> str | None:
    """Returns the configured JWT secret, else the stored one; None if an issuer signs the tokens."""
    if server.jwt_secret is not None or server.jwks_url is not None:
        return server.jwt_secret
    secret, _ = await ledger.write(rows.get_or_create_secret, _JWT_SECRET, _random_text(_JWT_SECRET_LENGTH))
    return secret


def find_key_id(user_id: str) -> str | None:
    """Returns the id of the key whose user this is; None for other users."""
    kind, slash, key_id = user_id.partition("/")
    return key_id if slash and kind in ("key", "tools") else None


class ToolKeyPolicy:
    """The orchestrator's policy that restricts tool keys to their tools. It also creates the contexts of calls.

    Each key has its own user id, so no key reads what calls of another key stored, cached or opened. The policy
    identifies the key by the user id, and therefore also covers calls that a tool makes.
    """

    rule = "what the key allows (toolsAllowed, toolsDenied)"

    def __init__(self) -> None:
        self.pending_calls: PendingCalls | None = None
        """Handles pending calls. Without it, tools whose result comes later fail."""
        self._contexts: dict[Caller, ToolContext] = {}
        self._filters: dict[str, _ToolFilter] = {}

    def context_for(self, caller: Caller) -> ToolContext:
        """Returns the context of calls that this caller makes outside a run, the same one every time."""
        context = self._contexts.get(caller)
        if context is None:
            context = self._create_context(caller)
            if len(self._contexts) < _MAX_CACHED:
                self._contexts[caller] = context
        return context

    def may_use(self, caller: Caller, tool_name: str) -> bool:
        """Whether the caller's key allows the tool with this full name."""
        return not isinstance(caller, ToolKeyCaller) or self._filter(caller).find_reason(tool_name) is None

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        user = context.user_id
        if user is None or not user.startswith(_TOOLS_USER):
            return _ALLOW
        tool_filter = self._filters.get(user)
        if tool_filter is None:
            return Deny("the key of this call is unknown")
        return tool_filter.decide(tool.name)

    def _create_context(self, caller: Caller) -> ToolContext:
        if isinstance(caller, ToolKeyCaller):
            self._filter(caller)
            user, agent_id = _TOOLS_USER + caller.key_id, caller.agent_entity_id
        elif isinstance(caller, SecretKeyCaller):
            user, agent_id = _SECRET_USER + caller.key_id, None
        else:
            raise Problem(403, f"{caller.kind} credentials cannot call tools; use a secret key or a tool key")
        host = None
        if self.pending_calls is not None:
            host = GatewayCallHost(self.pending_calls, agent_entity_id=agent_id, confirms_delivery=False)
        return ToolContext(user_id=user, session_id=f"session-{caller.key_id}", agent_entity_id=agent_id, host=host)

    def _filter(self, caller: ToolKeyCaller) -> _ToolFilter:
        user = _TOOLS_USER + caller.key_id
        tool_filter = self._filters.get(user)
        if tool_filter is None:
            tool_filter = self._filters[user] = _ToolFilter(caller)
        return tool_filter


class _ToolFilter:
    """Matches tool names against the patterns of one key, and caches the decisions."""

    def __init__(self, key: ToolKeyCaller) -> None:
        self._allowed = None if key.tools_allowed is None else tuple(map(str.casefold, key.tools_allowed))
        self._denied = tuple(map(str.casefold, key.tools_denied))
        self._decisions: dict[str, Decision] = {}

    def decide(self, name: str) -> Decision:
        decision = self._decisions.get(name)
        if decision is None:
            reason = self.find_reason(name)
            decision = _ALLOW if reason is None else Deny(reason)
            if len(self._decisions) > _MAX_CACHED:
                self._decisions.clear()
            self._decisions[name] = decision
        return decision

    def find_reason(self, name: str) -> str | None:
        """Returns why the key may not use a tool, or None. A denied pattern wins over an allowed one."""
        folded = name.casefold()
        if any(fnmatch.fnmatchcase(folded, pattern) for pattern in self._denied):
            return f'this key may not use the tool "{name}" (toolsDenied)'
        if self._allowed is not None and not any(fnmatch.fnmatchcase(folded, pattern) for pattern in self._allowed):
            return f'this key may not use the tool "{name}" (toolsAllowed)'
        if name == _SEARCH_TOOL and (self._denied or self._allowed is not None):
            return f'this key may not use the tool "{name}": it would describe tools that the key may not use'
        return None


class KeyUsage:
    """Counts the calls of each key and stores the counts every 10 seconds. `stage` is a stage of the orchestrator.

    A killed process loses the counts since the last flush; the calls themselves are stored.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, list[int]] = {}
        """Key id → calls, failed calls, and when the key was last used (Unix milliseconds)."""
        self._flushing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._flushing = asyncio.create_task(self._flush_periodically())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            await asyncio.gather(self._flushing, return_exceptions=True)
        await self.flush()

    def stage(self, plan: StageContext, next: CallHandler, /) -> CallHandler:
        counts = self._counts

        def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
            if (
                call.parent is not None
                or (user := call.base_context.user_id) is None
                or (key_id := find_key_id(user)) is None
            ):
                return next(call)
            return run_and_count(call, key_id)

        async def run_and_count(call: Call, key_id: str) -> ToolResult:
            try:
                result = await next(call)
            except BaseException:
                self._count(key_id, failed=1)
                raise
            if (key_counts := counts.get(key_id)) is not None and result.ok:
                key_counts[0] += 1
            else:
                self._count(key_id, failed=not result.ok)
            return result

        return run

    def record_use(self, key_id: str) -> None:
        """Records that the key authenticated a request now."""
        self._counts.setdefault(key_id, [0, 0, 0])[2] = now_ms()

    async def flush(self) -> None:
        """Stores the counts."""
        snapshot = {key_id: tuple(counts) for key_id, counts in self._counts.items() if any(counts)}
        if not snapshot:
            return
        now = now_ms()
        try:
            uses = {key_id: KeyUse(calls, failed, at or now) for key_id, (calls, failed, at) in snapshot.items()}
            await self._ledger.write(rows.record_use, uses)
        except StorageError as error:
            _log.warning("key usage not stored, retrying in %d s: %s", _FLUSH_SECONDS, error)
            return
        for key_id, stored in snapshot.items():
            counts = self._counts[key_id]
            counts[0] -= stored[0]
            counts[1] -= stored[1]
            if counts[2] == stored[2]:
                counts[2] = 0
            if not any(counts):
                del self._counts[key_id]

    def _count(self, key_id: str, *, failed: int) -> None:
        counts = self._counts.setdefault(key_id, [0, 0, 0])
        counts[0] += 1
        counts[1] += failed

    async def _flush_periodically(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            await self.flush()


def _new_record(kind: KeyKind, key: str, name: str, scope: KeyScope) -> NewKey:
    return NewKey(id=new_id("key"), kind=kind, hash=hash_key(key), name=name, hint=key_hint(key), scope=scope)


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
