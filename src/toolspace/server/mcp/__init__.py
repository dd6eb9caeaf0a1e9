"""Toolspace as an MCP server, of both protocol eras. The gateway mounts it; `toolspace mcp` runs it."""
