"""The demo model: rules that call the real tools, for the first minutes without a key. Needs no network.

`model` has the model, `rules` the rules that answer people. Used by `registry` and the server. Imports `core` only.
"""
