"""Runs tools: the catalog of tools, the pipeline of stages, runs, queues, the event bus and the call log.

`orchestrator` is the entry point, `layered_orchestrator` adds tools on top of another orchestrator, `pipeline` has
the order of the stages, and `stages` has the stages themselves. `Toolspace` and agents use it. It may import `core`
and `errors` only.
"""
