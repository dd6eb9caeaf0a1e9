"""A gateway in this process whose agents have scripted models, for the measures of durable agents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from toolspace.agents.agent import entity_id_for
from toolspace.core.ids import new_id
from toolspace.core.language_model import Model
from toolspace.server.gateway import Gateway
from toolspace.spaces.ledger import Effects
from toolspace.storage.queries import inbox


def write_config(folder: Path, names: Iterable[str], **more: Any) -> Path:
    """Writes a configuration of agents without a limit on cycles per minute."""
    limits = {"cyclesPerMinute": 1_000_000, "maxAgentTurns": 1_000_000}
    agents = {name: {"system": "Add.", "limits": limits, "loop": {"maxSteps": 1000}} for name in names}
    path = folder / "toolspace.json"
    storage = {"dir": str(folder / "state"), **more.pop("storage", {})}
    path.write_text(json.dumps({"agents": agents, "storage": storage, "demo": False, **more}))
    return path


@asynccontextmanager
async def agent_gateway(path: Path) -> AsyncGenerator[Gateway]:
    async with Gateway.open(path) as gateway:
        yield gateway


def set_model(gateway: Gateway, name: str, model: Model) -> None:
    """Replaces the model of an agent, from its next cycle on."""
    gateway.toolspace.agents.get(name).model = model


async def send_event(gateway: Gateway, names: Iterable[str], data: Any = None) -> None:
    """Adds an event to the inbox of each agent."""
    await gateway.ledger.commit(_push, [entity_id_for(name) for name in names], data)


async def wait_until_idle(gateway: Gateway) -> None:
    """Waits until no agent runs."""
    while gateway.agent_host.scheduler.active_count:  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.0003)


def _push(effects: Effects, agents: list[str], data: Any) -> Any:
    for agent in agents:
        yield from inbox.add(agent, new_id("evt"), "service", data, priority=inbox.PLAN_OR_SERVICE)
        effects.notify_inbox(agent)
