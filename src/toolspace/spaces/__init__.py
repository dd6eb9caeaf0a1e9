"""Spaces: the services behind the gateway, without HTTP: messages, runs, calls, workers, plans, documents.

- `ledger`: runs transactions and notifies waiters, subscribers and other processes after the commit.
- `call_transactions`, `pending_calls`, `call_context`, `call_recorder`: tool calls, from the start to the delivered
  result; `elicitation`: questions to the people in a call's space.
- `runs`, `messaging`, `plans`, `workers`, `document_library`: the other services.
- `sweeper`: does what is due, and cleans up after dead processes.

Used by `agents/` and `server/`. May import `storage/`, `orchestrator/`, `providers/`, `builtin/` and `core/`.
"""
