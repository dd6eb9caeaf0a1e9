"""Counts quotas in the database, so that they hold over restarts and for all processes that share it."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.quotas import QuotaCharge, QuotaStore
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import quotas


class StoredQuotas(QuotaStore):
    """The counters of a gateway."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def now_ms(self) -> int:
        return self._ledger.now_ms()

    async def take(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        try:
            await self._ledger.write(quotas.take, charges)
        except quotas.QuotaExceeded as error:
            return error.charge
        return None

    async def add(self, charges: Sequence[QuotaCharge]) -> None:
        await self._ledger.write(quotas.add, charges)

    async def find_exhausted(self, charges: Sequence[QuotaCharge]) -> QuotaCharge | None:
        return await self._ledger.read(quotas.find_exhausted, charges)
