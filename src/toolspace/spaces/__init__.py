"""Spaces: the services behind the gateway, without HTTP: entities, spaces, messages, inboxes, runs, calls, workers,
plans.

- `ledger`: runs transactions and notifies waiters, subscribers and other processes after the commit.
- `call_transactions`, `pending_calls`, `call_host`, `call_recorder`: tool calls, from the start to the delivered
result.
- `runs`, `messaging`, `plans`, `deletion`, `workers`, `subscriber_presence`, `sweeper`: the other services.
- `elicitation`, `document_library`, `agent_services`: what tools of agents use.

Used by `agents/` and `server/`. May import `storage/`, `orchestrator/`, `providers/`, `builtin/` and `core/`.
"""
