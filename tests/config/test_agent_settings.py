"""The settings of one agent: model, loop, limits, notifications, embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from toolspace.config.agent_settings import AgentLimits, AgentLoopSettings, AgentModelSettings, ConsciousnessSettings
from toolspace.config.configuration import AgentSpec
from toolspace.config.server_settings import (
    EmbeddingSettings,
    NotificationSettings,
    SmtpSettings,
    WebhookSettings,
)
from toolspace.errors import ConfigError

# What an agent says


@pytest.mark.spec("11.1")
def test_an_agent_without_settings_has_the_defaults(agent: Any, tmp_path: Path) -> None:
    assert agent("") == AgentSpec(name="a", path=tmp_path / "toolspace.yaml")
    spec = agent("system: You help.")
    assert spec.system == "You help."
    assert spec.model == AgentModelSettings(timeout=600, retries=4)
    assert spec.loop == AgentLoopSettings(
        max_steps=20, tool_choice="auto", max_tool_calls_per_turn=None, review="rules"
    )
    assert spec.consciousness == ConsciousnessSettings(max_tokens=100_000, min_recent_cycles=3)
    assert spec.limits == AgentLimits(
        max_agent_turns=6,
        cycles_per_minute=60,
        max_tokens=None,
        max_cost=None,
        timeout=None,
        max_depth=8,
        inbox_batch=50,
    )
    assert not spec.has_own_tools


@pytest.mark.spec("11.1")
def test_every_setting_of_an_agent_is_read(load: Any, tmp_path: Path) -> None:
    config = load(
        """
agents:
  helper: {system: x}
  a:
    version: 1.10
    agent: {name: other, description: Does much., system: Do much.}
    model:
      provider: OpenAI
      name: gpt-5
      temperature: 0.5
      maxOutputTokens: 900
      reasoning: {effort: high}
      baseUrl: https://models.example.com/v1
      apiKey: ${KEY}
      headers: {X-Team: 7}
      timeout: 30s
      retries: 0
    loop: {maxSteps: 3, toolChoice: Required, maxToolCallsPerTurn: 2, review: model}
    consciousness: {maxTokens: 500, minRecentCycles: 1}
    limits:
      maxAgentTurns: 0
      cyclesPerMinute: 5
      maxTokens: 1000
      maxCost: 0.25
      timeout: 1m
      maxDepth: 2
      inboxBatch: 10
    router: {destinations: helper}
    agents: [helper]
    spaces: [Lobby, "The back room"]
    knowledge: [./docs, /abs/file.md]
    notifications:
      webhook: {url: "https://hooks.example.com", headers: {A: b}}
    runtime: {response: {type: ui-message-stream}}
""",
        KEY="hunter2",
    )
    spec = config.agents["a"]
    assert (spec.name, spec.description, spec.system, spec.version) == ("a", "Does much.", "Do much.", "1.10")
    assert spec.model == AgentModelSettings(
        provider="openai",
        name="gpt-5",
        temperature=0.5,
        max_output_tokens=900,
        reasoning="high",
        base_url="https://models.example.com/v1",
        api_key="hunter2",
        headers={"X-Team": "7"},
        timeout=30,
        retries=0,
    )
    assert spec.loop == AgentLoopSettings(
        max_steps=3, tool_choice="required", max_tool_calls_per_turn=2, review="model"
    )
    assert spec.consciousness == ConsciousnessSettings(max_tokens=500, min_recent_cycles=1)
    assert spec.limits == AgentLimits(
        max_agent_turns=0,
        cycles_per_minute=5,
        max_tokens=1000,
        max_cost=0.25,
        timeout=60,
        max_depth=2,
        inbox_batch=10,
    )
    assert spec.router.destinations == ("helper",)
    assert spec.agents == ("helper",)
    assert spec.spaces == ("Lobby", "The back room")
    assert spec.knowledge == (tmp_path / "docs", Path("/abs/file.md"))
    assert spec.notifications.webhook == WebhookSettings(url="https://hooks.example.com", headers={"A": "b"})
    assert spec.runtime == {"response": {"type": "ui-message-stream"}}
    assert spec.response_format == "ui-message-stream"
    assert spec.config is None
    assert "hunter2" not in repr(config)
    assert "hunter2" in config.secret_values
    assert config.warnings == ()


@pytest.mark.spec("11.1")
@pytest.mark.parametrize(
    ("model_text", "expected"),
    [
        ("openai:gpt-5", ("openai", "gpt-5", None)),
        ("Ollama:llama3:8b", ("ollama", "llama3:8b", None)),
        ("demo", ("demo", None, None)),
        ("{provider: demo}", ("demo", None, None)),
        ("{baseUrl: 'http://localhost:11434/v1', name: llama3}", ("openai-compatible", "llama3", None)),
        ("{provider: google, name: gemini-2.5-pro, reasoning: low}", ("google", "gemini-2.5-pro", "low")),
        ("{provider: google, name: gemini-2.5-pro, reasoning: false}", ("google", "gemini-2.5-pro", "none")),
        ("{temperature: 1}", (None, None, None)),
        ("", (None, None, None)),
    ],
)
def test_a_model_is_written_in_one_word_or_in_full(
    agent: Any, model_text: str, expected: tuple[str | None, ...]
) -> None:
    model = agent(f"model: {model_text}").model
    assert (model.provider, model.name, model.reasoning) == expected


def test_the_tool_choice_may_have_the_form_of_the_ai_sdk(agent: Any) -> None:
    assert agent("loop: {toolChoice: search}").loop.tool_choice == "search"
    assert agent("loop: {toolChoice: {type: tool, toolName: search}}").loop.tool_choice == "search"


@pytest.mark.spec("5.2")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: x", 'modle: unknown key; did you mean "model"?'),
        ("storage: {}", "storage: unknown key"),
        ("model: gpt-5", 'model: expected a mapping, or text such as "openai:gpt-5", got "gpt-5"'),
        ("model: 5", "model: expected a mapping, or text"),
        ("model: {provider: openai}", 'model: "name" is missing; give both "provider" and "name", or neither'),
        ("model: {name: gpt-5}", 'model: "provider" is missing; give both'),
        ("model: {provider: o, name: n, temperature: 3}", "model.temperature: expected a number of at least 0 and"),
        ("model: {provider: o, name: n, temperature: .nan}", "model.temperature: expected a number of at least 0"),
        ("model: {provider: o, name: n, temperature: warm}", "model.temperature: expected a number of at least 0"),
        ("model: {provider: o, name: n, reasoning: 5}", "model.reasoning: expected a word such as low"),
        ("model: {provider: o, name: n, reasoning: {budget: 5}}", "model.reasoning.budget: unknown key"),
        ("model: {provider: o, name: n, baseUrl: 'ftp://x'}", "model.baseUrl: expected a URL that begins with http"),
        ("model: {provider: o, name: n, retries: -1}", "model.retries: expected an integer of at least 0, got -1"),
        ("loop: {maxSteps: 0}", "loop.maxSteps: expected an integer of at least 1, got 0"),
        ("loop: {toolChoice: 5}", "loop.toolChoice: expected auto, required, none, or the name of a tool, got 5"),
        ("loop: {review: never}", "loop.review: expected one of rules, model"),
        ("limits: {maxCost: -1}", "limits.maxCost: expected a number of at least 0, or null, got -1"),
        (f"limits: {{maxCost: {10**400}}}", "limits.maxCost: expected a number of at least 0, or null"),
        ("limits: {maxToken: 5}", 'limits.maxToken: unknown key; did you mean "maxTokens"'),
        ("consciousness: {maxTokens: 0}", "consciousness.maxTokens: expected an integer of at least 1, got 0"),
        ("agent: {nam: x}", 'agent.nam: unknown key; did you mean "name"'),
        ("system: x, agent: {system: y}", 'system: means the same as "agent.system", which is given too; remove one'),
        ('system: "a\\0b"', "system: expected text without NUL characters"),
        ("agents: 5", "agents: expected a mapping of agents by name, or a list of files, names and agents, got 5"),
        ("agents: [5]", "agents[0]: expected the path of an agent's file, or a mapping that describes it, got 5"),
        ('spaces: [""]', 'spaces[0]: expected a name, got ""'),
        ("notifications: {webhook: nowhere}", "notifications.webhook.url: expected a URL"),
        ("notifications: {smtp: {host: h}}", 'notifications.smtp: "from" is missing; expected a mail address'),
        (
            'notifications: {smtp: {host: h, from: "a@b\\nBcc: c@d", to: e@f}}',
            "notifications.smtp.from: expected a mail address",
        ),
        ("tools: [{name: t}]", 'tools[0]: "executionType" is missing'),
        ("mcpServers: {s: {command: x, queue: gone}}", 'mcpServers.s.queue: there is no queue "gone"'),
        ("tools: {aliases: {b: b}}", "tools.aliases.b: the alias leads back to itself: b → b"),
    ],
)
def test_problems_of_an_agent_are_reported_with_their_place(find_problems: Any, text: str, message: str) -> None:
    problems = find_problems("agents:\n  a: {" + text + "}\n")
    assert any(fault.startswith(f"toolspace.yaml:2: agents.a.{message}") for fault in problems), problems


# Notifications


@pytest.mark.spec("11.1")
def test_an_agents_own_notifications_take_precedence(load: Any) -> None:
    config = load(
        "notifications:\n  webhook: https://all.example.com\n"
        "  smtp: {host: mail, from: Bot <bot@example.com>, to: ann@example.com, username: u, password: hunter2,\n"
        "    tls: tls}\n"
        "agents: {a: {notifications: {webhook: 'https://own.example.com'}}, b: {}}\n"
    )
    smtp = SmtpSettings(
        host="mail",
        sender="Bot <bot@example.com>",
        to=("ann@example.com",),
        username="u",
        password="hunter2",
        tls="tls",
    )
    assert config.notifications == NotificationSettings(
        webhook=WebhookSettings(url="https://all.example.com"), smtp=smtp
    )
    assert config.agents["b"].notifications == config.notifications
    assert config.agents["a"].notifications == NotificationSettings(
        webhook=WebhookSettings(url="https://own.example.com"), smtp=smtp
    )
    assert "hunter2" not in repr(config)


@pytest.mark.spec("17.3")
def test_variables_configure_notifications(load: Any) -> None:
    config = load(
        "",
        TOOLSPACE_NOTIFICATIONS_WEBHOOK_URL="https://hooks.example.com",
        TOOLSPACE_NOTIFICATIONS_SMTP_HOST="mail",
        TOOLSPACE_NOTIFICATIONS_SMTP_FROM="a@b",
        TOOLSPACE_NOTIFICATIONS_SMTP_TO="c@d, e@f",
        TOOLSPACE_DEMO="no",
        TOOLSPACE_SERVER_MAX_ACTIVE_AGENTS="2",
    )
    assert config.notifications.webhook == WebhookSettings(url="https://hooks.example.com")
    assert config.notifications.smtp == SmtpSettings(host="mail", sender="a@b", to=("c@d", "e@f"))
    assert (config.demo, config.server.max_active_agents) == (False, 2)
    assert load("").server.max_active_agents == 32


@pytest.mark.spec("17.3")
def test_the_model_of_embeddings_is_named_in_short_in_full_or_by_variables(load: Any) -> None:
    assert load("").embeddings is None
    assert load("embeddings: openai:small\n").embeddings == EmbeddingSettings(model="openai:small")
    full = load("embeddings: {model: m, baseUrl: 'http://localhost:1/v1', apiKey: hunter2, headers: {A: b}}\n")
    assert full.embeddings == EmbeddingSettings(
        model="m", base_url="http://localhost:1/v1", api_key="hunter2", headers={"A": "b"}
    )
    assert "hunter2" in full.secret_values
    assert "hunter2" not in repr(full.embeddings)
    assert load("", TOOLSPACE_EMBEDDINGS_MODEL="small").embeddings == EmbeddingSettings(model="small")
    with pytest.raises(ConfigError, match='"model" is missing'):
        load("embeddings: {apiKey: k}\n")
