"""How one command asks a running toolspace of the same configuration: its servers' state, to restart one, its gateway.

A long-running process listens on a socket file in the state folder, which only its own user can reach; one line of JSON
asks, one line answers. It calls no tools. The one secret that it tells is a gateway's key that is good for as long as
that process lives, to the user whose process it is. Without Unix sockets, nobody listens and nobody is found.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from toolspace.core.names import sanitise
from toolspace.errors import ToolspaceError
from toolspace.providers.mcp.status import ServerStatus
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server.control_socket")
_FOLDER = "run"
_REQUEST_BYTES, _ANSWER_BYTES = 64 * 1024, 16 * 1024 * 1024
_REQUEST_SECONDS = 5.0
_ANSWER_SECONDS = {"status": 5.0, "restart": 120.0, "gateway": 5.0}
"""A server may have to be downloaded before it starts."""
_MOST_PEERS = 64
_numbers = itertools.count()


class ServerReport(ServerStatus, frozen=True, kw_only=True, rename="camel"):
    """A server's status, and what its tools cost a model."""

    tokens: int = 0


class LocalGateway(msgspec.Struct, frozen=True):
    """Where a gateway answers on this machine, and a secret key that only its process's memory has."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"GatewayDoor(url={self.url!r}, key='…')"


class ControlRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    do: Literal["status", "restart", "gateway"]
    name: str = ""
    """The server to restart."""


class ControlResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one running toolspace says."""

    pid: int
    servers: tuple[ServerReport, ...] = ()
    error: str = ""
    gateway: LocalGateway | None = None


def report_servers(ts: Toolspace) -> tuple[ServerReport, ...]:
    """Every MCP server of a toolspace as it is now."""
    tokens: dict[str, int] = {}
    for tool in ts.list_tools():
        if (found := ts.orchestrator.explain(tool.name)) is not None:
            namespace = sanitise(found[0].provider.namespace)
            tokens[namespace] = tokens.get(namespace, 0) + ts.orchestrator.token_cost(tool)
    return tuple(
        ServerReport(**msgspec.structs.asdict(status), tokens=tokens.get(sanitise(status.name), 0))
        for status in ts.list_servers()
    )


@asynccontextmanager
async def serve_control_socket(ts: Toolspace, gateway: LocalGateway | None = None) -> AsyncGenerator[None]:
    """Answers other commands while the block runs. That it cannot is no reason for the program to fail.

    `gateway`: the door of the gateway that this process is, if it is one.
    """
    async with AsyncExitStack() as stack:
        try:
            door = stack.enter_context(_bound(ts.state_dir, ts.config_path))
            if door is not None:
                await stack.enter_async_context(_serving(ts, gateway, door))
        except (_Unavailable, OSError) as error:
            _log.info("other commands cannot ask this process: %s", error.__cause__ or error)
        yield


async def ask_processes(state_dir: Path, config_path: Path | None, request: ControlRequest) -> list[ControlResponse]:
    """What every running toolspace of this configuration answers; nothing where none runs."""
    return await _ask_all(state_dir, _prefix(config_path), request)


async def find_gateway(state_dir: Path, config_path: Path | None) -> LocalGateway | None:
    """The running gateway of this configuration, else another one that keeps its state in the same folder."""
    request = ControlRequest("gateway")
    for prefix in (_prefix(config_path), ""):
        for answer in await _ask_all(state_dir, prefix, request):
            if answer.gateway is not None:
                return answer.gateway
    return None


async def _ask_all(state_dir: Path, prefix: str, request: ControlRequest) -> list[ControlResponse]:
    if not hasattr(socket, "AF_UNIX"):
        return []
    try:
        with _folder(state_dir, create=False) as folder:
            names = sorted(
                name
                for name in os.listdir(folder)
                if name.startswith(prefix) and name.endswith(".sock") and not name.startswith(".")
            )
            answers = await asyncio.gather(*(_ask(folder, state_dir, name, request) for name in names[-_MOST_PEERS:]))
    except _Unavailable:
        return []
    return [answer for answer in answers if answer is not None]


# Where the sockets are


class _Unavailable(Exception):
    """There is no place for sockets here; the cause says why."""


class _Door(NamedTuple):
    """A bound socket, and how its file is called."""

    socket: socket.socket
    folder: int
    hidden: str
    """Its name until it listens, so that nobody takes it for a dead one."""
    name: str
    path: Path


def _prefix(config_path: Path | None) -> str:
    # Resolved: the same file may be reached through links.
    text = "" if config_path is None else str(config_path.resolve())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12] + "-"


@contextmanager
def _folder(state_dir: Path, *, create: bool) -> Generator[int]:
    """The descriptor of the folder of the sockets, which is ours and nobody else's."""
    from toolspace.storage import private_files  # Here: it needs POSIX.

    root = folder = -1
    try:
        try:
            if create:
                private_files.make_private_folder(state_dir)
            root = private_files.open_root(state_dir)
            folder = private_files.open_folder(_FOLDER, within=root, create=create)
        except OSError as error:
            raise _Unavailable from error
        yield folder
    finally:
        for one in (folder, root):
            if one >= 0:
                os.close(one)


def _address(folder: int, state_dir: Path, name: str) -> str:
    # Through the descriptor where that goes: a socket's path has room for a hundred characters only.
    through = f"/proc/self/fd/{folder}"
    return f"{through}/{name}" if os.path.isdir(through) else str(state_dir / _FOLDER / name)


@contextmanager
def _bound(state_dir: Path, config_path: Path | None) -> Generator[_Door | None]:
    if not hasattr(socket, "AF_UNIX"):
        yield None
        return
    with _folder(state_dir, create=True) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        name = f"{_prefix(config_path)}{os.getpid()}-{next(_numbers)}.sock"
        hidden = f".{name}"
        try:
            for old in (hidden, name):  # Of a dead process that had our number.
                with suppress(FileNotFoundError):
                    os.unlink(old, dir_fd=folder)
            door.bind(_address(folder, state_dir, hidden))
            os.chmod(hidden, 0o600, dir_fd=folder)
        except OSError as error:
            raise _Unavailable from error
        try:
            yield _Door(door, folder, hidden, name, (state_dir / _FOLDER / name).absolute())
        finally:
            for made in (hidden, name):
                with suppress(FileNotFoundError):
                    os.unlink(made, dir_fd=folder)


# The side that answers


@asynccontextmanager
async def _serving(ts: Toolspace, gateway: LocalGateway | None, door: _Door) -> AsyncGenerator[None]:
    from toolspace.providers.mcp.transports.orphan_cleanup import (
        get_orphan_cleanup,  # Here: short commands never listen.
    )

    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _serve(ts, gateway, reader, writer)
        finally:
            tasks.discard(task)

    server = await asyncio.start_unix_server(serve, sock=door.socket, limit=_REQUEST_BYTES)
    try:
        os.rename(door.hidden, door.name, src_dir_fd=door.folder, dst_dir_fd=door.folder)
        get_orphan_cleanup().add_file(door.path)
        try:
            yield
        finally:
            get_orphan_cleanup().remove_file(door.path)
    finally:
        server.close()
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(
    ts: Toolspace, gateway: LocalGateway | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """One request and its answer. Whatever the other side does, it ends."""
    try:
        if not _is_own_user(writer):
            return
        answer = await _answer(ts, gateway, reader)
        writer.write(msgspec.json.encode(answer) + b"\n")
        async with asyncio.timeout(_REQUEST_SECONDS):
            await writer.drain()
    except (OSError, TimeoutError):
        pass  # Whoever asked is gone, or never asked.
    finally:
        writer.close()


async def _answer(ts: Toolspace, gateway: LocalGateway | None, reader: asyncio.StreamReader) -> ControlResponse:
    pid = os.getpid()
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            line = await reader.readline()
        request = msgspec.json.decode(line, type=ControlRequest)
    except (ValueError, msgspec.MsgspecError):
        return ControlResponse(pid, error="that is no request")
    try:
        if request.do == "gateway":
            return ControlResponse(pid, gateway=gateway)
        if request.do == "restart":
            await ts.restart_server(request.name)
        return ControlResponse(pid, report_servers(ts))
    except ToolspaceError as error:
        return ControlResponse(pid, report_servers(ts), error=str(error))
    except Exception:
        _log.exception("a request could not be answered: %s", request.do)
        return ControlResponse(pid, error="internal error; the log of that process has more")


def _is_own_user(writer: asyncio.StreamWriter) -> bool:
    """Whether the same user asks, or root. Elsewhere than on Linux the folder's mode alone has to do."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", peer)
    return uid in (os.geteuid(), 0)


# The side that asks


async def _ask(folder: int, state_dir: Path, name: str, request: ControlRequest) -> ControlResponse | None:
    pid = _pid(name)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS[request.do]):
            reader, writer = await asyncio.open_unix_connection(_address(folder, state_dir, name), limit=_ANSWER_BYTES)
            try:
                writer.write(msgspec.json.encode(request) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        return msgspec.json.decode(line, type=ControlResponse) if line else None
    except ConnectionRefusedError:
        # Nobody listens any more, and nobody will: it got this name only once it listened.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        return None
    except TimeoutError:
        return ControlResponse(pid, error=f"process {pid} does not answer; if it hangs, end it")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None  # It ended just now, or is of another version.


def _pid(name: str) -> int:
    parts = name.removesuffix(".sock").split("-")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
