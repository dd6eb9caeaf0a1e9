"""SQLite: one file, one process, many programs in one commit.

`database` has `SqliteDatabase` with its threads, `group_commit` runs programs on a connection, `fast_writes` commits
results of remembered calls in one statement, `files` has the write-ahead log and the lock. Used by `server/gateway.py`.
"""
