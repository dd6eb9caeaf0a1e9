"""What the demo does about what people say: rules over words, the first that fits. Knows no dialogue and no model."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from zoneinfo import available_timezones

from toolspace.core import json_text
from toolspace.models.demofiles import delete_files, draw_chart, list_files, read_file, search_files
from toolspace.models.demoscript import MOST_LISTED, Request, Rule, Script, Want, say

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


def answer(request: Request) -> Script[None]:
    """Does what a person asks for, by the first rule that fits."""
    said = " ".join(request.text.split())
    for pattern, rule in _RULES:
        if (match := pattern.search(said)) is not None:
            yield from rule(request, match)
            return
    yield from say(NOT_UNDERSTOOD)


def _greet(request: Request, match: re.Match[str]) -> Script[None]:
    yield from say(GREETING)


def _welcome(request: Request, match: re.Match[str]) -> Script[None]:
    yield from say("You are welcome.")


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


def _tell_time(request: Request, match: re.Match[str]) -> Script[None]:
    named = _PLACE.search(" ".join(request.text.split()))
    zone = _zone_of(named[1].strip()) if named is not None else None
    heard = yield Want("current_time", {"timezone": zone} if zone is not None else {})
    if heard.failed:
        yield from say(f"I cannot tell: {heard.reason}")
        return
    date, _, clock = str(heard.data.get("iso", "")).partition("T")
    yield from say(f"It is {clock[:5]} on {date} in {heard.data.get('timezone')}.")


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


def _remember(request: Request, match: re.Match[str]) -> Script[None]:
    what = match["what"].strip(" .!")
    key = re.sub(r"\W+", "-", what.lower()).strip("-")[:60] or "note"
    heard = yield Want("set_memories", {"memories": [{"key": key, "value": what}]})
    yield from say(f"I cannot remember it: {heard.reason}" if heard.failed else f"I will remember: {what}.")


def _recall(request: Request, match: re.Match[str]) -> Script[None]:
    heard = yield Want("get_memories", {})
    if heard.failed:
        yield from say(f"I cannot remember: {heard.reason}")
        return
    kept: Sequence[Mapping[str, Any]] = heard.data.get("memories") or ()
    lines = [f"  {one['value'] if isinstance(one['value'], str) else json_text.encode(one['value'])}" for one in kept]
    yield from say("\n".join(["I remember:", *lines[:MOST_LISTED]]) if lines else "Nothing yet; tell me something.")


def _forget(request: Request, match: re.Match[str]) -> Script[None]:
    heard = yield Want("get_memories", {})
    kept: Sequence[Mapping[str, Any]] = heard.data.get("memories") or ()
    wanted = match["what"].strip(" .!?").lower()
    everything = wanted in ("it", "all", "all of it", "everything")
    keys = [str(one["key"]) for one in kept if everything or wanted in json_text.encode(one).lower()]
    if not keys:
        yield from say(f"I cannot: {heard.reason}" if heard.failed else "I remember nothing like that.")
        return
    gone = yield Want("delete_memories", {"keys": keys})
    yield from say(f"I cannot forget it: {gone.reason}" if gone.failed else f"Forgotten: {', '.join(keys)}.")


_REMINDER: Final = re.compile(r"Remind in (?P<space>\S+): (?P<what>.+)", re.DOTALL)
_WAIT: Final = r"(?P<wait>(?:an?|\d[\d.]*) ?[a-z]+(?:(?:,| and) (?:an?|\d[\d.]*) ?[a-z]+)*)"
_WHEN: Final = (
    re.compile(rf"\bremind me in {_WAIT}(?: to| that| of| about)?(?: (?P<what>.+))?$", re.IGNORECASE),
    re.compile(rf"\bremind me(?: to| that| of| about)? (?P<what>.+) in {_WAIT}[.!]?$", re.IGNORECASE),
)


def _remind(request: Request, match: re.Match[str]) -> Script[None]:
    said = " ".join(request.text.split())
    asked = next((found for pattern in _WHEN if (found := pattern.search(said)) is not None), None)
    if asked is None:
        yield from say('When? Say it like this: "remind me in 10 seconds to stretch".')
        return
    what = (asked["what"] or "it is time").strip(" .!")
    plan = {"name": "Reminder", "instruction": f"Remind in {request.space_id}: {what}", "runAfter": asked["wait"]}
    heard = yield Want("set_plans", {"plans": [plan]})
    if heard.failed:
        yield from say(f"I cannot plan that: {heard.reason}")
    else:
        yield from say(f"I will remind you in {asked['wait']}: {what}.")


def reminder_of(instruction: str) -> tuple[str, str] | None:
    """The space and the words of a reminder that the demo planned."""
    found = _REMINDER.match(instruction)
    return (found["space"], found["what"].strip()) if found is not None else None


# Who is there


def _introduce(request: Request, match: re.Match[str]) -> Script[None]:
    heard = yield Want("get_space_context", {})
    if heard.failed:
        yield from say(f"I cannot see that: {heard.reason}")
        return
    members: Sequence[Mapping[str, Any]] = heard.data.get("members") or ()
    names = ", ".join(f"{one.get('name')} ({one.get('type')})" for one in members[:MOST_LISTED])
    yield from say(f'In "{heard.data.get("spaceName")}" there is {names}.')


def _rule(pattern: str, rule: Rule) -> tuple[re.Pattern[str], Rule]:
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
