"""Runs tools: the catalog of tools, the pipeline of stages, calls, runs with their traces, and the event bus.

`orchestrator` is the entry point, `layered_orchestrator` adds tools on top of another orchestrator, `pipeline` has the
order of the stages, and `stages` has the stages with what they work on: queues, worker threads, the call log, stored
results. `Toolspace` and agents use it. It may import `core` and `errors` only.
"""
