"""Turns configuration into parts: providers, policies, queues, contexts. Used by `toolspace.toolspace`."""
