"""Runs one stdio server: a process in a session of its own, its pipes, its end. Knows nothing of MCP."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from toolspace.core.secret_masking import is_secret_name, mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports import process_tree
from toolspace.providers.mcp.transports.base import wait_until_done
from toolspace.providers.mcp.transports.orphan_cleanup import get_orphan_cleanup
from toolspace.providers.mcp.transports.process_tree import MARK_VARIABLE, build_mark_value

# MERGED from launch: What a stdio server is started with: the program, its folder, its environment. Starts nothing.

_INHERITED = """
    HOME LOGNAME PATH SHELL TERM USER
    LANG LANGUAGE TZ TMPDIR TMP TEMP DISPLAY WAYLAND_DISPLAY DBUS_SESSION_BUS_ADDRESS
    HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE NODE_EXTRA_CA_CERTS
    NODE_PATH NODE_OPTIONS NVM_DIR NVM_BIN VOLTA_HOME PNPM_HOME BUN_INSTALL DENO_DIR
    DOCKER_HOST DOCKER_CONTEXT DOCKER_CONFIG PLAYWRIGHT_BROWSERS_PATH
    APPDATA COMSPEC HOMEDRIVE HOMEPATH LOCALAPPDATA PATHEXT PROCESSOR_ARCHITECTURE PROGRAMDATA PROGRAMFILES
    SYSTEMDRIVE SYSTEMROOT USERNAME USERPROFILE
"""
"""What programs need to find their files and the network. Everything else of ours, keys above all, stays here."""
_NAMES = frozenset(_INHERITED.split())
_PREFIXES = ("LC_", "XDG_", "npm_config_", "NPM_CONFIG_", "UV_", "PIP_", "FNM_")
_COMES_WITH = {
    "npx": "Node.js",
    "npm": "Node.js",
    "node": "Node.js",
    "uvx": "uv",
    "bunx": "Bun",
    "bun": "Bun",
    "deno": "Deno",
    "docker": "Docker",
}


class LaunchCommand(NamedTuple):
    program: str
    args: tuple[str, ...]
    cwd: str | None
    env: dict[str, str]


def build_launch_command(name: str, spec: ServerSpec, mark: str) -> LaunchCommand:
    """Raises ProviderError, with the way out, where it could not be started."""
    if not spec.command:
        raise ProviderError(f"server {name!r} has no command; give it one, or a url")
    env = {**inherited_environment(), **spec.env, MARK_VARIABLE: build_mark_value(mark)}
    if any("\0" in text for text in (spec.command, *spec.args, *env, *env.values())):
        raise ProviderError(f"server {name!r} has a NUL character in its command, args or env; take it out")
    cwd = Path(spec.cwd).expanduser() if spec.cwd is not None else None
    if cwd is not None and not cwd.is_dir():
        raise ProviderError(f"the folder {str(cwd)!r} that server {name!r} is to run in (cwd) does not exist")
    return LaunchCommand(_program(name, spec.command, cwd, env), spec.args, str(cwd) if cwd is not None else None, env)


def inherited_environment() -> dict[str, str]:
    """What a server gets of our environment."""
    return {
        key: value
        for key, value in os.environ.items()
        if (key in _NAMES or (sys.platform == "win32" and key.upper() in _NAMES) or key.startswith(_PREFIXES))
        and not _holds_key(key)
        and not value.startswith("()")  # A shell function.
    }


def _holds_key(name: str) -> bool:
    return is_secret_name(name) or "_auth" in name.lower()  # npm_config_//host/:_auth


def _program(name: str, command: str, cwd: Path | None, env: dict[str, str]) -> str:
    command = os.path.expanduser(command)
    if os.path.dirname(command):
        path = (cwd or Path.cwd()) / command
        if not path.is_file():
            wrong = "is a folder; name the program in it" if path.is_dir() else "does not exist"
            raise ProviderError(f"the command {str(path)!r} of server {name!r} {wrong}")
        if not os.access(path, os.X_OK):
            raise ProviderError(
                f"the command {str(path)!r} of server {name!r} is not executable; make it so with chmod +x, or give "
                "the program that runs it as the command and the file in args"
            )
        return str(path)
    if (found := shutil.which(command, path=env.get("PATH", os.defpath))) is None:
        # A hint where the program has another name than what to install.
        hint = f"install {_COMES_WITH[command]}" if command in _COMES_WITH else "install it"
        raise ProviderError(
            f"the command {command!r} of server {name!r} is not on the PATH; {hint}, or give its full path "
            "as the command"
        )
    return found


GRACE_SECONDS = 2.0
"""Seconds for a server to end by itself once its input is closed; after that it is told to, then killed."""
_ROUNDS = (
    (signal.SIGTERM, 1.0),
    (process_tree.KILL_SIGNAL, 1.0),
    (process_tree.KILL_SIGNAL, 0.5),
    (process_tree.KILL_SIGNAL, 0.5),
)
_REAP_SECONDS = 2.0
_PIPES_SECONDS = 0.25
"""How long the last words of a process that is gone are waited for: a child may hold its pipes open for ever."""
_KEPT_LINES = 20
_LINE = 4_000
_SHOWN = 500
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOISE = re.compile(r"\s*(Node\.js v\d|at |npm notice|npm error A complete log|\W*$)")
"""Lines that programs add below the one that says what is wrong."""


class ServerProcess(asyncio.SubprocessProtocol):
    """A running server. `start_process` makes one; `stop` ends it and everything that it started."""

    def __init__(self, name: str, receive: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.pid = 0
        self.is_ended = False
        """Whether nothing more will come: the process is gone, or has closed its output."""
        self.mark = process_tree.create_mark()
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._receive: Callable[[bytes], None] | None = receive
        self._on_end = on_end
        self._errors: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._partial = b""
        self._first = process_tree.ProcessIdentity(0, 0)
        self._transport: asyncio.SubprocessTransport | None = None
        self._open = {1, 2}
        self._paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._exited = asyncio.Event()
        self._closed = asyncio.Event()
        self._settling: asyncio.TimerHandle | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None as long as it runs."""
        return self._transport.get_returncode() if self._transport is not None else None

    @property
    def last_error_lines(self) -> tuple[str, ...]:
        """The last lines that it wrote to its standard error, without secrets."""
        lines = [*self._errors, self._partial]
        return tuple(text for line in lines if (text := _shown(line)))

    @property
    def exit_description(self) -> str:
        """What to tell of its end: `the server ended with exit code 1: no such file`."""
        code = self.exit_code
        if code is None:
            how = "the server closed its output"
        elif code < 0:
            how = f"the server was ended by {_signal_name(-code)}"
        else:
            how = f"the server ended with exit code {code}"
        words = self.last_error_lines
        telling = [line for line in words if _NOISE.match(line) is None] or words
        if not telling:
            return how
        # Who ends by itself says why; who is killed said something else.
        return f"{how}: {telling[-1]}" if code is None or code >= 0 else f"{how}; its last words: {telling[-1]}"

    async def write(self, data: bytes) -> None:
        """Waits while the server does not read. BrokenPipeError when it is gone."""
        while not self._writable.is_set():  # Before, not after: what nobody reads must not pile up here.
            await self._writable.wait()
        pipe = self._pipe(0)
        if self.is_ended or pipe is None or pipe.is_closing():
            raise BrokenPipeError(errno.EPIPE, "the server is gone")
        cast("asyncio.WriteTransport", pipe).write(data)

    def pause(self) -> None:
        """Reads no more of its output for now: the server has to wait once its pipe is full."""
        pipe = self._pipe(1)
        if pipe is not None and not self._paused and 1 in self._open:
            self._paused = True
            cast("asyncio.ReadTransport", pipe).pause_reading()

    def resume(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and self._paused and 1 in self._open:
            self._paused = False
            cast("asyncio.ReadTransport", pipe).resume_reading()

    async def stop(self, grace: float = GRACE_SECONDS) -> None:
        """Ends it and everything that it started. Returns when that is done, also to a caller that is cancelled.

        Takes the grace and a few seconds at most, whatever the server does.
        """
        if self._stopping is None:
            self._stopping = asyncio.get_running_loop().create_task(self._stop(grace))
        await wait_until_done(self._stopping)

    async def _stop(self, grace: float) -> None:
        known = frozenset((self._first,))
        try:
            self._receive = None  # What it still says is read and dropped: it could not end otherwise.
            self.resume()
            known |= process_tree.find_descendants(self._first, self.mark)
            if (pipe := self._pipe(0)) is not None:
                pipe.close()
            await _within(grace, self._exited)
            for kind, seconds in _ROUNDS:
                left = process_tree.find_descendants(self._first, self.mark, known)
                if not left:
                    break
                known |= left
                process_tree.send_signal(kind, self.pid, left)
                await _gone(left, seconds)
            await _within(_REAP_SECONDS, self._exited)
        except asyncio.CancelledError:  # The loop is closing: at once, then.
            process_tree.send_signal(
                process_tree.KILL_SIGNAL, self.pid, process_tree.find_descendants(self._first, self.mark, known)
            )
            raise
        finally:
            self._release()
        await _within(_REAP_SECONDS, self._closed)

    def _release(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if self._transport is not None:
            with suppress(PermissionError):  # Closing signals it once more; it may have changed its user.
                self._transport.close()
        get_orphan_cleanup().remove_group(self.pid)
        get_orphan_cleanup().remove_mark(self.mark)

    # What the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()
        self._first = process_tree.identify_process(self.pid)
        get_orphan_cleanup().add_group(self.pid)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._hear(data)
        elif self._receive is not None:
            self._receive(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open.discard(fd)
        if fd == 0:
            self._writable.set()
        self._settle()

    def process_exited(self) -> None:
        self._exited.set()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _settle(self) -> None:
        """The end of the process and of its pipes come in any order, and some of them never."""
        if self._exited.is_set() and not self._open:
            self._finish()
        elif (self._exited.is_set() or 1 not in self._open) and self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(_PIPES_SECONDS, self._finish)

    def _finish(self) -> None:
        if self._settling is not None:
            self._settling.cancel()
        if not self.is_ended:
            self.is_ended = True
            self._writable.set()
            if self._stopping is None:
                self._on_end()

    def _hear(self, data: bytes) -> None:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = self._partial + lines[0]
            self._partial = b""
        self._partial = (self._partial + rest)[:_LINE]
        if self._log.isEnabledFor(logging.DEBUG):
            for line in lines:
                if text := _shown(line):
                    self._log.debug("%s", text)
        self._errors.extend(line[:_LINE] for line in lines[-_KEPT_LINES:])

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return self._transport.get_pipe_transport(fd) if self._transport is not None else None


async def start_process(
    name: str, spec: ServerSpec, *, receive: Callable[[bytes], None], on_end: Callable[[], None]
) -> ServerProcess:
    """Starts a server. `receive` gets its output as it comes, `on_end` is called once when nothing more will come.

    Raises ProviderError, with the way out, where it cannot be started.
    """
    process = ServerProcess(name, receive, on_end)
    what = build_launch_command(name, spec, process.mark)
    # Before it starts: Toolspace could be killed right after.
    get_orphan_cleanup().add_mark(process.mark)
    try:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process, what.program, *what.args, cwd=what.cwd, env=what.env, start_new_session=True
        )
    except OSError as error:
        get_orphan_cleanup().remove_mark(process.mark)
        hint = "; does its first line name a program (#!)?" if error.errno == errno.ENOEXEC else ""
        raise ProviderError(
            f"the command {what.program!r} of server {name!r} cannot be started: {error}{hint}"
        ) from None
    except BaseException:  # Cancelled while it starts: it may be there already.
        if process.pid:
            await process.stop(0)
        else:
            process_tree.kill_marked(process.mark)
            get_orphan_cleanup().remove_mark(process.mark)
        raise
    return process


async def _within(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _gone(found: frozenset[process_tree.ProcessIdentity], seconds: float) -> None:
    """Waits for processes that are not our children: there is no event for their end."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, 0.002
    while process_tree.is_any_alive(found) and loop.time() < deadline:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)


def _shown(line: bytes) -> str:
    text = _CONTROL.sub("", line.decode("utf-8", "replace")).strip()
    return mask_secrets(text)[:_SHOWN] if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
