"""Caches of tool results: `memory` for one process, `sqlite` in a file that several processes share.

Both implement `core.interfaces.ResultCache`. Used by `toolspace.py`, which imports `sqlite` only if it is configured.
"""
