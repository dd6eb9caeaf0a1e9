"""What all tests share: state that never leaves the test's own folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from toolspace.testing import Recorder

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell: programs under test would inherit that, and not hear Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name in ("TOOLSPACE_CONFIG", "TOOLSPACE_LOG", "TOOLSPACE_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def record() -> type[Recorder]:
    """Keeps the events of a toolspace: `seen = record(ts)`."""
    return Recorder
