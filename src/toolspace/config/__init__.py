"""The configuration: finds, parses, validates and describes it. Imports `core` and `errors` only; builds nothing.

Used by `composition`, `toolspace`, the agents, the server and the CLI.

- `load`: `load_config`, the entry point; `configuration`: `Config`, its result
- `tool_settings`, `provider_settings`, `server_settings`, `agent_settings`, `shared_settings`:
  the sections, with one declaration for each setting; `top_level`: the sections together
- `reader`, `value_types`: read declared settings; `agent_files`: finds the agents in all files
- `document`, `variables`, `environment`, `files`: files, `${VAR}` and `TOOLSPACE_*` variables
- `documentation`, `json_schema`: render the declared settings
"""
