"""Toolspace as an MCP server, in both protocol eras: stateless (2026-07-28) and handshake (before it).

`endpoint` serves HTTP and `stdio` serves standard input and output. `service` is what both offer of a toolspace;
`sdk_server` binds it to the MCP SDK's server, and `fast_path` answers frequent requests without the SDK. The gateway
mounts `gateway_mount`; `toolspace mcp` runs the other two. Imports the rest of `server`, `orchestrator` and `core`.
"""
