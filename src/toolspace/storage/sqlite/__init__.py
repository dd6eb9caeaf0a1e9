"""SQLite: one file, one process, many programs in one commit.

`database` has `SqliteDatabase` with its threads, `transactions` runs programs on a connection, `batch_writer` commits
results of remembered calls in one statement, `files` has the write-ahead log and the lock. Used by `server/gateway.py`.
"""
