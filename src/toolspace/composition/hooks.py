"""Builds the hooks that a configuration describes: functions, webhooks, and the included ones. Runs none."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from toolspace.config.configuration import Config
from toolspace.config.hook_settings import INCLUDED_HOOKS, HookSettings
from toolspace.config.secret_references import load_secrets, resolve_secrets
from toolspace.core import json_text
from toolspace.core.hooks import Hook, HookCall, HookDecision, HookFunction, HookPoint
from toolspace.core.result import ToolResult
from toolspace.core.result_masking import mask_personal_data_in_result, mask_secrets_in_result
from toolspace.errors import ConfigError, ToolExecutionError
from toolspace.providers.plugins import get_factory

if TYPE_CHECKING:
    from toolspace.providers.rest.client import HttpClient

MAX_RESPONSE_BYTES = 8 * 1024 * 1024
"""Of a webhook. A replaced result may be as large as a result that hooks see, in any encoding."""


def build_hooks(config: Config, get_client: Callable[[], HttpClient]) -> tuple[Hook, ...]:
    """The hooks in their order. Raises `ConfigError` that names file, line and value."""
    hooks: list[Hook] = []
    problems: list[str] = []
    for position, settings in enumerate(config.hooks):
        source = config.source("hooks", position)
        try:
            hooks += _build_hook(settings, config, source, get_client)
        except ConfigError as error:
            problems.append(f"{config.source('hooks', position, 'use')}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return tuple(hooks)


def _build_hook(
    settings: HookSettings, config: Config, source: str, get_client: Callable[[], HttpClient]
) -> Iterator[Hook]:
    points: list[HookPoint] = [settings.on]
    name = settings.use
    if settings.use in INCLUDED_HOOKS:
        use = _MASKS[settings.use]
        if settings.on == "after":
            points.append("error")  # A failure may quote the same data as a result.
    elif settings.is_webhook:
        use, name = _create_webhook(settings, get_client()), "webhook"
    else:
        use = _load_function(settings.use, config)
    for on in points:
        yield Hook(
            use=use,
            on=on,
            tools=settings.tools,
            on_failure=settings.on_failure,
            timeout=settings.timeout,
            name=name,
            source=source,
        )


def _load_function(use: str, config: Config) -> HookFunction:
    function: Any = get_factory(use, config.base_dir)
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{use}: a {type(function).__name__} is no hook; name a function with one parameter")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ConfigError(f"{use}: a hook is a function with one parameter, the call") from None
    except ValueError:
        pass  # Some callables written in C have no signature.
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise ConfigError(f"{use}: a hook returns its decision; it cannot be a generator")
    return function


def _create_webhook(settings: HookSettings, client: HttpClient) -> HookFunction:
    """A function that sends the call to a URL, and returns the decision in the response.

    The URL is the operator's, so it may have any address. Redirects are not followed.
    """

    async def call_webhook(call: HookCall) -> object:
        from yarl import URL

        from toolspace.providers.rest.client import HttpRequest

        await load_secrets(settings)
        resolved_settings = resolve_secrets(settings)
        request = HttpRequest(
            "POST",
            URL(resolved_settings.use),
            headers={"Accept": "application/json", **resolved_settings.headers, "Content-Type": "application/json"},
            body=json_text.encode_bytes(call.to_dict()),
        )
        response = await client.fetch(request, max_bytes=MAX_RESPONSE_BYTES)
        if not 200 <= response.status < 300:
            raise ToolExecutionError(f"the webhook answered with the status {response.status}")
        if not response.body.strip():
            return None
        try:
            return json_text.decode(response.body)
        except ValueError as error:
            raise ToolExecutionError(f"the webhook's response is no JSON: {error}") from None

    return call_webhook


def _create_mask(mask: Callable[[ToolResult], ToolResult]) -> HookFunction:
    def mask_outcome(call: HookCall) -> HookDecision | None:
        return None if call.outcome is None else HookDecision(result=mask(call.outcome))

    return mask_outcome


_MASKS: Mapping[str, HookFunction] = {
    "mask_secrets": _create_mask(mask_secrets_in_result),
    "mask_personal_data": _create_mask(mask_personal_data_in_result),
}
