"""The gateway: the HTTP API, event streams, authentication and the MCP endpoint over one toolspace and its database.

- The HTTP edge, shared with the MCP endpoint: `uvicorn_server`, `host_and_cors`, `requests` (body reader).
- One request: `routing` (the ASGI application), `requests`, `responses`, `idempotency`, `openapi`, and `routes/`.
- Access: `authentication`, `authorization`, `tool_permissions`, `api_keys`, `access_tokens`, `rate_limit`, `redaction`.
- Streams: `sse_responses`, `sse_encoding`, `dialects/`.
- The process: `gateway` (puts the parts together), `metrics`, `demo_setup`, `control_socket`.
- `mcp/`: the MCP server, over stdio and HTTP.

The CLI and programs that embed a gateway use this package. It may import all packages except `cli` and `testing`.
docs/internals/server.md follows one request through it.
"""
