"""What a rule of the demo is made of: a script that yields the calls it wants, one by one, and is sent their answers.

It depends on nothing else: the same answers lead to the same calls, so that it can be run again up to any place.
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

MOST_LISTED: Final = 30
"""Lines of a list that are said."""


class WantedCall(NamedTuple):
    """A tool call that a script wants."""

    name: str
    arguments: Mapping[str, Any]


class CallOutcome(NamedTuple):
    """What came of it."""

    text: str
    failed: bool = False

    @property
    def data(self) -> Mapping[str, Any]:
        """The answer as an object; empty where it is none."""
        try:
            found = json_text.decode(self.text)
        except ValueError:
            return {}
        return cast("Mapping[str, Any]", found) if isinstance(found, dict) else {}

    @property
    def reason(self) -> str:
        """Why it failed, without the words around it."""
        return self.text.removeprefix("(tool failed: ").removesuffix(")")


class DemoRequest(NamedTuple):
    """What a person said in a space, and where the demo's files are."""

    text: str
    space_id: str
    folder: str | None


DemoScript = Generator[WantedCall, CallOutcome, T]
DemoRule = Callable[[DemoRequest, "re.Match[str]"], DemoScript[None]]


def send_message(text: str) -> DemoScript[CallOutcome]:
    return (yield WantedCall("send_message", {"text": text}))


# MERGED from demofiles: The demo's rules about files: lists, reads and searches its folder, asks before it deletes…

_MOST_SHOWN: Final = 1_500
"""Characters of a file that are said."""
_NO_FOLDER: Final = "I was given no folder to look into."


class _File(NamedTuple):
    name: str
    """Within the folder."""
    path: str
    size: int


def list_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    found = yield from _files(request)
    if not found:
        if found is not None:
            yield from send_message("The folder is empty.")
        return
    lines = [f"  {file.name} ({file.size} bytes)" for file in found[:MOST_LISTED]]
    more = [f"  … and {len(found) - MOST_LISTED} more"] if len(found) > MOST_LISTED else []
    yield from send_message("\n".join([f"In {request.folder}:", *lines, *more]))


def read_file(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    found = yield from _files(request)
    if found is None:
        return
    chosen = _named(found, request.text)
    if len(chosen) != 1:
        names = ", ".join(file.name for file in (chosen or found)[:MOST_LISTED]) or "none at all"
        yield from send_message(f"Which file? There is {names}.")
        return
    heard = yield WantedCall("read_file", {"path": chosen[0].path})
    text = str(heard.data.get("content", ""))
    if heard.failed:
        yield from send_message(f"I cannot read {chosen[0].name}: {heard.reason}")
    else:
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
        yield from send_message(f"{chosen[0].name}:\n{shown.strip() or '(it is empty)'}")


def search_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    if request.folder is None:
        yield from send_message(_NO_FOLDER)
        return
    wanted = (match["what"] or match["other"]).strip(" ?.!\"'")
    heard = yield WantedCall("grep_files", {"pattern": re.escape(wanted), "path": request.folder, "ignoreCase": True})
    if heard.failed:
        yield from send_message(f"I cannot search: {heard.reason}")
        return
    hits: Sequence[Mapping[str, Any]] = heard.data.get("matches") or ()
    lines = [
        f"  {_within(request.folder, str(hit.get('path')))}:{hit.get('line')}: {str(hit.get('text', '')).strip()}"
        for hit in hits[:MOST_LISTED]
    ]
    yield from send_message("\n".join([f'"{wanted}" is in:', *lines]) if lines else f'No file has "{wanted}" in it.')


def delete_files(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    found = yield from _files(request)
    if found is None:
        return
    chosen = _named(found, match["what"])
    if not chosen:
        names = ", ".join(file.name for file in found[:MOST_LISTED]) or "nothing"
        yield from send_message(f"I do not know what to delete. There is {names}.")
        return
    names = ", ".join(file.name for file in chosen)
    asked = {
        "action": f"Delete {names}",
        "details": f"{sum(file.size for file in chosen)} bytes in all; they cannot be brought back.",
        "items": [file.path for file in chosen],
    }
    heard = yield WantedCall("confirmAction", asked)
    if heard.failed:
        yield from send_message(f"I delete nothing without asking, and I cannot ask: {heard.reason}")
    elif heard.data.get("status") == "pending":
        yield from send_message(f"Shall I delete {names}? I wait for your answer to the question above.")
    else:
        yield from continue_deletion(asked, heard)


def continue_deletion(asked: Mapping[str, Any], heard: CallOutcome) -> DemoScript[None]:
    """Goes on after people were asked whether files may be deleted."""
    paths = [str(path) for path in asked.get("items") or ()]
    names = str(asked.get("action", "")).removeprefix("Delete ")
    if heard.failed:
        yield from send_message(f"I delete nothing: {heard.reason}")
        return
    if not is_agreement(heard.text):
        yield from send_message(f"All right, I keep {names}.")
        return
    failed: list[str] = []
    for path in paths:
        done = yield WantedCall("delete_file", {"path": path})
        if done.failed:
            failed.append(f"{PurePath(path).name}: {done.reason}")
    if failed:
        yield from send_message("Not all of it could be deleted. " + "; ".join(failed))
    else:
        yield from send_message(f"Deleted {names}.")


def is_agreement(text: str) -> bool:
    """Whether an answer means yes: `{"confirmed": true}`, `true`, "yes" and their like."""
    try:
        said: Any = json_text.decode(text)
    except ValueError:
        said = text
    if isinstance(said, dict):
        given = cast("dict[str, Any]", said)
        said = next((given[key] for key in ("confirmed", "approved", "accepted", "answer", "value") if key in given), 0)
    return said is True or (isinstance(said, str) and said.strip().lower() in ("yes", "y", "true", "ok", "confirm"))


def _files(request: DemoRequest) -> DemoScript[Sequence[_File] | None]:
    """The files of the folder; None where that failed, and was said."""
    if request.folder is None:
        yield from send_message(_NO_FOLDER)
        return None
    heard = yield WantedCall("list_files", {"path": request.folder, "recursive": True})
    if heard.failed:
        yield from send_message(f"I cannot look into the folder: {heard.reason}")
        return None
    entries: Sequence[Mapping[str, Any]] = heard.data.get("files") or ()
    return [
        _File(_within(request.folder, str(one["path"])), str(one["path"]), int(one.get("size") or 0))
        for one in entries
        if one.get("type") == "file"
    ]


def _within(folder: str, path: str) -> str:
    return path.removeprefix(folder.rstrip("/") + "/")


def _named(files: Sequence[_File], text: str) -> list[_File]:
    """The files that a text means: by their names, else by words that are in their paths."""
    said = text.lower()
    exact = [file for file in files if file.name.lower() in said or PurePath(file.name).name.lower() in said]
    if exact:
        return exact
    # "drafts" means what has "draft" in it; short words are in too many names.
    words = [word.rstrip("s") for word in re.findall(r"[\w-]{4,}", said) if word not in _NO_NAMES]
    return [file for file in files if any(word in file.name.lower() for word in words)]


_NO_NAMES: Final = frozenset(
    ("clean", "delete", "remove", "tidy", "file", "files", "folder", "please", "read", "show", "open", "that", "what")
)


# A chart


def draw_chart(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    found = yield from _files(request)
    if found is None:
        return
    tables = [file for file in found if file.name.lower().endswith(".csv")]
    chosen = _named(tables, request.text) or tables
    if not chosen:
        yield from send_message("There is no table (.csv) to draw a chart of.")
        return
    heard = yield WantedCall("read_file", {"path": chosen[0].path})
    if heard.failed:
        yield from send_message(f"I cannot read {chosen[0].name}: {heard.reason}")
        return
    title, labels, values = _columns(str(heard.data.get("content", "")), chosen[0].name)
    if not values:
        yield from send_message(f"{chosen[0].name} has no column of numbers.")
        return
    shown = yield WantedCall("displayChart", {"title": title, "type": "bar", "labels": labels, "values": values})
    if shown.failed:
        yield from send_message(f"I cannot show a chart: {shown.reason}")
        return
    best = labels[values.index(max(values))]
    yield from send_message(
        f"Here is {title}, from {chosen[0].name}: {sum(values):g} in all, and most of it in {best}."
    )


def _columns(text: str, name: str) -> tuple[str, list[str], list[float]]:
    """The first column as labels, and the first one with numbers in every row as values."""
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


# MERGED from demorules: What the demo does about what people say: rules over words, the first that fits. Knows no …

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


def run_first_match(request: DemoRequest) -> DemoScript[None]:
    """Does what a person asks for, by the first rule that fits."""
    said = " ".join(request.text.split())
    for pattern, rule in _RULES:
        if (match := pattern.search(said)) is not None:
            yield from rule(request, match)
            return
    yield from send_message(NOT_UNDERSTOOD)


def _greet(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    yield from send_message(GREETING)


def _welcome(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    yield from send_message("You are welcome.")


# The clock

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
"""Places that no time zone is named after, or more than one."""
_PLACE: Final = re.compile(r"\b(?:in|at) ([^?.!,;]+)", re.IGNORECASE)


def _tell_time(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    named = _PLACE.search(" ".join(request.text.split()))
    zone = _zone_of(named[1].strip()) if named is not None else None
    heard = yield WantedCall("current_time", {"timezone": zone} if zone is not None else {})
    if heard.failed:
        yield from send_message(f"I cannot tell: {heard.reason}")
        return
    date, _, clock = str(heard.data.get("iso", "")).partition("T")
    yield from send_message(f"It is {clock[:5]} on {date} in {heard.data.get('timezone')}.")


@functools.cache
def _zone_names() -> frozenset[str]:
    return frozenset(available_timezones())


def _zone_of(place: str) -> str:
    """The time zone of a place; the place itself where nobody knows, so that the tool says what it takes."""
    if (known := _CITIES.get(place.lower())) is not None:
        return known
    wanted = place.replace(" ", "_").lower()
    fitting = (zone for zone in _zone_names() if wanted in (zone.lower(), zone.lower().rpartition("/")[2]))
    # Some are there twice, as Asia/Tokyo and Japan are: those with a continent are the present names.
    return min(fitting, key=lambda zone: ("/" not in zone, zone), default=place)


# What it keeps in mind


def _remember(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    what = match["what"].strip(" .!")
    key = re.sub(r"\W+", "-", what.lower()).strip("-")[:60] or "note"
    heard = yield WantedCall("set_memories", {"memories": [{"key": key, "value": what}]})
    yield from send_message(f"I cannot remember it: {heard.reason}" if heard.failed else f"I will remember: {what}.")


def _recall(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    heard = yield WantedCall("get_memories", {})
    if heard.failed:
        yield from send_message(f"I cannot remember: {heard.reason}")
        return
    kept: Sequence[Mapping[str, Any]] = heard.data.get("memories") or ()
    lines = [f"  {one['value'] if isinstance(one['value'], str) else json_text.encode(one['value'])}" for one in kept]
    yield from send_message(
        "\n".join(["I remember:", *lines[:MOST_LISTED]]) if lines else "Nothing yet; tell me something."
    )


def _forget(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    heard = yield WantedCall("get_memories", {})
    kept: Sequence[Mapping[str, Any]] = heard.data.get("memories") or ()
    wanted = match["what"].strip(" .!?").lower()
    everything = wanted in ("it", "all", "all of it", "everything")
    keys = [str(one["key"]) for one in kept if everything or wanted in json_text.encode(one).lower()]
    if not keys:
        yield from send_message(f"I cannot: {heard.reason}" if heard.failed else "I remember nothing like that.")
        return
    gone = yield WantedCall("delete_memories", {"keys": keys})
    yield from send_message(f"I cannot forget it: {gone.reason}" if gone.failed else f"Forgotten: {', '.join(keys)}.")


_REMINDER: Final = re.compile(r"Remind in (?P<space>\S+): (?P<what>.+)", re.DOTALL)
_WAIT: Final = r"(?P<wait>(?:an?|\d[\d.]*) ?[a-z]+(?:(?:,| and) (?:an?|\d[\d.]*) ?[a-z]+)*)"
_WHEN: Final = (
    re.compile(rf"\bremind me in {_WAIT}(?: to| that| of| about)?(?: (?P<what>.+))?$", re.IGNORECASE),
    re.compile(rf"\bremind me(?: to| that| of| about)? (?P<what>.+) in {_WAIT}[.!]?$", re.IGNORECASE),
)


def _remind(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    said = " ".join(request.text.split())
    asked = next((found for pattern in _WHEN if (found := pattern.search(said)) is not None), None)
    if asked is None:
        yield from send_message('When? Say it like this: "remind me in 10 seconds to stretch".')
        return
    what = (asked["what"] or "it is time").strip(" .!")
    plan = {"name": "Reminder", "instruction": f"Remind in {request.space_id}: {what}", "runAfter": asked["wait"]}
    heard = yield WantedCall("set_plans", {"plans": [plan]})
    if heard.failed:
        yield from send_message(f"I cannot plan that: {heard.reason}")
    else:
        yield from send_message(f"I will remind you in {asked['wait']}: {what}.")


def parse_reminder(instruction: str) -> tuple[str, str] | None:
    """The space and the words of a reminder that the demo planned."""
    found = _REMINDER.match(instruction)
    return (found["space"], found["what"].strip()) if found is not None else None


# Who is there


def _introduce(request: DemoRequest, match: re.Match[str]) -> DemoScript[None]:
    heard = yield WantedCall("get_space_context", {})
    if heard.failed:
        yield from send_message(f"I cannot see that: {heard.reason}")
        return
    members: Sequence[Mapping[str, Any]] = heard.data.get("members") or ()
    names = ", ".join(f"{one.get('name')} ({one.get('type')})" for one in members[:MOST_LISTED])
    yield from send_message(f'In "{heard.data.get("spaceName")}" there is {names}.')


def _rule(pattern: str, rule: DemoRule) -> tuple[re.Pattern[str], DemoRule]:
    return re.compile(pattern, re.IGNORECASE), rule


_RULES: Final = (
    _rule(r"\bremind me\b", _remind),
    _rule(r"\bwhat (?:do|can|did) you (?:still )?(?:remember|know)\b", _recall),
    _rule(r"^(?:please |can you |could you )?(?:remember|note)(?: that|:)? (?P<what>.+)", _remember),
    _rule(r"^(?:please )?forget (?:about |that )?(?P<what>.+)", _forget),
    _rule(r"\b(?:chart|plot|graph|diagram|draw)\b", draw_chart),
    _rule(r"\b(?:delete|remove|clean[ -]?up|tidy(?: up)?)\b(?P<what>.*)", delete_files),
    _rule(r"\b(?:what time|the time\b|time is it|what is the date|what day)", _tell_time),
    _rule(r"\b(?:search|look)\b.*? for (?P<what>.+)|^(?:find|search|grep) (?P<other>.+)", search_files),
    _rule(r"\b(?:list|which|what|show)\b.*\b(?:files|folder|documents)\b|^ls\b", list_files),
    _rule(r"\b(?:read|show|open|print|cat)\b|\bwhat(?: is|'s) in\b", read_file),
    _rule(r"\bwho(?: is|'s) (?:here|there|in)\b", _introduce),
    _rule(r"\b(?:thanks|thank you|bye|goodbye)\b", _welcome),
    _rule(r"^(?:hi|hello|hey|help|good (?:morning|day|evening)|\?)\b|\bwhat can you do\b|\bwho are you\b|^\?", _greet),
)
