"""Runs a chat: shows the events of the space and of the agent's runs, and acts on what the person types."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast

from toolspace.cli.chat.conversation_view import ConversationView
from toolspace.cli.chat.questions import OpenQuestions
from toolspace.cli.chat.run_tracker import ChatContext, RunTracker
from toolspace.cli.chat.screen import ChatScreen, ControlKey, SubmittedLine
from toolspace.cli.event_loop import Interrupts, wait_for_signal
from toolspace.cli.options import Options
from toolspace.client.errors import ApiError
from toolspace.client.events import EventSubscription, StreamEvent
from toolspace.client.transport import quote_segment
from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.names import did_you_mean
from toolspace.core.stored_records import run_stream, space_stream

_GREETING_MESSAGES: Final = 4
"""Earlier messages that are shown at the start."""
_HISTORY_MESSAGES: Final = 30
_LATEST_MESSAGES: Final = 20
_CATCH_UP_SECONDS: Final = 5.0
_SECOND_INTERRUPT_SECONDS: Final = 3.0
_CONNECTION_NOTE_SECONDS: Final = 0.5
"""How long a connection is lost before the person is told so."""
_HELP: Final = """\
What you type is sent as a message to the space; the agent decides whether to answer.
  /history   show earlier messages
  /agents    list the agents of this gateway
  /later     leave a question unanswered; it stays open
  /say TEXT  send a message while a question is open
  /decline   decline a question of an MCP server
  /quit      leave; Ctrl-D does too
Ctrl-C cancels the run of the agent; pressed twice it leaves."""
_LEAVING_COMMANDS: Final = ("/quit", "/exit")
_COMMAND: Final = re.compile(r"/[a-z]+")
_COMMANDS: Final = ("/help", "/history", "/agents", "/later", "/say", "/decline", "/quit")


class Conversation:
    """One chat from its start until the person leaves."""

    def __init__(self, options: Options, context: ChatContext, screen: ChatScreen) -> None:
        self._options = options
        self._context = context
        self._client = context.client
        self._screen = screen
        self._runs = RunTracker(context, on_event=self._on_run_event, on_silence=self._on_silence)
        self._view = ConversationView(
            screen,
            options.output,
            person_id=context.person.id,
            agent_id=context.agent.id,
            names=context.names,
            is_busy=lambda: self._runs.is_busy,
        )
        self._questions = OpenQuestions(context, screen, self._view, self._runs)
        self._reported_runs: set[str] = set()
        """Runs whose end was shown."""
        self._last_seq = 0
        """The number of the last message that was shown."""
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        """Lines of a terminal that are not handled yet. While the gateway restarts, they wait."""
        self._connection_note: asyncio.TimerHandle | None = None
        self._is_disconnected = False
        """Whether the person was told that the connection is lost."""
        self._event_received = asyncio.Condition()
        self._leave_until = 0.0
        """Until when another Ctrl-C leaves, in the time of the loop."""

    async def run(self, interrupts: Interrupts) -> int:
        """Runs until the person leaves. Returns the exit code."""
        path = f"/api/spaces/{quote_segment(self._context.space.id)}/stream"
        native = {"format": "native"}  # An agent may have another default.
        stream = self._client.stream(path, query=native, on_connection=self._on_connection)
        event_task = asyncio.ensure_future(self._follow(stream))
        connected = asyncio.ensure_future(stream.connected.wait())
        tasks: set[asyncio.Future[Any]] = {event_task, connected}
        try:
            # Connected before anything is sent, so that no event is missed.
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if event_task.done():
                await event_task
            await self._greet()
            tasks |= {
                asyncio.ensure_future(work)
                for work in (
                    self._runs.run(),
                    self._show_idle(),
                    self._handle_input(),
                    self._handle_lines(),
                    wait_for_signal(interrupts),
                )
            }
            tasks.discard(connected)
            done_tasks, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done_tasks:
                await task  # Raises its error, if it has one.
        finally:
            stream.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._cancel_connection_note()
            await self._runs.aclose()
            self._view.abort_message()
        if interrupts.signal is not None:
            await self._runs.cancel()
        return 1 if self._runs.has_failed and not self._screen.is_interactive else 0

    # Connection

    def _on_connection(self, is_connected: bool) -> None:
        """Shows that the connection is lost, unless it returns at once, and that it has returned."""
        self._cancel_connection_note()
        if not is_connected:
            loop = asyncio.get_running_loop()
            self._connection_note = loop.call_later(_CONNECTION_NOTE_SECONDS, self._show_disconnected)
        elif self._is_disconnected:
            self._is_disconnected = False
            self._view.show_note("reconnected to the gateway")

    def _show_disconnected(self) -> None:
        self._is_disconnected = True
        self._view.show_note("the connection to the gateway is lost; reconnecting. What you type is sent then")

    def _cancel_connection_note(self) -> None:
        if self._connection_note is not None:
            self._connection_note.cancel()

    # Events

    async def _follow(self, stream: EventSubscription) -> None:
        async for event in stream:
            self._print_json(space_stream(self._context.space.id), event)
            await self._load_sender(event)
            self._on_space_event(event)
            async with self._event_received:
                self._event_received.notify_all()

    async def _load_sender(self, event: StreamEvent) -> None:
        """Loads the name of a sender who joined the space after the start, such as the receiver of a handoff."""
        data = _event_data(event)
        message: Mapping[str, Any] = data.get("message", {}) if event.type == "message.done" else data
        sender = message.get("senderId")
        names = self._context.names
        if isinstance(sender, str) and sender not in names:
            names[sender] = sender  # Asked only once; a sender who is not a member keeps its id as the name.
            with suppress(ApiError):
                members = await self._client.spaces.list_members(self._context.space.id)
                names.update({member.entity_id: member.name for member in members})

    def _on_space_event(self, event: StreamEvent) -> None:
        data = _event_data(event)
        match event.type:
            case "message.started":
                self._view.start_message(data)
            case "message.delta":
                self._view.append_delta(data)
            case "message.done":
                message: Mapping[str, Any] = data.get("message", {})
                self._view.finish_message(message)
                self._last_seq = max(self._last_seq, int(message.get("seq", 0)))
            case "run.started" if data.get("agentEntityId") == self._context.agent.id:
                self._view.show_working()
                self._runs.add_run(str(data.get("runId")))
            case _ if event.type.startswith(("tool.", "approval.")):
                self._on_call_event(event.type, data)
            case _:
                pass

    def _on_run_event(self, run_id: str, event: StreamEvent) -> None:
        """Handles an event of a run, which also has events that the space does not show."""
        self._print_json(run_stream(run_id), event)
        data = _event_data(event)
        if event.type == "run.done" and run_id not in self._reported_runs:
            self._reported_runs.add(run_id)
            if data.get("status") == "failed":
                reason = data.get("error") or "the reason is unknown"
                self._view.show_problem(f"{self._context.agent.name} failed: {reason}")
            elif data.get("status") == "canceled":
                self._view.show_note("canceled")
            elif data.get("spoke") is False and self._runs.answers_here(run_id) and not self._questions.has_of(run_id):
                self._view.show_note(f"{self._context.agent.name} has ended its run without a message")
        elif event.type.startswith(("tool.", "approval.")):
            self._on_call_event(event.type, data)

    def _on_call_event(self, event_type: str, data: Mapping[str, Any]) -> None:
        if event_type in ("tool.done", "tool.error"):
            self._view.finish_call(data)
            self._questions.remove(str(data.get("toolCallId")))
        elif event_type == "approval.requested":
            self._questions.add_approval(data)
        elif event_type == "approval.decided":
            self._questions.remove_approval(str(data.get("toolCallId")))
        elif event_type not in ("tool.started", "tool.ready"):
            self._view.update_call(data)
        elif data.get("spaceId") != self._context.space.id:
            pass  # A call in another space is not part of this chat.
        elif event_type == "tool.started":
            self._view.update_call(data)
        elif data.get("status") == "requires_action" and data.get("executionTarget") == "client":
            self._questions.add(data)
        else:
            self._view.start_call(data)

    def _print_json(self, stream: str, event: StreamEvent) -> None:
        if self._options.json:
            record = {"stream": stream, "id": event.id, "type": event.type, "at": now_ms(), "data": event.data}
            self._options.output.text(json_text.encode(record))

    # Input

    async def _handle_input(self) -> None:
        """Reads and handles input until the person leaves."""
        while True:
            if not self._screen.is_interactive:
                await self._runs.wait_until_idle(unless=lambda: self._questions.form is not None)
                await self._catch_up()
            action = await self._screen.read()
            if action is ControlKey.INTERRUPT:
                if await self._interrupt():
                    return
            elif isinstance(action, SubmittedLine):
                self._leave_until = 0.0
                if action.text.strip() in _LEAVING_COMMANDS:
                    return
                if self._screen.is_interactive:
                    self._lines.put_nowait(action.text)
                else:
                    await self._handle_line(action.text)
            else:
                break
        if self._questions.form is not None:
            self._view.show_note("a question is left open; the next toolspace chat asks it again")

    async def _handle_lines(self) -> None:
        """Handles the lines of a terminal one after the other. Keys such as Ctrl-C do not wait for them."""
        while True:
            await self._handle_line(await self._lines.get())

    async def _handle_line(self, line: str) -> None:
        """Runs a command, answers a question or sends a message."""
        word = line.strip()
        if word == "/say" or word.startswith("/say "):
            await self._send(word.removeprefix("/say").strip())
        elif self._questions.form is not None and word not in ("/help", "/history", "/agents"):
            if not await self._questions.answer(line):
                await self._send(line)
                self._view.show_note("sent as a message; the question is still open")
        elif _COMMAND.fullmatch(word):
            await self._run_command(word)
        elif word:
            await self._send(line)

    async def _send(self, line: str) -> None:
        if not line:
            self._view.show_problem("there is no text to send")
            return
        space_id = self._context.space.id
        try:
            message = await self._client.spaces.send_message(space_id, line, entity_id=self._context.person.id)
        except ApiError as error:
            self._view.show_problem(error.detail or str(error))
        else:
            self._view.show_working()
            self._runs.expect_event(f"space_message:{message.id}", message.created_at)

    async def _run_command(self, word: str) -> None:
        if word == "/help":
            self._view.show_note(_HELP)
        elif word == "/history":
            page = await self._client.spaces.list_messages(self._context.space.id, limit=_HISTORY_MESSAGES)
            self._view.show_history(page.items)
        elif word == "/agents":
            async for agent in self._client.agents.all():
                mark = " (here)" if agent.id in self._context.names else ""
                self._view.show_note(f"  {agent.name}{mark}  {agent.id}")
        elif word in ("/later", "/decline"):
            self._view.show_note("there is no open question")
        else:
            hint = did_you_mean(word, _COMMANDS) or "; /help lists the commands"
            self._view.show_problem(f"there is no {word}{hint}")

    async def _interrupt(self) -> bool:
        """Cancels the runs of the agent on Ctrl-C. Returns whether the person leaves."""
        now = asyncio.get_running_loop().time()
        if now < self._leave_until:
            return True
        self._leave_until = now + _SECOND_INTERRUPT_SECONDS
        self._screen.clear_input()
        if not await self._runs.cancel():
            self._view.show_note("Ctrl-C again leaves; so do Ctrl-D and /quit")
        return False

    # Start, idle and silence

    async def _greet(self) -> None:
        context = self._context
        messages = (await self._client.spaces.list_messages(context.space.id, limit=_GREETING_MESSAGES)).items
        self._last_seq = max((message.seq for message in messages), default=0)
        if self._screen.is_interactive:
            self._view.show_history(messages)
            place = f'"{context.space.name}" at {self._client.url}'
            self._view.show_note(f"Chat with {context.agent.name} in {place}; /help for help.")
        await self._questions.load_open()

    async def _show_idle(self) -> None:
        """Removes the activity whenever the agent has nothing more to do."""
        while True:
            await self._runs.wait_until_idle()
            await self._catch_up()
            self._view.show_idle()
            await self._runs.wait_until_busy()

    def _on_silence(self) -> None:
        name = self._context.agent.name
        self._view.show_note(f"{name} has not handled the message yet; it is in its inbox. Does a program run {name}?")

    async def _catch_up(self) -> None:
        """Waits until stored messages and questions are shown: the end of a run may arrive before its messages."""
        page = await self._client.spaces.list_messages(self._context.space.id, limit=_LATEST_MESSAGES)
        messages = [entry for entry in page.items if entry.kind == "message" and entry.status != "running"]
        last_seq = max((message.seq for message in messages), default=0)
        call_ids = {entry.call_id for entry in page.items if entry.status == "requires_action"}
        with suppress(TimeoutError):
            async with asyncio.timeout(_CATCH_UP_SECONDS), self._event_received:
                await self._event_received.wait_for(
                    lambda: self._last_seq >= last_seq and self._questions.has_received(call_ids)
                )


def _event_data(event: StreamEvent) -> Mapping[str, Any]:
    data: object = event.data
    return cast("dict[str, Any]", data) if isinstance(data, dict) else {}
