"""`ToolspaceClient`: the HTTP API of a gateway as methods."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from toolspace.client.call_resources import CallsApi, RunsApi, ToolsApi
from toolspace.client.events import EventSubscription
from toolspace.client.resources import AgentsApi, EntitiesApi, KeysApi, ServersApi, SpacesApi
from toolspace.client.transport import GatewayCredentials, Token, Transport


class ToolspaceClient:
    """The API of a gateway.

    async with ToolspaceClient("http://127.0.0.1:8787", secret_key="sk_…") as client:
        space = await client.spaces.create("Support")
        async for event in client.spaces.subscribe(space.id):
            ...

    With a `secret_key` (or a tool key) it has the permissions of the key; with a `public_key` and a `token` those of
    the entity in the token. A token may be a function, which is called for a new one when the old one has expired.
    """

    def __init__(
        self,
        url: str,
        *,
        secret_key: str | None = None,
        public_key: str | None = None,
        token: Token | None = None,
        timeout: float = 60.0,
        attempts: int = 5,
    ) -> None:
        credentials = GatewayCredentials(secret_key=secret_key, public_key=public_key, token=token)
        self._transport = Transport(url, credentials, timeout=timeout, attempts=attempts)
        self.entities = EntitiesApi(self._transport)
        self.spaces = SpacesApi(self._transport)
        self.agents = AgentsApi(self._transport)
        self.runs = RunsApi(self._transport)
        self.tools = ToolsApi(self._transport)
        self.calls = CallsApi(self._transport)
        self.servers = ServersApi(self._transport)
        self.keys = KeysApi(self._transport)

    @property
    def url(self) -> str:
        return self._transport.url

    async def me(self) -> dict[str, Any]:
        """Returns the identity of these credentials."""
        return await self._transport.request("GET", "/api/me")

    def subscribe(self) -> EventSubscription:
        """Iterates over new events of all spaces and runs; for secret keys.

        Events during a lost connection are missed: only the streams of single spaces and runs are replayed.
        """
        return self.stream("/api/events")

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        last_event_id: str | int | None = None,
        retry_unreachable: bool = True,
    ) -> EventSubscription:
        """Iterates over any stream. With `retry_unreachable=False` it raises if the gateway cannot be reached."""
        return EventSubscription(
            self._transport, path, query=query, last_event_id=last_event_id, retry_unreachable=retry_unreachable
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: dict[str, Any] | None = None,
        body: object = None,
        idempotency_key: str | None = None,
    ) -> Any:
        """Sends any other request, for routes without a method of their own."""
        return await self._transport.request(method, path, query=query, body=body, idempotency_key=idempotency_key)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._transport.aclose()
