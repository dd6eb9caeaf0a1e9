"""What the tests of loaded code share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def interpreter() -> Iterator[None]:
    """What a test imports and puts on the path is gone after it."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] != "toolspace":  # Half of it anew would not know the other half's classes.
            del sys.modules[name]
