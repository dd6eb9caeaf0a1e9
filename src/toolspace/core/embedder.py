"""Meaning as numbers, whoever computes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Embedder(Protocol):
    """Turns texts into vectors: the closer their directions, the closer what the texts mean."""

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, in their order, all of one length. Raises `ModelError`."""
        ...
