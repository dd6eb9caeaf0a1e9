"""Finds, reads and checks the configuration, and says where each value came from. Builds nothing."""
