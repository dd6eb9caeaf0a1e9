"""Runs one stdio server: resolves its command and environment, starts it in its own session, stops it and its children.

`stdio` uses it. It knows nothing of MCP.
"""

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
from typing import cast

from toolspace.core.secret_masking import is_secret_name, mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.server_spec import ServerSpec
from toolspace.providers.mcp.transports.base import wait_until_done
from toolspace.providers.mcp.transports.orphan_cleanup import get_orphan_cleanup
from toolspace.providers.mcp.transports.process_tree import (
    KILL_SIGNAL,
    MARK_VARIABLE,
    ProcessIdentity,
    build_mark_value,
    create_mark,
    find_descendants,
    identify_process,
    is_any_alive,
    kill_marked,
    send_signal,
)

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
"""The variables that programs need to find files and the network. Servers inherit no others, above all no keys."""
_INHERITED_NAMES = frozenset(_INHERITED.split())
_INHERITED_PREFIXES = ("LC_", "XDG_", "npm_config_", "NPM_CONFIG_", "UV_", "PIP_", "FNM_")
_PACKAGES = {
    "npx": "Node.js",
    "npm": "Node.js",
    "node": "Node.js",
    "uvx": "uv",
    "bunx": "Bun",
    "bun": "Bun",
    "deno": "Deno",
    "docker": "Docker",
}
"""Commands whose package has another name."""
GRACE_SECONDS = 2.0
"""How long a server may take to end by itself after its input is closed. Then it is terminated, then killed."""
_STOP_ROUNDS = ((signal.SIGTERM, 1.0), (KILL_SIGNAL, 1.0), (KILL_SIGNAL, 0.5), (KILL_SIGNAL, 0.5))
_REAP_SECONDS = 2.0
_LAST_OUTPUT_SECONDS = 0.25
"""How long to wait for the last output of an ended process: a child may hold its pipes open for ever."""
_KEPT_LINES = 20
_LINE_BYTES = 4_000
_LINE_CHARACTERS = 500
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_NOISE = re.compile(r"\s*(Node\.js v\d|at |npm notice|npm error A complete log|\W*$)")
"""Lines that programs print below the one that says what is wrong."""


def _build_command(name: str, spec: ServerSpec, mark: str) -> tuple[str, Path | None, dict[str, str]]:
    """Returns the program, its folder and its environment. Raises ProviderError, which says what to change."""
    if not spec.command:
        raise ProviderError(f"server {name!r} has no command; give it one, or a url")
    inherited_env = {key: value for key, value in os.environ.items() if _is_inherited(key, value)}
    env = {**inherited_env, **spec.env, MARK_VARIABLE: build_mark_value(mark)}
    if any("\0" in text for text in (spec.command, *spec.args, *env, *env.values())):
        raise ProviderError(f"server {name!r} has a NUL character in its command, args or env; remove it")
    cwd = Path(spec.cwd).expanduser() if spec.cwd is not None else None
    if cwd is not None and not cwd.is_dir():
        raise ProviderError(f"the folder {str(cwd)!r} that server {name!r} is to run in (cwd) does not exist")
    return _find_program(name, spec.command, cwd, env), cwd, env


def _is_inherited(key: str, value: str) -> bool:
    """Whether a server inherits a variable of this process's environment."""
    if is_secret_name(key) or "_auth" in key.lower() or value.startswith("()"):  # npm's `_auth`; a shell function.
        return False
    is_listed = key in _INHERITED_NAMES or (sys.platform == "win32" and key.upper() in _INHERITED_NAMES)
    return is_listed or key.startswith(_INHERITED_PREFIXES)


def _find_program(name: str, command: str, cwd: Path | None, env: dict[str, str]) -> str:
    command = os.path.expanduser(command)
    if os.path.dirname(command):
        path = (cwd or Path.cwd()) / command
        if not path.is_file():
            problem = "is a folder; name the program in it" if path.is_dir() else "does not exist"
            raise ProviderError(f"the command {str(path)!r} of server {name!r} {problem}")
        if not os.access(path, os.X_OK):
            raise ProviderError(
                f"the command {str(path)!r} of server {name!r} is not executable; run chmod +x on it, or give the "
                "program that runs it as the command and the file in args"
            )
        return str(path)
    program = shutil.which(command, path=env.get("PATH", os.defpath))
    if program is None:
        hint = f"install {_PACKAGES[command]}" if command in _PACKAGES else "install it"
        raise ProviderError(
            f"the command {command!r} of server {name!r} is not on the PATH; {hint}, or give its full path "
            "as the command"
        )
    return program


class ServerProcess(asyncio.SubprocessProtocol):
    """A running server. `start_process` creates it; `stop` ends it and every process that it started."""

    def __init__(self, name: str, receive: Callable[[bytes], None], on_end: Callable[[], None]) -> None:
        self.pid = 0
        self.is_ended = False
        """Whether no more output will come: the process has ended, or has closed its output."""
        self.mark = create_mark()
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._receive: Callable[[bytes], None] | None = receive
        self._on_end = on_end
        self._error_lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._partial_error_line = b""
        self._identity = ProcessIdentity(0, 0)
        self._transport: asyncio.SubprocessTransport | None = None
        self._open_pipes = {1, 2}
        self._is_paused = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._exit_event = asyncio.Event()
        self._close_event = asyncio.Event()
        self._end_timer: asyncio.TimerHandle | None = None
        self._stop_task: asyncio.Task[None] | None = None

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended the process. None: it runs."""
        return self._transport.get_returncode() if self._transport is not None else None

    @property
    def last_error_lines(self) -> tuple[str, ...]:
        """The last lines of its standard error, with secrets masked."""
        lines = [*self._error_lines, self._partial_error_line]
        return tuple(text for line in lines if (text := _clean_line(line)))

    @property
    def exit_description(self) -> str:
        """For example `the server ended with exit code 1: no such file`."""
        code = self.exit_code
        if code is None:
            description = "the server closed its output"
        elif code < 0:
            description = f"the server was ended by {_signal_name(-code)}"
        else:
            description = f"the server ended with exit code {code}"
        lines = self.last_error_lines
        useful_lines = [line for line in lines if _NOISE.match(line) is None] or lines
        if not useful_lines:
            return description
        # A server that ends by itself prints the reason last; one that was killed printed something else.
        separator = ":" if code is None or code >= 0 else "; its last output:"
        return f"{description}{separator} {useful_lines[-1]}"

    async def write(self, data: bytes) -> None:
        """Waits while the server does not read. Raises BrokenPipeError if it is gone."""
        while not self._writable.is_set():  # Before the write: data that nobody reads must not pile up in memory.
            await self._writable.wait()
        pipe = self._pipe(0)
        if self.is_ended or pipe is None or pipe.is_closing():
            raise BrokenPipeError(errno.EPIPE, "the server is gone")
        cast("asyncio.WriteTransport", pipe).write(data)

    def pause(self) -> None:
        """Stops reading its output. The server blocks when its pipe is full."""
        pipe = self._pipe(1)
        if pipe is not None and not self._is_paused and 1 in self._open_pipes:
            self._is_paused = True
            cast("asyncio.ReadTransport", pipe).pause_reading()

    def resume(self) -> None:
        pipe = self._pipe(1)
        if pipe is not None and self._is_paused and 1 in self._open_pipes:
            self._is_paused = False
            cast("asyncio.ReadTransport", pipe).resume_reading()

    async def stop(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """Ends the server and every process that it started. Finishes even if the caller is cancelled.

        Takes the grace period and a few seconds at most, whatever the server does.
        """
        if self._stop_task is None:
            self._stop_task = asyncio.get_running_loop().create_task(self._stop(grace_seconds))
        await wait_until_done(self._stop_task)

    async def _stop(self, grace_seconds: float) -> None:
        processes = frozenset((self._identity,))
        try:
            self._receive = None  # Output is still read, and dropped: a full pipe would keep the server from ending.
            self.resume()
            processes |= find_descendants(self._identity, self.mark)
            if (pipe := self._pipe(0)) is not None:
                pipe.close()
            await _wait(self._exit_event, grace_seconds)
            for kind, seconds in _STOP_ROUNDS:
                survivors = find_descendants(self._identity, self.mark, processes)
                if not survivors:
                    break
                processes |= survivors
                send_signal(kind, self.pid, survivors)
                await _wait_for_end(survivors, seconds)
            await _wait(self._exit_event, _REAP_SECONDS)
        except asyncio.CancelledError:  # The event loop is closing: no time for a grace period.
            survivors = find_descendants(self._identity, self.mark, processes)
            send_signal(KILL_SIGNAL, self.pid, survivors)
            raise
        finally:
            self._release()
        await _wait(self._close_event, _REAP_SECONDS)

    def _release(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._transport is not None:
            with suppress(PermissionError):  # Closing signals the process once more; it may have changed its user.
                self._transport.close()
        get_orphan_cleanup().remove(self.pid)
        get_orphan_cleanup().remove(self.mark)

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.SubprocessTransport", transport)
        self.pid = self._transport.get_pid()
        self._identity = identify_process(self.pid)
        get_orphan_cleanup().add(self.pid)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 2:
            self._add_error_output(data)
        elif self._receive is not None:
            self._receive(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self._open_pipes.discard(fd)
        if fd == 0:
            self._writable.set()
        self._check_end()

    def process_exited(self) -> None:
        self._exit_event.set()
        self._check_end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._close_event.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def _check_end(self) -> None:
        """The ends of the process and of its pipes are reported in any order, and some of them never."""
        if self._exit_event.is_set() and not self._open_pipes:
            self._finish()
        elif (self._exit_event.is_set() or 1 not in self._open_pipes) and self._end_timer is None:
            self._end_timer = asyncio.get_running_loop().call_later(_LAST_OUTPUT_SECONDS, self._finish)

    def _finish(self) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        if not self.is_ended:
            self.is_ended = True
            self._writable.set()
            if self._stop_task is None:
                self._on_end()

    def _add_error_output(self, data: bytes) -> None:
        *lines, rest = (self._partial_error_line + data).split(b"\n")
        self._partial_error_line = rest[:_LINE_BYTES]
        if self._log.isEnabledFor(logging.DEBUG):
            for line in lines:
                if text := _clean_line(line):
                    self._log.debug("%s", text)
        self._error_lines.extend(line[:_LINE_BYTES] for line in lines[-_KEPT_LINES:])

    def _pipe(self, fd: int) -> asyncio.BaseTransport | None:
        return self._transport.get_pipe_transport(fd) if self._transport is not None else None


async def start_process(
    name: str, spec: ServerSpec, *, receive: Callable[[bytes], None], on_end: Callable[[], None]
) -> ServerProcess:
    """Starts a server. `receive` is called with its output, `on_end` once when no more output will come.

    Raises ProviderError, which says what to change, if the server cannot be started.
    """
    process = ServerProcess(name, receive, on_end)
    program, cwd, env = _build_command(name, spec, process.mark)
    # Before the start: Toolspace could be killed right after it.
    get_orphan_cleanup().add(process.mark)
    try:
        await asyncio.get_running_loop().subprocess_exec(
            lambda: process, program, *spec.args, cwd=cwd, env=env, start_new_session=True
        )
    except OSError as error:
        get_orphan_cleanup().remove(process.mark)
        hint = "; does its first line name a program (#!)?" if error.errno == errno.ENOEXEC else ""
        raise ProviderError(f"the command {program!r} of server {name!r} cannot be started: {error}{hint}") from None
    except BaseException:  # Cancelled during the start: the process may exist already.
        if process.pid:
            await process.stop(0)
        else:
            kill_marked(process.mark)
            get_orphan_cleanup().remove(process.mark)
        raise
    return process


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


async def _wait_for_end(processes: frozenset[ProcessIdentity], seconds: float) -> None:
    """Polls, because processes that are not our children send no event when they end."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + seconds, 0.002
    while is_any_alive(processes) and loop.time() < deadline:
        await asyncio.sleep(pause)
        pause = min(pause * 2, 0.05)


def _clean_line(line: bytes) -> str:
    text = _CONTROL.sub("", line.decode("utf-8", "replace")).strip()
    return mask_secrets(text)[:_LINE_CHARACTERS] if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
