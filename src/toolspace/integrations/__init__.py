"""Adapters to other libraries: Pydantic AI, LangChain and OpenTelemetry.

Each module needs the extra of its library and is imported by the user's program. They use the library interface only,
so they may import everything below `server`, the types of `toolspace.py` and `orchestrator/` for checking alone.
"""

LOOP_TOOLS = frozenset(("agent__final_report", "agent__task_status"))
"""Tools whose results are for the owner of the model loop. Another library's loop would ignore them."""
