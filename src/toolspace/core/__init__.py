"""Plain data and pure functions that every other package uses, and the interfaces that others implement.

The interfaces are in `extension_points` and `language_model`.

Tools, schemas, results, events, records and names live here, next to helpers for JSON, YAML, server-sent events, text
search and times. Nothing here opens files, connections or databases. It may import `toolspace.errors` only.
"""
