"""`toolspace chat`: a conversation with an agent of a gateway, in a terminal or through a pipe."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any, Final, cast

import click

from toolspace.cli.chat.line_editor import ControlKey, SubmittedLine
from toolspace.cli.chat.questions import OpenQuestions
from toolspace.cli.chat.run_tracker import RunTracker
from toolspace.cli.chat.screen import ChatScreen, TerminalScreen, choose_screen
from toolspace.cli.chat.setup import ChatContext, open_chat
from toolspace.cli.chat.view import ConversationView
from toolspace.cli.gateway_connection import gateway_options
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.runner import Interrupts, fast_loop_factory, run, wait_for_signal
from toolspace.client.errors import ApiError
from toolspace.client.events import StreamEvent
from toolspace.client.transport import quote_segment
from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.names import did_you_mean
from toolspace.core.records import run_stream, space_stream

_REMEMBERED: Final = 4
"""Messages of the past that are shown at the start."""
_HISTORY: Final = 30
_LATEST: Final = 20
_CATCH_UP_SECONDS: Final = 5.0
_TWICE_SECONDS: Final = 3.0
_CLOSE_SECONDS: Final = 20.0
"""For a gateway of our own to end what it does."""
_HELP: Final = """\
What you write is said in the space; the agent answers when it likes.
  /history   what was said before
  /agents    the agents of this gateway
  /later     leave a question unanswered; it stays open
  /decline   answer a question of a server with no
  /quit      leave; Ctrl-D does too
Ctrl-C cancels what the agent does; pressed twice it leaves."""
_WORD: Final = re.compile(r"/[a-z]+")
_COMMANDS: Final = ("/help", "/history", "/agents", "/later", "/decline", "/quit")


@click.command("chat", cls=Command)
@click.argument("agent", required=False, metavar="[AGENT]")
@gateway_options
@click.option("--space", metavar="ID", help="Talk in this space, which the agent is in; without it, one for the two.")
@click.pass_obj
def command(options: Options, agent: str | None, url: str | None, key: str | None, space: str | None) -> int:
    """Talk to an agent of a gateway: the one that runs here, else one that is started for as long as you talk.

    AGENT is a name or an id, and may be left out where there is only one. Where standard input is no terminal, each
    line of it is said, the answers are printed, and it ends when the last one was answered. With --json each line is
    an event.
    """
    set_up_logs(options, os.environ)
    return run(
        lambda interrupts: _chat(options, interrupts, url, key, agent=agent, space=space),
        loop_factory=fast_loop_factory(),
    )


async def _chat(
    options: Options, interrupts: Interrupts, url: str | None, key: str | None, *, agent: str | None, space: str | None
) -> int:
    interrupts.grace = _CLOSE_SECONDS
    async with open_chat(options, url, key, agent=agent, space=space) as room:
        screen = choose_screen(options.output)
        with screen.open() if isinstance(screen, TerminalScreen) else nullcontext():
            return await Conversation(options, room, screen).run(interrupts)


class Conversation:
    """A conversation: what is heard is shown, what is typed is said, or answers what was asked."""

    def __init__(self, options: Options, room: ChatContext, screen: ChatScreen) -> None:
        self._options = options
        self._room = room
        self._client = room.client
        self._screen = screen
        self._view = ConversationView(
            screen,
            options.output,
            me=room.me.id,
            agent=room.agent.id,
            names=room.names,
            is_busy=lambda: self._work.is_busy,
        )
        self._work = RunTracker(room, hear=self._hear_run, on_silence=self._doubt)
        self._questions = OpenQuestions(room, screen, self._view, self._work)
        self._told: set[str] = set()
        """Runs whose end was told."""
        self._said_up_to = 0
        self._heard = asyncio.Condition()
        self._armed_until = 0.0
        """How long another Ctrl-C means to leave."""

    async def run(self, interrupts: Interrupts) -> int:
        """Talks until the person leaves; the exit code."""
        client, space = self._client, self._room.space
        path = f"/api/spaces/{quote_segment(space.id)}/stream"
        stream = client.stream(path, retry_unreachable=not self._room.is_local)
        following = asyncio.ensure_future(self._follow(stream))
        connected = asyncio.ensure_future(stream.connected.wait())
        tasks: set[asyncio.Future[Any]] = {following, connected}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)  # Nothing may be said before it is heard.
            if following.done():
                await following
            await self._greet()
            tasks |= {
                asyncio.ensure_future(one)
                for one in (self._work.run(), self._rest(), self._converse(), wait_for_signal(interrupts))
            }
            tasks.discard(connected)
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                await one  # What ended it, if it went wrong.
        finally:
            stream.close()
            for one in tasks:
                one.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._questions.aclose()
            await self._work.aclose()
            self._view.break_off()
        if interrupts.signal is not None:
            await self._work.cancel()
        return 1 if self._work.failed and not self._screen.keeps_typing else 0

    # What is heard

    async def _follow(self, stream: Any) -> None:
        async for event in stream:
            self._print(space_stream(self._room.space.id), event)
            await self._meet(event)
            self._hear(event)
            async with self._heard:
                self._heard.notify_all()

    async def _meet(self, event: StreamEvent) -> None:
        """Asks who someone is that came into the space after us, such as an agent that a request was handed on to."""
        data = _members(event)
        message: Mapping[str, Any] = data.get("message", {}) if event.type == "message.done" else data
        sender = message.get("senderId")
        names = self._room.names
        if isinstance(sender, str) and sender not in names:
            names[sender] = sender  # Asked once: who is no member has no other name here.
            with suppress(ApiError):
                members = await self._client.spaces.list_members(self._room.space.id)
                names.update({member.entity_id: member.name for member in members})

    def _hear(self, event: StreamEvent) -> None:
        """Something that happened in the space."""
        data = _members(event)
        match event.type:
            case "message.started":
                self._view.message_started(data)
            case "message.delta":
                self._view.message_grew(data)
            case "message.done":
                message: Mapping[str, Any] = data.get("message", {})
                self._view.message_done(message)
                self._said_up_to = max(self._said_up_to, int(message.get("seq", 0)))
            case "run.started" if data.get("agentEntityId") == self._room.agent.id:
                self._view.working()
                self._work.add_run(str(data.get("runId")))
            case _ if event.type.startswith("tool."):
                self._hear_call(event.type, data)
            case _:
                pass

    def _hear_run(self, run_id: str, event: StreamEvent) -> None:
        """Something that happened in a run of the agent: also what does not show in the space."""
        self._print(run_stream(run_id), event)
        data = _members(event)
        if event.type == "run.done" and run_id not in self._told:
            self._told.add(run_id)
            if data.get("status") == "failed":
                self._view.wrong(f"{self._room.agent.name} failed: {data.get('error') or 'nobody knows why'}")
            elif data.get("status") == "canceled":
                self._view.note("canceled")
        elif event.type.startswith("tool."):
            self._hear_call(event.type, data)

    def _hear_call(self, type: str, data: Mapping[str, Any]) -> None:
        if type in ("tool.done", "tool.error"):
            self._view.call_ended(data)
            self._questions.remove(str(data.get("toolCallId")))
        elif type != "tool.started":
            self._view.call_moved(data)
        elif data.get("spaceId") != self._room.space.id:
            pass  # What it does elsewhere is not a part of this conversation.
        elif data.get("status") == "requires_action" and data.get("executionTarget") == "client":
            self._questions.add(data)
        else:
            self._view.call_started(data)

    def _print(self, stream: str, event: StreamEvent) -> None:
        if self._options.json:
            fact = {"stream": stream, "id": event.id, "type": event.type, "at": now_ms(), "data": event.data}
            self._options.output.text(json_text.encode(fact))

    # What is typed

    async def _converse(self) -> None:
        while True:
            if not self._screen.keeps_typing:
                await self._work.wait_until_idle(unless=lambda: self._questions.form is not None)
                await self._catch_up()
                await self._questions.wait_until_ready()
            action = await self._screen.read()
            if action is ControlKey.INTERRUPT:
                if await self._interrupt():
                    return
            elif isinstance(action, SubmittedLine):
                self._armed_until = 0.0
                if await self._take(action.text):
                    return
            else:
                break
        if self._questions.form is not None:
            self._view.note("a question is left open; toolspace chat asks it again")

    async def _take(self, line: str) -> bool:
        """Does what a line asks for; whether it asks to leave."""
        word = line.strip()
        if word in ("/quit", "/exit"):
            return True
        if self._questions.form is not None and word not in ("/help", "/history", "/agents"):
            await self._questions.answer(line)
        elif _WORD.fullmatch(word):
            await self._obey(word)
        elif line.strip():
            try:
                said = await self._client.spaces.send_message(self._room.space.id, line, entity_id=self._room.me.id)
            except ApiError as error:
                self._view.wrong(error.detail or str(error))
            else:
                self._view.working()
                self._work.expect_event(f"space_message:{said.id}", said.created_at)
        return False

    async def _obey(self, word: str) -> None:
        if word == "/help":
            self._view.note(_HELP)
        elif word == "/history":
            self._view.recall((await self._client.spaces.list_messages(self._room.space.id, limit=_HISTORY)).items)
        elif word == "/agents":
            async for one in self._client.agents.all():
                here = " (here)" if one.id in self._room.names else ""
                self._view.note(f"  {one.name}{here}  {one.id}")
        elif word in ("/later", "/decline"):
            self._view.note("nothing is asked")
        else:
            self._view.wrong(f"there is no {word}{did_you_mean(word, _COMMANDS) or '; /help lists what there is'}")

    async def _interrupt(self) -> bool:
        """Ctrl-C: cancels what runs; whether it asks to leave."""
        now = asyncio.get_running_loop().time()
        if now < self._armed_until:
            return True
        self._armed_until = now + _TWICE_SECONDS
        if isinstance(self._screen, TerminalScreen):
            self._screen.editor.clear()
        if not await self._work.cancel():
            self._view.note("Ctrl-C again leaves; so do Ctrl-D and /quit")
        return False

    # What goes on around it

    async def _greet(self) -> None:
        room = self._room
        past = (await self._client.spaces.list_messages(room.space.id, limit=_REMEMBERED)).items
        self._said_up_to = max((one.seq for one in past), default=0)
        if self._screen.keeps_typing:
            self._view.recall(past)
            self._view.note(f'You talk to {room.agent.name} in "{room.space.name}" at {self._client.url}; /help helps.')
        await self._questions.load_open()

    async def _rest(self) -> None:
        """Says so whenever the agent has nothing more to do."""
        while True:
            await self._work.wait_until_idle()
            await self._catch_up()
            self._view.rests()
            await self._work.wait_until_busy()

    def _doubt(self) -> None:
        name = self._room.agent.name
        self._view.note(f"{name} has not looked at it yet; it waits in its inbox. Does any program run {name}?")

    async def _catch_up(self) -> None:
        """Waits for what was said and asked to be heard: that the agent is done may be known before its words are."""
        page = await self._client.spaces.list_messages(self._room.space.id, limit=_LATEST)
        said = max((one.seq for one in page.items if one.kind == "message" and one.status != "running"), default=0)
        asked = {one.call_id for one in page.items if one.status == "requires_action"}
        with suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_SECONDS), self._heard:
                await self._heard.wait_for(lambda: self._said_up_to >= said and self._questions.has_received(asked))


def _members(event: StreamEvent) -> Mapping[str, Any]:
    data: object = event.data
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}
