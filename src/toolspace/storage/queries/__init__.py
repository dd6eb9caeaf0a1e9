"""The tables and what is asked of them: one module of programs for each aggregate, and the databases that run them."""
