"""Helpers to test extensions: a contract test suite for each extension point, and in-memory implementations.

    from toolspace.testing import ProviderContract

    class TestWeather(ProviderContract):
        call = ("current", {"city": "Lisbon"})

        @pytest.fixture
        def provider(self) -> ToolProvider:
            return WeatherProvider()

The contracts need pytest and pytest-asyncio, in either of its modes. The rest needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from toolspace.models.scripted import ScriptedModel as ScriptedModel
    from toolspace.models.scripted import call as call
    from toolspace.storage.memory_cache import MemoryCache as MemoryCache
    from toolspace.storage.memory_outputs import MemoryOutputs as MemoryOutputs
    from toolspace.testing.doubles import EventRecorder as EventRecorder
    from toolspace.testing.doubles import FakeClock as FakeClock
    from toolspace.testing.provider_contract import ProviderContract as ProviderContract
    from toolspace.testing.storage_contracts import CacheContract as CacheContract
    from toolspace.testing.storage_contracts import ConversationsContract as ConversationsContract
    from toolspace.testing.storage_contracts import OutputsContract as OutputsContract

T = TypeVar("T")
_MODULES = {
    "CacheContract": "toolspace.testing.storage_contracts",
    "ConversationsContract": "toolspace.testing.storage_contracts",
    "EventRecorder": "toolspace.testing.doubles",
    "FakeClock": "toolspace.testing.doubles",
    "MemoryCache": "toolspace.storage.memory_cache",
    "MemoryOutputs": "toolspace.storage.memory_outputs",
    "OutputsContract": "toolspace.testing.storage_contracts",
    "ProviderContract": "toolspace.testing.provider_contract",
    "ScriptedModel": "toolspace.models.scripted",
    "call": "toolspace.models.scripted",
}

__all__ = list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports an exported name on first use: only the contracts need pytest."""
    if name not in _MODULES:
        raise AttributeError(f"module 'toolspace.testing' has no attribute {name!r}")
    from importlib import import_module

    try:
        if name.endswith("Contract"):
            import_module("pytest_asyncio")
            # So that a failed assertion shows its values, as in other tests.
            import_module("pytest").register_assert_rewrite(_MODULES[name])
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "pytest_asyncio"):
            raise
        missing = f"toolspace.testing.{name} runs under pytest, and {error.name} is not installed"
        raise ImportError(f"{missing}; install both: pip install pytest pytest-asyncio", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def mark_coroutine_tests(suite: type[T]) -> type[T]:
    """A class decorator for contract suites: its coroutines run in either mode of pytest-asyncio."""
    from inspect import iscoroutinefunction

    import pytest

    for test in filter(iscoroutinefunction, vars(suite).values()):
        pytest.mark.asyncio(test)
    return suite
