"""Keys: how they look, how they are kept, and the first ones. Knows nothing of requests."""

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
from toolspace.orchestrator.stage import CallHandler, StageContext
from toolspace.server.authorization import Caller, SecretKeyCaller, ToolKeyCaller
from toolspace.server.problems import Problem
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import KeyKind, KeyRecord, KeyScope, KeyUse, NewKey, Revocation

PREFIXES: Final[dict[KeyKind, str]] = {"secret": "sk_", "public": "pk_", "tools": "tk_"}
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 40
_JWT_SECRET: Final = "jwt_secret"


class InitialKeys(msgspec.Struct, frozen=True):
    """What was made on the first start, to be shown once; None for what was configured or made before."""

    secret: str | None
    public: str | None
    jwt_secret: str | None


def generate_key(kind: KeyKind) -> str:
    """A key that nobody guesses: 238 bits of chance behind the prefix of its kind."""
    return PREFIXES[kind] + _chance(_LENGTH)


def hash_key(key: str) -> str:
    """What is kept of a key. One round is enough: there is no dictionary of keys made by chance."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def key_hint(key: str) -> str:
    """What may be shown of a key later: `sk_…a1b2`."""
    return f"{key[:3]}…{key[-4:]}"


async def create_key(ledger: Ledger, kind: KeyKind, name: str, scope: KeyScope | None = None) -> tuple[KeyRecord, str]:
    """Makes a key. The text is given this once: only its hash is kept."""
    text = generate_key(kind)
    return await ledger.write(rows.create, _new(kind, text, name, scope or KeyScope())), text


async def revoke_key(ledger: Ledger, key_id: str, *, another_way_in: bool) -> Revocation:
    """Ends a key. The last secret one stays, unless there is another way in, such as a configured key."""
    return await ledger.write(rows.revoke, key_id, spare_last_secret=not another_way_in)


async def create_missing_keys(ledger: Ledger, server: ServerSettings) -> InitialKeys | None:
    """Makes the keys that are missing on a first start; None where nothing had to be made.

    Of several processes that start at once, one makes them and gets them back.
    """
    wanted: list[KeyKind] = []
    if server.secret_key is None:
        wanted.append("secret")
    if server.public_key is None:
        wanted.append("public")
    texts: dict[KeyKind, str] = {kind: generate_key(kind) for kind in wanted}
    made = await ledger.write(
        rows.create_first, [_new(kind, text, "first", KeyScope()) for kind, text in texts.items()]
    )
    jwt_secret = None
    if server.jwt_secret is None and server.jwks_url is None:
        kept, new = await ledger.write(rows.get_or_create_secret, _JWT_SECRET, _chance(64))
        jwt_secret = kept if new else None
    if not made and jwt_secret is None:
        return None
    shown = {kind: texts[kind] for kind in made}
    return InitialKeys(secret=shown.get("secret"), public=shown.get("public"), jwt_secret=jwt_secret)


async def load_jwt_secret(ledger: Ledger, server: ServerSettings) -> str | None:
    """What tokens are signed with: as configured, else as made on the first start; none where an issuer signs them."""
    if server.jwt_secret is not None or server.jwks_url is not None:
        return server.jwt_secret
    kept, _ = await ledger.write(rows.get_or_create_secret, _JWT_SECRET, _chance(64))
    return kept


def _new(kind: KeyKind, text: str, name: str, scope: KeyScope) -> NewKey:
    return NewKey(id=new_id("key"), kind=kind, hash=hash_key(text), name=name, hint=key_hint(text), scope=scope)


def _chance(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


# MERGED from tool_keys: What a key may do with tools: in whose name its calls run, and which tools it is shown and…

_SECRET_USER: Final = "key/"
_TOOLS_USER: Final = "tools/"
"""Calls in runs have their agent as user. No id has a slash, so no agent is ever taken for a key."""
_SEARCH: Final = "agent__find_tools"
_ALLOW: Final = Allow()


def find_key_id(user_id: str) -> str | None:
    """The id of the key that a user is; None for other users."""
    kind, slash, key_id = user_id.partition("/")
    return key_id if slash and kind in ("key", "tools") else None


class ToolKeyPolicy:
    """The policy that holds tool keys to their tools. Give it to the orchestrator, and ask it for contexts.

    Calls of one key run as a user of their own: what one of them stored, cached or opened, no other key reads. The
    policy goes by that user, so it holds for calls inside calls too.
    """

    rule = "what the key allows (toolsAllowed, toolsDenied)"

    def __init__(self) -> None:
        self.pending_calls: PendingCalls | None = None
        """Hands out calls that someone else answers; without one such calls fail."""
        self._contexts: dict[Caller, ToolContext] = {}
        self._keys: dict[str, _Filter] = {}

    def context_for(self, caller: Caller) -> ToolContext:
        """The context of calls that this caller makes outside of a run. The same one every time."""
        known = self._contexts.get(caller)
        if known is None:
            known = self._make(caller)
            if len(self._contexts) < 10_000:
                self._contexts[caller] = known
        return known

    def may_use(self, caller: Caller, name: str) -> bool:
        """Whether this caller may use the tool of this full name, as far as its key says."""
        return not isinstance(caller, ToolKeyCaller) or self._filter(caller).refusal(name) is None

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        user = context.user_id
        if user is None or not user.startswith(_TOOLS_USER):
            return _ALLOW
        known = self._keys.get(user)
        if known is None:
            return Deny("the key of this call is not known any more")
        return known.decide(tool.name)

    def _make(self, caller: Caller) -> ToolContext:
        if isinstance(caller, ToolKeyCaller):
            self._filter(caller)
            user, agent = _TOOLS_USER + caller.key_id, caller.agent_entity_id
        elif isinstance(caller, SecretKeyCaller):
            user, agent = _SECRET_USER + caller.key_id, None
        else:
            raise Problem(403, f"{caller.kind} credentials call no tools; use a secret key or a tool key")
        return ToolContext(
            user_id=user, session_id=f"session-{caller.key_id}", agent_entity_id=agent, host=self._room(agent)
        )

    def _room(self, agent_entity_id: str | None) -> GatewayCallHost | None:
        if self.pending_calls is None:
            return None
        return GatewayCallHost(self.pending_calls, agent_entity_id=agent_entity_id, confirms_delivery=False)

    def _filter(self, key: ToolKeyCaller) -> _Filter:
        user = _TOOLS_USER + key.key_id
        known = self._keys.get(user)
        if known is None:
            known = self._keys[user] = _Filter(key)
        return known


class _Filter:
    """One key's patterns, each tool looked at once."""

    def __init__(self, key: ToolKeyCaller) -> None:
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


# MERGED from key_usage: What is done with each key: counted as it happens, written down now and then. Decides noth…

_log = logging.getLogger("toolspace.access")
_WRITE_SECONDS: Final = 10.0


class KeyUsage:
    """Counts the calls of each key. Give `stage` to the orchestrator; inside `async with` it writes down what it has.

    What was counted since the last time is lost where the process is killed: the calls themselves have rows.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, list[int]] = {}
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write_now_and_then())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
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
            return counted(call, key_id)

        async def counted(call: Call, key_id: str) -> ToolResult:
            try:
                result = await next(call)
            except BaseException:
                self._count(key_id, failed=1)
                raise
            if (mine := counts.get(key_id)) is not None and result.ok:
                mine[0] += 1
            else:
                self._count(key_id, failed=not result.ok)
            return result

        return run

    def record_use(self, key_id: str) -> None:
        """The key was shown just now."""
        self._counts.setdefault(key_id, [0, 0, 0])[2] = now_ms()

    async def flush(self) -> None:
        """Writes down what was counted."""
        counted = {key_id: tuple(counts) for key_id, counts in self._counts.items() if any(counts)}
        if not counted:
            return
        now = now_ms()
        try:
            uses = {key_id: KeyUse(calls, failed, at or now) for key_id, (calls, failed, at) in counted.items()}
            await self._ledger.write(rows.record_use, uses)
        except StorageError as error:
            _log.warning("what was done with keys is written down later: %s", error)
            return
        for key_id, written in counted.items():
            counts = self._counts[key_id]
            for place in (0, 1):
                counts[place] -= written[place]
            counts[2] = 0 if counts[2] == written[2] else counts[2]
            if not any(counts):
                del self._counts[key_id]

    def _count(self, key_id: str, *, failed: int) -> None:
        counts = self._counts.setdefault(key_id, [0, 0, 0])
        counts[0] += 1
        counts[1] += failed

    async def _write_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await self.flush()
