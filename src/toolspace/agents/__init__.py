"""Agents: what describes one, what runs it, and the tools that are its own.

- `agent.py`: the configured agent; `agent_run.py`: the prepared agent, the state of one run and its budget
- `registry.py`: all agents by name, with their open models and tools
- `loop.py`, `failure_review.py`: the loop of model and tools
- `subagents.py`, `subagent_run_recorder.py`: an agent that answers a program or another agent
- `handoff.py`: hand-offs between agents
- `agent_host.py`, `scheduler.py`: the resident agents of a gateway, and which of them runs next
- `cycle_runner.py`, `durable_loop.py`, `session_transactions.py`: one cycle from its start to its stored end; its
  loop, which survives restarts; its transactions. `paused_runs.py`, `history.py`, `compaction.py`, `prompt_builder.py`
  and `live_output.py` are parts of it
- `background_tasks.py`: background tasks and the reflection on them
- `prebuilt/`: the tools of every resident agent

The toolspace and the server use it. It may import `spaces` and the packages below; what programs use without a gateway
(`subagents.py`, `handoff.py` and what they need) does not import `spaces`.
"""
