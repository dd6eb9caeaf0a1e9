"""MCP servers as providers of tools.

`provider` is the entry point: one `McpProvider` per server. It holds a `connection`, which opens a `session` through
`open_connection`, over one of the `transports/`, with `oauth/` where the server needs a login. `server_spec` is plain
data for the rest of Toolspace and imports no MCP library; import the other modules only when a server is configured.
Used by `composition`, `server` and `cli`; imports `core` and `errors`.
"""
