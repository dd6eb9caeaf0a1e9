"""What the models of all providers that are asked over HTTP share: sending, listening, and the end of an answer.

Each provider's module says how a request is written (`StreamingModel.write`) and what an event means (`Answer.take`).
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import msgspec

from toolspace.core import json_text, tokens
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
from toolspace.errors import ModelError
from toolspace.models import errors
from toolspace.models.http import ModelHttpClient
from toolspace.models.prices import ModelPrice, calculate_cost, find_price
from toolspace.models.request_encoding import TurnLayout

if TYPE_CHECKING:
    import aiohttp
    from yarl import URL

MAX_ANSWER = 32 << 20
"""Characters of one answer, with its arguments and thoughts."""
_MAX_REFUSAL = 1 << 16
_LAST_SECONDS = 5.0
"""How long more is waited for after the model stopped: mostly it is what it cost."""
_PARTING_SECONDS = 0.25
"""How long the end of a stream is waited for after the answer is complete, so that its connection can be used again."""

_log = logging.getLogger("toolspace.models")


class ModelEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model is, and how its provider knows who asks. Its text shows no key."""

    url: str
    headers: Mapping[str, str] = {}
    credential_name: str = ""
    """What to look at where the key is refused: `OPENAI_API_KEY`, `model.apiKey`."""

    def __repr__(self) -> str:
        return f"Endpoint(url={self.url.partition('?')[0]!r})"


class StreamedResponse:
    """One answer as it comes. A provider's own kind of it takes the events."""

    def __init__(self, name: str, check: str, listen: ModelListener | None) -> None:
        self.name = name
        self.credential_name = check
        self.tool_names: Mapping[str, str] = {}
        """What the provider calls a tool → its name, where those differ."""
        self.is_complete = False
        """The provider has said all: what still comes matters no more."""
        self.finish: FinishReason | None = None
        """Why the model stopped, once the provider has said so: little comes after that."""
        self.is_refusal = False
        self.usage: Usage | None = None
        self.cost: float | None = None
        """Where the provider itself says what it cost."""
        self.cache_write_tokens = 0
        """Tokens that the provider keeps for the next request, and charges more for."""
        self.layout = TurnLayout()
        self._listen = listen
        self._texts: list[str] = []
        self._calls: list[_Call] = []
        self._ids: set[str] = set()
        self._room = MAX_ANSWER

    def receive_event(self, data: bytes) -> None:
        """Takes one event. Raises `ModelError`, or one of msgspec's errors for what is not of the provider's form."""
        raise NotImplementedError

    def add_text(self, piece: str) -> None:
        self._fill(len(piece))
        self._texts.append(piece)
        self.layout.add_text(len(piece))
        if self._listen is not None:
            self._listen(TextDelta(piece))

    def add_refusal(self, piece: str) -> None:
        """A piece of what the model says instead of an answer."""
        self.is_refusal = True
        self.add_text(piece)

    def add_thinking(self, piece: str) -> None:
        self._fill(len(piece))
        if self._listen is not None and piece:
            self._listen(ThinkingDelta(piece))

    def start_call(self, identity: str | None, name: str) -> int:
        """A call begins. Gives its index, under which its arguments come."""
        index = len(self._calls)
        name = self.tool_names.get(name, name)
        identity = identity or f"call_{index}"
        if identity in self._ids:  # Some servers call all of them alike.
            identity = f"{identity}_{index}"
        self._ids.add(identity)
        self._calls.append(_Call(identity, name))
        self._fill(len(name) + 50)
        self.layout.add_call(index)
        if self._listen is not None:
            self._listen(CallStarted(index, identity, name))
        return index

    def add_arguments(self, index: int, piece: str) -> None:
        """A piece of a call's arguments."""
        self._fill(len(piece))
        self._calls[index].pieces.append(piece)
        if self._listen is not None and piece:
            self._listen(CallDelta(index, piece))

    def has_arguments(self, index: int) -> bool:
        return bool(self._calls[index].pieces)

    @property
    def call_count(self) -> int:
        """How many calls have begun."""
        return len(self._calls)

    def build_turn(self, model: str, price: ModelPrice | None, asked: int) -> ModelTurn:
        """The whole turn. `asked`: the bytes of the request, which tell what it cost where the provider does not."""
        calls = tuple(ModelCall(one.id, one.name, "".join(one.pieces)) for one in self._calls)
        finish = "filter" if self.is_refusal else self.finish or "other"
        if calls and finish in ("stop", "other"):
            finish = "tools"
        text = "".join(self._texts)
        usage = self.usage
        if usage is None:
            said = tokens.estimate_tokens(text) + sum(tokens.estimate_tokens(call.arguments) for call in calls)
            usage = Usage(input_tokens=asked // 4, output_tokens=said)
        cost = self.cost
        if cost is None:
            read, cached = usage.input_tokens, usage.cached_tokens
            cost = calculate_cost(
                price, input=read, cached=cached, output=usage.output_tokens, written=self.cache_write_tokens
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

    def _fill(self, size: int) -> None:
        self._room -= size
        if self._room < 0:
            most = f"{MAX_ANSWER:,} characters"
            raise ModelError("invalid", f"{self.name}: its answer has more than {most}; set model.maxOutputTokens")


class _Call:
    __slots__ = ("id", "name", "pieces")

    def __init__(self, identity: str, name: str) -> None:
        self.id = identity
        self.name = name
        self.pieces: list[str] = []


class StreamingModel(Model):
    """A model that is asked over HTTP and answers with a stream of events."""

    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """What a request can do without, and the words in a refusal that mean it.

    Models of one provider differ in what they take, and no list of them stays true: what is refused by name is left
    out, and not sent again.
    """
    per_request_features: ClassVar[frozenset[str]] = frozenset(("images", "thoughts"))
    """Of these, the ones that may be fine in another request."""
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
        self._without: frozenset[str] = frozenset()

    @abstractmethod
    def build_request(self, request: ModelRequest, without: frozenset[str]) -> dict[str, Any]:
        """The body of a request, without what was refused."""

    def create_response(self, request: ModelRequest, listen: ModelListener | None) -> StreamedResponse:
        """What takes the answer to a request."""
        return self.response_class(self.name, self.endpoint.credential_name, listen)

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        without = self._without
        body = encode_body(self.build_request(request, without))
        while True:
            try:
                return await self._ask(body, request.settings.timeout, self.create_response(request, listen))
            except ModelError as error:
                conceded = self._concede(error, request, without, body)
                if conceded is None:
                    raise
                word, body = conceded
                without |= {word}
                if word not in self.per_request_features:
                    self._without |= {word}
                _log.warning("%s; asking again without %s", error, word)

    async def aclose(self) -> None:
        if self._owns_http:
            await self._http.aclose()

    def _concede(
        self, error: ModelError, request: ModelRequest, without: frozenset[str], body: bytes
    ) -> tuple[str, bytes] | None:
        if error.kind not in ("invalid", "not_found") or error.status is None:
            return None
        text = str(error).lower()
        for word, signs in self.optional_features.items():
            if word not in without and any(sign in text for sign in signs):
                shorter = encode_body(self.build_request(request, without | {word}))
                if shorter != body:
                    return word, shorter
        return None

    async def _ask(self, body: bytes, timeout: float, answer: StreamedResponse) -> ModelTurn:
        from toolspace.core.http_errors import HTTP_FAILURES

        begun = False
        try:
            url = self._url or self._parse_url()
            response = await self._http.post(url, self._headers, body, timeout)
            try:
                if response.status != 200:
                    raise await self._refusal(response)
                begun = True
                await self._read(response, answer)
            finally:
                response.close()  # The connection too, unless all was read and it is in the pool again.
        # `from None`: the errors of aiohttp carry the whole URL.
        except HTTP_FAILURES as fault:
            if answer.finish is None:
                raise errors.error_from_connection(
                    self.name, fault, self._parse_url(), timeout=timeout, begun=begun
                ) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
            raise ModelError("broken", f"{self.name}: its answer is not of the form of its API: {fault}") from None
        if answer.finish is None and not answer.is_complete:
            raise ModelError("broken", f"{self.name}: its answer broke off before its end")
        return answer.build_turn(self.name, self.price, len(body))

    async def _read(self, response: aiohttp.ClientResponse, answer: StreamedResponse) -> None:
        content = response.content
        if response.content_type != "text/event-stream" and await self._is_whole(response, answer):
            return
        decoder = SseDecoder()
        try:
            while chunk := await content.readany():
                _receive(answer, decoder.feed(chunk))
                if answer.is_complete:
                    await _part(content)
                    return
                if answer.finish is not None:
                    break
            if answer.finish is None or await _come_to_an_end(content, decoder, answer):
                _receive(answer, decoder.finish())
        except ValueError as error:
            if isinstance(error, msgspec.MsgspecError | UnicodeError):
                raise
            raise ModelError("invalid", f"{self.name}: its answer cannot be read: {error}") from None

    async def _is_whole(self, response: aiohttp.ClientResponse, answer: StreamedResponse) -> bool:
        """Takes an answer that is one JSON document: some servers do not stream, though asked to."""
        if response.content_type != "application/json":
            if response.content_type in ("text/html", "application/xhtml+xml"):
                raise errors.build_error(
                    self.name, "not_found", f"a web page is at {self._shown_url()}; check base_url"
                )
            return False  # Many send events under other names, or none.
        body = await _read_some(response, MAX_ANSWER)
        if not body.lstrip().startswith(b"{"):
            decoder = SseDecoder()
            _receive(answer, decoder.feed(body))
            _receive(answer, decoder.finish())
            return True
        answer.receive_event(body)
        answer.is_complete = True
        return True

    async def _refusal(self, response: aiohttp.ClientResponse) -> ModelError:
        body = await _read_some(response, _MAX_REFUSAL)
        headers = {name.lower(): value for name, value in response.headers.items()}
        if 300 <= response.status < 400:
            message = f"{self._shown_url()} leads elsewhere; set base_url to where the API is"
            return errors.build_error(self.name, "not_found", message, status=response.status)
        return errors.error_from_response(
            self.name, response.status, headers, body, check=self.endpoint.credential_name
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

    def _shown_url(self) -> str:
        return self.endpoint.url.partition("?")[0]


def encode_body(body: dict[str, Any]) -> bytes:
    """The bytes of a body. What comes from tools and people may hold characters that UTF-8 cannot carry."""
    try:
        return _encoder.encode(body)
    except UnicodeEncodeError:
        return _encoder.encode(_valid(body))


def _valid(value: Any) -> Any:
    if isinstance(value, str):
        return json_text.valid_text(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {json_text.valid_text(key): _valid(one) for key, one in fields.items()}
    if isinstance(value, list | tuple):
        return [_valid(one) for one in cast("list[Any]", value)]
    return value


async def _read_some(response: aiohttp.ClientResponse, limit: int) -> bytes:
    body = bytearray()
    while len(body) <= limit and (chunk := await response.content.readany()):
        body += chunk
    return bytes(body[:limit])


def _receive(answer: StreamedResponse, events: Sequence[SseEvent]) -> None:
    for event in events:
        if event.data is not None:
            answer.receive_event(event.data)


async def _come_to_an_end(content: aiohttp.StreamReader, decoder: SseDecoder, answer: StreamedResponse) -> bool:
    """Takes what comes after the reason of the end; not for long, as some servers then leave the stream open."""
    try:
        async with asyncio.timeout(_LAST_SECONDS):
            while not answer.is_complete and (chunk := await content.readany()):
                _receive(answer, decoder.feed(chunk))
    except TimeoutError:
        return False
    if answer.is_complete:
        await _part(content)
    return not answer.is_complete


async def _part(content: aiohttp.StreamReader) -> None:
    """Reads on to the end of a stream whose answer is complete, if that comes at once."""
    if content.at_eof():
        return
    try:
        async with asyncio.timeout(_PARTING_SECONDS):
            while await content.readany():
                pass
    except Exception:  # Whatever it is, the answer is there.
        return


_encoder = msgspec.json.Encoder()
