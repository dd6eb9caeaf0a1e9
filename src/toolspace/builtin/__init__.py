"""The tools that come with Toolspace: system, files, network, data, memory, tasks.

`catalog` lists all of them and the collections that agents get. `system`, `files`, `grep`, `network`, `data`,
`memory` and `task_tools` define the tools. The other modules do the work: `allowed_paths`, `forbidden_paths` and
`file_io` for files, `http_client` (with the allowed hosts) and `web_search` for the network. Every tool treats its
arguments as untrusted. `toolspace.composition` and `toolspace.agents` use this package. It imports only
`toolspace.core` and `toolspace.errors`.
"""
