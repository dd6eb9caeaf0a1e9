"""Storage: everything that Toolspace writes to a database or to local files.

- `database`: the interface of a database, which runs SQL programs as transactions.
- `schema`: the tables, as migrations. `queries/`: one module of SQL programs for each kind of record.
- `sqlite/`, `postgres/`: the two databases. `streams/`: event streams, subscriptions and wake-ups inside a process.
- `caches/`: tool results for a limited time. `outputs/`: large tool results, by handle.

`spaces/`, `agents/` and `server/` use the database, through `spaces.ledger`; `toolspace.py` uses caches and outputs.
May import `core/` and `errors` only.
"""
