"""A model that says what a script tells it to: for tests of agents, without a provider or a key. Thinks nothing."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core.model import (
    NO_USAGE,
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    TextDelta,
    Usage,
)
from toolspace.errors import ModelError

ScriptedTurn = str | ModelTurn | ModelCall | Sequence[ModelCall] | BaseException | type[BaseException]
"""One turn: a text, a whole turn, one call, several calls at once, or an error to raise."""
ScriptStep = ScriptedTurn | Callable[[ModelRequest], "ScriptedTurn | Awaitable[ScriptedTurn]"]
"""A turn, or what makes one of the request; it may be asynchronous."""

_ONE_REQUEST = Usage(requests=1)
_PIECE = 12
"""Characters of arguments that are heard at once."""
_WORDS = re.compile(r"\s*\S+\s*|\s+")


def call(name: str, arguments: Mapping[str, Any] | str | None = None, *, id: str = "") -> ModelCall:
    """A tool call for a script. Arguments that are text go out as they are: they need not be JSON.

    A call without an id gets one that is unique in its script.
    """
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return ModelCall(id, name, text)


class ScriptedModel(Model):
    """Says one step of its script for each request, and remembers the requests.

        model = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."])

    A callable in place of the script makes the turn of every request.
    """

    name = "scripted:script"

    def __init__(
        self,
        script: Iterable[ScriptStep] | ScriptStep = (),
        *,
        name: str | None = None,
        usage: Usage = _ONE_REQUEST,
        record: bool = True,
        context_window: int | None = None,
    ) -> None:
        """`usage` is what a turn costs that says nothing of its own; without `record`, no request is remembered."""
        self.requests: list[ModelRequest] = []
        """What it was asked, in order; each with the turns that it had then."""
        self.context_window = context_window
        if name is not None:
            self.name = name
        self._usage = usage
        self._record = record
        self._asked = 0
        self._looping = False
        self._each: ScriptStep | None = None
        self._steps: list[ScriptStep] = []
        if isinstance(script, str | ModelTurn | ModelCall | BaseException):
            self._steps.append(script)
        elif callable(script):
            self._each = script
        else:
            self._steps.extend(cast("Iterable[ScriptStep]", script))
        # Made once: the same turn is then said at no cost.
        self._turns: list[ModelTurn | None] = [self._made(step, at) for at, step in enumerate(self._steps)]

    @classmethod
    def looping(cls, script: Iterable[ScriptStep] | ScriptStep, **options: Any) -> ScriptedModel:
        """A script that begins again at its end, and so never runs out."""
        model = cls(script, **options)
        model._looping = True
        return model

    @property
    def remaining_steps(self) -> int | None:
        """How many steps it has not said yet; None: it never runs out."""
        return None if self._looping or self._each is not None else max(0, len(self._steps) - self._asked)

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        at = self._asked
        self._asked = at + 1
        if self._record:
            self.requests.append(_as_it_is(request))
        if self._each is not None:
            turn, step = None, self._each
        else:
            count = len(self._steps)
            place = at % count if self._looping and count else at
            if place >= count:
                turns = "1 turn" if count == 1 else f"{count} turns"
                what = f"the script of {self.name} has {turns}, and this is request {at + 1}"
                raise ModelError("invalid", f"{what}; give it more turns, or make it with ScriptedModel.looping")
            turn, step = self._turns[place], self._steps[place]
        if turn is None:
            turn = await self._ask(step, request, at)
        if listen is not None:
            _stream(turn, listen)
        return turn

    async def _ask(self, step: ScriptStep, request: ModelRequest, at: int) -> ModelTurn:
        if not _raises(step) and callable(step):
            said = cast("Callable[[ModelRequest], ScriptedTurn | Awaitable[ScriptedTurn]]", step)(request)
            if isinstance(said, Awaitable):
                said = await said
            step = said
        if _raises(step):
            raise cast("BaseException", step)
        turn = self._made(step, at)
        if turn is None:
            kinds = "a text, a ModelTurn, call(…), several calls, an exception or a function of the request"
            raise ModelError("invalid", f"turn {at + 1} of the script is {type(step).__name__}; it must be {kinds}")
        return turn

    def _made(self, said: ScriptStep, at: int) -> ModelTurn | None:
        """The turn of a step that is known before the request is."""
        if isinstance(said, str):
            return ModelTurn(text=said, usage=self._usage, model=self.name)
        if isinstance(said, ModelCall):
            said = (said,)
        if isinstance(said, ModelTurn):
            turn = said
        elif isinstance(said, list | tuple) and all(isinstance(one, ModelCall) for one in cast("Sequence[Any]", said)):
            turn = ModelTurn(calls=tuple(cast("Sequence[ModelCall]", said)))
        else:
            return None
        calls = tuple(
            one if one.id else ModelCall(f"call_{at + 1}_{index + 1}", one.name, one.arguments)
            for index, one in enumerate(turn.calls)
        )
        return msgspec.structs.replace(
            turn,
            calls=calls,
            finish="tools" if calls and turn.finish == "stop" else turn.finish,
            usage=self._usage if turn.usage is NO_USAGE else turn.usage,
            model=turn.model or self.name,
        )


def _raises(step: object) -> bool:
    return isinstance(step, BaseException) or (isinstance(step, type) and issubclass(step, BaseException))


def _as_it_is(request: ModelRequest) -> ModelRequest:
    """The request with turns that no one adds to."""
    if isinstance(request.turns, tuple):
        return request
    return msgspec.structs.replace(request, turns=tuple(request.turns))


def _stream(turn: ModelTurn, listen: ModelListener) -> None:
    for word in _WORDS.findall(turn.text):
        listen(TextDelta(word))
    for index, one in enumerate(turn.calls):
        listen(CallStarted(index, one.id, one.name))
        for start in range(0, len(one.arguments), _PIECE):
            listen(CallDelta(index, one.arguments[start : start + _PIECE]))
