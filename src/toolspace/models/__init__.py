"""Models: adapters of the providers of language models, and models that need none. Knows nothing of agents."""
