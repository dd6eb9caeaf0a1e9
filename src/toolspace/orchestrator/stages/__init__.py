"""The stages of a call, one module each; `orchestrator.pipeline` puts them in order."""
