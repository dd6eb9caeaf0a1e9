"""SQLite: one file, one process, many programs in one commit.

`database` has `SqliteDatabase` with its threads, `group_commit` runs programs on a connection, `database_file` opens
the file and has its lock and its write-ahead log. Used by `server/gateway.py`.
"""
