"""Language models: adapters of providers, a scripted model for tests, and the demo model.

- `registry`: `open_model`, the entry point; finds the provider, its URL and its key
- `openai_chat`, `openai_responses`, `anthropic`, `google`: adapters over HTTP; `pydantic_ai`: all other providers
- `streaming`, `request_encoding`, `errors`, `http`, `retry`, `prices`: what the adapters share
- `images`, `embeddings`: image and embedding models
- `scripted`, `demo`: models that need no provider

Used by the agents, `composition` and the CLI. Imports `core` and `errors` only; knows nothing of agents.
"""
