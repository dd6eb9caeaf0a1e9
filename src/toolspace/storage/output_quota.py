"""How many bytes of stored outputs a session, a principal and all together may have. Both output stores use it.

An output beyond a limit is refused; nothing is deleted for it, least of all an output of someone else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from toolspace.core import defaults
from toolspace.core.extension_points import StoredOutput
from toolspace.core.tool_context import LOCAL_PRINCIPAL
from toolspace.errors import ToolLimitError

_RELOAD_SECONDS: Final = 60.0
"""How often the outputs of other processes are counted."""


class OutputLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How many bytes of stored outputs there may be; None: any number."""

    per_session: int | None = defaults.OUTPUT_BYTES_PER_SESSION
    per_principal: int | None = defaults.OUTPUT_BYTES_PER_PRINCIPAL
    total: int | None = defaults.OUTPUT_BYTES_IN_TOTAL


class OutputQuota:
    """Counts the bytes of outputs, finished and unfinished. Any thread may use it."""

    def __init__(
        self,
        limits: OutputLimits,
        clock: Callable[[], float],
        load: Callable[[], Iterable[StoredOutput]] | None = None,
    ) -> None:
        """`load` returns the outputs that have not expired; needed if other processes store outputs, too."""
        self._limits = limits
        self._clock = clock
        self._load = load
        self._next_load = float("-inf")
        self._lock = threading.Lock()
        self._outputs: dict[str, StoredOutput] = {}
        """Finished outputs by handle."""
        self._session_bytes: Counter[str] = Counter()
        self._principal_bytes: Counter[str] = Counter()
        self._total_bytes = 0

    def reserve(self, session: str, owner: str | None, size: int) -> None:
        """Counts bytes before they are written. Raises `ToolLimitError` if they are too many."""
        with self._lock:
            self._refresh()
            if self._find_excess(session, owner, size) is not None:
                self._expire()
            if (excess := self._find_excess(session, owner, size)) is not None:
                raise ToolLimitError(excess, executed=True)
            self._count(session, owner, size)

    def release(self, session: str, owner: str | None, size: int) -> None:
        """Gives back the bytes of an output that was discarded."""
        with self._lock:
            self._count(session, owner, -size)

    def add(self, output: StoredOutput) -> None:
        """Notes a finished output, whose bytes are reserved: they are free again when it expires."""
        with self._lock:
            self._outputs[output.handle] = output

    def remove(self, handle: str) -> None:
        """Gives back the bytes of a finished output that was discarded."""
        with self._lock:
            if handle in self._outputs:
                self._forget(handle)

    def _find_excess(self, session: str, owner: str | None, size: int) -> str | None:
        """Returns why so many bytes more are too many, or None."""
        limits, principal = self._limits, owner or LOCAL_PRINCIPAL
        for setting, limit, used_bytes, subject in (
            ("perSession", limits.per_session, self._session_bytes[session], "this session"),
            ("perPrincipal", limits.per_principal, self._principal_bytes[principal], f'principal "{principal}"'),
            ("total", limits.total, self._total_bytes, "this installation"),
        ):
            if limit is not None and used_bytes + size > limit:
                return (
                    f"{subject} has {used_bytes} bytes of stored outputs, and the limit is {limit} "
                    f"(storage.outputs.{setting}); stored outputs expire by themselves"
                )
        return None

    def _refresh(self) -> None:
        """Counts the outputs that other processes have stored or removed since the last time."""
        now = self._clock()
        if self._load is None or now < self._next_load:
            return
        self._next_load = now + _RELOAD_SECONDS
        outputs = {output.handle: output for output in self._load()}
        for handle in self._outputs.keys() - outputs.keys():
            self._forget(handle)
        for handle in outputs.keys() - self._outputs.keys():
            output = self._outputs[handle] = outputs[handle]
            self._count(output.session, output.owner, output.bytes)

    def _expire(self) -> None:
        now = self._clock()
        for handle in [handle for handle, output in self._outputs.items() if output.expires_at <= now]:
            self._forget(handle)

    def _forget(self, handle: str) -> None:
        output = self._outputs.pop(handle)
        self._count(output.session, output.owner, -output.bytes)

    def _count(self, session: str, owner: str | None, size: int) -> None:
        self._total_bytes += size
        for counts, key in ((self._session_bytes, session), (self._principal_bytes, owner or LOCAL_PRINCIPAL)):
            counts[key] += size
            if not counts[key]:
                del counts[key]
