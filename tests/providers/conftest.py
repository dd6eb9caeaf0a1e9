"""Fixtures for tests that load user code."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Removes the modules and path entries that a test adds."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] != "toolspace":  # Half of it anew would not know the other half's classes.
            del sys.modules[name]
