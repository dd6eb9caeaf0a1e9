"""Finds the running gateway that a command connects to, and a key for it. Used by `chat`, `keys` and `tail`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import click

from toolspace.cli.config_file import read_config
from toolspace.cli.options import Options
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import GatewayUnreachable
from toolspace.client.transport import LocateGateway
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config.configuration import Config
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ProviderError
from toolspace.server import control_socket

KEY_VARIABLE, URL_VARIABLE = "TOOLSPACE_SECRET_KEY", "TOOLSPACE_URL"
F = TypeVar("F", bound=Callable[..., Any])


class GatewayAddress(NamedTuple):
    """The URL of a gateway and a key for it."""

    url: str
    key: str
    is_local: bool
    """Whether the key comes from a gateway process on this machine. It is valid while that process runs."""


def gateway_options(command: F) -> F:
    """Adds `--url` and `--key` to a command."""
    command = click.option(
        "--key", metavar="KEY", help=f"Secret key of the gateway. Default: ${KEY_VARIABLE}, else a local key."
    )(command)
    return click.option(
        "--url",
        metavar="URL",
        help=f"URL of the gateway. Default: ${URL_VARIABLE}, else the gateway of this configuration on this machine.",
    )(command)


async def find_gateway(options: Options, url: str | None, key: str | None) -> GatewayAddress:
    """Returns the gateway of the options, else of the environment, else the local one. Raises `ProviderError`."""
    url = url or os.environ.get(URL_VARIABLE) or None
    key = key or os.environ.get(KEY_VARIABLE) or None
    config = read_config(options)
    if key is not None:
        register_secrets([key])
    if url is None or key is None:
        local = await find_local_gateway(config)
        if local is not None and url in (None, local.url):
            return local if key is None else GatewayAddress(local.url, key, is_local=False)
    key = key or (await asyncio.to_thread(resolve_process_secrets, config)).server.secret_key
    if key is None:
        raise ProviderError(
            f"no gateway of this configuration runs on this machine; start one with toolspace serve, or name one with "
            f"--url and --key (or ${KEY_VARIABLE})"
            if url is None
            else f"{url} needs a secret key: --key, or ${KEY_VARIABLE}"
        )
    return GatewayAddress(url or _configured_url(config), key, is_local=False)


async def find_local_gateway(config: Config) -> GatewayAddress | None:
    """Returns the gateway of this configuration that runs on this machine, or None."""
    local = await control_socket.find_gateway(config.state_dir, config.path)
    return GatewayAddress(local.url, local.key, is_local=True) if local is not None else None


@asynccontextmanager
async def connect(options: Options, url: str | None, key: str | None) -> AsyncGenerator[ToolspaceClient]:
    """Yields a client of the gateway. Raises `ProviderError` if it cannot be reached."""
    address = await find_gateway(options, url, key)
    try:
        async with create_client(address) as client:
            yield client
    except GatewayUnreachable as error:
        raise ProviderError(str(error)) from error


def create_client(
    address: GatewayAddress, *, attempts: int = 2, locate: LocateGateway | None = None
) -> ToolspaceClient:
    try:
        return ToolspaceClient(address.url, secret_key=address.key, attempts=attempts, locate=locate)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _configured_url(config: Config) -> str:
    server = config.server
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    return server.public_url or f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{server.port}"
