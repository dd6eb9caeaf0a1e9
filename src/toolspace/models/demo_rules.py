"""The rules of the demo model: the first rule whose pattern matches a person's message answers it.

A rule is a text, or a script: a generator that yields the tool calls it wants, gets their results back, and returns the
text to send. It depends on nothing else: the same results lead to the same calls, so that `demo_model` can run it again
up to any point. Knows no conversation and no model.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple, TypeVar, cast
from zoneinfo import available_timezones

from toolspace.core import json_text

T = TypeVar("T")

_MAX_LISTED: Final = 30
"""The length limit of a list in a message."""
_MAX_SHOWN: Final = 1_500
"""Characters of a file in a message."""
KEY_VARIABLES: Final = "OPENAI_API_KEY, ANTHROPIC_API_KEY or GEMINI_API_KEY"
GREETING: Final = (
    "Hello! I am the demo agent: a few rules instead of a model, but the tools are real. Try one of these:\n"
    "  what time is it in Tokyo?\n"
    "  list the files, then: read welcome.txt\n"
    "  chart the sales\n"
    "  clean up the drafts (I ask you before I delete anything)\n"
    "  remember that my train leaves at nine, then: what do you remember?\n"
    "  remind me in 10 seconds to stretch\n"
    f"For a real model, set {KEY_VARIABLES} and restart the gateway."
)
NOT_UNDERSTOOD: Final = (
    "I did not understand that: I am the demo, a few rules, and no model is configured. "
    f'Set {KEY_VARIABLES} and restart the gateway to talk to a real one. Say "help" for what I can do.'
)


class WantedCall(NamedTuple):
    """A tool call that a script wants."""

    name: str
    arguments: Mapping[str, Any]


class CallOutcome(NamedTuple):
    """The result of a call."""

    text: str
    failed: bool = False

    @property
    def data(self) -> Mapping[str, Any]:
        """The result as an object; empty if it is none."""
        try:
            value = json_text.decode(self.text)
        except ValueError:
            return {}
        return cast("Mapping[str, Any]", value) if isinstance(value, dict) else {}

    @property
    def reason(self) -> str:
        """Why the call failed."""
        return self.text.removeprefix("(tool failed: ").removesuffix(")")


class DemoRequest(NamedTuple):
    """A person's message in a space, and the folder of the demo's files."""

    text: str
    space_id: str
    folder: str | None


class DemoCallError(Exception):
    """A call of a script failed. The message is sent instead of the text that the script would return."""


DemoScript = Generator[WantedCall, CallOutcome, T]
DemoReply = str | DemoScript[str]
DemoRule = str | Callable[[DemoRequest, "re.Match[str]"], DemoScript[str]]


def find_reply(request: DemoRequest) -> DemoReply:
    """The text or the script of the first rule that matches a person's message."""
    request = request._replace(text=" ".join(request.text.split()))
    for pattern, rule in _RULES:
        match = re.search(pattern, request.text, re.IGNORECASE)
        if match is not None:
            return rule if isinstance(rule, str) else rule(request, match)
    return NOT_UNDERSTOOD


def send_reply(reply: DemoReply) -> DemoScript[None]:
    """Runs a script and sends the text that it returns."""
    try:
        text = reply if isinstance(reply, str) else (yield from reply)
    except DemoCallError as error:
        text = str(error)
    yield WantedCall("send_message", {"text": text})


def _call(name: str, arguments: Mapping[str, Any], failure: str) -> DemoScript[Mapping[str, Any]]:
    """The result of a call. Raises `DemoCallError`, which begins with `failure`."""
    outcome = yield WantedCall(name, arguments)
    if outcome.failed:
        raise DemoCallError(f"{failure}: {outcome.reason}")
    return outcome.data


# Files


class _File(NamedTuple):
    name: str
    """Relative to the folder."""
    path: str
    size: int


def _list_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    files = yield from _list_folder(request)
    if not files:
        return "The folder is empty."
    lines = [f"  {file.name} ({file.size} bytes)" for file in files[:_MAX_LISTED]]
    more = [f"  … and {len(files) - _MAX_LISTED} more"] if len(files) > _MAX_LISTED else []
    return "\n".join([f"In {request.folder}:", *lines, *more])


def _read_file(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    files = yield from _list_folder(request)
    matching_files = _find_named(files, request.text)
    if len(matching_files) != 1:
        return f"Which file? There is {_join_names(matching_files or files) or 'none at all'}."
    file = matching_files[0]
    data = yield from _call("read_file", {"path": file.path}, f"I cannot read {file.name}")
    text = str(data.get("content", ""))
    excerpt = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
    return f"{file.name}:\n{excerpt.strip() or '(it is empty)'}"


def _search_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    folder = _get_folder(request)
    phrase = (match["what"] or match["other"]).strip(" ?.!\"'")
    arguments = {"pattern": re.escape(phrase), "path": folder, "ignoreCase": True}
    data = yield from _call("grep_files", arguments, "I cannot search")
    hits: Sequence[Mapping[str, Any]] = data.get("matches") or ()
    lines = [
        f"  {_relative_name(folder, str(hit.get('path')))}:{hit.get('line')}: {str(hit.get('text', '')).strip()}"
        for hit in hits[:_MAX_LISTED]
    ]
    return "\n".join([f'"{phrase}" is in:', *lines]) if lines else f'No file has "{phrase}" in it.'


def _delete_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    files = yield from _list_folder(request)
    matching_files = _find_named(files, match["what"])
    if not matching_files:
        return f"I do not know what to delete. There is {_join_names(files) or 'nothing'}."
    names = ", ".join(file.name for file in matching_files)
    confirmation = {
        "action": f"Delete {names}",
        "details": f"{sum(file.size for file in matching_files)} bytes in all; they cannot be brought back.",
        "items": [file.path for file in matching_files],
    }
    outcome = yield WantedCall("confirmAction", confirmation)
    if outcome.failed:
        return f"I delete nothing without asking, and I cannot ask: {outcome.reason}"
    if outcome.data.get("status") == "pending":
        return f"Shall I delete {names}? I wait for your answer to the question above."
    return (yield from continue_deletion(confirmation, outcome))


def continue_deletion(confirmation: Mapping[str, Any], outcome: CallOutcome) -> DemoScript[str]:
    """Deletes the files of a confirmation if people agreed."""
    paths = [str(path) for path in confirmation.get("items") or ()]
    names = str(confirmation.get("action", "")).removeprefix("Delete ")
    if outcome.failed:
        return f"I delete nothing: {outcome.reason}"
    if not _is_agreement(outcome.text):
        return f"All right, I keep {names}."
    problems: list[str] = []
    for path in paths:
        deletion = yield WantedCall("delete_file", {"path": path})
        if deletion.failed:
            problems.append(f"{PurePath(path).name}: {deletion.reason}")
    return f"Not all of it could be deleted. {'; '.join(problems)}" if problems else f"Deleted {names}."


def _is_agreement(text: str) -> bool:
    """Whether a person's answer means yes: `{"confirmed": true}`, `true`, "yes" and the like."""
    try:
        answer: Any = json_text.decode(text)
    except ValueError:
        answer = text
    if isinstance(answer, dict):
        fields = cast("dict[str, Any]", answer)
        keys = ("confirmed", "approved", "accepted", "answer", "value")
        answer = next((fields[key] for key in keys if key in fields), False)
    return answer is True or (
        isinstance(answer, str) and answer.strip().lower() in ("yes", "y", "true", "ok", "confirm")
    )


def _list_folder(request: DemoRequest) -> DemoScript[Sequence[_File]]:
    folder = _get_folder(request)
    data = yield from _call("list_files", {"path": folder, "recursive": True}, "I cannot look into the folder")
    entries: Sequence[Mapping[str, Any]] = data.get("files") or ()
    return [
        _File(_relative_name(folder, str(entry["path"])), str(entry["path"]), int(entry.get("size") or 0))
        for entry in entries
        if entry.get("type") == "file"
    ]


def _get_folder(request: DemoRequest) -> str:
    if request.folder is None:
        raise DemoCallError("I was given no folder to look into.")
    return request.folder


def _join_names(files: Sequence[_File]) -> str:
    return ", ".join(file.name for file in files[:_MAX_LISTED])


def _relative_name(folder: str, path: str) -> str:
    return path.removeprefix(folder.rstrip("/") + "/")


def _find_named(files: Sequence[_File], text: str) -> list[_File]:
    """The files that a text means: by their names, else by words in their names."""
    text = text.lower()
    matches = [file for file in files if file.name.lower() in text or PurePath(file.name).name.lower() in text]
    if matches:
        return matches
    # "drafts" means names with "draft". Short words are in too many names.
    words = [word.rstrip("s") for word in re.findall(r"[\w-]{4,}", text) if word not in _COMMON_WORDS]
    return [file for file in files if any(word in file.name.lower() for word in words)]


_COMMON_WORDS: Final = frozenset(
    ("clean", "delete", "remove", "tidy", "file", "files", "folder", "please", "read", "show", "open", "that", "what")
)


# Charts


def _draw_chart(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    files = yield from _list_folder(request)
    tables = [file for file in files if file.name.lower().endswith(".csv")]
    matching_files = _find_named(tables, request.text) or tables
    if not matching_files:
        return "There is no table (.csv) to draw a chart of."
    file = matching_files[0]
    data = yield from _call("read_file", {"path": file.path}, f"I cannot read {file.name}")
    title, labels, values = _read_columns(str(data.get("content", "")), file.name)
    if not values:
        return f"{file.name} has no column of numbers."
    chart = {"title": title, "type": "bar", "labels": labels, "values": values}
    yield from _call("displayChart", chart, "I cannot show a chart")
    largest = labels[values.index(max(values))]
    return f"Here is {title}, from {file.name}: {sum(values):g} in all, and most of it in {largest}."


def _read_columns(text: str, name: str) -> tuple[str, list[str], list[float]]:
    """The title, the labels of the first column, and the values of the first column with numbers in every row."""
    rows = [row for row in csv.reader(text.splitlines()) if row]
    if len(rows) < 2:
        return name, [], []
    head, *body = rows
    for column in range(1, len(head)):
        try:
            values = [float(row[column]) for row in body]
        except (ValueError, IndexError):
            continue
        return f"{head[column]} by {head[0]}".capitalize(), [row[0] for row in body], values
    return name, [], []


# Time

_CITIES: Final = {
    "beijing": "Asia/Shanghai",
    "boston": "America/New_York",
    "delhi": "Asia/Kolkata",
    "hamburg": "Europe/Berlin",
    "london": "Europe/London",
    "mumbai": "Asia/Kolkata",
    "munich": "Europe/Berlin",
    "new delhi": "Asia/Kolkata",
    "nyc": "America/New_York",
    "san francisco": "America/Los_Angeles",
    "seattle": "America/Los_Angeles",
    "washington": "America/New_York",
}
"""Cities whose name is in no time zone, or in more than one."""
_PLACE: Final = re.compile(r"\b(?:in|at) ([^?.!,;]+)", re.IGNORECASE)


def _tell_time(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    place = _PLACE.search(request.text)
    arguments = {"timezone": _find_time_zone(place[1].strip())} if place is not None else {}
    data = yield from _call("current_time", arguments, "I cannot tell")
    date, _, clock = str(data.get("iso", "")).partition("T")
    return f"It is {clock[:5]} on {date} in {data.get('timezone')}."


_list_time_zones = functools.cache(available_timezones)


def _find_time_zone(place: str) -> str:
    """The time zone of a place, or the place itself if it has none: the tool then explains what it accepts."""
    if (zone := _CITIES.get(place.lower())) is not None:
        return zone
    name = place.replace(" ", "_").lower()
    zones = (zone for zone in _list_time_zones() if name in (zone.lower(), zone.lower().rpartition("/")[2]))
    # Some zones have two names, such as Asia/Tokyo and Japan: the one with a continent is the current name.
    return min(zones, key=lambda zone: ("/" not in zone, zone), default=place)


# Memories and reminders


def _remember(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    text = match["what"].strip(" .!")
    key = re.sub(r"\W+", "-", text.lower()).strip("-")[:60] or "note"
    yield from _call("set_memories", {"memories": [{"key": key, "value": text}]}, "I cannot remember it")
    return f"I will remember: {text}."


def _recall(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    data = yield from _call("get_memories", {}, "I cannot remember")
    memories: Sequence[Mapping[str, Any]] = data.get("memories") or ()
    values = [memory["value"] for memory in memories]
    lines = [f"  {value if isinstance(value, str) else json_text.encode(value)}" for value in values]
    return "\n".join(["I remember:", *lines[:_MAX_LISTED]]) if lines else "Nothing yet; tell me something."


def _forget(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    data = yield from _call("get_memories", {}, "I cannot")
    memories: Sequence[Mapping[str, Any]] = data.get("memories") or ()
    phrase = match["what"].strip(" .!?").lower()
    is_all = phrase in ("it", "all", "all of it", "everything")
    keys = [str(memory["key"]) for memory in memories if is_all or phrase in json_text.encode(memory).lower()]
    if not keys:
        return "I remember nothing like that."
    yield from _call("delete_memories", {"keys": keys}, "I cannot forget it")
    return f"Forgotten: {', '.join(keys)}."


_REMINDER: Final = re.compile(r"Remind in (?P<space>\S+): (?P<what>.+)", re.DOTALL)
_DELAY: Final = r"(?P<wait>(?:an?|\d[\d.]*) ?[a-z]+(?:(?:,| and) (?:an?|\d[\d.]*) ?[a-z]+)*)"
_REMINDER_REQUESTS: Final = (
    re.compile(rf"\bremind me in {_DELAY}(?: to| that| of| about)?(?: (?P<what>.+))?$", re.IGNORECASE),
    re.compile(rf"\bremind me(?: to| that| of| about)? (?P<what>.+) in {_DELAY}[.!]?$", re.IGNORECASE),
)


def _remind(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    reminder = next(filter(None, (pattern.search(request.text) for pattern in _REMINDER_REQUESTS)), None)
    if reminder is None:
        return 'When? Say it like this: "remind me in 10 seconds to stretch".'
    text, delay = (reminder["what"] or "it is time").strip(" .!"), reminder["wait"]
    plan = {"name": "Reminder", "instruction": f"Remind in {request.space_id}: {text}", "runAfter": delay}
    yield from _call("set_plans", {"plans": [plan]}, "I cannot plan that")
    return f"I will remind you in {delay}: {text}."


def parse_reminder(instruction: str) -> tuple[str, str] | None:
    """The space and the text of a reminder that the demo planned."""
    match = _REMINDER.match(instruction)
    return (match["space"], match["what"].strip()) if match is not None else None


def _introduce(request: DemoRequest, match: re.Match[str]) -> DemoScript[str]:
    data = yield from _call("get_space_context", {}, "I cannot see that")
    members: Sequence[Mapping[str, Any]] = data.get("members") or ()
    names = ", ".join(f"{member.get('name')} ({member.get('type')})" for member in members[:_MAX_LISTED])
    return f'In "{data.get("spaceName")}" there is {names}.'


_RULES: Final[Sequence[tuple[str, DemoRule]]] = (
    (r"\bremind me\b", _remind),
    (r"\bwhat (?:do|can|did) you (?:still )?(?:remember|know)\b", _recall),
    (r"^(?:please |can you |could you )?(?:remember|note)(?: that|:)? (?P<what>.+)", _remember),
    (r"^(?:please )?forget (?:about |that )?(?P<what>.+)", _forget),
    (r"\b(?:chart|plot|graph|diagram|draw)\b", _draw_chart),
    (r"\b(?:delete|remove|clean[ -]?up|tidy(?: up)?)\b(?P<what>.*)", _delete_files),
    (r"\b(?:what time|the time\b|time is it|what is the date|what day)", _tell_time),
    (r"\b(?:search|look)\b.*? for (?P<what>.+)|^(?:find|search|grep) (?P<other>.+)", _search_files),
    (r"\b(?:list|which|what|show)\b.*\b(?:files|folder|documents)\b|^ls\b", _list_files),
    (r"\b(?:read|show|open|print|cat)\b|\bwhat(?: is|'s) in\b", _read_file),
    (r"\bwho(?: is|'s) (?:here|there|in)\b", _introduce),
    (r"\b(?:thanks|thank you|bye|goodbye)\b", "You are welcome."),
    (r"^(?:hi|hello|hey|help|good (?:morning|day|evening)|\?)\b|\bwhat can you do\b|\bwho are you\b|^\?", GREETING),
)
"""The patterns, in order of precedence, and their rules."""
