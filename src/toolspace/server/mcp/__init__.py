"""Toolspace as an MCP server, in both protocol eras: stateless (2026-07-28) and handshake (before it).

`http_endpoint` serves HTTP, alone or in the gateway, and `stdio` serves standard input and output. `tool_service` is
what both offer of a toolspace. `request_handlers` answers requests through the MCP SDK's server, and `fast_path`
answers frequent ones without the SDK. `toolspace mcp` and the gateway use it. Imports the rest of `server`,
`orchestrator` and `core`.
"""
