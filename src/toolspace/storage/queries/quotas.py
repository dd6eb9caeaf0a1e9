"""SQL programs for the counters of quotas: one row for each counter and window."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.quotas import QuotaCharge
from toolspace.storage.database import Program, long_running
from toolspace.storage.queries.statement_builder import delete_selected, first_value, insert_into

_INSERT = insert_into("quota_counters", ("key", "window_start", "reset_at", "amount"))
_ADD = f"""{_INSERT} ON CONFLICT (key, window_start)
    DO UPDATE SET amount = quota_counters.amount + excluded.amount"""
_ADD_WITHIN_LIMIT = f"{_ADD} WHERE quota_counters.amount + excluded.amount <= ? RETURNING amount"


class QuotaExceeded(Exception):
    """A charge exceeds its limit. Raised in a program, it takes back the charges before it."""

    def __init__(self, charge: QuotaCharge) -> None:
        super().__init__(charge.name)
        self.charge = charge


def take(charges: Sequence[QuotaCharge]) -> Program[None]:
    """Adds charges to their counters. Raises `QuotaExceeded` if one exceeds its limit: then nothing is added."""
    for charge in charges:
        if charge.amount > charge.limit:  # The first charge of a window is inserted without a comparison.
            raise QuotaExceeded(charge)
        rows = yield _ADD_WITHIN_LIMIT, (*_row(charge), charge.limit)
        if not rows:
            raise QuotaExceeded(charge)


def add(charges: Sequence[QuotaCharge]) -> Program[None]:
    """Adds charges to their counters, whatever their limits are."""
    for charge in charges:
        yield _ADD, _row(charge)


def find_exhausted(charges: Sequence[QuotaCharge]) -> Program[QuotaCharge | None]:
    """Returns the first charge whose counter has reached its limit, or None."""
    select = "SELECT amount FROM quota_counters WHERE key = ? AND window_start = ?"
    for charge in charges:
        amount = yield from first_value(select, charge.key, charge.window_start)
        if (amount or 0) >= charge.limit:
            return charge
    return None


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` counters of windows that ended before a time; returns how many."""
    clauses = "WHERE reset_at < ? ORDER BY reset_at LIMIT ?"
    return len((yield from delete_selected("quota_counters", "key, window_start", clauses, before, limit)))


def _row(charge: QuotaCharge) -> tuple[str, int, int, int]:
    return charge.key, charge.window_start, charge.reset_at, charge.amount
