"""`Settings`: the settings of a toolspace that a program makes without a configuration file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from toolspace.core import defaults
from toolspace.core.extension_points import OutputStore, Policy, TokenCounter
from toolspace.core.hooks import Hook
from toolspace.core.quotas import Quota
from toolspace.core.token_count import estimate_tokens
from toolspace.orchestrator.effective_settings import DEFAULT, CallDefaults, SourcedValue, ToolRules
from toolspace.orchestrator.stages.queue import QueueSpec
from toolspace.storage.output_quota import OutputLimits


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a toolspace without a configuration file. Durations are seconds."""

    tool_timeout: float = defaults.TOOL_TIMEOUT_SECONDS
    tool_response_max_bytes: int = defaults.TOOL_RESPONSE_MAX_BYTES
    """For models: a larger result is stored, and the model gets a handle and a preview."""
    max_inline_bytes: int = defaults.MAX_INLINE_BYTES
    """For programs: `Toolspace.call` outside a run returns a whole result up to this size."""
    max_tool_calls_per_turn: int | None = None
    max_concurrent_tools: int | None = None
    """How many calls of one run may run at once; None: 3 in a run of an agent, any number in a run of a program."""
    context_window: int | None = None
    tool_search_threshold: int | None = defaults.TOOL_SEARCH_THRESHOLD
    circuit_breaker_failures: int | None = defaults.CIRCUIT_BREAKER_FAILURES
    """After how many transport errors or timeouts in a row a provider is not called for a while; None: never."""
    circuit_breaker_delay: float = defaults.CIRCUIT_BREAKER_DELAY_SECONDS
    start_patience: float = defaults.START_PATIENCE_SECONDS
    """How long agents' prompts and lists for MCP clients wait for providers that are starting."""
    tool_output_ttl: float = defaults.TOOL_OUTPUT_TTL_SECONDS
    output_limits: OutputLimits = OutputLimits()
    """How many bytes of results may be stored; of the store that the toolspace creates itself."""
    queues: Mapping[str, QueueSpec] = {}
    aliases: Mapping[str, str] = {}
    overrides: Mapping[str, ToolRules] = {}
    policies: Sequence[Policy] = ()
    quotas: Sequence[Quota] = ()
    """Counted in memory: a restart forgets them."""
    hooks: Sequence[Hook] = ()
    """Run for matching calls, in this order."""
    count_tokens: TokenCounter = estimate_tokens
    state_dir: Path | None = None
    """The directory of stored outputs; None: the user's state directory."""

    def defaults(self) -> CallDefaults:
        values = {name: getattr(self, name) for name in CallDefaults.__struct_fields__}
        return CallDefaults(
            **{
                name: SourcedValue(value, DEFAULT if value is None else f"Settings.{name}")
                for name, value in values.items()
            }
        )

    def create_outputs(self, directory: Path) -> OutputStore:
        """The store of large outputs, in files below this directory."""
        from toolspace.storage.disk_outputs import DiskOutputs  # Imported here: importing Toolspace stays fast.

        return DiskOutputs(
            directory, ttl=self.tool_output_ttl, limits=self.output_limits, count_tokens=self.count_tokens
        )
