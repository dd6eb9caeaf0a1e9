"""The databases that run queries: SQLite and PostgreSQL, their schema, and the writes deferred to a commit."""
