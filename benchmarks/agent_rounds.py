"""Measure: one tool round of an agent's run: the model's turn, its call, the result. Scripted models, in memory.

A long run minus a short one, so that what a run costs at its beginning and its end is not in it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.harness import Contestant, Ratio, Report, Timings, race, repeat
from benchmarks.workloads import ARGUMENTS, add, create_toolspace

SHORT, LONG = 2, 22
"""Rounds of the two runs that are compared."""
OURS = "Toolspace.run_agent"
PYDANTIC_AI = "pydantic-ai Agent.run"
OPENAI_AGENTS = "openai-agents Runner.run"

Runner = Callable[[int], Awaitable[Any]]
"""Runs an agent whose model calls a tool in so many rounds, one call in each, and then answers."""


async def measure() -> Report:
    report = Report(f"One tool round of an agent's run, in memory: ({LONG} rounds minus {SHORT}) / {LONG - SHORT}")
    runners: dict[str, Runner] = {}
    for name, make in {OURS: toolspace_runner, PYDANTIC_AI: pydantic_ai, OPENAI_AGENTS: openai_agents}.items():
        try:
            run = await make()
            await run(SHORT)
        except Exception as error:
            report.notes.append(f"{name} is remaining out: {type(error).__name__}: {error}")
        else:
            runners[name] = run
    timings = await race_rounds(runners, rounds=30)
    for peer in (PYDANTIC_AI, OPENAI_AGENTS):
        if peer in runners:
            report.ratio(f"against {peer}", round_ratio(timings, OURS, peer), must=0.5, aim=0.1)
    for name in runners:
        report.figure(f"{name}, a round", per_round(timings, name) * 1e6, "µs")
    for name in runners:
        report.figure(f"{name}, a run of {SHORT} rounds", timings.best(_key(name, SHORT)) * 1e6, "µs")
    return report


async def race_rounds(runners: dict[str, Runner], *, rounds: int) -> Timings:
    """Times both lengths of each runner's runs, side by side."""
    contestants = [
        Contestant(_key(name, length), repeat(run, length)) for name, run in runners.items() for length in (SHORT, LONG)
    ]
    return await race(contestants, rounds=rounds, slice_ms=40)


def per_round(timings: Timings, name: str) -> float:
    """Seconds for one round."""
    return (timings.best(_key(name, LONG)) - timings.best(_key(name, SHORT))) / (LONG - SHORT)


def round_ratio(timings: Timings, name: str, other_name: str) -> Ratio:
    """How the rounds of two compare; the spread is that of whole runs, which says how noisy the machine was."""
    run_ratio = timings.ratio(_key(name, LONG), _key(other_name, LONG))
    value = per_round(timings, name) / per_round(timings, other_name)
    return Ratio(value, value * run_ratio.low / run_ratio.value, value * run_ratio.high / run_ratio.value)


def _key(name: str, length: int) -> str:
    return f"{name}, {length} rounds"


async def toolspace_runner() -> Runner:
    from toolspace import Agent, LoopSettings
    from toolspace.models.scripted import ScriptedModel, call

    agent = Agent("adder", system="Add.", settings=LoopSettings(max_steps=LONG + 5))
    ts = create_toolspace([add])
    ts.agents.add([agent])
    # Other arguments in each round: a run refuses calls that a model keeps repeating.
    scripts = {rounds: [call("add", {"a": n, "b": 2}) for n in range(rounds)] + ["done"] for rounds in (SHORT, LONG)}

    async def run(rounds: int) -> None:
        agent.model = ScriptedModel(scripts[rounds], record=False)
        result = await ts.run_agent("adder", "Add.")
        assert result.steps == rounds + 1, result

    return run


async def pydantic_ai() -> Runner:
    from pydantic_ai import Agent
    from pydantic_ai.messages import ModelMessage, ModelResponse, TextPart, ToolCallPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel
    from pydantic_ai.usage import RequestUsage, UsageLimits

    remaining = 0

    async def respond(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        nonlocal remaining
        remaining -= 1
        part = ToolCallPart("add", ARGUMENTS) if remaining >= 0 else TextPart("done")
        # With its usage: else each request would be estimated by reading all messages, which no real model makes it do.
        return ModelResponse(parts=[part], usage=RequestUsage(input_tokens=1, output_tokens=1))

    agent = Agent(FunctionModel(respond), tools=[add], instructions="Add.")
    limits = UsageLimits(request_limit=None)

    async def run(rounds: int) -> None:
        nonlocal remaining
        remaining = rounds
        result = await agent.run("Add.", usage_limits=limits)
        assert result.output == "done", result

    return run


async def openai_agents() -> Runner:
    from agents import Agent, Model, ModelResponse, RunConfig, Runner, Usage, function_tool, set_tracing_disabled
    from openai.types.responses import ResponseFunctionToolCall, ResponseOutputMessage, ResponseOutputText

    set_tracing_disabled(True)

    class Scripted(Model):
        remaining = 0

        async def get_response(self, *arguments: Any, **options: Any) -> ModelResponse:
            self.remaining -= 1
            if self.remaining >= 0:
                item: Any = ResponseFunctionToolCall(
                    arguments=ARGUMENTS, call_id=f"call_{self.remaining}", name="add", type="function_call"
                )
            else:
                text = ResponseOutputText(annotations=[], text="done", type="output_text")
                item = ResponseOutputMessage(
                    id="msg_1", content=[text], role="assistant", status="completed", type="message"
                )
            return ModelResponse(output=[item], usage=Usage(requests=1), response_id=None)

        def stream_response(self, *arguments: Any, **options: Any) -> Any:
            raise NotImplementedError

    model = Scripted()
    agent = Agent(name="adder", instructions="Add.", model=model, tools=[function_tool(add)])
    config = RunConfig(tracing_disabled=True)

    async def run(rounds: int) -> None:
        model.remaining = rounds
        result = await Runner.run(agent, "Add.", max_turns=rounds + 5, run_config=config)
        assert result.final_output == "done", result

    return run
