"""Adapters to other libraries: Pydantic AI, LangChain, OpenTelemetry. Each module needs its extra, and only its own."""
