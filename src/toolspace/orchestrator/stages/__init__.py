"""The stages of a call. `orchestrator.pipeline` puts them in order; a call passes the outermost one first.

Each module holds one stage, or a few small ones of the same kind. Stages import the call, its services and `core`, but
not each other.
"""
