"""What tests of extensions need: a contract for each extension point, and fakes that are real implementations.

    from toolspace.testing import ProviderContract

    class TestWeather(ProviderContract):
        call = ("current", {"city": "Lisbon"})

        @pytest.fixture
        def provider(self) -> ToolProvider:
            return WeatherProvider()

The contracts run under pytest with pytest-asyncio, in either of its modes; the rest needs neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from toolspace.models.scripted import ScriptedModel as ScriptedModel
    from toolspace.models.scripted import call as call
    from toolspace.storage.caches.memory import MemoryCache as MemoryCache
    from toolspace.storage.outputs.memory import MemoryOutputs as MemoryOutputs
    from toolspace.testing.doubles import EventRecorder as EventRecorder
    from toolspace.testing.doubles import FakeClock as FakeClock
    from toolspace.testing.provider_contract import ProviderContract as ProviderContract
    from toolspace.testing.storage_contracts import CacheContract as CacheContract
    from toolspace.testing.storage_contracts import OutputsContract as OutputsContract

_PLACES = {
    "CacheContract": "toolspace.testing.storage_contracts",
    "FakeClock": "toolspace.testing.doubles",
    "MemoryCache": "toolspace.storage.caches.memory",
    "MemoryOutputs": "toolspace.storage.outputs.memory",
    "OutputsContract": "toolspace.testing.storage_contracts",
    "ProviderContract": "toolspace.testing.provider_contract",
    "EventRecorder": "toolspace.testing.doubles",
    "ScriptedModel": "toolspace.models.scripted",
    "call": "toolspace.models.scripted",
}

__all__ = list(_PLACES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Loads what is asked for: only the contracts need pytest."""
    if name not in _PLACES:
        raise AttributeError(f"module 'toolspace.testing' has no attribute {name!r}")
    from importlib import import_module

    try:
        if name.endswith("Contract"):
            import_module("pytest_asyncio")
            # A failed assertion shows its values, as in the tests of whoever uses it.
            import_module("pytest").register_assert_rewrite(_PLACES[name])
        value = getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "pytest_asyncio"):
            raise
        missing = f"toolspace.testing.{name} runs under pytest, and {error.name} is not installed"
        raise ImportError(f"{missing}; install both: pip install pytest pytest-asyncio", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
