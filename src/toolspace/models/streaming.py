"""The base of all adapters that call a provider over HTTP and read a streamed response.

An adapter defines how a request is written (`StreamingModel.build_request`) and what an event means
(`StreamedResponse.receive_event`). Sending, reading, errors, cost and retries without refused features are here.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from toolspace.core import json_text
from toolspace.core.model import (
    CallDelta,
    CallStarted,
    FinishReason,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    TextDelta,
    ThinkingDelta,
    Usage,
)
from toolspace.core.sse import SseDecoder, SseEvent
from toolspace.core.tokens import estimate_tokens
from toolspace.errors import ModelError
from toolspace.models import http as errors
from toolspace.models.http import ModelHttpClient
from toolspace.models.prices import ModelPrice, calculate_cost, find_price
from toolspace.models.request_encoding import TurnLayout

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

MAX_RESPONSE = 32 << 20
"""Characters of one response, with its arguments and reasoning."""
_MAX_ERROR_BODY = 1 << 16
LAST_EVENTS_SECONDS = 5.0
"""How long to wait for events after the finish reason: mostly the usage follows."""
_END_OF_STREAM_SECONDS = 0.25
"""How long to wait for the end of a complete stream, so that its connection can be reused."""

_log = logging.getLogger("toolspace.models")
_encoder = msgspec.json.Encoder()


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The URL of a model's API and its headers. Its `repr` shows no key."""

    url: str
    headers: Mapping[str, str] = {}
    credential_name: str = ""
    """The variable or setting to check if the key is refused: `OPENAI_API_KEY`, `model.apiKey`."""

    def __repr__(self) -> str:
        return f"ModelEndpoint(url={self.url.partition('?')[0]!r})"


class StreamedResponse:
    """One response while it arrives. A provider's subclass receives the events."""

    def __init__(self, name: str, credential_name: str, listen: ModelListener | None) -> None:
        self.name = name
        self.credential_name = credential_name
        self.tool_names: Mapping[str, str] = {}
        """The provider's spelling of a tool's name → the name, if they differ."""
        self.is_complete = False
        """Whether the provider has sent everything that matters."""
        self.finish: FinishReason | None = None
        """The finish reason, once the provider has sent it. Few events follow it."""
        self.is_refusal = False
        self.usage: Usage | None = None
        self.cost: float | None = None
        """The cost, if the provider itself sends it."""
        self.cache_write_tokens = 0
        """Tokens that the provider writes to its cache, at a higher price."""
        self.layout = TurnLayout()
        self._listen = listen
        self._texts: list[str] = []
        self._calls: list[_StreamedCall] = []
        self._ids: set[str] = set()
        self._remaining_size = MAX_RESPONSE

    def receive_event(self, data: bytes) -> None:
        """Handles one event. Raises `ModelError`, or a msgspec error if the data does not have the API's form."""
        raise NotImplementedError

    def add_text(self, piece: str) -> None:
        self._count_size(len(piece))
        self._texts.append(piece)
        self.layout.add_text(len(piece))
        if self._listen is not None:
            self._listen(TextDelta(piece))

    def add_refusal(self, piece: str) -> None:
        """Adds text of a refusal, which the model writes instead of a response."""
        self.is_refusal = True
        self.add_text(piece)

    def add_thinking(self, piece: str) -> None:
        self._count_size(len(piece))
        if self._listen is not None and piece:
            self._listen(ThinkingDelta(piece))

    def start_call(self, call_id: str | None, name: str) -> int:
        """Starts a call and returns its index, which its arguments refer to."""
        index = len(self._calls)
        name = self.tool_names.get(name, name)
        call_id = call_id or f"call_{index}"
        if call_id in self._ids:  # Some servers use the same id for all calls.
            call_id = f"{call_id}_{index}"
        self._ids.add(call_id)
        self._calls.append(_StreamedCall(call_id, name))
        self._count_size(len(name) + 50)
        self.layout.add_call(index)
        if self._listen is not None:
            self._listen(CallStarted(index, call_id, name))
        return index

    def add_arguments(self, index: int, piece: str) -> None:
        self._count_size(len(piece))
        self._calls[index].pieces.append(piece)
        if self._listen is not None and piece:
            self._listen(CallDelta(index, piece))

    def has_arguments(self, index: int) -> bool:
        return bool(self._calls[index].pieces)

    @property
    def call_count(self) -> int:
        return len(self._calls)

    def build_turn(self, model: str, price: ModelPrice | None, request_bytes: int) -> ModelTurn:
        """The whole turn. Its usage is estimated from the text sizes if the provider sends none."""
        calls = tuple(ModelCall(call.id, call.name, "".join(call.pieces)) for call in self._calls)
        finish = "filter" if self.is_refusal else self.finish or "other"
        if calls and finish in ("stop", "other"):
            finish = "tools"
        text = "".join(self._texts)
        usage = self.usage
        if usage is None:
            output_tokens = estimate_tokens(text) + sum(estimate_tokens(call.arguments) for call in calls)
            usage = Usage(input_tokens=request_bytes // 4, output_tokens=output_tokens)
        cost = self.cost
        if cost is None:
            cost = calculate_cost(
                price,
                input=usage.input_tokens,
                cached=usage.cached_tokens,
                output=usage.output_tokens,
                cache_writes=self.cache_write_tokens,
            )
        return ModelTurn(
            text=text,
            calls=calls,
            finish=finish,
            usage=Usage(
                requests=1,
                input_tokens=usage.input_tokens,
                cached_tokens=usage.cached_tokens,
                output_tokens=usage.output_tokens,
                cost=cost,
            ),
            model=model,
            thinking=self.layout.entries,
        )

    def _count_size(self, size: int) -> None:
        self._remaining_size -= size
        if self._remaining_size < 0:
            limit = f"{MAX_RESPONSE:,} characters"
            raise ModelError("invalid", f"{self.name}: its answer has more than {limit}; set model.maxOutputTokens")


class _StreamedCall:
    __slots__ = ("id", "name", "pieces")

    def __init__(self, call_id: str, name: str) -> None:
        self.id = call_id
        self.name = name
        self.pieces: list[str] = []


class StreamingModel(Model):
    """A model behind an HTTP API that streams its response as events."""

    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Features that a request can omit → the words in an error message that mean them.

    Models of one provider differ in what they accept, and no list of them stays correct. A feature that the provider
    refuses by name is omitted_features, and not sent again.
    """
    per_request_features: ClassVar[frozenset[str]] = frozenset(("images", "thoughts"))
    """Optional features that are omitted for one request only: another request may be accepted with them."""
    response_class: ClassVar[type[StreamedResponse]]

    def __init__(
        self, provider: str, model: str, endpoint: ModelEndpoint, *, http: ModelHttpClient | None = None
    ) -> None:
        self.name = f"{provider}:{model}"
        self.model = model
        self.endpoint = endpoint
        self.price = find_price(model)
        self.context_window = self.price.context_window if self.price is not None else None
        self._http = http or ModelHttpClient()
        self._owns_http = http is None
        self._url: URL | None = None
        self._headers: Mapping[str, str] = {**endpoint.headers, "Content-Type": "application/json"}
        self._omitted_features: frozenset[str] = frozenset()

    @abstractmethod
    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        """The body of a request, without the omitted features."""

    def create_response(self, request: ModelRequest, listen: ModelListener | None) -> StreamedResponse:
        """The object that receives the response to a request."""
        return self.response_class(self.name, self.endpoint.credential_name, listen)

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        omitted_features = self._omitted_features
        body = encode_body(self.build_request(request, omitted_features))
        while True:
            try:
                return await self._send(body, request.settings.timeout, self.create_response(request, listen))
            except ModelError as error:
                shorter_request = self._omit_refused_feature(error, request, omitted_features, body)
                if shorter_request is None:
                    raise
                feature, body = shorter_request
                omitted_features |= {feature}
                if feature not in self.per_request_features:
                    self._omitted_features |= {feature}
                _log.warning("%s; repeating the request without %s", error, feature)

    async def aclose(self) -> None:
        if self._owns_http:
            await self._http.aclose()

    def _omit_refused_feature(
        self, error: ModelError, request: ModelRequest, omitted_features: frozenset[str], body: bytes
    ) -> tuple[str, bytes] | None:
        """The feature that the error refuses and the request without it, or None."""
        if error.kind not in ("invalid", "not_found") or error.status is None:
            return None
        message = str(error).lower()
        for feature, words in self.optional_features.items():
            if feature not in omitted_features and any(word in message for word in words):
                shorter_body = encode_body(self.build_request(request, omitted_features | {feature}))
                if shorter_body != body:
                    return feature, shorter_body
        return None

    async def _send(self, body: bytes, timeout: float, response: StreamedResponse) -> ModelTurn:
        from toolspace.core.http_errors import HTTP_FAILURES

        has_started = False
        try:
            url = self._url or self._parse_url()
            http_response = await self._http.post(url, self._headers, body, timeout)
            try:
                if http_response.status != 200:
                    raise await self._read_error(http_response)
                has_started = True
                await self._read(http_response, response)
            finally:
                http_response.close()  # Closes the connection too, unless all was read and it is back in the pool.
        # `from None`: the errors of aiohttp contain the whole URL.
        except HTTP_FAILURES as failure:
            if response.finish is None:
                raise errors.error_from_connection(
                    self.name, failure, self._parse_url(), timeout=timeout, has_started=has_started
                ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError("broken", f"{self.name}: its answer is not of the form of its API: {error}") from None
        if response.finish is None and not response.is_complete:
            raise ModelError("broken", f"{self.name}: its answer broke off before its end")
        return response.build_turn(self.name, self.price, len(body))

    async def _read(self, http_response: aiohttp.ClientResponse, response: StreamedResponse) -> None:
        content = http_response.content
        if http_response.content_type != "text/event-stream" and await self._read_whole(http_response, response):
            return
        decoder = SseDecoder()
        try:
            while chunk := await content.readany():
                _receive(response, decoder.feed(chunk))
                if response.is_complete:
                    await _read_to_end(content)
                    return
                if response.finish is not None:
                    break
            if response.finish is None or await _read_last_events(content, decoder, response):
                _receive(response, decoder.finish())
        except ValueError as error:
            if isinstance(error, msgspec.MsgspecError | UnicodeError):
                raise
            raise ModelError("invalid", f"{self.name}: its answer cannot be read: {error}") from None

    async def _read_whole(self, http_response: aiohttp.ClientResponse, response: StreamedResponse) -> bool:
        """Reads a response that is one JSON document: some servers do not stream. Returns False for a stream."""
        if http_response.content_type != "application/json":
            if http_response.content_type in ("text/html", "application/xhtml+xml"):
                message = f"a web page is at {self._url_without_query()}; check base_url"
                raise errors.build_error(self.name, "not_found", message)
            return False  # Many servers send events with another content type, or none.
        body = await _read_body(http_response, MAX_RESPONSE)
        if not body.lstrip().startswith(b"{"):
            decoder = SseDecoder()
            _receive(response, decoder.feed(body))
            _receive(response, decoder.finish())
            return True
        response.receive_event(body)
        response.is_complete = True
        return True

    async def _read_error(self, http_response: aiohttp.ClientResponse) -> ModelError:
        body = await _read_body(http_response, _MAX_ERROR_BODY)
        status = http_response.status
        headers = {name.lower(): value for name, value in http_response.headers.items()}
        if 300 <= status < 400:
            message = f"{self._url_without_query()} redirects elsewhere; set base_url to the URL of the API"
            return errors.build_error(self.name, "not_found", message, status=status)
        return errors.error_from_response(
            self.name, status, headers, body, credential_name=self.endpoint.credential_name
        )

    def _parse_url(self) -> URL:
        from yarl import URL

        if self._url is None:
            try:
                self._url = URL(self.endpoint.url)
            except ValueError as error:
                raise ModelError("not_found", f"{self.name}: its address is no URL: {error}; check base_url") from None
            if self._url.scheme not in ("http", "https") or not self._url.raw_host:
                self._url = None
                raise ModelError("not_found", f"{self.name}: its address must begin with http:// or https://")
        return self._url

    def _url_without_query(self) -> str:
        return self.endpoint.url.partition("?")[0]


def encode_body(body: dict[str, Any]) -> bytes:
    """A request body as JSON. Replaces characters that UTF-8 cannot encode: texts of tools and people may have them."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return _encoder.encode(_replace_invalid_text(body))


def _replace_invalid_text(value: Any) -> Any:
    if isinstance(value, str):
        return json_text.valid_text(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {json_text.valid_text(key): _replace_invalid_text(inner) for key, inner in fields.items()}
    if isinstance(value, list | tuple):
        return [_replace_invalid_text(inner) for inner in cast("list[Any]", value)]
    return value


async def _read_body(http_response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    while len(body) <= limit and (chunk := await http_response.content.readany()):
        body += chunk
    return bytes(body[:limit])


def _receive(response: StreamedResponse, events: Sequence[SseEvent]) -> None:
    for event in events:
        if event.data is not None:
            response.receive_event(event.data)


async def _read_last_events(content: aiohttp.StreamReader, decoder: SseDecoder, response: StreamedResponse) -> bool:
    """Reads the events after the finish reason, for a limited time: some servers then leave the stream open.

    Returns whether the stream ended without a last event.
    """
    try:
        async with asyncio.timeout(LAST_EVENTS_SECONDS):
            while not response.is_complete and (chunk := await content.readany()):
                _receive(response, decoder.feed(chunk))
    except TimeoutError:
        return False
    if response.is_complete:
        await _read_to_end(content)
    return not response.is_complete


async def _read_to_end(content: aiohttp.StreamReader) -> None:
    """Reads a complete stream to its end, if that comes at once."""
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(_END_OF_STREAM_SECONDS):
            while await content.readany():
                pass
    except Exception:  # The response is complete: a failure does not matter any more.
        return
