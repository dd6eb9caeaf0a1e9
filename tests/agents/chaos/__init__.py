"""Processes with agents that are killed, stopped and stalled, and checks of what the agents did."""
