"""The section `providers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.spec("3.2")
def test_providers_are_read(load: Any, tmp_path: Path) -> None:
    config = load(
        """
queues: {q: {concurrent: 1}}
providers:
  weather: {}
  notes: ./notes.py:NotesProvider
  archive:
    uses: my_package.notes:NotesProvider
    namespace: old
    settings: {file: "${FILE}", sizes: [1, 2]}
    enabled: no
    required: yes
    toolsAllowed: read*
    excludeTools: [read_all]
    queue: q
    cache: 5m
    requestTimeoutMs: 1500
""",
        FILE="/data/a.db",
    )
    weather, notes, archive = config.providers.values()
    assert (weather.name, weather.uses, weather.enabled, weather.settings) == ("weather", None, True, {})
    assert (notes.name, notes.uses) == ("notes", "./notes.py:NotesProvider")
    assert (archive.uses, archive.namespace) == ("my_package.notes:NotesProvider", "old")
    assert archive.settings == {"file": "/data/a.db", "sizes": [1, 2]}
    assert (archive.enabled, archive.required) == (False, True)
    assert (archive.tools_allowed, archive.tools_denied) == (("read*",), ("read_all",))
    assert (archive.queue, archive.cache, archive.request_timeout) == ("q", 300, 1.5)
    assert config.files() == (tmp_path / "toolspace.yaml", tmp_path / "notes.py")
    assert config.source("providers", "archive", "queue").endswith("toolspace.yaml:14 (providers.archive.queue)")


@pytest.mark.spec("5.2")
def test_problems_of_providers_have_their_place(find_problems: Any) -> None:
    problems = find_problems(
        """
providers:
  a: {use: x}
  b: {uses: 5, namespace: " ", settings: [1]}
  c: {queue: nowhere}
  d: {settings: {key: "${NOT_SET_ANYWHERE}"}}
  e: {enabled: false, queue: nowhere, settings: {key: "${NOT_SET_ANYWHERE}"}}
"""
    )
    assert [line.partition("toolspace.yaml:")[2].partition("; ")[0] for line in problems] == [
        "3: providers.a.use: unknown key",
        "4: providers.b.uses: expected a name, got 5",
        '4: providers.b.namespace: expected a name, got " "',
        "4: providers.b.settings: expected a mapping, got a list",
        '5: providers.c.queue: there is no queue "nowhere"',
        "6: providers.d.settings.key: the variable NOT_SET_ANYWHERE is not set",
    ]


@pytest.mark.spec("4.11")
def test_the_repr_of_a_provider_hides_its_settings(load: Any) -> None:
    config = load("providers: {a: {settings: {key: opensesame, of: {b: [opensesame]}}}}")
    assert "sesame" not in repr(config)
    assert "sesame" not in repr(config.providers["a"])
    assert "name='a'" in repr(config.providers["a"])
