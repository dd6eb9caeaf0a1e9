"""Loads the configuration: reads the files, applies environment variables and defaults, and validates the whole.

The main file may describe agents, or refer to files that do; all of them are read and checked together. Used by
`Toolspace.open`, the server and the CLI. Builds nothing from it; `composition` does. Runs no agent.
"""

from __future__ import annotations

import os
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from toolspace.config.agent_settings import AgentEntry, AgentIdentity
from toolspace.config.configuration import (
    AGENT_KEYS,
    ANY_FILE_KEYS,
    FUNCTION_FILE,
    INLINE_KEYS,
    PROCESS_KEYS,
    TOOL_KEYS,
    AgentSpec,
    Config,
    ConfigPart,
    TopLevelSettings,
)
from toolspace.config.environment_variables import expand, find_secrets, read_overrides
from toolspace.config.file_formats import (
    EMPTY,
    ConfigDocument,
    KeyPath,
    config_error,
    display_name,
    format_key_path,
    format_value,
    read_document,
)
from toolspace.config.find_and_watch import StateLocation, find_state_dir
from toolspace.config.secret_references import SecretReference
from toolspace.config.server_settings import NotificationSettings
from toolspace.config.tool_settings import ToolSettings
from toolspace.config.validation import ReadingContext, declared_settings
from toolspace.core.names import agent_name_problem, agent_tool_name, did_you_mean
from toolspace.core.secret_masking import is_secret_name
from toolspace.errors import ConfigError

_NAME_MISSING = '"name" is missing; expected a name'


def load_config(path: Path | None, *, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of a file; without a file, the defaults. Raises `ConfigError` with all problems at once."""
    environ = os.environ if environ is None else environ
    path = None if path is None else path.absolute()
    base_dir = Path.cwd() if path is None else path.parent
    overrides = read_overrides(environ)
    file = _File(path, EMPTY if path is None else read_document(path), base_dir, environ, overrides.values)
    main = ConfigPart(file.context)
    settings = main.read(*TOOL_KEYS, *PROCESS_KEYS, *ANY_FILE_KEYS, *(AGENT_KEYS if file.has_agent else ()))
    defaults = main.merge_defaults(settings)
    main.check_references(settings)
    resolver = _AgentResolver(file, main, settings, environ)
    resolver.check()
    state = StateLocation(settings.storage.dir) if settings.storage.dir else find_state_dir(path, environ)
    config = Config(
        defaults=defaults,
        queues=settings.queues,
        policies=settings.policies,
        quotas=settings.quotas,
        tools=settings.tools,
        mcp_servers=settings.all_servers,
        rest_tools=settings.rest_tools,
        openapi=settings.openapi,
        providers=settings.providers,
        router=settings.router,
        notifications=settings.notifications,
        embeddings=settings.embeddings,
        storage=settings.storage,
        server=settings.server,
        functions=_resolve_functions(settings.functions, file.context),
        hooks=settings.hooks,
        demo=settings.demo,
        path=path,
        base_dir=base_dir,
        state_dir=state.path,
        document=file.document,
        origins=file.context.origins,
    )
    agents = resolver.build_specs(config)
    return msgspec.structs.replace(
        config,
        agents=agents,
        agent=agents[resolver.main_agent] if resolver.main_agent is not None else None,
        warnings=(*overrides.warnings, *resolver.warnings(), *_describe_old_state(state)),
        secret_values=resolver.find_secrets().union(_find_override_secrets(overrides.values)),
        secret_references=resolver.list_secret_references(),
    )


def _describe_old_state(state: StateLocation) -> Iterator[str]:
    if state.new_path is not None:
        yield (
            f"storage.dir: the state is still in {state.path}, which all your projects shared; to move it to this "
            f"project, stop the gateway and run: mv {shlex.quote(str(state.path))} {shlex.quote(str(state.new_path))}"
        )


def _resolve_functions(functions: tuple[str, ...], context: ReadingContext) -> tuple[str, ...]:
    """As written, except that files in an environment variable are relative to the working directory."""
    if not isinstance(context.origins.get(("functions",)), str):
        return functions
    return tuple(str(Path.cwd() / entry) if FUNCTION_FILE.fullmatch(entry) else entry for entry in functions)


def _find_override_secrets(overrides: Mapping[KeyPath, tuple[str, Any]]) -> Iterator[str]:
    """The values of environment variables that override a secret setting."""
    for key, (_, value) in overrides.items():
        if isinstance(value, str) and is_secret_name(str(key[-1])):
            yield value


# Agents


class _File:
    """A file, and the context that collects its problems."""

    def __init__(
        self,
        path: Path | None,
        document: ConfigDocument,
        base_dir: Path,
        environ: Mapping[str, str],
        overrides: Mapping[KeyPath, tuple[str, Any]] | None = None,
    ) -> None:
        self.path = path
        self.document = document
        """As written, before its variables were filled in."""
        self.has_agent = "agent" in document.data
        self.secrets = frozenset(find_secrets(document.data, environ))
        # Editors define these two variables in files that are read unchanged.
        workspace = base_dir.parent if base_dir.name in (".vscode", ".cursor") else base_dir
        variables = {"workspaceFolder": str(workspace), "userHome": environ.get("HOME", ""), **environ}
        data, original_texts, problems, references = expand(document, variables, base_dir)
        self.secret_references = {
            reference: f"{document.format_location(path)}: {format_key_path(path)}"
            for reference, path in references.items()
        }
        self.context = ReadingContext(
            document._replace(data=data),
            base_dir=base_dir,
            original_texts=original_texts,
            overrides=overrides,
            problems=problems,
        )


class _Agent(msgspec.Struct, eq=False):
    """An agent, and its references to other agents."""

    name: str
    file: _File
    part: ConfigPart
    settings: TopLevelSettings
    is_main: bool = False
    """Whether it is the main file's own agent."""
    callees: dict[str, KeyPath] = {}
    """The agents that it may call, and the place of each reference."""


class _AgentResolver:
    """Finds every agent that a configuration describes, in the main file and in the files that it refers to.

    Checks the references between agents, and builds an `AgentSpec` for each.
    """

    def __init__(self, file: _File, main: ConfigPart, settings: TopLevelSettings, environ: Mapping[str, str]) -> None:
        """Reads the agents of the main file and of all files that it refers to."""
        self._environ = environ
        self._main_file = file
        self._files: dict[Path, _File | None] = {} if file.path is None else {Path(os.path.normpath(file.path)): file}
        self._file_errors: list[str] = []
        """Errors of files that could not be parsed."""
        self._agents: dict[str, _Agent] = {}
        self._invalid_names: set[str | None] = set()
        """Names of invalid agents, so that references to them are not reported too. None: a name is unknown."""
        self._names_by_place: dict[tuple[_File, KeyPath], str] = {}
        self._tool_names: dict[str, str] = {}
        # A queue instead of recursion: a chain of files may be long.
        self._pending: deque[tuple[AgentEntry, _File, _Agent]] = deque()
        self._queues = main.list_queues()
        self._main_part = _Agent("", self._main_file, main, settings)
        """The main file, with or without its own agent."""
        self.main_agent: str | None = None
        """The name of the main file's own agent."""
        if file.has_agent:
            self._add_main_agent(main, settings)
        owner = self._agents[self.main_agent] if self.main_agent is not None else self._main_part
        self._pending.extend((entry, self._main_file, owner) for entry in settings.agents)
        while self._pending:
            self._resolve_entry(*self._pending.popleft())

    def _add_main_agent(self, main: ConfigPart, settings: TopLevelSettings) -> None:
        identity = settings.agent or AgentIdentity()
        if identity.name is None:
            if ("agent",) in main.context.origins:  # Otherwise a problem of `agent` has been reported already.
                main.context.report(main.find_origin("agent"), _NAME_MISSING)
            self._invalid_names.add(None)
        elif self._check_name(identity.name, main.context, main.find_origin("agent", "name")):
            self.main_agent = identity.name
            self._add(_Agent(identity.name, self._main_file, main, settings, is_main=True))

    def _resolve_entry(self, entry: AgentEntry, file: _File, owner: _Agent) -> None:
        """Resolves one entry of `agents`, and appends the entries of the agent that it leads to."""
        if entry.file is None and not entry.is_definition:
            owner.callees.setdefault(cast("str", entry.name), entry.path)
            return
        target = file if entry.file is None else self._open_file(entry, file)
        if target is None:
            self._invalid_names.add(entry.name)
            return
        part = ConfigPart(target.context.without_overrides(), entry.path if entry.is_definition else ())
        name = entry.name
        if name is None:  # A file that was read before keeps the name of its agent.
            name = self._names_by_place.get((target, part.path)) or _find_name(part.data)
        if name is None:
            if entry.is_definition:
                file.context.report(entry.path, _NAME_MISSING)
            else:
                target.context.report(("agent",), _NAME_MISSING)
            self._invalid_names.add(None)
            return
        if self._is_new(name, target, part, entry, file):
            agent = _Agent(name, target, part, self._read(part))
            self._add(agent)
            self._pending.extend((inner, target, agent) for inner in agent.settings.agents)
        owner.callees.setdefault(name, entry.path)

    def _open_file(self, entry: AgentEntry, file: _File) -> _File | None:
        """The file that an entry refers to, or None if it describes no agent, which is reported."""
        path = cast("Path", entry.file)
        if path not in self._files:
            self._files[path] = None
            try:
                document = read_document(path)
            except ConfigError as error:
                name, message = display_name(path), str(error)
                if message.startswith(f"{name}: "):  # The file cannot be read at all: the reference is the problem.
                    file.context.report(entry.path, f"{format_value(name)}: {message.removeprefix(f'{name}: ')}")
                else:
                    self._file_errors.append(message)
                return None
            target = self._files[path] = _File(path, document, path.parent, self._environ)
            for setting in PROCESS_KEYS:
                if document.data.get(setting.key) is not None:
                    target.context.warn((setting.key,), "has no effect, as another file names this one; say it there")
        target = self._files[path]
        if target is not None and not target.has_agent:
            expected = "expected a mapping with the agent's name and instructions"
            target.context.report((), f'"agent" is missing; {expected}')
            return None
        return target

    def _add(self, agent: _Agent) -> None:
        self._agents[agent.name] = agent
        self._names_by_place.setdefault((agent.file, agent.part.path), agent.name)

    def _is_new(self, name: str, target: _File, part: ConfigPart, entry: AgentEntry, file: _File) -> bool:
        """Whether the name is valid and free. Reports another agent of the same name."""
        existing_agent = self._agents.get(name)
        if existing_agent is None:
            is_valid = self._check_name(name, file.context, entry.path)
            if not is_valid:
                self._invalid_names.add(name)
            return is_valid
        if existing_agent.file is not target or existing_agent.part.path != part.path:
            place = existing_agent.part.format_location()
            file.context.report(entry.path, f"there is another agent {format_value(name)}, in {place}; rename one")
        return False

    def _check_name(self, name: str, context: ReadingContext, path: KeyPath) -> bool:
        """Whether an agent can have this name, which becomes the name of a tool. Reports why not."""
        problem = agent_name_problem(name)
        other_name = self._tool_names.setdefault(agent_tool_name(name).casefold(), name)
        if problem is None and other_name != name:
            problem = f"and {format_value(other_name)} would be one tool, {agent_tool_name(name)}; rename one"
        if problem is not None:
            context.report(path, f"{format_value(name)} {problem}")
        return problem is None

    def _read(self, part: ConfigPart) -> TopLevelSettings:
        is_inline = part.path != ()
        settings = part.read(*TOOL_KEYS, *ANY_FILE_KEYS, *AGENT_KEYS, *(INLINE_KEYS if is_inline else PROCESS_KEYS))
        part.check_references(settings, self._queues)
        origins = part.context.origins
        for key in ("description", "system"):
            if is_inline and (key,) in origins and ("agent", key) in origins:
                message = f'means the same as "agent.{key}", which is given too; remove one'
                part.context.report(part.find_origin(key), message)
        return settings

    # Checks of references

    def check(self) -> None:
        """Raises `ConfigError` with all problems of all files."""
        self._check_references()
        for cycle in find_reference_cycles(
            {name: agent.settings.router.destinations for name, agent in self._agents.items()}
        ):
            if len(cycle) > 1:  # A reference to itself has been reported already.
                agent = self._agents[cycle[0]]
                route = " → ".join((*cycle, cycle[0]))
                agent.part.context.report(
                    self._find_destination(agent, cycle[1]),
                    f"handing off could go in a circle: {route}; take one of them out",
                )
        errors = [
            str(config_error(context.document, context.problems))
            for context in self._list_contexts()
            if context.problems
        ]
        if errors or self._file_errors:
            raise ConfigError("\n".join((*errors, *self._file_errors)))

    def _check_references(self) -> None:
        main = [] if self.main_agent is not None else [self._main_part]
        for agent in (*main, *self._agents.values()):
            for name, path in agent.callees.items():
                self._check_reference(agent, name, path, "an agent cannot call itself")
            for name in agent.settings.router.destinations:
                path = self._find_destination(agent, name)
                self._check_reference(agent, name, path, "an agent cannot hand off to itself")

    def _check_reference(self, agent: _Agent, name: str, path: KeyPath, self_reference: str) -> None:
        if name == agent.name and agent is not self._main_part:
            agent.part.context.report(path, f"{self_reference}; take {format_value(name)} out")
        elif name not in self._agents and name not in self._invalid_names and None not in self._invalid_names:
            names = ", ".join(self._agents)
            hint = did_you_mean(name, self._agents) or (
                f"; the agents are {names}" if names else "; describe it under agents"
            )
            agent.part.context.report(path, f"there is no agent {format_value(name)}{hint}")

    def _find_destination(self, agent: _Agent, name: str) -> KeyPath:
        """The place of a destination in the document."""
        path = agent.part.find_origin("router", "destinations")
        element = (*path, agent.settings.router.destinations.index(name))
        return element if element in agent.file.context.document.lines else path

    def _list_contexts(self) -> list[ReadingContext]:
        files = (self._main_file, *filter(None, self._files.values()))
        return list(dict.fromkeys(file.context for file in files))

    # Results

    def warnings(self) -> Iterator[str]:
        yield from dict.fromkeys(warning for context in self._list_contexts() for warning in context.warnings)

    def find_secrets(self) -> frozenset[str]:
        """The values in the files that no log may show."""
        return self._main_file.secrets.union(*(file.secrets for file in self._files.values() if file is not None))

    def list_secret_references(self) -> dict[SecretReference, str]:
        """The references to secrets in all files, and the place of each."""
        files = dict.fromkeys((self._main_file, *filter(None, self._files.values())))
        return {reference: place for file in files for reference, place in file.secret_references.items()}

    def build_specs(self, config: Config) -> dict[str, AgentSpec]:
        """The agents. A setting that an agent leaves out is taken from the main configuration."""
        # The configuration of one agent knows the memory directories of all: its file tools must not reach them.
        outlines = {
            name: AgentSpec(name=name, memory_dir=_find_memory_dir(agent, config))
            for name, agent in self._agents.items()
        }
        main_config = msgspec.structs.replace(config, agents=outlines)
        return {name: self._build_spec(agent, main_config) for name, agent in self._agents.items()}

    def _build_spec(self, agent: _Agent, config: Config) -> AgentSpec:
        settings = agent.settings
        identity = settings.agent or AgentIdentity()
        return AgentSpec(
            name=agent.name,
            description=identity.description or settings.description,
            system=identity.system or settings.system,
            version=settings.version,
            model=settings.model,
            loop=settings.loop,
            consciousness=settings.consciousness,
            limits=settings.limits,
            session=settings.session,
            memories=settings.memories,
            memory_dir=_find_memory_dir(agent, config),
            router=settings.router,
            agents=tuple(agent.callees),
            named_tools=settings.tools.named_tools or config.tools.named_tools,
            tasks=settings.tasks,
            auto_enter=settings.auto_enter,
            spaces=settings.spaces,
            knowledge=settings.knowledge,
            notifications=NotificationSettings(
                webhook=settings.notifications.webhook or config.notifications.webhook,
                smtp=settings.notifications.smtp or config.notifications.smtp,
            ),
            runtime=settings.runtime,
            config=None if agent.is_main else self._build_own_config(agent, config),
            path=agent.file.path,
            max_cost_source=_find_source(agent, "limits", "maxCost") if settings.limits.max_cost is not None else "",
        )

    def _build_own_config(self, agent: _Agent, config: Config) -> Config | None:
        """The configuration of the agent's own tools, or None if it has none."""
        if not any(agent.part.data.get(setting.key) for setting in TOOL_KEYS):
            return None
        settings, context = agent.settings, agent.part.context
        return Config(
            defaults=agent.part.merge_defaults(settings, config.defaults),
            queues={**config.queues, **settings.queues},
            tools=_merge_tools(settings.tools, config.tools, context),
            mcp_servers=settings.all_servers,
            rest_tools=settings.rest_tools,
            openapi=settings.openapi,
            providers=settings.providers,
            functions=settings.functions,
            storage=config.storage,
            server=config.server,
            path=agent.file.path,
            base_dir=context.base_dir,
            state_dir=config.state_dir,
            document=agent.file.document,
            origins=context.origins,
            secret_values=agent.file.secrets,
            parent=config,
        )


def _find_source(agent: _Agent, *key: str) -> str:
    """The place of a setting of an agent, as problems name it: `toolspace.yaml:12: agents.ada.limits.maxCost`."""
    path = agent.part.find_origin(*key)
    return f"{agent.part.context.document.format_location(path)}: {format_key_path(path)}"


def find_reference_cycles(edges: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Cycles in a graph, each from the node that is visited first. They share no edge with one another.

    Uses an explicit stack: a path may be longer than Python's recursion limit.
    """
    visited_nodes: set[str] = set()
    for start in edges:
        path: dict[str, Iterator[str]] = {}
        if start not in visited_nodes:
            path[start] = iter(edges[start])
        while path:
            node = next(reversed(path))
            neighbor = next(path[node], None)
            if neighbor is None:
                visited_nodes.add(node)
                del path[node]
            elif neighbor in path:
                nodes = list(path)
                yield tuple(nodes[nodes.index(neighbor) :])
            elif neighbor in edges and neighbor not in visited_nodes:
                path[neighbor] = iter(edges[neighbor])


def _find_memory_dir(agent: _Agent, config: Config) -> Path | None:
    """The directory of the agent's memory files, if its own definition names one."""
    return (config if agent.is_main else agent.settings).tools.memory_dir


def _find_name(data: Mapping[str, Any]) -> str | None:
    """The name in a definition, before the definition is read."""
    identity = data.get("agent")
    inner_name: object = cast("Mapping[str, Any]", identity).get("name") if isinstance(identity, Mapping) else None
    name = data.get("name") if inner_name is None else inner_name
    return name.strip() or None if isinstance(name, str) else None


def _merge_tools(own_tools: ToolSettings, main_tools: ToolSettings, context: ReadingContext) -> ToolSettings:
    """The agent's settings over those of the main file.

    An agent has its own built-in tools only if it has a setting of `tools`; otherwise it uses those that all share.
    """
    written_fields = {
        setting.attribute for setting in declared_settings(ToolSettings) if ("tools", setting.key) in context.origins
    }
    separate = {"names", "definitions", "mcp_servers", "timeout", "max_concurrent", "builtins"}
    changes: dict[str, Any] = {
        name: getattr(main_tools, name)
        for name in main_tools.__struct_fields__
        if name not in written_fields | separate
    }
    if "builtins" not in written_fields:
        changes["builtins"] = main_tools.builtins if written_fields - separate else False
    return msgspec.structs.replace(own_tools, **changes)
