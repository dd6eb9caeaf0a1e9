"""Transports to MCP servers: stdio, streamable HTTP, SSE, WebSocket, and plain HTTP requests for stateless servers.

`factory.open_transport` opens the one that a `ServerSpec` names, and `stateless_http` serves servers of the stateless
era. Used by `toolspace.providers.mcp.connect` only. Imports `core`, `errors` and `spec`; knows nothing of tools, calls
or reconnecting.
"""
