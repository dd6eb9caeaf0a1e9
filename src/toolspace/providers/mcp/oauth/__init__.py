"""OAuth at MCP servers over HTTP: logs in, stores and renews tokens, and adds them to requests.

`authorization` is the entry point for connections and for `toolspace servers login`; `login_flow` drives the MCP SDK's
OAuth client; `token_store` keeps the tokens. The other modules import no MCP library, so that renewing a token stays
quick. Used by `open_connection`, `transports.stateless_http`, `composition` and `cli`; imports `core`, `errors` and
`server_spec`.
"""
