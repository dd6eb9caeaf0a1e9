"""Storage: everything that Toolspace writes to a database or to local files.

- `database`: the interface of a database, which runs SQL programs as transactions.
- `migrations`: the tables, as migrations. `queries/`: one module of SQL programs for each kind of record.
- `sqlite/`, `postgres/`: the two databases. `streams/`: event streams, subscriptions and wake-ups inside a process.
- `memory_cache`, `sqlite_cache`: tool results for a limited time. `memory_outputs`, `disk_outputs`: large tool
  results, by handle, in memory and on disk. `private_files`: files that only their owner may read.

`spaces/`, `agents/` and `server/` use the database, through `spaces.ledger`; `toolspace.py` uses caches and outputs.
May import `core/` and `errors` only.
"""
