"""Sources of tools: local functions, MCP servers, REST and OpenAPI services, configured and internal tools, plugins.

`functions` holds local functions and built-in tools, and loads functions from the user's code; `plugins` builds
providers from packages or the user's code; `configured_tools` and `expressions` execute tools that are declared in the
configuration; `internal_tools` are the tools of the `agent` namespace; `mcp`, `rest` and `openapi` are packages of
their own. `toolspace.composition` and `toolspace.toolspace` create providers; the orchestrator calls them through
`ToolProvider`. This package imports only `toolspace.core` and `toolspace.errors`.
"""
