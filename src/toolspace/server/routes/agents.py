"""Routes for agents: the entities that think. What they keep in mind has routes of its own."""

from __future__ import annotations

from toolspace.core.records import Entity, RunRecord
from toolspace.server.api_types import PageQuery, ResultPage, build_page
from toolspace.server.authorization import Access, EntityCaller, get_visible_agent
from toolspace.server.requests import Request
from toolspace.server.routes.entities import redact_entity
from toolspace.server.routes.runs import AgentRunListQuery
from toolspace.server.routing import Route
from toolspace.storage.queries import entities, runs


async def list_agents(request: Request) -> ResultPage[Entity]:
    query = request.query(PageQuery)
    caller = request.caller
    found = await request.gateway.ledger.read(
        entities.list_entities,
        type="agent",
        sharing_with=caller.entity_id if isinstance(caller, EntityCaller) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page([redact_entity(caller, agent) for agent in found], query.limit, lambda agent: agent.id)


async def get_agent(request: Request) -> Entity:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return redact_entity(request.caller, agent)


async def list_runs_of_agent(request: Request) -> ResultPage[RunRecord]:
    query = request.query(AgentRunListQuery)
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    found = await request.gateway.ledger.read(
        runs.list_runs, agent_entity_id=agent.id, status=query.status, before=query.cursor, limit=query.limit + 1
    )
    return build_page(found, query.limit, lambda run: run.id)


ROUTES = [
    Route(
        method="GET",
        path="/api/agents",
        handler=list_agents,
        access=Access.MEMBER,
        tag="agents",
        summary="List agents, by id",
        description="With a token: those that share a space with the entity; their metadata is left out.",
        query=PageQuery,
        response=ResultPage[Entity],
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}",
        handler=get_agent,
        access=Access.MEMBER,
        tag="agents",
        summary="One agent",
        response=Entity,
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}/runs",
        handler=list_runs_of_agent,
        access=Access.SECRET,
        tag="agents",
        summary="The runs of an agent, newest first",
        query=AgentRunListQuery,
        response=ResultPage[RunRecord],
    ),
]
