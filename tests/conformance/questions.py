"""The tools of the conformance suite that ask the caller. Each asks what its scenario expects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolspace import ElicitationResult, Tool, ToolContext, ToolError, tool


def fields(**properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


NAME = fields(name={"type": "string"})
OK = fields(ok={"type": "boolean"})
DEFAULTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "default": "John Doe"},
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
        "verified": {"type": "boolean", "default": True},
    },
}
TITLED = [{"const": f"value{number}", "title": f"Option {number}"} for number in (1, 2, 3)]
ENUMS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
        "titledSingle": {"type": "string", "oneOf": TITLED},
        "legacyEnum": {
            "type": "string",
            "enum": ["opt1", "opt2", "opt3"],
            "enumNames": ["Option One", "Option Two", "Option Three"],
        },
        "untitledMulti": {"type": "array", "items": {"type": "string", "enum": ["option1", "option2", "option3"]}},
        "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
    },
}


def prompt_of(text: str, tokens: int = 100) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": {"type": "text", "text": text}}], "maxTokens": tokens}


def describe(answer: ElicitationResult) -> str:
    return f"action={answer.action}, content={json.dumps(dict(answer.content or {}))}"


@tool
async def test_elicitation(message: str, context: ToolContext) -> str:
    """Asks the user for a name and an address."""
    schema = fields(
        username={"type": "string", "description": "User's response"},
        email={"type": "string", "description": "User's email address"},
    )
    return f"User response: {describe(await context.elicit(message, schema))}"


@tool
async def test_elicitation_sep1034_defaults(context: ToolContext) -> str:
    """Asks with a default for every kind of field."""
    return f"Elicitation completed: {describe(await context.elicit('Please review', DEFAULTS))}"


@tool
async def test_elicitation_sep1330_enums(context: ToolContext) -> str:
    """Asks with every kind of choice."""
    return f"Elicitation completed: {describe(await context.elicit('Please choose', ENUMS))}"


@tool
async def test_sampling(prompt: str, context: ToolContext) -> str:
    """Asks the model of the client."""
    return f"LLM response: {(await context.sample(prompt_of(prompt)))['content']['text']}"


@tool
async def test_input_required_result_elicitation(context: ToolContext) -> str:
    """Asks for a name."""
    answer = await context.elicit("What is your name?", NAME, key="user_name")
    return f"Hello, {(answer.content or {}).get('name', 'stranger')}!"


@tool
async def test_input_required_result_sampling(context: ToolContext) -> str:
    """Asks the model of the client."""
    return str((await context.sample(prompt_of("What is the capital of France?"), key="capital_question"))["content"])


@tool
async def test_input_required_result_list_roots(context: ToolContext) -> str:
    """Asks for roots."""
    return f"Roots: {', '.join(await context.roots(key='client_roots'))}"


@tool
async def test_input_required_result_request_state(context: ToolContext) -> str:
    """Asks for a confirmation."""
    return f"state-ok: {describe(await context.elicit('Please confirm', OK, key='confirm'))}"


@tool
async def test_input_required_result_tampered_state(context: ToolContext) -> str:
    """Asks for a confirmation."""
    return describe(await context.elicit("Please confirm", OK, key="confirm"))


@tool
async def test_input_required_result_multiple_inputs(context: ToolContext) -> str:
    """Asks for a name, a greeting and roots concurrently."""
    answer, text, folders = await asyncio.gather(
        context.elicit("What is your name?", NAME, key="user_name"),
        context.sample(prompt_of("Generate a greeting", 50), key="greeting"),
        context.roots(key="client_roots"),
    )
    return f"{describe(answer)} {text['content']} {folders}"


@tool
async def test_input_required_result_multi_round(context: ToolContext) -> str:
    """Asks for a name, then for a colour."""
    name = await context.elicit("Step 1: What is your name?", NAME, key="step1")
    colour = fields(color={"type": "string"})
    answer = await context.elicit("Step 2: What is your favorite color?", colour, key="step2")
    return f"{describe(name)} {describe(answer)}"


@tool
async def test_input_required_result_capabilities(context: ToolContext) -> str:
    """Asks the user if possible, else the model."""
    try:
        return describe(await context.elicit("What is your name?", NAME, key="user_name"))
    except ToolError:
        return str((await context.sample(prompt_of("Generate a name"), key="name"))["content"])


@tool
async def test_missing_capability(context: ToolContext) -> str:
    """Uses sampling."""
    return str(await context.sample(prompt_of("Are you there?")))


@tool
async def test_streaming_elicitation(context: ToolContext) -> str:
    """Reports progress, then asks."""
    context.report_progress(1, 2, "about to ask")
    return describe(await context.elicit("Go on?", OK))


ASKING: Sequence[Tool] = (
    test_elicitation,
    test_elicitation_sep1034_defaults,
    test_elicitation_sep1330_enums,
    test_sampling,
    test_input_required_result_elicitation,
    test_input_required_result_sampling,
    test_input_required_result_list_roots,
    test_input_required_result_request_state,
    test_input_required_result_tampered_state,
    test_input_required_result_multiple_inputs,
    test_input_required_result_multi_round,
    test_input_required_result_capabilities,
    test_missing_capability,
    test_streaming_elicitation,
)
