"""Toolspace as an MCP server, in both protocol eras: stateless (2026-07-28) and handshake (before it).

`http_endpoint` serves HTTP, alone or in the gateway, and `stdio` serves standard input and output. `tools` is what both
offer of a toolspace; `sdk_server` binds it to the MCP SDK's server, and `fast_path` answers frequent requests without
the SDK. `toolspace mcp` and the gateway use it. Imports the rest of `server`, `orchestrator` and `core`.
"""
