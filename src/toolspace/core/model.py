"""A model, whoever serves it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from toolspace.core.conversation import Listener, ModelRequest, ModelTurn


class Model(ABC):
    """Answers requests. Holds no conversation: each request brings all of it."""

    name: str = ""
    """`provider:model`, as people write it: `openai:gpt-5`."""
    context_window: int | None = None
    """In tokens, where it is known."""

    @abstractmethod
    async def respond(self, request: ModelRequest, listen: Listener | None = None) -> ModelTurn:
        """The model's whole turn; `listen` hears its pieces as they come. Raises `ModelError`.

        Cancelling it stops the request.
        """

    async def aclose(self) -> None:
        """Lets go of its connections."""
