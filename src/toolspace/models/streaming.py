"""The base of all adapters that call a provider over HTTP and read a streamed response.

An adapter defines how a request is written (`StreamingModel.build_request`) and what an event means
(`StreamedResponse.receive_event`). Reading, tool calls, usage, cost and retries without refused features are here.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from toolspace.core.language_model import (
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
    Turn,
    Usage,
)
from toolspace.core.sse_decoder import SseDecoder, SseEvent
from toolspace.core.token_count import estimate_tokens
from toolspace.core.tool_export import ToolFormat
from toolspace.errors import ModelError
from toolspace.models.errors import build_error, connection_error, event_error
from toolspace.models.http import ModelEndpoint, ModelHttpClient, encode_body, read_body, read_error
from toolspace.models.prices import ModelPrice, calculate_cost, find_price
from toolspace.models.request_encoding import IMAGES_AND_PDF, ToolEncoder, TurnLayout, normalize_turns

if TYPE_CHECKING:
    import aiohttp

_END_OF_STREAM_SECONDS = 0.25
"""How long to wait for the end of a complete stream, so that its connection can be reused."""
_NO_MEDIA: frozenset[str] = frozenset()

_log = logging.getLogger("toolspace.models")


class StreamLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one response."""

    max_size: int = 32 << 20
    """Characters of a response, with its arguments and reasoning."""
    last_events_seconds: float = 5.0
    """How long to wait for events after the finish reason: mostly the usage follows."""


_DEFAULT_LIMITS = StreamLimits()


class _StreamedCall(msgspec.Struct):
    id: str
    name: str
    pieces: list[str] = []


class StreamedResponse:
    """One response while it arrives. A provider's subclass receives the events."""

    def __init__(
        self, endpoint: ModelEndpoint, listen: ModelListener | None, limits: StreamLimits = _DEFAULT_LIMITS
    ) -> None:
        self.endpoint = endpoint
        self.limits = limits
        self.tool_names: Mapping[str, str] = {}
        """The provider's spelling of a tool's name → the name, if they differ."""
        self.call_indices: dict[int, int] = {}
        """The provider's index of a call, or its position in the response → its index here."""
        self.is_complete = False
        """Whether the provider has sent everything that matters."""
        self.finish: FinishReason | None = None
        """The finish reason, once the provider has sent it. Few events follow it."""
        self.usage: Usage | None = None
        self.cost: float | None = None
        """The cost, if the provider itself sends it."""
        self.layout = TurnLayout()
        self._is_refusal = False
        self._cache_write_tokens = 0
        self._listen = listen
        self._texts: list[str] = []
        self._calls: list[_StreamedCall] = []
        self._ids: set[str] = set()
        self._remaining_size = limits.max_size

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
        self._is_refusal = True
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

    def add_arguments(self, index: int | None, piece: str) -> None:
        """Adds to the arguments of a call. Ignores them if the call is unknown."""
        if index is None:
            return
        self._count_size(len(piece))
        self._calls[index].pieces.append(piece)
        if self._listen is not None and piece:
            self._listen(CallDelta(index, piece))

    def has_arguments(self, index: int) -> bool:
        return bool(self._calls[index].pieces)

    @property
    def call_count(self) -> int:
        return len(self._calls)

    def set_usage(
        self, input: int | None, output: int | None, *, cached: int | None = 0, cache_writes: int | None = 0
    ) -> None:
        """`input` counts all input tokens, including those that the provider read from or wrote to its cache."""
        self.usage = Usage(input_tokens=input or 0, cached_tokens=cached or 0, output_tokens=output or 0)
        self._cache_write_tokens = cache_writes or 0

    def event_error(self, error: object) -> ModelError:
        """The error for an error event."""
        return event_error(self.endpoint, error)

    def build_turn(self, price: ModelPrice | None, request_bytes: int) -> ModelTurn:
        """The whole turn. Its usage is estimated from the text sizes if the provider sends none."""
        calls = tuple(ModelCall(call.id, call.name, "".join(call.pieces)) for call in self._calls)
        finish = "filter" if self._is_refusal else self.finish or "other"
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
                cache_writes=self._cache_write_tokens,
            )
        return ModelTurn(
            text=text,
            calls=calls,
            finish=finish,
            usage=msgspec.structs.replace(usage, requests=1, cost=cost),
            model=self.endpoint.name,
            thinking_data=self.layout.entries,
        )

    def _count_size(self, size: int) -> None:
        self._remaining_size -= size
        if self._remaining_size < 0:
            limit = f"more than {self.limits.max_size:,} characters"
            raise ModelError("invalid", f"{self.endpoint.name}: its answer has {limit}; set model.maxOutputTokens")


class StreamingModel(Model):
    """A model behind an HTTP API that streams its response as events."""

    tool_format: ClassVar[ToolFormat]
    response_class: ClassVar[type[StreamedResponse]]
    accepted_media: ClassVar[frozenset[str]] = IMAGES_AND_PDF
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Features that a request can omit → the words in an error message that mean them.

    Models of one provider differ in what they accept, and no list of them stays correct. A feature that the provider
    refuses by name is omitted, and not sent again.
    """
    per_request_features: ClassVar[frozenset[str]] = frozenset(("images", "thoughts"))
    """Optional features that are omitted for one request only: another request may be accepted with them."""

    def __init__(
        self,
        model: str,
        endpoint: ModelEndpoint,
        *,
        http: ModelHttpClient | None = None,
        limits: StreamLimits = _DEFAULT_LIMITS,
    ) -> None:
        self.name = endpoint.name
        self.model = model
        self.endpoint = endpoint
        self.limits = limits
        self.price = find_price(model)
        self.context_window = self.price.context_window if self.price is not None else None
        self.tool_encoder = ToolEncoder(self.tool_format)
        self._http = http or ModelHttpClient()
        self._owns_http = http is None
        self._omitted_features: frozenset[str] = frozenset()

    @abstractmethod
    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        """The body of a request, without the omitted features."""

    def create_response(self, request: ModelRequest, listen: ModelListener | None) -> StreamedResponse:
        """The object that receives the response to a request."""
        return self.response_class(self.endpoint, listen, self.limits)

    def normalize_turns(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[Turn]:
        """The turns in a form that the provider accepts, with the media that it accepts."""
        return normalize_turns(request.turns, _NO_MEDIA if "images" in omitted_features else self.accepted_media)

    def add_tools(
        self,
        body: dict[str, Any],
        request: ModelRequest,
        omitted_features: frozenset[str],
        encoder: ToolEncoder | None = None,
    ) -> str | None:
        """Adds the tools to the body. Returns the tool choice if it is not `auto` and possible with these tools."""
        if not request.tools:
            return None
        encoded = (encoder or self.tool_encoder).encode(request.tools, brief="descriptions" in omitted_features)
        body["tools"] = encoded.raw
        choice = request.tool_choice
        return choice if choice in ("required", "none") or choice in encoded.names else None

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
        from toolspace.core.http_client_errors import HTTP_FAILURES

        has_started = False
        try:
            http_response = await self._http.post(self.endpoint, body, timeout)
            try:
                if http_response.status != 200:
                    raise await read_error(self.endpoint, http_response)
                has_started = True
                await self._read(http_response, response)
            finally:
                http_response.close()  # Closes the connection too, unless all was read and it is back in the pool.
        # `from None`: the errors of aiohttp contain the whole URL.
        except HTTP_FAILURES as failure:
            if response.finish is None:
                raise connection_error(self.endpoint, failure, timeout=timeout, has_started=has_started) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            message = f"{self.name}: its response does not have the form of its API: {error}"
            raise ModelError("broken", message) from None
        if response.finish is None and not response.is_complete:
            raise ModelError("broken", f"{self.name}: its response broke off before its end")
        return response.build_turn(self.price, len(body))

    async def _read(self, http_response: aiohttp.ClientResponse, response: StreamedResponse) -> None:
        content, content_type = http_response.content, http_response.content_type
        if content_type in ("text/html", "application/xhtml+xml"):
            message = f"a web page is at {self.endpoint.url_without_query}; check base_url"
            raise build_error(self.endpoint, "not_found", message)
        decoder = SseDecoder()
        try:
            # Some servers do not stream, and many send events with another content type, or none.
            if content_type == "application/json":
                body = await read_body(http_response, self.limits.max_size)
                if body.lstrip().startswith(b"{"):
                    response.receive_event(body)
                    response.is_complete = True
                else:
                    _receive(response, [*decoder.feed(body), *decoder.finish()])
                return
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


def select_options(options: Mapping[str, Any], omitted_features: frozenset[str]) -> dict[str, Any]:
    """The options of a request that are set and whose name is not an omitted feature."""
    return {name: value for name, value in options.items() if value is not None and name not in omitted_features}


def _receive(response: StreamedResponse, events: Sequence[SseEvent]) -> None:
    for event in events:
        if event.data == b"[DONE]":
            response.is_complete = True
        elif event.data:
            response.receive_event(event.data)


async def _read_last_events(content: aiohttp.StreamReader, decoder: SseDecoder, response: StreamedResponse) -> bool:
    """Reads the events after the finish reason, for a limited time: some servers then leave the stream open.

    Returns whether the stream ended without a last event.
    """
    try:
        async with asyncio.timeout(response.limits.last_events_seconds):
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
