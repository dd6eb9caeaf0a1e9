"""Runs an agent without a gateway. Its model is scripted; with an API key, use the name of a model instead."""

import asyncio

from toolspace import Agent, Toolspace, tool
from toolspace.testing import ScriptedModel, call


@tool
async def temperature(city: str) -> int:
    """Returns the temperature of a city in degrees."""
    return {"Lisbon": 21, "Oslo": 9}[city]


model = ScriptedModel([call("temperature", {"city": "Oslo"}), "It has 9 degrees there."])  # Or "openai:gpt-6.1-sol".
ts = Toolspace(tools=[temperature], agents=[Agent("weather", system="Be brief.", model=model)])
print(asyncio.run(ts.run_agent("weather", "How warm is it in Oslo?")).text)
