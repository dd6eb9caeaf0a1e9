"""From a function to a called tool, and what comes back when things go wrong."""

import asyncio

from toolspace import Toolspace, tool


@tool(timeout=5)
async def convert(amount: float, rate: float = 1.1) -> float:
    """Converts an amount of money.

    Args:
        amount: How much.
        rate: What one unit is worth.
    """
    return round(amount * rate, 2)


async def main() -> None:
    async with Toolspace(tools=[convert]) as ts:
        result = await ts.call("convert", {"amount": 20})
        print(result.ok, result.result)

        # A model sends text; what is plain is mended, what is wrong is explained.
        print((await ts.call("convert", '{"amount": "20", "rate": 2}')).result)
        print((await ts.call("convert", '{"amount": "many"}')).text)
        print((await ts.call("conver", {})).error)

        # What the model is shown.
        print(ts.to_llm_tools("openai")[0]["function"]["parameters"]["required"])


asyncio.run(main())
