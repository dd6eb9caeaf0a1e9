"""Transports to MCP servers: stdio, streamable HTTP and SSE, WebSocket, and plain HTTP requests for stateless servers.

`providers.mcp.open_connection` opens the one that a `ServerSpec` names. `base` has what all share, with the errors
that the rest of `providers.mcp` uses. Imports `core`, `errors`, `server_spec` and `oauth`; knows nothing of tools,
calls or reconnecting.
"""
