"""Pages of rows that are limited in bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from toolspace.storage.database import Program, read_page


def make_reader(rows: Sequence[int], limits: list[int]) -> Callable[[int | None, int], Program[list[int]]]:
    def read(last: int | None, limit: int) -> Program[list[int]]:
        limits.append(limit)
        yield "SELECT", ()
        behind = 0 if last is None else rows.index(last) + 1
        return list(rows[behind : behind + limit])

    return read


def run(program: Program[tuple[list[int], bool]]) -> tuple[list[int], bool]:
    try:
        next(program)
        while True:
            program.send([])
    except StopIteration as end:
        return end.value


@pytest.mark.parametrize("limit", [1, 15, 16, 17, 99, 100, 101, 500])
def test_small_rows_fill_a_page_with_two_reads(limit: int) -> None:
    rows, limits = list(range(100)), list[int]()
    assert run(read_page(make_reader(rows, limits), lambda _: 10, limit)) == (rows[:limit], limit < 100)
    assert len(limits) <= 2


def test_large_rows_end_a_page_early() -> None:
    rows, limits = list(range(100)), list[int]()
    assert run(read_page(make_reader(rows, limits), lambda _: 100, 100, max_bytes=3_000)) == (rows[:30], True)
    assert run(read_page(make_reader(rows, limits), lambda _: 10_000, 100, max_bytes=3_000)) == (rows[:16], True)
    assert run(read_page(make_reader(rows[:16], limits), lambda _: 10_000, 16, max_bytes=3_000)) == (rows[:16], True)
    assert run(read_page(make_reader([], limits), lambda _: 1, 10)) == ([], False)
