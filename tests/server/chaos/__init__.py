"""Gateways that are killed while results race timeouts."""
