"""examples/agents: the team works as its comments say, with a scripted model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.server.gateway_api import SECRET, ApiClient, open_api, write_config
from tests.server.scripted_agents import (
    PERSON,
    AgentGateway,
    Turn,
    list_input_texts,
    list_result_texts,
    offered_tools,
    open_model_server,
    text_completion,
    tool_calls_turn,
)
from toolspace import ToolWorker
from toolspace.core.ids import derived_id
from toolspace.models.registry import PROVIDERS
from toolspace.server.gateway import Gateway

TEAM = Path(__file__).parent.parent.parent / "examples" / "agents" / "toolspace.yaml"
TRAVEL = derived_id("spc", "named", "Travel")
USUAL = PROVIDERS["openai"].default_model or ""
ASK = tool_calls_turn(("agent__researcher", {"prompt": "What may a hotel cost?", "reason": "to book one"}))
LOOK = tool_calls_turn(("search_knowledge", {"query": "hotels a night"}))
BOOKING = {"action": "Book 2 nights in Lisbon, 120 euros each"}


@pytest.mark.spec("17.1")
@pytest.mark.spec("11.2")
async def test_the_example_team_searches_asks_and_books_after_confirmation(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        environ = {
            "OPENAI_API_KEY": "sk-team",
            "OPENAI_BASE_URL": model_server.base_url,
            "TOOLSPACE_STORAGE_DIR": str(tmp_path),
            "TOOLSPACE_SERVER_SECRET_KEY": SECRET,
        }
        async with Gateway.open(TEAM, environ=environ) as gateway, open_api(gateway) as api:
            setup = AgentGateway(gateway, api, model_server, partial(write_config, tmp_path))
            await setup.wait_for_documents(agent="researcher")
            await api.create("/api/entities", id=PERSON, type="human", name="Husam")
            await api.create(f"/api/spaces/{TRAVEL}/members", entityId=PERSON)
            asking_first: list[Turn] = [
                tool_calls_turn(("enter_space", {"spaceId": TRAVEL})),
                ASK,
                LOOK,
                "Up to 150 euros (House rules for travel).",
                tool_calls_turn(("confirmAction", BOOKING), ("send_message", {"text": "Shall I?"})),
                text_completion("I wait."),
            ]
            model_server.script(*asking_first, model=USUAL)
            await setup.say("Two nights in Lisbon, please", space=TRAVEL)
            run = await setup.wait_for_run_end(agent="concierge")
            requests = model_server.list_requests(USUAL)
            assert "confirmAction" in offered_tools(requests[0])
            assert "confirmAction" not in offered_tools(requests[2])  # The researcher has its own tools.
            assert "Up to 150 euros" in list_result_texts(requests[3])[-1]
            assert "150 euros" in list_result_texts(requests[4])[-1]

            (call,) = [
                candidate for candidate in await setup.list_calls(run) if candidate["toolName"] == "confirmAction"
            ]
            model_server.script(tool_calls_turn(("bookRoom", {"city": "Lisbon", "nights": 2})), model=USUAL)
            confirmation = {"runId": run["id"], "toolCallId": call["callId"], "result": {"confirmed": True}}
            async with serve_booking(api):
                assert (await api.post(f"/api/spaces/{TRAVEL}/tool-results", confirmation)).status == 200
                await setup.wait_for_run_end(2, agent="concierge")
            assert '{"confirmed":true}' in "\n".join(
                list_input_texts(model_server.list_requests(USUAL)[len(asking_first)])
            )
            assert list_result_texts(model_server.list_requests(USUAL)[-1])[-1] == "2 nights in Lisbon"
            assert await setup.list_agent_messages("concierge", TRAVEL) == ["Shall I?"]


@asynccontextmanager
async def serve_booking(api: ApiClient) -> AsyncGenerator[None]:
    """Runs a worker that books rooms."""
    worker = ToolWorker(api.url, secret_key=SECRET)

    @worker.tool("bookRoom")
    async def book(city: str, nights: int) -> str:
        return f"{nights} nights in {city}"

    async with worker:
        yield
