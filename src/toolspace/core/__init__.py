"""Frozen data and pure functions: tools, schemas, names, results, contexts, events."""
