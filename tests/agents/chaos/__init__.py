"""Agents whose processes are killed, stalled and started again, and the books about what they did."""
