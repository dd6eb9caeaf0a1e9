"""A model whose responses come from a script, for tests of agents without a provider or a key.

Public as `toolspace.testing.ScriptedModel`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import msgspec

from toolspace.core.language_model import (
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
"""A turn, or a function that makes one from the request. The function may be asynchronous."""

_ONE_REQUEST = Usage(requests=1)
_ARGUMENT_PIECE = 12
"""Characters of arguments in one streamed part."""
_WORDS = re.compile(r"\s*\S+\s*|\s+")


def call(name: str, arguments: Mapping[str, Any] | str | None = None, *, id: str = "") -> ModelCall:
    """A tool call for a script. Arguments that are a string are sent unchanged: they need not be JSON.

    A call without an id gets one that is unique in its script.
    """
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments or {}).decode()
    return ModelCall(id, name, text)


class ScriptedModel(Model):
    """Returns one step of its script for each request, and records the requests.

        model = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."])

    A function instead of the script makes the turn of every request.
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
        """`usage` applies to turns that have none. With `record=False` no request is recorded."""
        self.requests: list[ModelRequest] = []
        """The requests in order, each with the turns that it had then."""
        self.context_window = context_window
        if name is not None:
            self.name = name
        self._usage = usage
        self._record = record
        self._request_count = 0
        self._is_looping = False
        self._function: ScriptStep | None = None
        self._steps: list[ScriptStep] = []
        if isinstance(script, str | ModelTurn | ModelCall | BaseException):
            self._steps.append(script)
        elif callable(script):
            self._function = script
        else:
            self._steps.extend(cast("Iterable[ScriptStep]", script))
        # Built once, so that repeating a turn costs nothing.
        self._turns: list[ModelTurn | None] = [self._build_turn(step, index) for index, step in enumerate(self._steps)]

    @classmethod
    def loop(cls, script: Iterable[ScriptStep] | ScriptStep, **options: Any) -> ScriptedModel:
        """A script that starts again at its end."""
        model = cls(script, **options)
        model._is_looping = True
        return model

    @property
    def remaining_steps(self) -> int | None:
        """How many steps have not been used; None: it never runs out."""
        if self._is_looping or self._function is not None:
            return None
        return max(0, len(self._steps) - self._request_count)

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        index = self._request_count
        self._request_count = index + 1
        if self._record:
            # The caller may append to the turns later.
            self.requests.append(msgspec.structs.replace(request, turns=tuple(request.turns)))
        if self._function is not None:
            turn, step = None, self._function
        else:
            count = len(self._steps)
            position = index % count if self._is_looping and count else index
            if position >= count:
                turns = "1 turn" if count == 1 else f"{count} turns"
                problem = f"the script of {self.name} has {turns}, and this is request {index + 1}"
                raise ModelError("invalid", f"{problem}; give it more turns, or create it with ScriptedModel.loop")
            turn, step = self._turns[position], self._steps[position]
        if turn is None:
            turn = await self._run_step(step, request, index)
        if listen is not None:
            _stream(turn, listen)
        return turn

    async def _run_step(self, step: ScriptStep, request: ModelRequest, index: int) -> ModelTurn:
        if not _is_exception(step) and callable(step):
            result = cast("Callable[[ModelRequest], ScriptedTurn | Awaitable[ScriptedTurn]]", step)(request)
            if isinstance(result, Awaitable):
                result = await result
            step = result
        if _is_exception(step):
            raise cast("BaseException", step)
        turn = self._build_turn(step, index)
        if turn is None:
            kinds = "a text, a ModelTurn, call(…), several calls, an exception or a function of the request"
            raise ModelError("invalid", f"turn {index + 1} of the script is {type(step).__name__}; it must be {kinds}")
        return turn

    def _build_turn(self, step: ScriptStep, index: int) -> ModelTurn | None:
        """The turn of a step; None for a function, an exception, or something that is no step."""
        if isinstance(step, str):
            return ModelTurn(text=step, usage=self._usage, model=self.name)
        if isinstance(step, ModelCall):
            step = (step,)
        if isinstance(step, ModelTurn):
            turn = step
        elif isinstance(step, list | tuple) and all(
            isinstance(item, ModelCall) for item in cast("Sequence[Any]", step)
        ):
            turn = ModelTurn(calls=tuple(cast("Sequence[ModelCall]", step)))
        else:
            return None
        calls = tuple(
            call if call.id else ModelCall(f"call_{index + 1}_{number}", call.name, call.arguments)
            for number, call in enumerate(turn.calls, 1)
        )
        return msgspec.structs.replace(
            turn,
            calls=calls,
            finish="tools" if calls and turn.finish == "stop" else turn.finish,
            usage=self._usage if turn.usage is NO_USAGE else turn.usage,
            model=turn.model or self.name,
        )


def _is_exception(step: object) -> bool:
    return isinstance(step, BaseException) or (isinstance(step, type) and issubclass(step, BaseException))


def _stream(turn: ModelTurn, listen: ModelListener) -> None:
    for word in _WORDS.findall(turn.text):
        listen(TextDelta(word))
    for index, model_call in enumerate(turn.calls):
        listen(CallStarted(index, model_call.id, model_call.name))
        for start in range(0, len(model_call.arguments), _ARGUMENT_PIECE):
            listen(CallDelta(index, model_call.arguments[start : start + _ARGUMENT_PIECE]))
