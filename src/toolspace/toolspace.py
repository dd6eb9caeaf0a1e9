"""The composition root: builds a toolspace from tools or from a configuration, and owns everything that it opens.

`Toolspace` is the entry point of the library. `composition` builds the parts that a configuration describes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack, overload

import msgspec

from toolspace.composition import maintenance
from toolspace.composition.settings import Settings
from toolspace.composition.tool_sources import SourceRules, ToolSources
from toolspace.config.find_and_watch import default_state_dir, list_state_paths, mark_user_state
from toolspace.core.approvals import ApprovalCallback
from toolspace.core.call_statistics import ToolStats
from toolspace.core.extension_points import ConversationStore, OutputStore, ResultCache, ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool, as_tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ToolspaceError
from toolspace.orchestrator.call import Arguments
from toolspace.orchestrator.effective_settings import ProviderRules
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.layered_orchestrator import LayeredOrchestrator
from toolspace.orchestrator.orchestrator import ToolOrchestrator
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.orchestrator.run import Run
from toolspace.orchestrator.stages.policy import ProgramApprovals
from toolspace.providers.internal_tools import InternalProvider
from toolspace.providers.mcp.server_spec import NO_CALLBACKS, McpCallbacks, ServerStatus
from toolspace.storage.memory_cache import MemoryCache

if TYPE_CHECKING:
    from toolspace.agents.agent import Agent
    from toolspace.agents.agent_events import AgentStream
    from toolspace.agents.program_runs import AgentRunOptions
    from toolspace.agents.registry import AgentRegistry
    from toolspace.agents.subagents import AgentResult
    from toolspace.composition.from_config import ConfiguredParts
    from toolspace.config.configuration import Config
    from toolspace.core.language_model import ModelListener
    from toolspace.core.tool_export import ToolFormat
    from toolspace.providers.mcp.provider import McpProvider

_log = logging.getLogger("toolspace")
T = TypeVar("T")


class Toolspace:
    """A set of tools that are called through one pipeline.

        ts = Toolspace(tools=[add])
        result = await ts.call("add", {"a": 1, "b": 2})

    `async with` starts the providers and closes everything at the end. A toolspace of functions works without it.
    """

    def __init__(
        self,
        tools: Iterable[Tool | Callable[..., Any]] = (),
        *,
        agents: Iterable[Agent] = (),
        providers: Iterable[ToolProvider] = (),
        context: ToolContext | None = None,
        settings: Settings | None = None,
        cache: ResultCache | None = None,
        outputs: OutputStore | None = None,
        on_approval: ApprovalCallback | None = None,
        conversations: ConversationStore | None = None,
        parent: Toolspace | None = None,
    ) -> None:
        """`on_approval` decides the calls that a policy asks a person for: True or False, also as an `async def`.
        `conversations` keeps the sessions of `run_agent`; None: they are in memory.
        `parent`: a toolspace whose tools this one offers too, except those whose names it uses itself."""
        settings = settings or Settings()
        self.state_dir = settings.state_dir or default_state_dir()
        self.config_path: Path | None = None
        self.startup_wait = StartupWait()
        """How long `async with` waits for providers that start slowly."""
        self._parent = parent
        self._agents: AgentRegistry | None = None
        self._conversations = conversations
        self._conversation_dir: Path | None = None
        """Where conversations are stored if the program gave no store. None: in memory."""
        self._configured_agents: Sequence[Agent] = ()
        self._reload_lock = asyncio.Lock()
        self._environ: Mapping[str, str] = os.environ
        self._callbacks = NO_CALLBACKS
        self._background = maintenance.MaintenanceTasks()
        self._watcher = maintenance.ConfigWatcher(self._background, self._reload, self._finish_reload)
        self._cache = cache or MemoryCache()
        rules = SourceRules(settings.overrides, parent._sources.rules if parent is not None else None)
        if parent is None:
            state_context = ToolContext(private_paths=list_state_paths(self.state_dir))
            context = context.with_defaults(state_context) if context is not None else state_context
            self._outputs = outputs or settings.create_outputs(self.state_dir / "outputs")
            self.orchestrator = ToolOrchestrator(
                context=context,
                defaults=settings.defaults(),
                queues=settings.queues,
                cache=self._cache,
                outputs=self._outputs,
                policies=settings.policies,
                quotas=settings.quotas,
                hooks=settings.hooks,
                count_tokens=settings.count_tokens,
            )
        else:
            self._outputs = parent._outputs
            self.orchestrator = LayeredOrchestrator(
                parent.orchestrator,
                context=context,
                queues=settings.queues,
                cache=self._cache,
                is_hidden=rules.hide,
            )
        self._internal = InternalProvider(
            search=self.orchestrator.search,
            outputs=self._outputs,
            has_stored_output=self.orchestrator.stored_sessions.__contains__,
        )
        self._sources = ToolSources(self.orchestrator, rules, tools, self._internal)
        self.registry = self._sources.registry
        for provider in providers:
            self._sources.add_provider(provider, ProviderRules())
        if parent is None or settings.aliases:
            self.orchestrator.configure(aliases=settings.aliases)
        if on_approval is not None:
            self.orchestrator.configure(approvals=ProgramApprovals(on_approval))
        if agents := tuple(agents):
            self.agents.add(agents)

    @classmethod
    def open(
        cls,
        path: str | Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        session: str | None = None,
        callbacks: McpCallbacks = NO_CALLBACKS,
        single_tool: str | None = None,
        on_approval: ApprovalCallback | None = None,
    ) -> Self:
        """A toolspace from a configuration file; without a path, from the built-in tools alone.

        Use it with `async with`. Raises `ConfigError` with all problems of the file. `environ`: None is the
        environment of the process. `callbacks` answer the requests of MCP servers. `single_tool` names the only tool
        that will be called: providers that cannot offer it are left out, unless they are required.
        """
        # Imported here: a toolspace of functions needs no configuration.
        from toolspace.composition.from_config import build_settings, open_cache
        from toolspace.config.load import load_config

        environ = os.environ if environ is None else environ
        config_path = Path(path) if path is not None else None
        config = load_config(config_path, environ=environ)
        settings = build_settings(config)
        context = ToolContext(session_id=session)
        self = cls(context=context, settings=settings, cache=open_cache(config), on_approval=on_approval)
        self._conversation_dir = config.state_dir / "conversations"
        self._internal.always_offered = True
        self.config_path = config_path
        self._environ = environ
        self._callbacks = callbacks
        self._apply(self._build_parts(config, self, single_tool=single_tool))
        return self

    async def __aenter__(self) -> Self:
        if self.orchestrator.closed:
            raise ToolspaceError("this toolspace was closed; make a new one")
        try:
            await self.orchestrator.warmup(wait=self.startup_wait)
        except BaseException:
            await self.aclose()
            raise
        if self._parent is not None:
            return self
        if self._sources.parts is None:
            for pattern in self.orchestrator.find_unmatched(self._sources.rules.own_rules.overrides):
                _log.warning('Settings.overrides: "%s" matches no tool', pattern)
        stored_sessions = self.orchestrator.stored_sessions
        self._background.start(maintenance.sweep_outputs(self._outputs, stored_sessions))
        await maintenance.load_stored_sessions(self._outputs, stored_sessions)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stops everything that runs, and closes everything that was opened."""
        self._watcher.stop()
        self._background.cancel()
        if self._background.has_uncancellable:
            self.orchestrator.cancel()  # Providers that are being closed wait for the last calls.
        await self._background.aclose()
        if self._agents is not None:
            self.orchestrator.cancel()  # Before the agents' models and tools are closed.
            await self._agents.aclose()
        await self.orchestrator.cleanup()
        if (parts := self._sources.parts) is not None and parts.client is not None:
            await parts.client.aclose()
        await self._cache.aclose()
        if self._parent is None:
            await self._outputs.aclose()

    # Calls

    def call(
        self,
        name: str,
        arguments: Arguments = None,
        *,
        context: ToolContext | None = None,
        run: Run | None = None,
        call_id: str | None = None,
    ) -> Coroutine[Any, Any, ToolResult]:
        """Calls a tool. `arguments` is a mapping, or the JSON text that a model wrote.

        The result is whole up to `maxInlineBytes`, and above it the handle of a stored output. In a run, the result is
        what a model gets: above `toolResponseMaxBytes` a handle.
        """
        return self.orchestrator.execute(
            name, arguments, context=context, run=run, call_id=call_id, is_for_program=True
        )

    def cancel(self, call_id: str) -> bool:
        """Cancels a call and the calls that it made. Returns whether it was running."""
        return self.orchestrator.cancel(call_id)

    def run(self, **options: Any) -> Run:
        """A run: calls with their own limits, budget, deadline and trace. See `Run` for the options."""
        return self.orchestrator.run(**options)

    # Agents

    @property
    def agents(self) -> AgentRegistry:
        """The agents. Each is also a tool, `agent__{name}`."""
        if self._agents is None:
            # Imported here: most toolspaces have no agents.
            from toolspace.agents.handoff import RouterProvider
            from toolspace.agents.registry import AgentRegistry
            from toolspace.agents.subagents import AgentProvider

            if self._conversations is None and self._conversation_dir is not None:
                from toolspace.storage.disk_conversations import DiskConversations

                mark = partial(mark_user_state, self.state_dir) if self.config_path is None else None
                self._conversations = DiskConversations(self._conversation_dir, before_create=mark)
            registry = AgentRegistry(
                self.orchestrator,
                make_tools=self._create_for,
                environ=self._environ,
                conversations=self._conversations,
            )
            for provider in (AgentProvider(registry), RouterProvider()):
                self._sources.add_internal_provider(provider)
            self._agents = registry
        return self._agents

    @overload
    async def run_agent(
        self,
        name: str,
        prompt: str,
        *,
        output_type: type[T],
        listen: ModelListener | None = None,
        **options: Unpack[AgentRunOptions],
    ) -> AgentResult[T]: ...

    @overload
    async def run_agent(
        self,
        name: str,
        prompt: str,
        *,
        output_type: None = None,
        listen: ModelListener | None = None,
        **options: Unpack[AgentRunOptions],
    ) -> AgentResult[str]: ...

    async def run_agent(
        self, name: str, prompt: str, *, output_type: Any = None, listen: ModelListener | None = None, **options: Any
    ) -> AgentResult[Any]:
        """Lets an agent answer a prompt. The result contains failures; raises only if there is no such agent, or if
        the options contradict each other.

        `session` is the id of a conversation that the toolspace keeps for `context.user_id`; `history` continues the
        turns of an earlier result instead. `output_type` is the type of `result.output`: what does not fit it goes
        back to the model. `listen` receives the parts of the model's response. After a handoff, `result.agent` is the
        agent that answered.
        """
        from toolspace.agents.program_runs import ModelOutputListener, RunOptions, run_agent

        observer = ModelOutputListener(listen) if listen is not None else None
        return await run_agent(self.agents, name, prompt, RunOptions(output_type=output_type, **options), observer)

    @overload
    def stream_agent(
        self, name: str, prompt: str, *, output_type: type[T], **options: Unpack[AgentRunOptions]
    ) -> AgentStream[T]: ...

    @overload
    def stream_agent(
        self, name: str, prompt: str, *, output_type: None = None, **options: Unpack[AgentRunOptions]
    ) -> AgentStream[str]: ...

    def stream_agent(self, name: str, prompt: str, *, output_type: Any = None, **options: Any) -> AgentStream[Any]:
        """Lets an agent answer a prompt, and yields what happens: text, calls, results, steps, at last the result.

            async for event in ts.stream_agent("weather", "How warm is it in Oslo?"):
                if isinstance(event, AgentText):
                    print(event.text, end="")

        Leaving the loop cancels the run and everything below it. The options are those of `run_agent`.
        """
        from toolspace.agents.agent_events import AgentStream
        from toolspace.agents.program_runs import RunOptions, run_agent

        run_options, agents = RunOptions(output_type=output_type, **options), self.agents
        return AgentStream(lambda observer: run_agent(agents, name, prompt, run_options, observer), agents.own_run)

    def _create_for(self, agent: Agent) -> Toolspace:
        """A toolspace that only one agent uses, with this one as its parent."""
        toolspace = Toolspace(agent.tools, parent=self, settings=Settings(state_dir=self.state_dir))
        toolspace._callbacks = self._callbacks
        toolspace._configure_for(agent)
        return toolspace

    async def renew(self, agent: Agent) -> None:
        """Applies the new description of the one agent that uses this toolspace."""
        self._configure_for(agent)
        await self._finish_reload()

    def _configure_for(self, agent: Agent) -> None:
        config = agent.spec.config if agent.spec is not None else None
        if config is None or self._parent is None:
            self._sources.refresh_internal_rules()
            return
        parts = self._build_parts(config, self._parent)
        for warning in parts.warnings:
            _log.warning('the agent "%s": %s', agent.name, warning)
        self._sources.rules.hides_builtins = bool(parts.builtins) or ("tools", "builtins") in config.origins
        self._apply(parts)

    # Tools

    def add_tool(self, tool: Tool | Callable[..., Any]) -> Tool:
        """Adds a tool, or a function as a tool. Raises if its name is used."""
        tool = as_tool(tool)
        self.orchestrator.check_name_available(self.registry, tool.name)
        return self.registry.register(tool)

    def remove_tool(self, name: str) -> Tool:
        """Removes a tool that was added. Raises if there is none of that name."""
        return self.registry.unregister(name)

    async def add_provider(self, provider: ToolProvider, rules: ProviderRules | None = None) -> None:
        """Adds a provider and starts it. The overrides of `rules` replace equal ones of the toolspace."""
        self._sources.add_provider(provider, rules or ProviderRules())
        await self.orchestrator.warmup()

    def add_local_provider(self, provider: ToolProvider) -> None:
        """Adds a provider whose tools the settings of `tools` apply to, like functions and built-in tools."""
        self._sources.add_local_provider(provider)

    def list_tools(self, *, context: ToolContext | None = None) -> list[Tool]:
        """All tools that may be called."""
        return self.orchestrator.list_tools(context=context)

    def find_tool(self, name: str) -> Tool | None:
        """The tool of a name, an alias or another spelling of it; None if there is none."""
        return self.orchestrator.find(name)

    def to_llm_tools(
        self, format: ToolFormat = "openai", *, run: Run | None = None, strict: bool = False
    ) -> list[dict[str, Any]]:
        """The tool definitions for a model. If all would cost too many tokens: a search tool, and what it found."""
        from toolspace.core.tool_export import export_tools  # Imported here: programs may never export tools.

        return export_tools(self.orchestrator.tools_for_model(run), format, strict=strict)

    def search(self, query: str, limit: int = 10) -> list[tuple[Tool, float]]:
        """The tools that match a query best, with their scores."""
        return self.orchestrator.search(query, limit)

    # MCP servers

    def list_servers(self) -> list[ServerStatus]:
        """The status of each MCP server."""
        return [self._get_server_status(server) for server in self._find_servers().values()]

    async def restart_server(self, name: str) -> ServerStatus:
        """Restarts one MCP server. Raises if there is none of that name, or if it does not start."""
        servers = self._find_servers()
        if name not in servers:
            hint = did_you_mean(name, servers) or ("; there is none" if not servers else "")
            raise ToolspaceError(f'there is no MCP server "{name}"{hint}')
        await servers[name].restart()
        return self._get_server_status(servers[name])

    def _get_server_status(self, server: McpProvider) -> ServerStatus:
        circuit = dict(self.orchestrator.circuits.statuses()).get(server.namespace)
        if circuit is None or not circuit.is_open:
            return server.status()
        return msgspec.structs.replace(server.status(), circuit="open", next_probe_at=circuit.next_probe_at)

    def _find_servers(self) -> dict[str, McpProvider]:
        from toolspace.composition.providers import find_mcp_providers

        return find_mcp_providers(self.orchestrator.providers)

    # Events and statistics

    @property
    def bus(self) -> EventBus:
        return self.orchestrator.bus

    @property
    def outputs(self) -> OutputStore:
        """The store of large results."""
        return self._outputs

    def get_stats(self, principal: str | None = None) -> ToolStats:
        """Returns the statistics of all calls, or of the calls of one principal."""
        return self.orchestrator.get_stats(principal)

    @property
    def warnings(self) -> Sequence[str]:
        """Settings of the configuration that have no effect."""
        return self._sources.parts.warnings if self._sources.parts is not None else ()

    # Configuration

    async def reload(self) -> None:
        """Loads the configuration again and applies the changes. Raises if it is invalid; then nothing changes.

        Waits until new providers have started or failed. A provider that fails, even a required one, is retried in the
        background. Removed providers are closed in the background, when no call is running.
        """
        await self._reload()
        await self._finish_reload()

    def watch(self, *, interval: float = 1.0) -> None:
        """Reloads whenever a file of the configuration changes, and on SIGHUP."""
        self._watcher.start(lambda: parts.files() if (parts := self._sources.parts) is not None else (), interval)

    async def _reload(self) -> None:
        if self._sources.parts is None:
            raise ToolspaceError("this toolspace was made without configuration; there is nothing to reload")
        from toolspace.config.load import load_config

        async with self._reload_lock:
            config = load_config(self.config_path, environ=self._environ)
            if config.secret_references:
                from toolspace.config.secret_references import reload_secrets

                await asyncio.to_thread(reload_secrets, config.secret_references)
            self._apply(self._build_parts(config, self))

    def _build_parts(self, config: Config, main: Toolspace, *, single_tool: str | None = None) -> ConfiguredParts:
        """The parts of a configuration. `main` is the toolspace with the agents and the session."""
        from toolspace.composition.from_config import build_parts

        parts = build_parts(config, self._sources.parts, self._callbacks, lambda: main.agents, single_tool=single_tool)
        parts.context.session_id = main.orchestrator.context.session_id
        return parts

    def _apply(self, parts: ConfiguredParts) -> None:
        """Replaces the parts of the last configuration. Raises if tool names conflict; then nothing changes."""
        self._sources.check(parts)
        self._apply_agents(parts)
        for provider in self._sources.replace(parts):
            self._background.start(maintenance.close_when_idle(self.orchestrator, provider), is_cancellable=False)

    def _apply_agents(self, parts: ConfiguredParts) -> None:
        if self._parent is None and (parts.agents or self._agents is not None):
            from toolspace.agents.agent import Agent

            # Agents that the program added stay.
            added_agents = [agent for agent in self.agents if agent not in self._configured_agents]
            configured_agents = [Agent.from_spec(spec) for spec in parts.agents]
            self.agents.replace([*added_agents, *configured_agents])
            self._configured_agents = configured_agents

    async def _finish_reload(self) -> None:
        await maintenance.clear_cache(self._cache)  # A cached result may belong to a tool that has changed.
        if self._agents is not None:
            await self._agents.reload()
        await self.orchestrator.warmup()
