"""How a process is set up for serving."""

from __future__ import annotations

import subprocess
import sys

_ASK = """
import gc, sys
from toolspace.cli import mcp, serve
assert mcp.tune_process is serve.tune_process
serve.tune_process()
print(sys.getswitchinterval() <= 0.001, gc.get_threshold()[0] > 2000, gc.get_freeze_count() > 1000)
"""


def test_threads_take_short_turns_and_what_is_loaded_is_not_looked_through() -> None:
    said = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == ["True"] * 3
