"""SQL programs, one module for each kind of record: calls, runs, sessions, inbox, messages, events, …

A function here returns a `Program` that reads or writes rows of few tables. It checks no permission and notifies
nobody: the transactions in `spaces/` and `agents/` combine programs and do both. May import `storage.database` and
`core/`.
"""
