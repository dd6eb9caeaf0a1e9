"""PostgreSQL: a database that several gateway processes share.

`database` runs programs on a pool of connections, `wakeups` carries hints between the processes (LISTEN and NOTIFY).
Used by `server/gateway.py`.
"""
