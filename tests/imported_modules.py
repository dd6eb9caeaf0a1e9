"""Removes the modules that a test imports from files of its own."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def restore_imports() -> Generator[None]:
    """Restores the import path, and removes new modules of test files after the block.

    Installed packages stay: a second import of half a package would not know the classes of the other half.
    """
    path, names = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - names:
            if _is_test_file(sys.modules[name]):
                del sys.modules[name]


def _is_test_file(module: ModuleType) -> bool:
    paths = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    installed_places = (sys.prefix, sys.base_prefix)
    is_product = module.__name__.partition(".")[0] in ("toolspace", "tests")
    return not is_product and any(path and not path.startswith(installed_places) for path in paths)
