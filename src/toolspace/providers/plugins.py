"""Builds the providers that a configuration names, from installed packages or the user's own code. Starts none.

`toolspace.composition` uses it. `MountedProvider` puts a provider under a namespace and can be retired while calls run.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.extension_points import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.prebuilt_actions import PrebuiltAction
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ConfigError, ToolspaceError
from toolspace.providers.functions import import_user_code

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "toolspace.providers"
"""The entry-point group in which packages declare their providers."""
ACTION_GROUP = "toolspace.prebuilt"
"""The entry-point group in which packages declare their prebuilt actions, by the name of the action."""

_NAME = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
_SPECIFICATION = re.compile(rf"(?:(?P<file>.+\.py)|(?P<module>{_NAME})):(?P<name>{_NAME})")
_MIN_SECRET_LENGTH = 4
"""Shorter values are not hidden: `on` or `5` is no secret, and is a part of many words."""


def get_factory(uses: str, base_dir: Path | None = None) -> object:
    """The class or function that creates a provider. Raises `ConfigError`.

    `uses` is the name of a provider in an installed package, or `package.module:Name` or `./file.py:Name`. The latter
    two are looked for in `base_dir` first, and loaded again if their code has changed.
    """
    if ":" in uses or uses.endswith(".py"):
        return _import_factory(uses, Path.cwd() if base_dir is None else base_dir)
    return _load_installed_factory(uses)


def build_provider(
    factory: object, uses: str, settings: Mapping[str, Any], *, source_settings: Mapping[str, Any] | None = None
) -> ToolProvider:
    """Creates a provider without starting it. Raises `ConfigError`.

    `source_settings` are the settings before variables were filled in. Error messages hide values that came from
    variables, and values under a key such as `apiKey`.
    """
    secrets = list(_list_secrets(settings, source_settings or settings))
    return _check_provider(_call_factory(factory, uses, settings, secrets), uses)


def list_installed_providers() -> dict[str, list[EntryPoint]]:
    """The providers of installed packages, by name."""
    return _list_installed(ENTRY_POINT_GROUP)


def load_installed_action(name: str) -> PrebuiltAction | None:
    """The prebuilt action of this name of an installed package; None if no package has one. Raises `ConfigError`."""
    entry_points = _list_installed(ACTION_GROUP).get(name, [])
    if not entry_points:
        return None
    if len(entry_points) > 1:
        origins = " and ".join(f"{point.value} ({_describe_package(point)})" for point in entry_points)
        raise ConfigError(f'the prebuilt action "{name}" is offered twice, by {origins}; uninstall one of them')
    (entry_point,) = entry_points
    action = _load_entry_point(entry_point, f'the prebuilt action "{name}"')
    if not isinstance(action, PrebuiltAction) or action.name != name:
        place = f"{entry_point.value} ({_describe_package(entry_point)})"
        raise ConfigError(f'{place} is no prebuilt action "{name}"; decorate the function with @prebuilt("{name}")')
    return action


def _list_installed(group: str) -> dict[str, list[EntryPoint]]:
    """The entry points of a group by name, without those that packages declare twice."""
    from importlib.metadata import entry_points  # Imported here: few configurations need it.

    entries_by_name: dict[str, list[EntryPoint]] = {}
    for entry_point in entry_points(group=group):
        entries = entries_by_name.setdefault(entry_point.name, [])
        if all(entry_point.value != entry.value for entry in entries):
            entries.append(entry_point)
    return entries_by_name


def _load_entry_point(entry_point: EntryPoint, description: str) -> object:
    try:
        return entry_point.load()
    except (Exception, SystemExit) as error:
        origin = f"{description} of {_describe_package(entry_point)} ({entry_point.value})"
        raise ConfigError(f"{origin} cannot be imported: {_describe_error(error)}") from error


def _load_installed_factory(name: str) -> object:
    installed_providers = list_installed_providers()
    entry_points = installed_providers.get(name, [])
    if not entry_points:
        names = (
            f"installed are {', '.join(sorted(installed_providers))}" if installed_providers else "none is installed"
        )
        raise ConfigError(
            f'no installed package offers a provider "{name}"{did_you_mean(name, installed_providers)}; {names}. '
            "For one of your own: uses: package.module:Name"
        )
    if len(entry_points) > 1:
        origins = " and ".join(f"{point.value} ({_describe_package(point)})" for point in entry_points)
        raise ConfigError(
            f'the provider "{name}" is offered twice, by {origins}; say which: uses: {entry_points[0].value}'
        )
    (entry_point,) = entry_points
    return _load_entry_point(entry_point, f'the provider "{name}"')


def _describe_package(entry_point: EntryPoint) -> str:
    package = entry_point.dist
    return f"{package.name} {package.version}" if package is not None else "an unknown package"


def _import_factory(uses: str, base_dir: Path) -> object:
    match = _SPECIFICATION.fullmatch(uses)
    if match is None:
        raise ConfigError(
            f"{uses!r} names no provider; write the name of an installed one, package.module:Name, or ./file.py:Name"
        )
    value: object = import_user_code(uses, match, base_dir)
    for step in match["name"].split("."):
        if not hasattr(value, step):
            members: dict[str, object] = getattr(value, "__dict__", {})
            names = [key for key, item in members.items() if not key.startswith("_") and callable(item)]
            raise ConfigError(f"{uses}: there is no {step!r} in it{did_you_mean(step, names)}")
        value = getattr(value, step)
    return value


def _call_factory(factory: object, uses: str, settings: Mapping[str, Any], secrets: Collection[str]) -> object:
    if not callable(factory):
        raise ConfigError(
            f"{uses}: {_describe_type(factory)} makes no provider; name a ToolProvider class or a function"
        )
    if problems := list(_find_setting_problems(factory, settings)):
        raise ConfigError(f"{uses}: {'; '.join(problems)}")
    try:
        return factory(**settings)
    except Exception as error:
        names = f" with the settings {', '.join(settings)}" if settings else ""
        raise ConfigError(f"{uses} cannot be made{names}: {_hide(_describe_error(error), secrets)}") from error


def _find_setting_problems(factory: Callable[..., object], settings: Mapping[str, Any]) -> Iterator[str]:
    """Unknown and missing settings by name, found before the provider's code runs."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # Some callables written in C have no signature.
        return
    accepted_parameters = {
        item.name: item for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)
    }
    if not any(item.kind is item.VAR_KEYWORD for item in parameters):
        names = f"; it takes {', '.join(accepted_parameters)}" if accepted_parameters else "; it takes none"
        for name in settings:
            if name not in accepted_parameters:
                yield f'there is no setting "{name}"{did_you_mean(name, accepted_parameters) or names}'
    for name, parameter in accepted_parameters.items():
        if parameter.default is parameter.empty and name not in settings:
            yield f'the setting "{name}" is missing'


def _check_provider(value: object, uses: str) -> ToolProvider:
    """The provider, if it is one and can list its tools before it is started."""
    if not isinstance(value, ToolProvider):
        if inspect.iscoroutine(value):
            value.close()
        raise ConfigError(f"{uses} makes {_describe_type(value)}, which is no ToolProvider")
    try:
        value.on_change(lambda: None)()
    except AttributeError as error:
        hint = "does its __init__ call super().__init__()?"
        raise ConfigError(f"{uses}: changes cannot be subscribed to: {_describe_error(error)}; {hint}") from error
    try:
        value.list_tools()
    except Exception as error:
        hint = "before it has started it may list nothing, but must not fail"
        raise ConfigError(f"{uses}: its tools cannot be listed: {_describe_error(error)}; {hint}") from error
    return value


def _describe_type(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _describe_error(error: BaseException) -> str:
    """The message of an exception, with its class unless it is one of ours."""
    if isinstance(error, ToolspaceError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _list_secrets(value: object, source: object, *, is_secret: bool = False) -> Iterator[str]:
    """The texts below keys that name secrets, and those that differ from their source: a variable was filled in."""
    if isinstance(value, Mapping):
        sources = cast("Mapping[object, object]", source)
        for key, item in cast("Mapping[object, object]", value).items():
            yield from _list_secrets(item, sources[key], is_secret=is_secret or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for item, source_item in zip(cast("list[object]", value), cast("list[object]", source), strict=True):
            yield from _list_secrets(item, source_item, is_secret=is_secret)
    elif isinstance(value, str) and (is_secret or value != source):
        yield value


def _hide(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):  # Longest first: one secret may contain another.
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, MASK)
    return mask_secrets(text)


class MountedProvider(ToolProvider):
    """A provider under a namespace. Passes everything on to the inner provider until it is retired."""

    def __init__(self, inner: ToolProvider, namespace: str, *, settings: bytes = b"") -> None:
        """`settings`: what the inner provider was built from."""
        super().__init__()
        self.inner = inner
        self._settings = settings
        self.kind = inner.kind
        self.namespace = namespace
        self.circuit_scope = inner.circuit_scope
        self._is_retired = False
        self._warmup_task: asyncio.Task[None] | None = None
        self._unsubscribe = inner.on_change(self.notify_changed)
        try:
            self._source_file = Path(inspect.getfile(type(inner)))
        except (TypeError, OSError):  # Defined in a shell, or compiled.
            self._source_file = None
        self._source = _read_source(self._source_file)

    def is_code_unchanged(self) -> bool:
        """Whether the file of the provider's class is the same as when it was mounted."""
        return _read_source(self._source_file) == self._source

    def retire(self) -> None:
        """Stops offering tools immediately. Running calls continue until `aclose`."""
        self._is_retired = True
        self.notify_changed()

    def list_tools(self) -> Sequence[Tool]:
        return () if self._is_retired else self.inner.list_tools()

    def has_tool(self, name: str) -> bool:
        return not self._is_retired and self.inner.has_tool(name)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await self.inner.execute(name, parameters, context)

    async def read_resource(self, uri: str, context: ToolContext) -> dict[str, Any]:
        return await self.inner.read_resource(uri, context)

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        return self.inner.is_offered(tool, context)

    def describe_execution(self, name: str) -> object:
        return self._settings, self._source, self.inner.describe_execution(name)

    def is_waiting_to_start(self) -> bool:
        return self.inner.is_waiting_to_start()

    def last_connected_at(self) -> float:
        return self.inner.last_connected_at()

    def is_reconnecting(self) -> bool:
        return self.inner.is_reconnecting()

    def get_instructions(self) -> str:
        return "" if self._is_retired else self.inner.get_instructions()

    async def warmup(self) -> None:
        if self._is_retired:  # A retry that started before the provider was retired.
            return
        self._warmup_task = task = asyncio.ensure_future(self.inner.warmup())
        try:
            await task
        except asyncio.CancelledError:
            # Cancelled by `aclose`, the warmup has not failed: it must be neither reported nor retried.
            if not self._is_retired or (current := asyncio.current_task()) is None or current.cancelling():
                raise
        finally:
            self._warmup_task = None

    async def aclose(self) -> None:
        """Closes the provider, also during its warmup, so that a provider that hangs can be removed."""
        self._is_retired = True
        self._unsubscribe()
        if self._warmup_task is not None:
            self._warmup_task.cancel()
            await asyncio.wait((self._warmup_task,))
        await self.inner.aclose()


def _read_source(file: Path | None) -> bytes:
    try:
        return file.read_bytes() if file is not None else b""
    except OSError:
        return b""
