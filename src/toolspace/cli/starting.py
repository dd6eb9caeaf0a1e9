"""Starts everything that the configuration names, only to look at it: what fails is to be seen like the rest."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from toolspace.cli.options import Options
from toolspace.cli.session import open_toolspace
from toolspace.errors import ProviderError
from toolspace.orchestrator.warmup import Patience
from toolspace.toolspace import Toolspace

_LOOK = Patience(seconds=60, stragglers=True)
"""As long as a server has for its start."""


@asynccontextmanager
async def started(options: Options) -> AsyncGenerator[Toolspace]:
    """The toolspace with its providers started, or known not to. Raises `ConfigError` where it cannot even be made."""
    if not options.verbose:
        # What does not start is told by whoever looks; once is enough.
        for name in ("toolspace.providers", "toolspace.mcp"):
            logging.getLogger(name).addFilter(lambda record: record.levelno > logging.WARNING)
    ts = open_toolspace(options)
    try:
        with suppress(ProviderError):  # One that is required: that, too, is to be looked at.
            await ts.orchestrator.warmup(patience=_LOOK)
        yield ts
    finally:
        await ts.aclose()
