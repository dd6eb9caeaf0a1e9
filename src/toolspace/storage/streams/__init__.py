"""Event streams inside a process: subscriptions to stored events, and waiters for what happens to one record.

`hub` gives stored events to subscribers, `subscriptions` has a stream with its ring of recent events and the cursors
into it, `waiters` wakes whoever waits for a call, an inbox or a worker's offer. Used by `spaces.ledger` and the SSE
routes of `server/`.
"""
