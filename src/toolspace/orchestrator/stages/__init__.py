"""The stages of a call. `orchestrator.pipeline` puts them in order; a call passes the outermost one first.

Each module holds one stage, or a few small ones of the same kind, with what they work on. Stages import the call, the
run and `core`; the pipeline only for its types.
"""
