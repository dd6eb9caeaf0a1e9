"""Stored outputs: large tool results by handle. `disk` keeps them as files (`files`), `memory` in the process.

Both implement `core.interfaces.OutputStore`; `handles` has what they share. Used by `toolspace.py` and `testing/`.
"""
