"""The public contract of caches, as the suites here run it."""

from __future__ import annotations

import pytest

from toolspace.testing import CacheContract as PublicContract
from toolspace.testing import FakeClock as Clock

__all__ = ["Clock", "LocalCacheContract"]


@pytest.mark.spec("4.2")
class LocalCacheContract(PublicContract):
    """Adds nothing: the contract of caches is public."""
