"""Makes the providers that configuration names: of installed packages, or of the user's own code. Starts none."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.context import ToolContext
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import did_you_mean
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import MASK, is_secret_name, mask_secrets
from toolspace.core.tool import Tool
from toolspace.errors import ConfigError, ToolspaceError

# Shared with functions, so that own code is found, read again and reported alike, whichever line names it.
from toolspace.providers.function_loader import import_file, user_imports

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

ENTRY_POINT_GROUP = "toolspace.providers"
"""The entry-point group in which packages declare their providers."""

_NAME = r"(?P<name>[^\W\d]\w*(?:\.[^\W\d]\w*)*)"
_FILE = re.compile(rf"(?P<file>.+\.py):{_NAME}")
_MODULE = re.compile(rf"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):{_NAME}")
_HERE = re.compile(rf"{re.escape(__file__)}:\d+: ")
_MIN_SECRET = 4
"""Shorter values stay in messages: `on` or `5` is no secret, and stands in many words."""


def load_provider(uses: str, settings: Mapping[str, Any], *, base_dir: Path | None = None) -> ToolProvider:
    """A new provider, not started, made with these settings. See `find_factory` for what `uses` may be."""
    return build_provider(get_factory(uses, base_dir), uses, settings)


def get_factory(uses: str, base_dir: Path | None = None) -> object:
    """What makes the provider: a class, or a function.

    `uses` is the name under which an installed package offers it, or `package.module:Name` or `./file.py:Name`, which
    are looked for in `base_dir` first, and read again where they were found before. Raises `ConfigError`.
    """
    if ":" in uses or uses.endswith(".py"):
        return _own(uses, Path.cwd() if base_dir is None else base_dir)
    return _installed(uses)


def build_provider(
    factory: object, uses: str, settings: Mapping[str, Any], *, source_settings: Mapping[str, Any] | None = None
) -> ToolProvider:
    """A new provider, not started. Raises `ConfigError`.

    `written` is how the settings stand in the file. What variables were filled into, and what a key such as `apiKey`
    gives away as a secret, no message shows.
    """
    hidden = [*_secrets_in(settings), *_filled_in(settings if source_settings is None else source_settings, settings)]
    return _checked(_make(factory, uses, settings, hidden), uses)


def list_installed_providers() -> dict[str, list[EntryPoint]]:
    """What the installed packages offer, by name."""
    from importlib.metadata import entry_points  # Here: only who configures a provider pays for looking.

    found: dict[str, list[EntryPoint]] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if all(point.value != other.value for other in found.setdefault(point.name, [])):
            found[point.name].append(point)
    return found


def _installed(name: str) -> object:
    offered = list_installed_providers()
    points = offered.get(name, [])
    if not points:
        raise ConfigError(f'no installed package offers a provider "{name}"{_way_out(name, offered)}')
    if len(points) > 1:
        places = " and ".join(f"{point.value} ({_package(point)})" for point in points)
        raise ConfigError(f'the provider "{name}" is offered twice, by {places}; say which: uses: {points[0].value}')
    try:
        return points[0].load()
    except (Exception, SystemExit) as error:
        origin = f'the provider "{name}" of {_package(points[0])} ({points[0].value})'
        raise ConfigError(f"{origin} cannot be imported: {_said(error)}") from error


def _way_out(name: str, offered: Collection[str]) -> str:
    known = f"; installed are {', '.join(sorted(offered))}" if offered else "; none is installed"
    return f"{did_you_mean(name, offered)}{known}. For one of your own: uses: package.module:Name"


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unknown package"


def _own(uses: str, base_dir: Path) -> object:
    if (match := _FILE.fullmatch(uses)) is not None:
        file = Path(os.path.normpath(base_dir / Path(match["file"]).expanduser()))
        if not file.is_file():
            raise ConfigError(f"{uses}: there is no file {file}")
        folder, load = file.parent, lambda: import_file(file)
    elif (match := _MODULE.fullmatch(uses)) is not None:
        module = match["module"]
        folder, load = Path(os.path.abspath(base_dir)), lambda: importlib.import_module(module)
    else:
        raise ConfigError(
            f"{uses!r} names no provider; write the name of an installed one, package.module:Name, or ./file.py:Name"
        )
    try:
        with user_imports(uses, folder):
            value: object = load()
    except ConfigError as error:
        # What is said there of functions, without them and without this file as the place of the fault.
        raise ConfigError(_HERE.sub("", str(error).removeprefix("functions: "))) from error.__cause__
    for step in match["name"].split("."):
        if not hasattr(value, step):
            inside: dict[str, object] = getattr(value, "__dict__", {})
            known = [key for key, item in inside.items() if not key.startswith("_") and callable(item)]
            raise ConfigError(f"{uses}: there is no {step!r} in it{did_you_mean(step, known)}")
        value = getattr(value, step)
    return value


def _make(factory: object, uses: str, settings: Mapping[str, Any], hidden: Collection[str]) -> object:
    if not callable(factory):
        raise ConfigError(f"{uses}: {_a(factory)} makes no provider; name a ToolProvider class, or a function")
    if faults := list(_misfits(factory, settings)):
        raise ConfigError(f"{uses}: {'; '.join(faults)}")
    try:
        return factory(**settings)
    except Exception as error:
        given = f" with the settings {', '.join(settings)}" if settings else ""
        raise ConfigError(f"{uses} cannot be made{given}: {_hide(_said(error), hidden)}") from error


def _misfits(factory: Callable[..., object], settings: Mapping[str, Any]) -> Iterator[str]:
    """What does not fit between the settings and the parameters: said by name, before the provider's code runs."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # Some callables written in C do not say.
        return
    takes = {one.name: one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    if not any(one.kind is one.VAR_KEYWORD for one in parameters):
        known = f"; it takes {', '.join(takes)}" if takes else "; it takes none"
        for name in settings:
            if name not in takes:
                yield f'there is no setting "{name}"{did_you_mean(name, takes) or known}'
    for name, one in takes.items():
        if one.default is one.empty and name not in settings:
            yield f'the setting "{name}" is missing'


def _checked(made: object, uses: str) -> ToolProvider:
    """The provider, if it is one and can be asked already: it is listed before it has started."""
    if not isinstance(made, ToolProvider):
        if inspect.iscoroutine(made):
            made.close()
        raise ConfigError(f"{uses} makes {_a(made)}, which is no ToolProvider")
    try:
        made.on_change(lambda: None)()
    except AttributeError as error:
        hint = "does its __init__ call super().__init__()?"
        raise ConfigError(f"{uses}: nobody can ask to be told of changes: {_said(error)}; {hint}") from error
    try:
        made.list_tools()
    except Exception as error:
        hint = "before it has started it may list nothing, but must answer"
        raise ConfigError(f"{uses}: its tools cannot be listed: {_said(error)}; {hint}") from error
    return made


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _said(error: BaseException) -> str:
    """What an exception says; of one that is not ours, its name too."""
    if isinstance(error, ToolspaceError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _secrets_in(value: object, *, inside: bool = False) -> Iterator[str]:
    """The texts below keys that sound like secrets."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[object, object]", value).items():
            yield from _secrets_in(item, inside=inside or is_secret_name(str(key)))
    elif isinstance(value, list | tuple):
        for item in cast("list[object]", value):
            yield from _secrets_in(item, inside=inside)
    elif inside and isinstance(value, str):
        yield value


def _filled_in(written: object, filled: object) -> Iterator[str]:
    """The texts that are not as they were written."""
    if isinstance(filled, Mapping):
        for key, item in cast("Mapping[str, object]", filled).items():
            yield from _filled_in(cast("Mapping[str, object]", written)[key], item)
    elif isinstance(filled, list):
        for before, item in zip(cast("list[object]", written), cast("list[object]", filled), strict=True):
            yield from _filled_in(before, item)
    elif isinstance(filled, str) and filled != written:
        yield filled


def _hide(text: str, secrets: Collection[str]) -> str:
    for secret in sorted(secrets, key=len, reverse=True):  # One may begin with another.
        if len(secret) >= _MIN_SECRET:
            text = text.replace(secret, MASK)
    return mask_secrets(text)


# MERGED from namespaced: A provider as configuration mounts it: under a namespace, and able to leave while calls s…


class MountedProvider(ToolProvider):
    """Passes everything on to the provider inside, until it is retired."""

    def __init__(self, inner: ToolProvider, namespace: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = inner.kind
        self.namespace = namespace
        self._retired = False
        self._starting: asyncio.Task[None] | None = None
        self._forget = inner.on_change(self.notify_changed)
        self._file = _source_file(inner)
        self._code = _read_source(self._file)

    def is_code_unchanged(self) -> bool:
        """Whether the file of its class still says what it said when this was made."""
        return _read_source(self._file) == self._code

    def retire(self) -> None:
        """Offers nothing from now on, at once. Calls in flight go on, until someone closes it."""
        self._retired = True
        self.notify_changed()

    def list_tools(self) -> Sequence[Tool]:
        return () if self._retired else self.inner.list_tools()

    def has_tool(self, name: str) -> bool:
        return not self._retired and self.inner.has_tool(name)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return await self.inner.execute(name, parameters, context)

    def is_offered(self, tool: Tool, context: ToolContext) -> bool:
        return self.inner.is_offered(tool, context)

    def get_instructions(self) -> str:
        return "" if self._retired else self.inner.get_instructions()

    async def warmup(self) -> None:
        if self._retired:  # Someone tries again who has not heard of it yet.
            return
        self._starting = starting = asyncio.ensure_future(_warmup(self.inner))
        try:
            await starting
        except asyncio.CancelledError:
            # Stopped by `aclose`, it has not failed: nobody should report it, or try again.
            if not self._retired or (task := asyncio.current_task()) is None or task.cancelling():
                raise
        finally:
            self._starting = None

    async def aclose(self) -> None:
        """Also while it still starts: a provider that hangs can be taken out of the configuration."""
        self._retired = True
        self._forget()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        await self.inner.aclose()


async def _warmup(provider: ToolProvider) -> None:
    await provider.warmup()


def _source_file(provider: ToolProvider) -> Path | None:
    try:
        return Path(inspect.getfile(type(provider)))
    except (TypeError, OSError):  # Made up in a shell, or compiled.
        return None


def _read_source(file: Path | None) -> bytes:
    try:
        return file.read_bytes() if file is not None else b""
    except OSError:
        return b""
