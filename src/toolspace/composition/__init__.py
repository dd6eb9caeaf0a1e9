"""Builds the parts of a toolspace from its configuration. Used by `toolspace.toolspace` and the CLI. Starts nothing.

- `from_config`: `build_parts`, the entry point: tools, rules, queues and the context
- `providers`: MCP servers, REST tools, OpenAPI services and providers of other packages
- `settings`: `Settings`, for programs without a configuration file
- `maintenance`: the tasks that a toolspace runs beside its calls

Imports `agents`, `config`, `core`, `models`, `orchestrator`, `providers`, `builtin` and `storage`.
"""
