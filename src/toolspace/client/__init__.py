"""The Python SDK of a gateway: its HTTP API as methods, its event streams as iterators, and workers.

`ToolspaceClient` (`client`) and `ToolWorker` (`worker`) are the entry points; both are exported from `toolspace`.
Programs of users and the command line use the package. It imports only `core`, and talks to the gateway over HTTP.
"""
