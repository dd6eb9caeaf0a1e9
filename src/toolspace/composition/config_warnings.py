"""Warnings about a configuration that is valid, but that most likely does not mean what its author wanted."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

from toolspace.composition.providers import REST
from toolspace.config.configuration import Config
from toolspace.core.names import AGENT_NAMESPACE, RESERVED_AGENT_NAMES, SEPARATOR, agent_tool_name, sanitise
from toolspace.core.prebuilt_actions import RESERVED_ACTION_NAMES
from toolspace.core.tool import Tool
from toolspace.core.tool_collections import BUILTIN_NAMES, TOOL_COLLECTIONS

_AGENT_PREFIX = AGENT_NAMESPACE + SEPARATOR
_ENTITY_PREFIX = "ent_"
_ROUTER_NAMESPACE = "router"
_UNUSED_SETTINGS = (("storage", "redis"),)


def list_unmatched_rules(config: Config, tools: Sequence[Tool]) -> list[str]:
    """A warning for each rule that matches no local tool: most likely it is misspelt."""
    names = [tool.name.casefold() for tool in tools]
    # With all built-in tools: a rule may name a collection of which this configuration offers only some.
    names_and_aliases = [*names, *BUILTIN_NAMES, *map(str.casefold, config.tools.aliases)]
    agent_names = [
        agent_tool_name(name).casefold() for name in (*RESERVED_AGENT_NAMES, *(config.parent or config).agents)
    ]
    # The tools of providers are unknown before the start, so a rule with a namespace may still match one.
    has_providers = any((config.providers, config.mcp_servers, config.rest_tools, config.openapi))
    rules = {
        "toolsAllowed": config.tools.tools_allowed or (),
        "toolsDenied": config.tools.tools_denied,
        # Overrides apply to the tools of providers too, by their names without the namespace.
        "overrides": () if has_providers else tuple(config.tools.overrides),
    }
    warnings = [
        f'tools: "{name}" matches no tool'
        for name in config.tools.names
        if SEPARATOR not in name
        and name not in TOOL_COLLECTIONS
        and not has_providers
        and not fnmatch.filter(names_and_aliases, name.casefold())
    ]
    warnings += [
        f'tools.{key}: "{pattern}" matches no tool'
        for key, patterns in rules.items()
        for pattern in patterns
        if SEPARATOR not in pattern and not fnmatch.filter(names_and_aliases, pattern.casefold())
    ]
    warnings += [
        f'tools.{key}: "{pattern}" matches no tool'
        for key, patterns in (("toolsDenied", config.tools.tools_denied), ("overrides", config.tools.overrides))
        for pattern in patterns
        if pattern.casefold().startswith(_AGENT_PREFIX) and not fnmatch.filter(agent_names, pattern.casefold())
    ]
    namespaces = _list_namespaces(config)
    warnings += [
        f'tools.{key}: "{pattern}" matches no tool: no server or service is named "{namespace}"'
        for key, patterns in (
            ("toolsAllowed", config.tools.tools_allowed or ()),
            ("toolsDenied", config.tools.tools_denied),
            ("overrides", config.tools.overrides),
        )
        for pattern in patterns
        if (namespace := pattern.partition(SEPARATOR)[0]) != pattern
        and not config.providers  # The namespace of a plugin is unknown before it is built.
        and not fnmatch.filter(namespaces, namespace.casefold())
    ]
    targets = {*names, *(alias.casefold() for alias in config.tools.aliases)}
    return warnings + [
        f'tools.aliases: "{alias}" stands for "{target}", but no tool has this name'
        for alias, target in config.tools.aliases.items()
        if SEPARATOR not in target and not has_providers and target.casefold() not in targets
    ]


def list_unmatched_quotas(config: Config, tools: Sequence[Tool]) -> list[str]:
    """A warning for each tool or agent of a quota that does not exist: most likely it is misspelt.

    Principals, keys and ids of entities are not checked: they exist only in the database of a gateway.
    """
    own_configs = [agent.config for agent in config.agents.values() if agent.config is not None]
    configs = [config, *own_configs]
    names = [tool.name.casefold() for tool in tools]
    names += [*BUILTIN_NAMES, *RESERVED_ACTION_NAMES]
    names += (name.casefold() for part in configs for name in (*part.tools.aliases, *part.tools.definitions))
    names += (agent_tool_name(name).casefold() for name in (*RESERVED_AGENT_NAMES, *config.agents))
    # The functions of single agents are not loaded here.
    has_other_tools = any(part.functions for part in own_configs) or any(
        part.providers or part.mcp_servers or part.rest_tools or part.openapi for part in configs
    )
    namespaces = [namespace for part in configs for namespace in _list_namespaces(part)]
    agent_names = list(map(str.casefold, config.agents))
    warnings: list[str] = []
    for position, quota in enumerate(config.quotas):
        for pattern in quota.tool or ():
            namespace, separator, _ = pattern.casefold().partition(SEPARATOR)
            if fnmatch.filter(names, pattern.casefold()):
                continue
            if separator:
                # The namespace of a plugin is unknown before it is built, and the tools of a server before its start.
                may_match = any(part.providers for part in configs) or bool(fnmatch.filter(namespaces, namespace))
                may_match = may_match and namespace != AGENT_NAMESPACE
            else:
                may_match = has_other_tools
            if not may_match:
                warnings.append(f'{config.source("quotas", position, "tool")}: "{pattern}" matches no tool')
        warnings += [
            f'{config.source("quotas", position, "agent")}: "{pattern}" matches no agent'
            for pattern in quota.agent or ()
            if not pattern.startswith(_ENTITY_PREFIX) and not fnmatch.filter(agent_names, pattern.casefold())
        ]
    return warnings


def _list_namespaces(config: Config) -> list[str]:
    """The namespaces of the configured servers and services, and those of Toolspace, as patterns compare them."""
    names = [*config.mcp_servers, *config.openapi]
    return [
        name.casefold()
        for name in (
            *names,
            *map(sanitise, names),
            *([REST] if config.rest_tools else ()),
            AGENT_NAMESPACE,
            _ROUTER_NAMESPACE,
        )
    ]


def list_missing_queues(config: Config, tools: Sequence[Tool]) -> list[str]:
    return [
        f'tool "{tool.name}" uses the queue "{tool.queue}", which is not configured; add it under queues'
        for tool in tools
        if tool.queue is not None and tool.queue not in config.queues
    ]


def list_unused_settings(config: Config) -> list[str]:
    """A warning for each configured setting that this version does not use."""
    sources = [config.source(*path) for path in _UNUSED_SETTINGS]
    return [f"{source}: not in effect: this version does not use it" for source in sources if source != "default"]
