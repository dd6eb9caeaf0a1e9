"""Routes of agents. Their inbox, plans, goals, memories, documents and tasks have their own modules."""

from __future__ import annotations

from toolspace.core.records import Entity, RunRecord
from toolspace.server.api_types import PageQuery, ResultPage, build_page
from toolspace.server.authorization import Access, EntityCaller, get_visible_agent
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.routes.runs import AgentRunListQuery
from toolspace.server.routing import Route
from toolspace.storage.queries import entities_and_spaces, runs


async def get_agent_id(request: Request) -> str:
    """Returns the path parameter `agentId`. Raises `Problem` 404 or 403 unless the caller may see that agent."""
    return (await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])).id


async def list_agents(request: Request) -> ResultPage[Entity]:
    query = request.query(PageQuery)
    caller = request.caller
    agents = await request.gateway.ledger.read(
        entities_and_spaces.list_entities,
        type="agent",
        sharing_with=caller.entity_id if isinstance(caller, EntityCaller) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page([redact_entity(agent, caller) for agent in agents], query.limit, lambda agent: agent.id)


async def get_agent(request: Request) -> Entity:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return redact_entity(agent, request.caller)


async def list_agent_runs(request: Request) -> ResultPage[RunRecord]:
    query = request.query(AgentRunListQuery)
    agent_id = await get_agent_id(request)
    records = await request.gateway.ledger.read(
        runs.list_runs, agent_entity_id=agent_id, status=query.status, before=query.cursor, limit=query.limit + 1
    )
    return build_page(records, query.limit, lambda run: run.id)


ROUTES = [
    Route(
        method="GET",
        path="/api/agents",
        handler=list_agents,
        access=Access.MEMBER,
        tag="agents",
        summary="List agents, ordered by id",
        description="With a token: the agents that share a space with the entity, without their metadata.",
        query=PageQuery,
        response=ResultPage[Entity],
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}",
        handler=get_agent,
        access=Access.MEMBER,
        tag="agents",
        summary="Get an agent",
        response=Entity,
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}/runs",
        handler=list_agent_runs,
        access=Access.SECRET,
        tag="agents",
        summary="List the runs of an agent, newest first",
        query=AgentRunListQuery,
        response=ResultPage[RunRecord],
    ),
]
