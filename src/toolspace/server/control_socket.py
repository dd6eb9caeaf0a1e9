"""The control socket: lets a command ask a running process of the same configuration for its MCP servers or gateway.

A long-running process listens on a Unix socket in the state directory that only its own user can open. A request is one
line of JSON, and so is the response. No tools can be called. The only secret that it returns is the local key of a
gateway, which is valid while that process runs. Without Unix sockets, no process listens and none is found.
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
from typing import Literal

import msgspec

from toolspace.core.names import sanitise
from toolspace.errors import ToolspaceError
from toolspace.providers.mcp.server_spec import ServerStatus
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.server.control_socket")
_FOLDER = "run"
_MAX_REQUEST_BYTES, _MAX_RESPONSE_BYTES = 64 * 1024, 16 * 1024 * 1024
_REQUEST_TIMEOUT = 5.0
_RESPONSE_TIMEOUTS = {"status": 5.0, "restart": 120.0, "gateway": 5.0}
"""A restart may have to download the MCP server."""
_MAX_PROCESSES = 64
_socket_numbers = itertools.count()


class ServerReport(ServerStatus, frozen=True, kw_only=True, rename="camel"):
    """The status of an MCP server, and how many tokens its tool definitions cost."""

    tokens: int = 0


class LocalGateway(msgspec.Struct, frozen=True):
    """The URL of a gateway on this machine, and its local secret key, which is stored nowhere."""

    url: str
    key: str

    def __repr__(self) -> str:
        return f"LocalGateway(url={self.url!r}, key='…')"


class ControlRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    do: Literal["status", "restart", "gateway"]
    name: str = ""
    """The server to restart."""


class ControlResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The response of one running process."""

    pid: int
    servers: tuple[ServerReport, ...] = ()
    error: str = ""
    gateway: LocalGateway | None = None


def report_servers(ts: Toolspace) -> tuple[ServerReport, ...]:
    """Returns the status of every MCP server of a toolspace."""
    tokens: dict[str, int] = {}
    for tool in ts.list_tools():
        if (entry := ts.orchestrator.explain(tool.name)) is not None:
            namespace = sanitise(entry[0].provider.namespace)
            tokens[namespace] = tokens.get(namespace, 0) + ts.orchestrator.token_cost(tool)
    return tuple(
        ServerReport(**msgspec.structs.asdict(status), tokens=tokens.get(sanitise(status.name), 0))
        for status in ts.list_servers()
    )


@asynccontextmanager
async def serve_control_socket(ts: Toolspace, gateway: LocalGateway | None = None) -> AsyncGenerator[None]:
    """Serves the control socket while the block runs. If that is impossible, the program continues without it.

    `gateway` is the gateway of this process, if it has one.
    """
    async with AsyncExitStack() as stack:
        if hasattr(socket, "AF_UNIX"):
            try:
                await stack.enter_async_context(_listen(ts, gateway))
            except OSError as error:
                _log.info("control socket disabled: %s", error)
        yield


async def ask_processes(state_dir: Path, config_path: Path | None, request: ControlRequest) -> list[ControlResponse]:
    """Returns the responses of all running processes of this configuration."""
    return await _ask_all(state_dir, _prefix(config_path), request)


async def find_gateway(state_dir: Path, config_path: Path | None) -> LocalGateway | None:
    """Returns the running gateway of this configuration, or None. Gateways of other configurations do not count."""
    responses = await ask_processes(state_dir, config_path, ControlRequest("gateway"))
    return next((response.gateway for response in responses if response.gateway is not None), None)


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
            responses = await asyncio.gather(
                *(_ask(folder, state_dir, name, request) for name in names[-_MAX_PROCESSES:])
            )
    except OSError:
        return []
    return [response for response in responses if response is not None]


# The socket files


def _prefix(config_path: Path | None) -> str:
    # Resolved, because symbolic links may lead to the same file.
    text = "" if config_path is None else str(config_path.resolve())
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12] + "-"


@contextmanager
def _folder(state_dir: Path, *, create: bool) -> Generator[int]:
    """Yields the descriptor of the folder of the sockets, which only this user can open. Raises `OSError`."""
    from toolspace.storage import private_files  # Imported here: it needs POSIX.

    if create:
        private_files.make_private_folder(state_dir)
    root = private_files.open_root(state_dir)
    try:
        folder = private_files.open_folder(_FOLDER, parent=root, create=create)
    finally:
        os.close(root)
    try:
        yield folder
    finally:
        os.close(folder)


def _address(folder: int, state_dir: Path, name: str) -> str:
    # Through the descriptor if possible: the path of a Unix socket is limited to about 100 characters.
    folder_path = f"/proc/self/fd/{folder}"
    return f"{folder_path}/{name}" if os.path.isdir(folder_path) else str(state_dir / _FOLDER / name)


def _delete(folder: int, *names: str) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)


# The server


@asynccontextmanager
async def _listen(ts: Toolspace, gateway: LocalGateway | None) -> AsyncGenerator[None]:
    """Listens on a new socket while the block runs. Raises `OSError`."""
    # Imported here: short commands do not listen.
    from toolspace.providers.mcp.transports.orphan_cleanup import get_orphan_cleanup

    name = f"{_prefix(ts.config_path)}{os.getpid()}-{next(_socket_numbers)}.sock"
    hidden_name = f".{name}"  # Until it listens: another process would take it for a dead socket and delete it.
    path = (ts.state_dir / _FOLDER / name).absolute()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _serve(ts, gateway, reader, writer)
        finally:
            tasks.discard(task)

    with _folder(ts.state_dir, create=True) as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as unix_socket:
        _delete(folder, hidden_name, name)  # Left by a dead process with the same process id.
        unix_socket.bind(_address(folder, ts.state_dir, hidden_name))
        try:
            os.chmod(hidden_name, 0o600, dir_fd=folder)
            server = await asyncio.start_unix_server(serve, sock=unix_socket, limit=_MAX_REQUEST_BYTES)
            try:
                os.rename(hidden_name, name, src_dir_fd=folder, dst_dir_fd=folder)
                get_orphan_cleanup().add(path)
                try:
                    yield
                finally:
                    get_orphan_cleanup().remove(path)
            finally:
                server.close()
                for task in tuple(tasks):
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            _delete(folder, hidden_name, name)


async def _serve(
    ts: Toolspace, gateway: LocalGateway | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Handles one request. It ends in bounded time whatever the client does."""
    try:
        if not _is_own_user(writer):
            return
        response = await _respond(ts, gateway, reader)
        writer.write(msgspec.json.encode(response) + b"\n")
        async with asyncio.timeout(_REQUEST_TIMEOUT):
            await writer.drain()
    except (OSError, TimeoutError):
        pass  # The client disconnected or sent nothing.
    finally:
        writer.close()


async def _respond(ts: Toolspace, gateway: LocalGateway | None, reader: asyncio.StreamReader) -> ControlResponse:
    pid = os.getpid()
    try:
        async with asyncio.timeout(_REQUEST_TIMEOUT):
            line = await reader.readline()
        request = msgspec.json.decode(line, type=ControlRequest)
    except (ValueError, msgspec.MsgspecError):
        return ControlResponse(pid, error="invalid request")
    try:
        if request.do == "gateway":
            return ControlResponse(pid, gateway=gateway)
        if request.do == "restart":
            await ts.restart_server(request.name)
        return ControlResponse(pid, report_servers(ts))
    except ToolspaceError as error:
        return ControlResponse(pid, report_servers(ts), error=str(error))
    except Exception:
        _log.exception("control request %s failed", request.do)
        return ControlResponse(pid, error="internal error; the log of that process has the details")


def _is_own_user(writer: asyncio.StreamWriter) -> bool:
    """Whether the client is the same user or root. Systems without `SO_PEERCRED` rely on the mode of the folder."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    peer = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", peer)
    return uid in (os.geteuid(), 0)


# The client


async def _ask(folder: int, state_dir: Path, name: str, request: ControlRequest) -> ControlResponse | None:
    pid = _pid(name)
    try:
        async with asyncio.timeout(_RESPONSE_TIMEOUTS[request.do]):
            reader, writer = await asyncio.open_unix_connection(
                _address(folder, state_dir, name), limit=_MAX_RESPONSE_BYTES
            )
            try:
                writer.write(msgspec.json.encode(request) + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
        return msgspec.json.decode(line, type=ControlResponse) if line else None
    except ConnectionRefusedError:
        # The process is dead: a socket gets this name only while it listens.
        with suppress(OSError):
            os.unlink(name, dir_fd=folder)
        return None
    except TimeoutError:
        return ControlResponse(pid, error=f"process {pid} does not respond; if it hangs, stop it")
    except (OSError, ValueError, msgspec.MsgspecError):
        return None  # The process just ended, or has another version.


def _pid(name: str) -> int:
    parts = name.removesuffix(".sock").split("-")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
