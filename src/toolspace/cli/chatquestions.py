"""What an agent asks the person in a chat: one question after the other, answered by what is typed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from toolspace.cli.chatforms import Again, Form, form_of
from toolspace.cli.chatroom import Room
from toolspace.cli.chatscreen import PROMPT, Screen
from toolspace.cli.chatview import View
from toolspace.cli.chatwork import Work
from toolspace.cli.output import neutral
from toolspace.client.errors import ApiError


class _Question:
    """A call that waits for a person. It can be answered once its form is known."""

    __slots__ = ("data", "form")

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data
        self.form: Form | None = None


class Questions:
    """Those that are open, the oldest first."""

    def __init__(self, room: Room, screen: Screen, view: View, work: Work) -> None:
        self._room = room
        self._client = room.client
        self._screen = screen
        self._view = view
        self._work = work
        self._open: dict[str, _Question] = {}
        self._seen: set[str] = set()
        """All that were asked: two streams tell of each."""
        self._preparing: set[asyncio.Future[None]] = set()
        self.form: Form | None = None
        """What the next line answers; None: nothing is asked."""

    async def find(self) -> None:
        """Asks what was left open before."""
        waiting = await self._client.calls.list(status=["waiting", "pending"], space_id=self._room.space.id)
        for call in reversed(waiting.items):
            if call.execution_target == "client" and call.visible and call.run_id is not None:
                data = {
                    "toolCallId": call.call_id,
                    "toolName": call.tool_name,
                    "input": call.args,
                    "runId": call.run_id,
                }
                self.take(data)

    def take(self, data: Mapping[str, Any]) -> None:
        """Someone is asked something."""
        call_id = str(data.get("toolCallId"))
        if call_id not in self._seen:
            self._seen.add(call_id)
            self._open[call_id] = _Question(data)
            task = asyncio.ensure_future(self._prepare(call_id))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)

    def knows(self, call_ids: Iterable[str | None]) -> bool:
        """Whether it was told of all of these."""
        return all(call_id in self._seen for call_id in call_ids if call_id is not None)

    async def prepared(self) -> None:
        """Waits until what is open can be answered."""
        await asyncio.gather(*self._preparing)

    def ended(self, call_id: str) -> None:
        """A call has its result, from whomever, or will never get one."""
        if self._open.pop(call_id, None) is not None:
            self._show()

    async def aclose(self) -> None:
        for task in self._preparing:
            task.cancel()
        await asyncio.gather(*self._preparing, return_exceptions=True)

    async def answer(self, line: str) -> None:
        """Takes a line for the question that is being asked."""
        form, word = self.form, line.strip()
        found = next(((key, one) for key, one in self._open.items() if one.form is form), None)
        if form is None or found is None:
            return
        call_id, question = found
        if word == "/later":
            del self._open[call_id]
            self._view.note("left open")
        else:
            said = form.refusal if word == "/decline" and form.refusal is not None else form.take(line)
            if isinstance(said, Again):
                self._view.wrong(said.reason)
                return
            if said is None:
                self.form = None  # So that its next field is shown.
            else:
                del self._open[call_id]
                await self._submit(call_id, str(question.data.get("runId")), said.value)
        self._show()

    async def _prepare(self, call_id: str) -> None:
        question = self._open[call_id]
        name = str(question.data.get("toolName"))
        schema: Mapping[str, Any] | None = None
        with suppress(ApiError):  # The tool may be the agent's own, which the list does not have.
            schema = (await self._client.tools.get(name)).output_schema
        if call_id in self._open:
            question.form = form_of(name, question.data.get("input"), schema)
            self._view.asked(question.data)
            self._show()

    def _show(self) -> None:
        """Makes the oldest question that is ready the one that is asked."""
        form = next((one.form for one in self._open.values() if one.form is not None), None)
        if form is not self.form or form is None:
            self.form = form
            self._screen.prompt = PROMPT if form is None else form.field.prompt
            if form is not None and form.field.explanation:
                self._screen.block(neutral(form.field.explanation))
        self._work.stir()

    async def _submit(self, call_id: str, run_id: str, value: Any) -> None:
        try:
            call = await self._client.tools.submit_result(self._room.space.id, run_id, call_id, value)
        except ApiError as error:  # Someone else has answered, or nobody can any more.
            self._view.wrong(error.detail or str(error))
        else:
            self._view.working()
            self._work.expect(f"tool_result:{call_id}", call.resolved_at or 0)
