"""MCP servers as providers of tools. Its modules import the MCP library: import them when a server is there."""
