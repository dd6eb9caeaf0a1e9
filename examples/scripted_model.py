"""Tests a model loop without a model provider or an API key: the responses of the model are scripted."""

import asyncio

from toolspace import Toolspace, tool
from toolspace.core.language_model import ModelRequest, ModelToolResult, ResultsTurn, Turn, UserTurn
from toolspace.testing import ScriptedModel, call


@tool
async def look_up(city: str) -> int:
    """Looks up the temperature of a city."""
    return {"Lisbon": 21, "Oslo": 9}[city]


async def main() -> None:
    model = ScriptedModel(
        [
            [call("look_up", {"city": "Lisbon"}), call("look_up", {"city": "Oslo"})],  # Two parallel calls.
            lambda request: (
                f"They have {' and '.join(tool_call.text for tool_call in request.turns[-1].results)} degrees."
            ),
        ]
    )
    turns: list[Turn] = [UserTurn("How warm is it in Lisbon and Oslo?")]
    async with Toolspace(tools=[look_up]) as ts:
        tools = tuple(tool for tool in ts.list_tools() if tool.name == "look_up")
        while True:
            turn = await model.respond(ModelRequest(system="Be brief.", turns=turns, tools=tools))
            turns.append(turn)
            if not turn.calls:
                break
            results = [
                ModelToolResult(tool_call.id, tool_call.name, (await ts.call(tool_call.name, tool_call.arguments)).text)
                for tool_call in turn.calls
            ]
            turns.append(ResultsTurn(tuple(results)))
    print(turn.text)
    print(len(model.requests), "requests;", model.remaining_steps, "turns left")


asyncio.run(main())
