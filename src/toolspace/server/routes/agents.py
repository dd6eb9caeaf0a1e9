"""Routes for agents: the entities that think. What they keep in mind has routes of its own."""

from __future__ import annotations

from toolspace.core.records import Entity, RunRecord
from toolspace.server.authorization import sees_agent
from toolspace.server.body_types import Page, Paging, page
from toolspace.server.callers import Access, Public
from toolspace.server.requests import Request
from toolspace.server.routes.entities import shown_to
from toolspace.server.routes.runs import RunsOfAgent
from toolspace.server.routing import Route
from toolspace.storage.queries import entities, runs


async def list_agents(request: Request) -> Page[Entity]:
    query = request.query(Paging)
    caller = request.caller
    found = await request.gateway.ledger.read(
        entities.entities,
        type="agent",
        sharing_with=caller.entity_id if isinstance(caller, Public) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return page([shown_to(caller, agent) for agent in found], query.limit, lambda agent: agent.id)


async def get_agent(request: Request) -> Entity:
    agent = await sees_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return shown_to(request.caller, agent)


async def list_runs_of_agent(request: Request) -> Page[RunRecord]:
    query = request.query(RunsOfAgent)
    agent = await sees_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    found = await request.gateway.ledger.read(
        runs.listing, agent_entity_id=agent.id, status=query.status, before=query.cursor, limit=query.limit + 1
    )
    return page(found, query.limit, lambda run: run.id)


ROUTES = [
    Route(
        method="GET",
        path="/api/agents",
        handler=list_agents,
        access=Access.MEMBER,
        tag="agents",
        summary="List agents, by id",
        description="With a token: those that share a space with the entity; their metadata is left out.",
        query=Paging,
        answer=Page[Entity],
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}",
        handler=get_agent,
        access=Access.MEMBER,
        tag="agents",
        summary="One agent",
        answer=Entity,
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}/runs",
        handler=list_runs_of_agent,
        access=Access.SECRET,
        tag="agents",
        summary="The runs of an agent, newest first",
        query=RunsOfAgent,
        answer=Page[RunRecord],
    ),
]
