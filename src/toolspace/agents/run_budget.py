"""One agent at work on one request: who asked it, what it may spend, what its tools decided for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.model import NO_USAGE, Usage
from toolspace.errors import ToolLimitError, ToolPermissionError

DEFAULT_MAX_DEPTH = 8


class RunLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one run of an agent may use, those it calls included. None: no bound of its own."""

    max_tokens: int | None = None
    max_cost: float | None = None
    timeout: float | None = None
    """Seconds."""
    max_depth: int = DEFAULT_MAX_DEPTH
    """How many agents may stand in one line, each called by the one before."""


class Handoff(msgspec.Struct, frozen=True):
    """Another agent is to answer in the place of this one."""

    agent: str
    message: str | None


class AgentRecursionError(ToolPermissionError):
    """An agent would wait for itself."""

    prefix = ""


class AgentRun:
    """What the calls of one agent's run share. In the `agent` of their contexts."""

    __slots__ = (
        "_asking",
        "_largest",
        "_waiting",
        "destinations",
        "expires_at",
        "handoff",
        "is_skipped",
        "is_unlimited",
        "limits",
        "name",
        "parent",
        "previous_agents",
        "request",
        "subagents",
        "usage",
    )

    def __init__(
        self,
        name: str,
        *,
        limits: RunLimits,
        request: str = "",
        parent: AgentRun | None = None,
        subagents: tuple[str, ...] | None = None,
        destinations: tuple[str, ...] = (),
        previous_agents: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self.limits = limits
        self.request = request
        """What it was asked, as it was asked: a hand-off passes it on."""
        self.parent = parent
        self.subagents = subagents
        """The agents that it may call; None: any."""
        self.destinations = destinations
        """The agents that it may hand its request to."""
        self.previous_agents = previous_agents
        """The agents that had the request before it, and handed it on."""
        self.usage: Usage = NO_USAGE
        """Of this run and all that it called."""
        self.expires_at = time.monotonic() + limits.timeout if limits.timeout is not None else float("inf")
        if parent is not None:
            self.expires_at = min(self.expires_at, parent.expires_at)
        unbounded = limits.max_tokens is None and limits.max_cost is None and self.expires_at == float("inf")
        self.is_unlimited = unbounded and (parent is None or parent.is_unlimited)
        """Whether nothing bounds what may be spent."""
        self.handoff: Handoff | None = None
        self.is_skipped = False
        self._asking = 0
        """How many requests to models are under way, here and below."""
        self._largest = (0, 0.0)
        """The most tokens, and the most money, that one request has cost so far."""
        self._waiting: list[asyncio.Future[None]] = []

    def lineage(self) -> Iterator[AgentRun]:
        """This frame, the one that called it, and so on."""
        frame: AgentRun | None = self
        while frame is not None:
            yield frame
            frame = frame.parent

    def add_usage(self, usage: Usage) -> None:
        """Adds what a model request cost, here and to everyone who waits for this."""
        frame: AgentRun | None = self
        while frame is not None:
            frame.usage = frame.usage + usage
            tokens, cost = frame._largest
            frame._largest = (max(tokens, usage.tokens), max(cost, usage.cost))
            frame = frame.parent

    async def begin_request(self) -> None:
        """Waits while the requests that are under way may use up what there is: agents that are called side by side
        would each find it unspent. Say `end_request` after it."""
        while (full := next((frame for frame in self.lineage() if frame._is_full()), None)) is not None:
            place = asyncio.get_running_loop().create_future()
            full._waiting.append(place)
            await place
        for frame in self.lineage():
            frame._asking += 1

    def end_request(self) -> None:
        """A request has ended, and what it cost is booked."""
        for frame in self.lineage():
            frame._asking -= 1
            waiting, frame._waiting = frame._waiting, []
            for place in waiting:
                if not place.done():
                    place.set_result(None)

    def _is_full(self) -> bool:
        """Whether one request more may be too many. Never where none is under way: then the bounds tell."""
        bounds, more = self.limits, self._asking + 1
        if more == 1:
            return False
        tokens, cost = self._largest
        if bounds.max_tokens is not None and self.usage.tokens + more * tokens > bounds.max_tokens:
            return True
        return bounds.max_cost is not None and self.usage.cost + more * cost > bounds.max_cost

    @property
    def remaining_seconds(self) -> float:
        return self.expires_at - time.monotonic()

    def exhausted_reason(self) -> str | None:
        """Why no more may be spent: by this run or by one that waits for it. None while there is room."""
        if self.is_unlimited:
            return None
        for frame in self.lineage():
            bounds = frame.limits
            if bounds.max_tokens is not None and frame.usage.tokens >= bounds.max_tokens:
                return f'the agent "{frame.name}" has used its {bounds.max_tokens} tokens (limits.maxTokens)'
            if bounds.max_cost is not None and frame.usage.cost >= bounds.max_cost:
                return f'the agent "{frame.name}" has spent its ${bounds.max_cost:g} (limits.maxCost)'
        if self.remaining_seconds <= 0:
            return f'the agent "{self.name}" has used up its time (limits.timeout)'
        return None

    def check_call(self, name: str) -> None:
        """Raises where this agent may not call another one now."""
        if self.subagents is not None and name not in self.subagents:
            known = f"; it may call {', '.join(self.subagents)}" if self.subagents else "; it has none to call"
            raise ToolPermissionError(f'the agent "{self.name}" may not call the agent "{name}"{known}')
        self.check_depth(name)

    def check_depth(self, name: str) -> None:
        """Raises where another agent may not stand behind this one in the line of those that wait for one another."""
        line = self.check_recursion(name)
        depth = min(frame.limits.max_depth for frame in self.lineage())
        if len(line) >= depth:
            raise ToolLimitError(
                f'the agent "{name}" would be number {len(line) + 1} in the line {" → ".join(line)}; '
                f"at most {depth} may stand in one (limits.maxDepth)"
            )

    def check_recursion(self, name: str) -> list[str]:
        """The names of those that wait for one another, this one last. Raises where one of them is meant."""
        line = [frame.name for frame in self.lineage()][::-1]
        if name in line:
            raise AgentRecursionError(f"Recursion detected: {' → '.join([*line[line.index(name) :], name])}")
        return line


def find_agent_run(context: ToolContext) -> AgentRun | None:
    """The run of an agent that a call belongs to; None where no agent calls."""
    agent = context.agent
    return agent if isinstance(agent, AgentRun) else None
