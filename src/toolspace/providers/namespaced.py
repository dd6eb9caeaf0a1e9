"""A provider as configuration mounts it: under a namespace, and able to leave while calls still run in it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool


class Mounted(ToolProvider):
    """Passes everything on to the provider inside, until it is retired."""

    def __init__(self, inner: ToolProvider, namespace: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = inner.kind
        self.namespace = namespace
        self._retired = False
        self._starting: asyncio.Task[None] | None = None
        self._forget = inner.on_change(self.changed)
        self._file = _file(inner)
        self._code = _read(self._file)

    def is_current(self) -> bool:
        """Whether the file of its class still says what it said when this was made."""
        return _read(self._file) == self._code

    def retire(self) -> None:
        """Offers nothing from now on, at once. Calls in flight go on, until someone closes it."""
        self._retired = True
        self.changed()

    def list_tools(self) -> Sequence[Tool]:
        return () if self._retired else self.inner.list_tools()

    def has_tool(self, name: str) -> bool:
        return not self._retired and self.inner.has_tool(name)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await self.inner.execute(name, parameters, context)

    def offers(self, tool: Tool, context: ToolContext) -> bool:
        return self.inner.offers(tool, context)

    def get_instructions(self) -> str:
        return "" if self._retired else self.inner.get_instructions()

    async def warmup(self) -> None:
        if self._retired:  # Someone tries again who has not heard of it yet.
            return
        self._starting = starting = asyncio.ensure_future(_warmup(self.inner))
        try:
            await starting
        except asyncio.CancelledError:
            # Stopped by `aclose`, it has not failed: nobody should report it, or try again.
            if not self._retired or (task := asyncio.current_task()) is None or task.cancelling():
                raise
        finally:
            self._starting = None

    async def aclose(self) -> None:
        """Also while it still starts: a provider that hangs can be taken out of the configuration."""
        self._retired = True
        self._forget()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        await self.inner.aclose()


async def _warmup(provider: ToolProvider) -> None:
    await provider.warmup()


def _file(provider: ToolProvider) -> Path | None:
    try:
        return Path(inspect.getfile(type(provider)))
    except (TypeError, OSError):  # Made up in a shell, or compiled.
        return None


def _read(file: Path | None) -> bytes:
    try:
        return file.read_bytes() if file is not None else b""
    except OSError:
        return b""
