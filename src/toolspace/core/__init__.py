"""Plain data and pure functions that every other package uses, and the extension points (`interfaces`, `model`).

Tools, schemas, results, events, records and names live here, next to helpers for JSON, YAML, server-sent events, text
search and times. Nothing here opens files, connections or databases. It may import `toolspace.errors` only.
"""
