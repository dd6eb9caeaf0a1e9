"""Agents: the loop of model and tools, and the cycles, tasks and helpers built on it."""
