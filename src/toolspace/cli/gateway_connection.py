"""Finds the running gateway that a command talks to, and a key for it."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

import click

from toolspace.cli.local_toolspace import config_environment, config_path
from toolspace.cli.options import Options
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import GatewayUnreachable
from toolspace.config.load import Config, load_config
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ProviderError
from toolspace.server import control_socket

KEY_VARIABLE, URL_VARIABLE = "TOOLSPACE_SECRET_KEY", "TOOLSPACE_URL"
F = TypeVar("F", bound=Callable[..., Any])


class GatewayAddress(NamedTuple):
    """Where a gateway is, and what opens it."""

    url: str
    key: str
    is_local: bool
    """Whether a process on this machine told its key: it is good for as long as that process lives."""


def gateway_options(command: F) -> F:
    """The options of commands that talk to a gateway."""
    command = click.option("--key", metavar="KEY", help=f"Its secret key; without it ${KEY_VARIABLE}, else as above.")(
        command
    )
    return click.option(
        "--url",
        metavar="URL",
        help=f"The gateway; without it ${URL_VARIABLE}, else the one of this configuration that runs on this machine.",
    )(command)


async def find_gateway(options: Options, url: str | None, key: str | None) -> GatewayAddress:
    """What was named; else what the environment names; else the gateway that runs here. Raises `ProviderError`."""
    url = url or os.environ.get(URL_VARIABLE) or None
    key = key or os.environ.get(KEY_VARIABLE) or None
    config = load_config(config_path(options), environ=config_environment(options))
    register_secrets(config.secret_values)
    if key is not None:
        register_secrets([key])
    if url is None or key is None:
        local = await control_socket.find_gateway(config.state_dir, config.path)
        if local is not None and url in (None, local.url):
            return GatewayAddress(local.url, key or local.key, is_local=key is None)
    key = key or config.server.secret_key
    if key is None:
        raise ProviderError(
            f"no gateway of this configuration runs here; start one with toolspace serve, or name one with --url and "
            f"--key (or ${KEY_VARIABLE})"
            if url is None
            else f"a secret key of {url} is needed: --key, or ${KEY_VARIABLE}"
        )
    return GatewayAddress(url or _configured(config), key, is_local=False)


@asynccontextmanager
async def connect(options: Options, url: str | None, key: str | None) -> AsyncGenerator[ToolspaceClient]:
    """A client of the gateway, for a command that asks it something."""
    door = await find_gateway(options, url, key)
    try:
        async with create_client(door) as client:
            yield client
    except GatewayUnreachable as error:
        raise ProviderError(str(error)) from error


def create_client(door: GatewayAddress) -> ToolspaceClient:
    try:
        return ToolspaceClient(door.url, secret_key=door.key, attempts=2)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _configured(config: Config) -> str:
    server = config.server
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(server.host, server.host)
    return server.public_url or f"http://{f'[{host}]' if ':' in host and '[' not in host else host}:{server.port}"
