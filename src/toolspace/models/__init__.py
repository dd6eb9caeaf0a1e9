"""Language models: adapters of providers, a scripted model for tests, and the demo model.

- `registry`: `open_model`, the entry point; finds the provider, its URL and its key
- `openai`, `anthropic`, `google`: adapters over HTTP; `pydantic_ai_adapter`: all other providers
- `streaming`, `request_encoding`, `http` (with retries), `errors`, `prices`: what the adapters share
- `images`, `embeddings`: image and embedding models
- `scripted`, `demo_model`, `demo_rules`: models that need no provider

Used by the agents, `composition` and the CLI. Imports `core` and `errors` only; knows nothing of agents.
"""
