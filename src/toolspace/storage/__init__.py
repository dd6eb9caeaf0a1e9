"""Where results are kept: caches, and outputs too large for a model. Imported module by module."""
