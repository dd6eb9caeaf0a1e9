"""Agents: what describes one, what runs it, and the tools that are its own.

- `agent.py`, `agent_run.py`, `run_budget.py`: the configured agent, the prepared agent, one run and its budget
- `registry.py`, `model_usage.py`: all agents by name, their open models and tools
- `loop.py`, `failure_review.py`: the loop of model and tools
- `agent_request.py`, `subagents.py`: an agent that answers a program or another agent, in memory
- `host.py`, `scheduler.py`, `cycle_runner.py`, `cycle.py`, `cycle_transactions.py`: resident agents of a gateway, which
  survive restarts; `history.py`, `compaction.py`, `prompt_builder.py`, `live_output.py`, `handoff.py` are parts of it
- `tasks.py`, `task_tools.py`, `reflection.py`: background tasks
- `subagent_runs.py`: stores the runs of called agents on a gateway
- `prebuilt/`: the tools of every resident agent

The toolspace and the server use it. It may import `spaces` and the packages below; what programs use without a gateway
(`agent_request.py` and what it needs) imports neither `spaces` nor `storage`.
"""
