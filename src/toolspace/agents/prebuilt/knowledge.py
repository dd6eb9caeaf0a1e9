"""What an agent can look up: passages of the documents that were given to it."""

from __future__ import annotations

from typing import Any

from toolspace.agents.prebuilt.action import NO_NUL, READ_ONLY, Action, Actor, takes
from toolspace.core.tool import ToolCategory
from toolspace.spaces.knowledge import Library

MOST_RESULTS = 20
USUAL_RESULTS = 5


async def _search_knowledge(actor: Actor, given: dict[str, Any]) -> Any:
    library = actor.room.services.library or Library(actor.ledger)
    limit = int(given.get("limit", USUAL_RESULTS))
    found = await library.search(actor.agent_id, given["query"], limit=limit)
    return {
        "results": [
            {
                "documentId": hit.document_id,
                "title": hit.title,
                "source": hit.source,
                "text": hit.text,
                "score": hit.score,
            }
            for hit in found.hits
        ],
        "total": found.total,
    }


ACTIONS = (
    Action(
        name="search_knowledge",
        description=(
            "Search the documents that were given to you. Gives the passages that fit best; use the words that you "
            "expect in them."
        ),
        input_schema=takes(
            {
                "query": {"type": "string", "minLength": 1, "maxLength": 2_000, "pattern": NO_NUL},
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MOST_RESULTS,
                    "default": USUAL_RESULTS,
                    "description": "How many passages to give.",
                },
            },
            "query",
        ),
        run=_search_knowledge,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
)
