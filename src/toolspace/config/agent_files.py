"""Finds every agent that a configuration describes, in its file and in the files that it names, and checks how they
hang together. Runs none of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.config import tool_settings
from toolspace.config.agent_settings import AgentEntry, AgentIdentity
from toolspace.config.configuration import Config
from toolspace.config.document import ConfigDocument, KeyPath, config_error, format_value
from toolspace.config.model import AgentSpec, NotificationSettings, ToolSettings
from toolspace.config.parsing import display_name, read_document
from toolspace.config.reader import ReadingContext
from toolspace.config.top_level import (
    AGENT_KEYS,
    ANY_FILE_KEYS,
    INLINE_KEYS,
    PROCESS_KEYS,
    TOOL_KEYS,
    ConfigPart,
    TopLevelSettings,
    create_context,
)
from toolspace.config.variables import find_secrets
from toolspace.core.names import agent_name_problem, agent_tool_name, did_you_mean
from toolspace.errors import ConfigError

# MERGED from routes: Finds circles in what leads to what. Knows no agents.


def find_reference_cycles(edges: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Circles, each from the node that was met first, until there is none that shares no edge with one of them.

    Goes by a stack of its own: a chain may be longer than Python lets functions call one another.
    """
    done: set[str] = set()
    for start in edges:
        way: dict[str, Iterator[str]] = {}
        if start not in done:
            way[start] = iter(edges[start])
        while way:
            last = next(reversed(way))
            following = next(way[last], None)
            if following is None:
                done.add(last)
                del way[last]
            elif following in way:
                names = list(way)
                yield tuple(names[names.index(following) :])
            elif following in edges and following not in done:
                way[following] = iter(edges[following])


_OWN_TOOLS = frozenset(setting.key for setting in TOOL_KEYS)
_OF_PROCESS = tuple(setting.key for setting in PROCESS_KEYS)


class _File:
    """A file that was read, and the session that notes what is wrong in it."""

    def __init__(
        self, path: Path | None, written: ConfigDocument, session: ReadingContext, environ: Mapping[str, str]
    ) -> None:
        self.path = path
        self.written = written
        self.session = session
        self.secrets = frozenset(find_secrets(written.data, environ))


class _Found:
    """An agent that was found, and what it refers to."""

    def __init__(
        self, name: str, file: _File, part: ConfigPart, root: TopLevelSettings, *, is_main: bool = False
    ) -> None:
        self.name = name
        self.file = file
        self.part = part
        self.root = root
        self.is_main = is_main
        self.calls: dict[str, KeyPath] = {}
        """The agents that it may call, and where it says so."""


class AgentResolver:
    """The agents of one configuration."""

    def __init__(
        self,
        main: ConfigPart,
        root: TopLevelSettings,
        *,
        path: Path | None,
        written: ConfigDocument,
        environ: Mapping[str, str],
        is_agent: bool,
    ) -> None:
        self._environ = environ
        self._main = _File(path, written, main.session, environ)
        self._files: dict[Path, _File | None] = {} if path is None else {Path(os.path.normpath(path)): self._main}
        self._faults: list[str] = []
        """Of files that could not even be read."""
        self._found: dict[str, _Found] = {}
        self._missed: set[str | None] = set()
        """Names of agents that are wrong, so that nobody who refers to one is told that there is none. None: of one
        whose name is not known."""
        self._by_part: dict[tuple[_File, KeyPath], str] = {}
        self._tool_names: dict[str, str] = {}
        # Not one inside the other: however long a chain of files is, it is followed.
        self._waiting: deque[tuple[AgentEntry, _File, _Found]] = deque()
        self._queues = main.queue_names()
        self._unnamed = _Found("", self._main, main, root)
        """What the main file says, be it an agent's or not."""
        self.main_agent: str | None = None
        """The name of the main file's own agent."""
        if is_agent:
            self._own(main, root)
        holder = self._found.get(self.main_agent) if self.main_agent is not None else None
        self._waiting.extend((entry, self._main, holder or self._unnamed) for entry in root.agents)
        while self._waiting:
            self._take(*self._waiting.popleft())

    def _own(self, main: ConfigPart, root: TopLevelSettings) -> None:
        head = root.agent or AgentIdentity()
        if head.name is None:
            if ("agent",) in main.session.origins:  # Else what is wrong with it has been said.
                main.session.report(main.origin("agent"), '"name" is missing; expected a name')
            self._missed.add(None)
        elif self._fits(head.name, main.session, main.origin("agent", "name")):
            self.main_agent = head.name
            self._keep(_Found(head.name, self._main, main, root, is_main=True))

    def _take(self, entry: AgentEntry, file: _File, holder: _Found) -> None:
        """Looks at one entry of `agents`, and puts those that it leads to into the line."""
        if entry.file is None and not entry.is_definition:
            holder.calls.setdefault(cast("str", entry.name), entry.at)
            return
        target = file if entry.file is None else self._open(entry, file)
        if target is None:
            self._missed.add(entry.name)
            return
        part = ConfigPart(target.session.isolated(), entry.at if entry.is_definition else ())
        name = entry.name
        if name is None:
            name = self._known_name(target, part) or _own_name(part.data)
        if name is None:
            if entry.is_definition:
                file.session.report(entry.at, '"name" is missing; expected a name')
            else:
                target.session.report(("agent",), '"name" is missing; expected a name')
            self._missed.add(None)
            return
        if self._is_new(name, target, part, entry, file):
            found = _Found(name, target, part, self._read(part))
            self._keep(found)
            self._waiting.extend((inner, target, found) for inner in found.root.agents)
        holder.calls.setdefault(name, entry.at)

    def _open(self, entry: AgentEntry, file: _File) -> _File | None:
        """The file that an entry names; None where it is none of an agent, which is noted."""
        path = cast("Path", entry.file)
        if path not in self._files:
            self._files[path] = None
            try:
                written = read_document(path)
            except ConfigError as error:
                name, message = display_name(path), str(error)
                if message.startswith(f"{name}: "):  # It could not even be looked into, and so has no line to mend.
                    file.session.report(entry.at, f"{format_value(name)}: {message.removeprefix(f'{name}: ')}")
                else:
                    self._faults.append(message)
                return None
            session = create_context(written, path.parent, self._environ, {})
            self._files[path] = _File(path, written, session, self._environ)
            for key in _OF_PROCESS:
                if written.data.get(key) is not None:
                    session.warn((key,), "has no effect, as another file names this one; say it there")
        found = self._files[path]
        if found is not None and "agent" not in found.written.data:
            expected = "expected a mapping with the agent's name and instructions"
            found.session.report((), f'"agent" is missing; {expected}')
            return None
        return found

    def _keep(self, found: _Found) -> None:
        self._found[found.name] = found
        self._by_part.setdefault((found.file, found.part.at), found.name)

    def _known_name(self, file: _File, part: ConfigPart) -> str | None:
        """What a file's agent is called already: who names the file alone means that one."""
        return self._by_part.get((file, part.at))

    def _is_new(self, name: str, target: _File, part: ConfigPart, entry: AgentEntry, file: _File) -> bool:
        known = self._found.get(name)
        if known is None:
            fits = self._fits(name, file.session, entry.at)
            self._missed.update(() if fits else (name,))
            return fits
        if known.file is not target or known.part.at != part.at:
            file.session.report(
                entry.at, f"there is another agent {format_value(name)}, in {known.part.place()}; rename one"
            )
        return False

    def _fits(self, name: str, session: ReadingContext, at: KeyPath) -> bool:
        """Whether an agent can be called so: its name becomes that of a tool."""
        fault = agent_name_problem(name)
        other = self._tool_names.setdefault(agent_tool_name(name).casefold(), name)
        if fault is None and other != name:
            fault = f"and {format_value(other)} would be one tool, {agent_tool_name(name)}; rename one"
        if fault is not None:
            session.report(at, f"{format_value(name)} {fault}")
        return fault is None

    def _read(self, part: ConfigPart) -> TopLevelSettings:
        in_place = part.at != ()
        root = part.read(*TOOL_KEYS, *ANY_FILE_KEYS, *AGENT_KEYS, *(INLINE_KEYS if in_place else PROCESS_KEYS))
        part.check(root, self._queues)
        for key in ("description", "system"):
            if in_place and (key,) in part.session.origins and ("agent", key) in part.session.origins:
                part.session.report(
                    part.origin(key), f'means the same as "agent.{key}", which is given too; remove one'
                )
        return root

    # How they hang together

    def check(self) -> None:
        """Raises `ConfigError` with all that is wrong, in every file."""
        self._check_references()
        for circle in find_reference_cycles({name: one.root.router.destinations for name, one in self._found.items()}):
            if len(circle) > 1:  # To itself has been said.
                first = self._found[circle[0]]
                way = " → ".join((*circle, circle[0]))
                first.part.session.report(
                    self._destination(first, circle[1]),
                    f"handing off could go in a circle: {way}; take one of them out",
                )
        faults = [str(config_error(one.document, one.problems)) for one in self._sessions() if one.problems]
        if faults or self._faults:
            raise ConfigError("\n".join((*faults, *self._faults)))

    def _check_references(self) -> None:
        main = [] if self.main_agent is not None else [self._unnamed]
        for found in (*main, *self._found.values()):
            for name, at in found.calls.items():
                self._check_reference(found, name, at, "an agent cannot call itself")
            for name in found.root.router.destinations:
                self._check_reference(found, name, self._destination(found, name), "an agent cannot hand off to itself")

    def _check_reference(self, found: _Found, name: str, at: KeyPath, itself: str) -> None:
        if name == found.name and found is not self._unnamed:
            found.part.session.report(at, f"{itself}; take {format_value(name)} out")
        elif name not in self._found and name not in self._missed and None not in self._missed:
            there = f"; the agents are {', '.join(self._found)}" if self._found else "; describe it under agents"
            hint = did_you_mean(name, self._found) or there
            found.part.session.report(at, f"there is no agent {format_value(name)}{hint}")

    def _destination(self, found: _Found, name: str) -> KeyPath:
        at = found.part.origin("router", "destinations")
        given = found.root.router.destinations
        inner = (*at, given.index(name))
        return inner if inner in found.file.session.document.lines else at

    def _sessions(self) -> list[ReadingContext]:
        return list(dict.fromkeys(file.session for file in (self._main, *filter(None, self._files.values()))))

    # What comes of it

    def warnings(self) -> Iterator[str]:
        yield from dict.fromkeys(warning for session in self._sessions() for warning in session.warnings)

    def find_secrets(self) -> frozenset[str]:
        """What stands in the files that no log may show."""
        return self._main.secrets.union(*(file.secrets for file in self._files.values() if file is not None))

    def build_specs(self, config: Config) -> dict[str, AgentSpec]:
        """The agents; what one does not say is as in the main configuration."""
        return {name: self._spec(found, config) for name, found in self._found.items()}

    def _spec(self, found: _Found, config: Config) -> AgentSpec:
        root = found.root
        head = root.agent or AgentIdentity()
        return AgentSpec(
            name=found.name,
            description=head.description or root.description,
            system=head.system or root.system,
            version=root.version,
            model=root.model,
            loop=root.loop,
            consciousness=root.consciousness,
            limits=root.limits,
            router=root.router,
            agents=tuple(found.calls),
            spaces=root.spaces,
            knowledge=root.knowledge,
            notifications=NotificationSettings(
                webhook=root.notifications.webhook or config.notifications.webhook,
                smtp=root.notifications.smtp or config.notifications.smtp,
            ),
            runtime=root.runtime,
            config=None if found.is_main else self._own_config(found, config),
            path=found.file.path,
        )

    def _own_config(self, found: _Found, config: Config) -> Config | None:
        data = found.part.data
        if not any(data.get(key) for key in _OWN_TOOLS):
            return None
        root, session = found.root, found.part.session
        return Config(
            defaults=found.part.defaults(root, config.defaults),
            queues={**config.queues, **root.queues},
            tools=_own_tools(root.tools, config.tools, session),
            mcp_servers=root.all_servers,
            rest_tools=root.rest_tools,
            openapi=root.openapi,
            providers=root.providers,
            functions=root.functions,
            storage=config.storage,
            server=config.server,
            path=found.file.path,
            base_dir=session.base_dir,
            state_dir=config.state_dir,
            document=found.file.written,
            origins=session.origins,
            secret_values=found.file.secrets,
            parent=config,
        )


def _own_name(data: Mapping[str, Any]) -> str | None:
    """The name that a definition gives itself, before anything of it is read."""
    head = data.get("agent")
    named: object = cast("Mapping[str, Any]", head).get("name") if isinstance(head, Mapping) else None
    name = data.get("name") if named is None else named
    return name.strip() or None if isinstance(name, str) else None


def _own_tools(own: ToolSettings, main: ToolSettings, session: ReadingContext) -> ToolSettings:
    """The agent's settings over those of the main file.

    Built-in tools are among its own only where it says something of them: else those that all agents share do.
    """
    given = {one.attribute for one in tool_settings.TOOLS.settings if ("tools", one.key) in session.origins}
    apart = {"definitions", "mcp_servers", "timeout", "max_concurrent", "builtins"}
    changes: dict[str, Any] = {
        name: getattr(main, name) for name in main.__struct_fields__ if name not in given | apart
    }
    if "builtins" not in given:
        changes["builtins"] = main.builtins if given - apart else False
    return msgspec.structs.replace(own, **changes)
