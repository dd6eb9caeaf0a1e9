"""Builds the parts of a toolspace from its configuration. Used by `toolspace.toolspace` and the CLI. Starts nothing.

- `parts`: `build_parts`, the entry point: tools, rules, queues and the context
- `providers`: MCP servers, REST tools, OpenAPI services and providers of other packages
- `settings`: the settings of a toolspace without a configuration; `housekeeping`: its background tasks

Imports `agents`, `config`, `core`, `models`, `orchestrator`, `providers`, `builtin` and `storage`.
"""
