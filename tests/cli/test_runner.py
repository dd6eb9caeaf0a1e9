"""The settings of a process that serves."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, sys
from toolspace.cli import mcp, serve
assert mcp.tune_process is serve.tune_process
serve.tune_process()
print(sys.getswitchinterval() <= 0.001, gc.get_threshold()[0] > 2000, gc.get_freeze_count() > 1000)
"""


def test_tuning_shortens_thread_turns_and_freezes_loaded_objects() -> None:
    process = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert process.stdout.split() == ["True"] * 3
