"""Fixtures for tests that load user code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.imported_modules import restore_imports


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Removes the modules and path entries that a test adds."""
    with restore_imports():
        yield
