"""Which limits hold for one gateway process alone, and so are not shared by the gateways of one database."""

from __future__ import annotations

from typing import Final

PROCESS_LIMITS: Final = (
    "queues (concurrent, rate, maxWaiting)",
    "maxConcurrentTools and the other limits of a run whose calls reach several gateways",
    "server.rateLimit, server.secretRateLimit and server.failedLoginLimit",
    "server.maxConcurrentRequests, server.maxStreams, server.maxStreamsPerCaller and server.maxConnectionsPerAddress",
    "server.maxActiveAgents and limits.maxParallelSessions of agents",
    "MCP sessions of a key",
)
"""With several gateways, each of these allows as much as one gateway does, several times."""
PROCESS_STATE: Final = ("cached results", "circuit breakers", "statistics of tools", "MCP servers and sessions")
"""What each gateway has of its own."""


def describe_process_limits(other_gateways: int) -> str:
    """Returns what a gateway says at its start if others use its database."""
    subject = "another gateway uses" if other_gateways == 1 else f"{other_gateways} other gateways use"
    return (
        f"{subject} this database, too; these limits hold for each gateway alone: {'; '.join(PROCESS_LIMITS)}. "
        f"Each gateway also has its own {', '.join(PROCESS_STATE)} (docs/gateway.md, Running several gateways)"
    )
