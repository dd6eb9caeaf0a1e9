"""Records which settings the tests cover, so that a documented setting without a test is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from toolspace.config.documentation import list_all_rows

Test = TypeVar("Test", bound=Callable[..., Any])


class SettingCoverage:
    """The settings that the tests of one module cover."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._settings: set[str] = set()

    def covers(self, *settings: str) -> Callable[[Test], Test]:
        """Marks a test as one that shows the effect of these settings."""
        self._settings.update(f"{self._prefix}{setting}" for setting in settings)
        return lambda test: test

    def list_missing(self, *prefixes: str, other_modules: tuple[str, ...] = ()) -> list[str]:
        """The documented settings with these prefixes that no test covers, except those of other modules."""
        settings = [row.path for row in list_all_rows() if row.path.startswith(prefixes)]
        own_settings = [setting for setting in settings if not setting.startswith(other_modules or "-")]
        return [setting for setting in own_settings if setting not in self._settings]
