"""How what happened reaches those who wait for it: event streams, waiters, and wake-ups between processes."""
