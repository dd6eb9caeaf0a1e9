"""Google's generateContent API, streamed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.models.model_server import ModelTestServer, error_reply, events, google_chunks, stream_reply
from tests.models.requests import ADD, HELLO, respond_and_record
from toolspace import ImagePart, Tool
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    TextDelta,
    ThinkingDelta,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.registry import open_model


def open_google(server: ModelTestServer, name: str = "gemini-2.5-flash") -> Model:
    return open_model("google", name, base_url=server.url, api_key="AIza-secret-1234567890", environ={}, retries=0)


@pytest.fixture
async def model(server: ModelTestServer) -> AsyncIterator[Model]:
    google_model = open_google(server)
    yield google_model
    await google_model.aclose()


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("split", [0, 1])
async def test_text_thinking_and_calls_without_ids_are_streamed(
    server: ModelTestServer, model: Model, split: int
) -> None:
    body = google_chunks(
        {"text": "Hm.", "thought": True},
        {"text": "Größe "},
        {"text": "🎉"},
        {"functionCall": {"name": "add", "args": {"a": 1}}},
        {"functionCall": {"name": "now"}},
    )
    server.reply(stream_reply(body, split=split))
    turn, parts = await respond_and_record(model)
    assert turn.text == "Größe 🎉"
    assert turn.calls == (ModelCall("call_0", "add", '{"a":1}'), ModelCall("call_1", "now", "{}"))
    assert turn.finish == "tools"
    assert parts == [
        ThinkingDelta("Hm."),
        TextDelta("Größe "),
        TextDelta("🎉"),
        CallStarted(0, "call_0", "add"),
        CallDelta(0, '{"a":1}'),
        CallStarted(1, "call_1", "now"),
        CallDelta(1, "{}"),
    ]
    usage = turn.usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1000, 400, 50)
    assert usage.cost == pytest.approx((600 * 0.3 + 400 * 0.03 + 50 * 2.5) / 1e6)


async def test_a_request_has_the_form_of_the_api(server: ModelTestServer, model: Model) -> None:
    server.reply(stream_reply(google_chunks({"text": "ok"})))
    settings = ModelSettings(temperature=0.5, max_output_tokens=100, reasoning="low")
    await model.respond(
        ModelRequest(system="Be brief.", turns=[UserTurn("Hello")], tools=(ADD,), tool_choice="add", settings=settings)
    )
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1beta/models/gemini-2.5-flash:streamGenerateContent?alt=sse")
    assert request.headers["x-goog-api-key"] == "AIza-secret-1234567890"
    assert request.json == {
        "contents": [{"role": "user", "parts": [{"text": "Hello"}]}],
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "tools": [
            {
                "functionDeclarations": [
                    {"name": "add", "description": "Adds.", "parametersJsonSchema": ADD.input_schema}
                ]
            }
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}},
        "generationConfig": {
            "temperature": 0.5,
            "maxOutputTokens": 100,
            "thinkingConfig": {"thinkingBudget": 1024, "includeThoughts": True},
        },
    }


async def test_thought_signatures_are_sent_back_in_their_place(server: ModelTestServer) -> None:
    model = open_google(server, "gemini-3.8-flash")
    first = google_chunks(
        {"text": "I look."},
        {"functionCall": {"name": "add", "args": {}, "id": "fc1"}, "thoughtSignature": "c2VhbA=="},
        {"functionCall": {"name": "add", "args": {}, "id": "fc2"}},
    )
    server.reply(
        stream_reply(first), stream_reply(google_chunks({"text": "done"}, {"text": "", "thoughtSignature": "ZW5k"}))
    )
    turns: list[Any] = [UserTurn("x"), await model.respond(HELLO)]
    turns.append(ResultsTurn((ModelToolResult("fc1", "add", "1"), ModelToolResult("fc2", "add", "no", is_error=True))))
    turns += [await model.respond(ModelRequest(system="", turns=turns)), UserTurn("and?")]
    await model.respond(ModelRequest(system="", turns=turns))
    # What another model called bears no seal; Google wants at least to be told so.
    other_turn = ModelTurn(calls=(ModelCall("a", "add", "{"), ModelCall("b", "add", "{}")), model="openai:gpt-6-sol")
    await model.respond(ModelRequest(system="", turns=[UserTurn("x"), other_turn]))
    await model.aclose()
    assert server.requests[2].json["contents"][1:4] == [
        {
            "role": "model",
            "parts": [
                {"text": "I look."},
                {"functionCall": {"name": "add", "args": {}, "id": "fc1"}, "thoughtSignature": "c2VhbA=="},
                {"functionCall": {"name": "add", "args": {}, "id": "fc2"}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"name": "add", "response": {"result": "1"}, "id": "fc1"}},
                {"functionResponse": {"name": "add", "response": {"error": "no"}, "id": "fc2"}},
            ],
        },
        {"role": "model", "parts": [{"text": "done"}, {"text": "", "thoughtSignature": "ZW5k"}]},
    ]
    assert server.requests[3].json["contents"][1]["parts"] == [
        {
            "functionCall": {"name": "add", "args": {"_malformed": "{"}},
            "thoughtSignature": "skip_thought_signature_validator",
        },
        {"functionCall": {"name": "add", "args": {}}},
    ]


@pytest.mark.parametrize("name", ["gemini-2.5-flash", "gemini-3.8-flash"])
async def test_images_in_results_are_sent(server: ModelTestServer, name: str) -> None:
    server.reply(stream_reply(google_chunks({"text": "ok"})))
    model = open_google(server, name)
    answer = ModelToolResult("a", "draw", "[image]", media=(ImagePart(data="AAAA"),))
    turns = [UserTurn("x"), ModelTurn(calls=(ModelCall("a", "draw", "{}"),)), ResultsTurn((answer,))]
    await model.respond(ModelRequest(system="", turns=turns))
    await model.aclose()
    contents = server.requests[0].json["contents"]
    part = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    function_response = contents[2]["parts"][0]["functionResponse"]
    if name.startswith("gemini-3"):
        assert function_response["parts"] == [part]
    else:
        assert contents[3]["parts"] == [{"text": "From the result of draw:"}, part]


async def test_tool_names_that_google_refuses_are_translated(server: ModelTestServer, model: Model) -> None:
    server.reply(stream_reply(google_chunks({"functionCall": {"name": "_2fa__code", "args": {}}})))
    turn, parts = await respond_and_record(
        model, ModelRequest(system="", turns=[UserTurn("x")], tools=(Tool("2fa__code", "Code."),))
    )
    assert server.requests[0].json["tools"][0]["functionDeclarations"][0]["name"] == "_2fa__code"
    assert turn.calls[0].name == "2fa__code"
    assert parts[0] == CallStarted(0, "call_0", "2fa__code")


@pytest.mark.parametrize(
    ("reason", "finish"), [("MAX_TOKENS", "length"), ("SAFETY", "filter"), ("RECITATION", "filter"), ("NEW", "other")]
)
async def test_the_finish_reason_is_translated(server: ModelTestServer, model: Model, reason: str, finish: str) -> None:
    server.reply(stream_reply(google_chunks({"text": "hi"}, finish=reason)))
    turn, _ = await respond_and_record(model)
    assert (turn.text, turn.finish) == ("hi", finish)


async def test_a_blocked_prompt_gives_an_empty_turn(server: ModelTestServer, model: Model) -> None:
    server.reply(
        stream_reply(events({"promptFeedback": {"blockReason": "SAFETY"}, "usageMetadata": {"promptTokenCount": 4}}))
    )
    turn, _ = await respond_and_record(model)
    assert (turn.text, turn.finish) == ("", "filter")


@pytest.mark.parametrize("reason", ["MALFORMED_FUNCTION_CALL", None])
async def test_invalid_calls_and_incomplete_responses_are_transient_errors(
    server: ModelTestServer, model: Model, reason: str | None
) -> None:
    server.reply(stream_reply(google_chunks({"text": "hi"}, finish=reason)))
    with pytest.raises(ModelError) as error_info:
        await model.respond(HELLO)
    assert error_info.value.kind == "broken"


def failed(code: int, name: str, message: str, *details: object) -> object:
    return {"error": {"code": code, "message": message, "status": name, "details": list(details)}}


@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (400, failed(400, "INVALID_ARGUMENT", "API key not valid. Please pass a valid API key."), "not_permitted"),
        (403, failed(403, "PERMISSION_DENIED", "no"), "not_permitted"),
        (404, failed(404, "NOT_FOUND", "models/x is not found"), "not_found"),
        (
            400,
            failed(400, "INVALID_ARGUMENT", "The input token count (9) exceeds the maximum number of tokens allowed"),
            "too_long",
        ),
        (
            429,
            failed(
                429,
                "RESOURCE_EXHAUSTED",
                "You exceeded your current quota",
                {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34s"},
            ),
            "rate_limited",
        ),
        (503, [failed(503, "UNAVAILABLE", "The model is overloaded.")], "overloaded"),
        (500, failed(500, "INTERNAL", "oops"), "unavailable"),
    ],
)
async def test_an_error_response_has_a_kind(
    server: ModelTestServer, model: Model, code: int, body: object, kind: str
) -> None:
    server.reply(error_reply(code, body))
    with pytest.raises(ModelError) as error_info:
        await model.respond(HELLO)
    assert (error_info.value.kind, error_info.value.status) == (kind, code)
    assert error_info.value.retry_after == (34.0 if code == 429 else None)


@pytest.mark.filterwarnings("ignore:Inheritance class:DeprecationWarning")
async def test_the_official_sdk_understands_the_test_server(server: ModelTestServer) -> None:
    genai = pytest.importorskip("google.genai")
    server.reply(
        stream_reply(google_chunks({"text": "Hi "}, {"functionCall": {"name": "add", "args": {"a": 1}}}), split=9)
    )
    client = genai.Client(api_key="k", http_options=genai.types.HttpOptions(base_url=server.url))
    chunks = [
        chunk
        async for chunk in await client.aio.models.generate_content_stream(model="gemini-2.5-flash", contents="hi")
    ]
    await client.aio.aclose()
    client.close()
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert parts[0].text == "Hi "
    assert parts[1].function_call.args == {"a": 1}
    assert server.requests[0].path.endswith("/models/gemini-2.5-flash:streamGenerateContent?alt=sse")
