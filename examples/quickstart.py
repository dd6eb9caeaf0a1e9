"""Turns a function into a tool, calls it, and shows the results of failed calls."""

import asyncio

from toolspace import Toolspace, tool


@tool(timeout=5)
async def convert(amount: float, rate: float = 1.1) -> float:
    """Converts an amount of money.

    Args:
        amount: The amount to convert.
        rate: The value of one unit.
    """
    return round(amount * rate, 2)


async def main() -> None:
    async with Toolspace(tools=[convert]) as ts:
        result = await ts.call("convert", {"amount": 20})
        print(result.ok, result.result)

        # Models send text: obvious type errors are corrected, other errors are explained.
        print((await ts.call("convert", '{"amount": "20", "rate": 2}')).result)
        print((await ts.call("convert", '{"amount": "many"}')).text)
        print((await ts.call("conver", {})).error)

        # The definition that the model gets.
        print(ts.to_llm_tools("openai")[0]["function"]["parameters"]["required"])


asyncio.run(main())
