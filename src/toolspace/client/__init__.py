"""The Python SDK of a gateway: its API as methods, its streams as iterators, and workers that execute its calls."""
