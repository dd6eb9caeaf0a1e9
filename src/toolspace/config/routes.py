"""Finds circles in what leads to what. Knows no agents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


def find_circles(edges: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Circles, each from the node that was met first, until there is none that shares no edge with one of them.

    Goes by a stack of its own: a chain may be longer than Python lets functions call one another.
    """
    done: set[str] = set()
    for start in edges:
        way: dict[str, Iterator[str]] = {}
        if start not in done:
            way[start] = iter(edges[start])
        while way:
            last = next(reversed(way))
            following = next(way[last], None)
            if following is None:
                done.add(last)
                del way[last]
            elif following in way:
                names = list(way)
                yield tuple(names[names.index(following) :])
            elif following in edges and following not in done:
                way[following] = iter(edges[following])
