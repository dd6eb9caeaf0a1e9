"""Gateways that are killed while results race time-outs, and what must be true afterwards."""
