"""Adapters to other libraries: Pydantic AI, LangChain and OpenTelemetry.

Each module needs the extra of its library and is imported by the user's program. The package imports only `core`: it
describes toolspaces, runs and calls by the protocols of `protocols`, so that it works with any object that fits.
"""
