"""Defaults that the configuration and the library share. Both take them from here, so that they cannot differ."""

from __future__ import annotations

from typing import Final

TOOL_TIMEOUT_SECONDS: Final = 30.0
TOOL_RESPONSE_MAX_BYTES: Final = 100_000
MAX_INLINE_BYTES: Final = 64 * 1024 * 1024
"""The size up to which a program gets a whole result."""
TOOL_SEARCH_THRESHOLD: Final = 20_000
"""Tokens of tool definitions above which a model gets a search tool instead of all definitions."""
OUTPUT_BYTES_PER_SESSION: Final = 2 * 1024**3
OUTPUT_BYTES_PER_PRINCIPAL: Final = 4 * 1024**3
OUTPUT_BYTES_IN_TOTAL: Final = 20 * 1024**3
AGENT_CONCURRENT_TOOLS: Final = 3
"""How many calls of an agent's run may run at once, unless the configuration says otherwise."""
TOOL_OUTPUT_TTL_SECONDS: Final = 86_400.0
"""How long stored results are kept."""
CIRCUIT_BREAKER_FAILURES: Final = 5
"""After how many failed calls in a row a provider is not called for a while."""
CIRCUIT_BREAKER_DELAY_SECONDS: Final = 30.0
START_PATIENCE_SECONDS: Final = 2.0
"""How long a list of tools waits for a provider that is starting."""
MODEL_TIMEOUT_SECONDS: Final = 600.0
MODEL_RETRIES: Final = 4
EVENT_RETENTION_SECONDS: Final = 604_800.0
RETENTION_SECONDS: Final = 2_592_000.0
WORKER_GRACE_SECONDS: Final = 3.0
READ_TIMEOUT_SECONDS: Final = 5.0
MAX_ACTIVE_AGENTS: Final = 32
"""How many agents may run a cycle at once."""
MAX_PARALLEL_SESSIONS: Final = 16
"""How many sessions of one agent may run a cycle at once."""
