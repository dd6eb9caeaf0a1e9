"""References to secrets in configuration files: `${keyring:name}`, `${file:path}` and `${cmd:program}`.

`environment_variables` turns each reference into a marked text, which is no secret. The code that builds a part calls
`resolve_secrets` on its settings. Values are cached for the process, and masked in logs and results; a reload reads
them again. Only files of the configuration are read this way: no document that is downloaded or that an agent writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

import msgspec

from toolspace.core.secret_values import SHORTEST_SECRET, reference_secrets
from toolspace.errors import ConfigError

Kind = Literal["keyring", "file", "cmd"]
T = TypeVar("T")
MAX_BYTES = 64 * 1024
"""How long a secret may be."""
COMMAND_SECONDS = 10.0
"""How long a program may take."""
KEYRING_SECONDS = 60.0
"""How long the keyring may take: it may ask the user to unlock it."""
KEYRING_SERVICE = "toolspace"
"""The service of an entry of the keyring whose reference names none."""
REFERENCE = re.compile(r"\$\{(keyring|file|cmd):(?!-)")
"""The start of a reference. `${file:-x}` is a variable with a default."""

_TOO_SHORT = (
    f"the secret has fewer than {SHORTEST_SECRET} characters, so it cannot be masked in results and logs; "
    "use a longer one"
)
_log = logging.getLogger("toolspace.config")
_JOINER = "\u2060"
"""An invisible character. It distinguishes a reference from the literal text that `$${file:x}` stands for."""
_MARKED = re.compile(rf"\$\{{{_JOINER}(keyring|file|cmd):([^{_JOINER}]*){_JOINER}\}}")
_SECTIONS = frozenset(
    (
        *("mcpservers", "servers", "resttools", "openapi", "providers", "websearch", "hooks", "model", "embeddings"),
        "notifications",
    )
)
_SINGLE_KEYS = (("storage", "url"), ("server", "secretkey"), ("server", "publickey"), ("server", "jwtsecret"))
_PLACES = (
    "mcpServers, restTools, openapi, providers, tools.webSearch, execution of tools.definitions, hooks, model, "
    "embeddings, notifications, storage.url, and secretKey, publicKey and jwtSecret of server"
)
_values: dict[SecretReference, str] = {}


class SecretReference(NamedTuple):
    """One reference."""

    kind: Kind
    text: str
    """The name of an entry of the keyring, the absolute path of a file, or a command line."""

    def __str__(self) -> str:
        return f"${{{self.kind}:{self.text}}}"


# References in a file


def mark_reference(kind: str, text: str, base_dir: Path) -> str:
    """The marked text of a reference. Paths are relative to `base_dir`. Raises `ValueError` if it is invalid."""
    text = text.strip()
    if not text or _JOINER in text or "\0" in text:
        raise ValueError(f"${{{kind}:…}} names nothing; write ${{keyring:name}}, ${{file:path}} or ${{cmd:program}}")
    if kind == "file":
        text = os.path.normpath(base_dir / Path(text).expanduser())
    elif kind == "cmd":
        try:
            program, *arguments = shlex.split(text)
        except ValueError as error:
            raise ValueError(f"${{cmd:…}} is no command line: {error}") from None
        if "/" in program:
            program = os.path.normpath(base_dir / Path(program).expanduser())
        text = shlex.join((program, *arguments))
    return f"${{{_JOINER}{kind}:{text}{_JOINER}}}"


def has_reference(text: str) -> bool:
    return _JOINER in text and _MARKED.search(text) is not None


def find_references(text: str) -> list[SecretReference]:
    return [SecretReference(cast("Kind", kind), name) for kind, name in _MARKED.findall(text)]


def check_place(path: tuple[str | int, ...]) -> str | None:
    """Why a setting cannot have a reference, or None if it can."""
    keys = [str(key).replace("_", "").lower() for key in path]
    is_allowed = (
        not _SECTIONS.isdisjoint(keys)
        or tuple(keys) in _SINGLE_KEYS
        or {"tools", "execution"} <= set(keys)
        or keys[0].startswith("x-")
    )
    return None if is_allowed else f"a reference to a secret has no effect here; it may be in {_PLACES}"


def find_readable_file(reference: SecretReference) -> str | None:
    """For `toolspace doctor`: a description of a file that other users may read, or None."""
    if reference.kind != "file" or os.name != "posix":
        return None
    try:
        mode = stat.S_IMODE(os.stat(reference.text).st_mode)
    except OSError:
        return None  # Whatever needs it reports the problem.
    return f"other users may read {reference.text} (mode {mode:o})" if mode & 0o044 else None


# Values


def resolve_secrets(value: T) -> T:
    """A copy with the secrets in place of the references; the value itself if it has none.

    Reads files and runs programs, unless they were read before. Raises `ConfigError`, which contains no secret.
    """
    return cast("T", _replace(value, _get))


def refers_to_secrets(value: object) -> bool:
    return any(True for _ in _list_references(value))


def are_loaded(value: object) -> bool:
    """Whether `resolve_secrets` need not wait for a file or program."""
    return all(reference in _values for reference in _list_references(value))


async def load_secrets(*values: object) -> None:
    """Reads the secrets that the values refer to, in a thread. Raises `ConfigError`."""
    for value in values:
        if not are_loaded(value):
            await asyncio.to_thread(resolve_secrets, value)


def reload_secrets(references: Mapping[SecretReference, str]) -> None:
    """Reads all secrets again. Raises `ConfigError` with all problems; then the old values stay.

    `references` has the place of each in the configuration.
    """
    new_values: dict[SecretReference, str] = {}
    problems: list[str] = []
    for reference, place in references.items():
        try:
            new_values[reference] = _read(reference)
        except ConfigError as error:
            problems.append(f"{place}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    _values.update(new_values)


def _get(reference: SecretReference) -> str:
    value = _values.get(reference)
    if value is None:
        value = _values[reference] = _read(reference)
    return value


def _replace(value: Any, get: Callable[[SecretReference], str]) -> Any:
    if isinstance(value, str):
        if _JOINER not in value:
            return value
        return _MARKED.sub(lambda match: get(SecretReference(cast("Kind", match[1]), match[2])), value)
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        changes = {name: new for name, field in fields.items() if (new := _replace(field, get)) is not field}
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        items = {key: _replace(inner, get) for key, inner in mapping.items()}
        return items if any(items[key] is not mapping[key] for key in items) else mapping
    if isinstance(value, list | tuple) and not hasattr(cast("object", value), "_fields"):
        members = cast("list[Any]", value)
        new_members = [_replace(inner, get) for inner in members]
        is_changed = any(new is not old for new, old in zip(new_members, members, strict=True))
        return cast("Any", type(members))(new_members) if is_changed else members
    return cast("object", value)


def _list_references(value: object) -> Iterator[SecretReference]:
    references: list[SecretReference] = []

    def collect(reference: SecretReference) -> str:
        references.append(reference)
        return ""

    _replace(value, collect)
    yield from references


def _read(reference: SecretReference) -> str:
    try:
        match reference.kind:
            case "keyring":
                value = _read_keyring(reference.text)
            case "file":
                value = _decode(_read_file(reference.text))
            case "cmd":
                value = _decode(_run(shlex.split(reference.text)))
    except ValueError as error:
        raise ConfigError(f"{reference}: {error}") from None
    if not value:
        raise ConfigError(f"{reference}: it is empty; store the secret there")
    reference_secrets.add(value)
    if len(value.strip()) < SHORTEST_SECRET:
        _log.warning("%s: %s", reference, _TOO_SHORT)
    return value


def _decode(content: bytes) -> str:
    if len(content) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES:,} bytes, which is too long for a secret")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text; store the secret as text, for example in Base64") from None
    return text.removesuffix("\n").removesuffix("\r")


def _read_file(path: str) -> bytes:
    try:
        # Not blocking: a named pipe without a writer would never open.
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise ValueError("it is no regular file")
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ValueError("there is no such file; create it, or correct the path") from None
    except OSError as error:
        raise ValueError(f"cannot be read: {error.strerror}") from None


def _run(command: list[str]) -> bytes:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # Not shown: it may contain the secret.
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ValueError("there is no such program; install it, or correct its path") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be started: {getattr(error, 'strerror', None) or type(error).__name__}") from None
    output = process.stdout
    assert output is not None

    def read() -> tuple[bytes, int | None]:
        with output:
            content = output.read(MAX_BYTES + 1)
        return content, process.wait() if len(content) <= MAX_BYTES else None

    try:
        content, code = _call_in_thread(read, COMMAND_SECONDS)
    finally:
        _kill(process)
    if code:
        raise ValueError(f"the program failed with exit code {code}; run it in a terminal to see why")
    return content


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends what still runs of a program and its children."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (OSError, AttributeError):
            process.kill()
        process.wait()


def _read_keyring(name: str) -> str:
    try:
        import keyring
        from keyring.errors import KeyringError, NoKeyringError
    except ImportError:
        raise ValueError("the library keyring is not installed; pip install 'toolspace[keyring]'") from None
    service, slash, entry = name.rpartition("/")
    service = service if slash and service else KEYRING_SERVICE
    try:
        value = _call_in_thread(lambda: keyring.get_password(service, entry), KEYRING_SECONDS)
    except NoKeyringError:
        raise ValueError("this machine has no keyring that works; see `keyring --list-backends`") from None
    except KeyringError as error:
        raise ValueError(f"the keyring cannot be read: {type(error).__name__}; is it locked?") from None
    if value is None:
        command = shlex.join(("keyring", "set", service, entry))
        raise ValueError(f"the keyring has no such entry; store it with `{command}`")
    if len(value) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES:,} characters, which is too long for a secret")
    return value


def _call_in_thread(function: Callable[[], T], seconds: float) -> T:
    """The result of a function. Raises `ValueError` if it takes longer; its thread does not keep the process alive."""
    results: list[T] = []
    errors: list[Exception] = []

    def call() -> None:
        try:
            results.append(function())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="toolspace secret")
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise ValueError(f"no result after {seconds:g} s")
    return results[0]
