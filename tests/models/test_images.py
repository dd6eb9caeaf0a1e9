"""Image models, and the tools that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.models.model_server import ModelTestServer, error_reply
from toolspace import ConfigError, ImagePart, Toolspace
from toolspace.errors import ModelError
from toolspace.models.images import DEFAULT_IMAGE_MODELS, open_image_model

DRAWN = {"created": 1, "data": [{"b64_json": "AAAA"}], "output_format": "webp", "usage": {"input_tokens": 3}}


def part(**fields: Any) -> dict[str, Any]:
    return {
        "candidates": [{"content": {"parts": [{"text": "Here:"}, fields], "role": "model"}, "finishReason": "STOP"}]
    }


async def test_openai_generates_an_image(server: ModelTestServer) -> None:
    server.reply(error_reply(200, DRAWN))
    model = open_image_model("openai", None, base_url=f"{server.url}/v1", api_key="sk-secret-1", environ={})
    assert await model.generate("a cat", size="16:9", quality="low") == ImagePart(data="AAAA", mime_type="image/webp")
    request = server.requests[0]
    assert (request.path, request.headers["authorization"]) == ("/v1/images/generations", "Bearer sk-secret-1")
    assert request.json == {
        "model": DEFAULT_IMAGE_MODELS["openai"],
        "prompt": "a cat",
        "n": 1,
        "size": "1536x1024",
        "quality": "low",
    }


async def test_gemini_generates_an_image(server: ModelTestServer) -> None:
    server.reply(error_reply(200, part(inlineData={"mimeType": "image/jpeg", "data": "AAAA"})))
    model = open_image_model("google", None, base_url=server.url, api_key="k", environ={})
    assert await model.generate("a cat", size="1792x1024") == ImagePart(data="AAAA", mime_type="image/jpeg")
    request = server.requests[0]
    assert request.path == f"/v1beta/models/{DEFAULT_IMAGE_MODELS['google']}:generateContent"
    assert request.json == {
        "contents": [{"role": "user", "parts": [{"text": "a cat"}]}],
        "generationConfig": {"responseModalities": ["IMAGE"], "imageConfig": {"aspectRatio": "16:9"}},
    }


async def test_imagen_generates_an_image(server: ModelTestServer) -> None:
    server.reply(error_reply(200, {"predictions": [{"bytesBase64Encoded": "AAAA", "mimeType": "image/png"}]}))
    model = open_image_model(None, "imagen-4.0-generate-001", base_url=server.url, api_key="k", environ={})
    assert await model.generate("a cat") == ImagePart(data="AAAA", mime_type="image/png")
    assert server.requests[0].path == "/v1beta/models/imagen-4.0-generate-001:predict"
    assert server.requests[0].json == {"instances": [{"prompt": "a cat"}], "parameters": {"sampleCount": 1}}


@pytest.mark.parametrize(
    ("reply", "kind", "message"),
    [
        (error_reply(200, {"data": []}), "invalid", "returned no image"),
        (error_reply(200, b"<html>"), "broken", "not have the form"),
        (error_reply(400, {"error": {"message": "Your request was rejected"}}), "invalid", "rejected"),
        (error_reply(401, {"error": {"message": "bad key"}}), "not_permitted", r"check execution\.apiKey"),
    ],
)
async def test_a_failure_has_a_kind_and_a_message(server: ModelTestServer, reply: Any, kind: str, message: str) -> None:
    server.reply(reply)
    model = open_image_model("openai", "gpt-image-2", base_url=server.url, api_key="k", environ={})
    with pytest.raises(ModelError, match=message) as error_info:
        await model.generate("a cat")
    assert error_info.value.kind == kind


async def test_a_busy_provider_is_retried(server: ModelTestServer) -> None:
    server.reply(error_reply(503, b"", retry_after="0"), error_reply(200, DRAWN))
    model = open_image_model("openai", "gpt-image-2", base_url=server.url, api_key="k", environ={})
    assert (await model.generate("a cat")).data == "AAAA"


def open_configured(folder: Path, execution: dict[str, Any], **more: Any) -> Toolspace:
    import json

    definition = {"name": "draw", "executionType": "image", "execution": execution, **more}
    path = folder / "toolspace.json"
    path.write_text(json.dumps({"tools": {"definitions": [definition], "builtins": False}}))
    return Toolspace.open(path)


@pytest.mark.spec("6.1")
async def test_a_configured_tool_generates_an_image(server: ModelTestServer, tmp_path: Path) -> None:
    server.reply(error_reply(200, DRAWN))
    execution = {
        "provider": "openai",
        "model": "gpt-image-2",
        "size": "1024x1024",
        "apiKey": "k",
        "baseUrl": server.url,
    }
    async with open_configured(tmp_path, execution) as ts:
        [tool] = [candidate for candidate in ts.list_tools() if candidate.name == "draw"]
        assert tool.input_schema["required"] == ["prompt"]
        result = await ts.call("draw", {"prompt": "a cat"})
        refused_result = await ts.call("draw", {})
    assert result.content == (ImagePart(data="AAAA", mime_type="image/webp"),)
    assert refused_result.error_kind == "invalid_parameters"


async def test_a_missing_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY", "GOOGLE_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    async with open_configured(tmp_path, {}) as ts:
        result = await ts.call("draw", {"prompt": "a cat"})
    assert not result.ok
    assert not result.executed
    assert "OPENAI_API_KEY" in (result.error or "")


async def test_a_misspelt_setting_is_reported_when_the_configuration_loads(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='did you mean "size"'):
        async with open_configured(tmp_path, {"siz": "1024x1024"}):
            pass
