"""A small expression language over JSON, for configured tools of type `compute`.

`compiler` turns text into an `Expression`; `runtime` has what it computes with. A step budget limits
time and size. `toolspace.providers.configured_tools` uses this package. It imports only `toolspace.core`.
"""
