"""The configuration: finds, parses, validates and describes it. Imports `core` and `errors` only; builds nothing.

Used by `composition`, `toolspace`, the agents, the server and the CLI.

- `load`: `load_config`, the entry point; it also finds the agents in all files
- `configuration`: `Config`, its result; the keys of a file; the list of all sections
- `tool_settings`, `provider_settings`, `server_settings`, `agent_settings`: one declaration for each setting
- `validation`, `value_types`: how settings are declared, read and checked
- `file_formats`: parses YAML, JSON and TOML, with the line of every value
- `environment_variables`: `TOOLSPACE_*` and `${VAR}`
- `find_and_watch`: finds the file and the state directory, notices changes
- `documentation`, `json_schema`: describe the declared settings
"""
