"""Hooks: keep transfers small, and hide account numbers in results. `docs/hooks.md` explains it."""

import asyncio

from toolspace import Hook, HookCall, HookDecision, Settings, ToolContext, Toolspace, tool


@tool
async def transfer(amount: int, iban: str) -> dict[str, object]:
    """Transfers money."""
    return {"amount": amount, "to": iban}


def check_amount(call: HookCall) -> HookDecision | None:
    if call.arguments["amount"] > 100:
        return HookDecision(deny=f"{call.principal} may transfer at most 100")
    return None  # The call passes unchanged.


async def hide_account(call: HookCall) -> HookDecision:
    return HookDecision(result={**call.result, "to": "…" + call.result["to"][-4:]})


async def main() -> None:
    hooks = [
        Hook(use=check_amount, on="before", tools="transfer"),
        Hook(use=hide_account, on="after", tools="transfer", timeout=2.0),
    ]
    toolspace = Toolspace([transfer], settings=Settings(hooks=hooks))
    carla = ToolContext(user_id="carla")
    for amount in (50, 5_000):
        result = await toolspace.call("transfer", {"amount": amount, "iban": "DE89370400440532013000"}, context=carla)
        print(result.text)


asyncio.run(main())
