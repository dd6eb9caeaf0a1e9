"""A conversation with an agent: a session, an answer as an object, and events while the agent works."""

import asyncio

from pydantic import BaseModel

from toolspace import Agent, AgentCallStarted, AgentFinished, AgentText, Toolspace, tool
from toolspace.testing import ScriptedModel, call


class Forecast(BaseModel):
    city: str
    degrees: int


@tool
async def temperature(city: str) -> int:
    """Returns the temperature of a city in degrees."""
    return {"Lisbon": 21, "Oslo": 9}[city]


model = ScriptedModel(
    [
        "I will look at Oslo for you.",
        '{"city": "Oslo", "degrees": "nine"}',  # Does not fit: the model is told why, and tries again.
        '{"city": "Oslo", "degrees": 9}',
        call("temperature", {"city": "Lisbon"}),
        "Lisbon has 21 degrees.",
    ]
)  # Or "openai:gpt-6.1-sol".


async def main() -> None:
    async with Toolspace(tools=[temperature], agents=[Agent("weather", model=model)]) as ts:
        await ts.run_agent("weather", "I am in Oslo.", session="anna-1")

        result = await ts.run_agent("weather", "How warm is it here?", session="anna-1", output_type=Forecast)
        print(result.unwrap().degrees, "degrees, after", len(result.turns), "turns")

        async for event in ts.stream_agent("weather", "And in Lisbon?", session="anna-1"):
            if isinstance(event, AgentText):
                print(event.text, end="")
            elif isinstance(event, AgentCallStarted):
                print(f"[{event.name} {event.arguments}]")
            elif isinstance(event, AgentFinished):
                print(f"\n{event.result.steps} steps")


asyncio.run(main())
