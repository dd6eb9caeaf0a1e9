"""The gateway: HTTP, streams, access and the MCP endpoint over one toolspace and its database."""
