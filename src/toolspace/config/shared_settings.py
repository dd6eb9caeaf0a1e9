"""Settings that several sections have: the queue, the cache, the timeout and so on, as types of their fields.

Used by the modules that declare sections. No `from __future__ import annotations` here or there: `declared_settings`
reads the annotations of the fields.
"""

from typing import Annotated

from toolspace.config import value_types as types
from toolspace.config.reader import SectionType, Setting
from toolspace.core.tool import Annotations

QueueName = Annotated[str | None, Setting(types.string, "The queue that its calls go through.")]
Cache = Annotated[
    float | None,
    Setting(types.cache_duration, "How long a result is reused for equal calls; 0 or false: never."),
]
CachePerUser = Annotated[bool, Setting(types.boolean, "Cache the results of each user separately.")]
Timeout = Annotated[
    float | None,
    Setting(types.duration, "How long one call may take; without it `defaults.toolTimeout`."),
]
RequestTimeout = Annotated[
    float | None,
    Setting(
        types.duration,
        "How long one call of its tools may take; without it `defaults.toolTimeout`.",
        key="requestTimeoutMs",
        aliases=("requestTimeout",),
    ),
]
Enabled = Annotated[bool, Setting(types.boolean, "Whether it is used at all.")]
Required = Annotated[bool, Setting(types.boolean, "Refuse to start if it does not start.")]
Tags = Annotated[tuple[str, ...], Setting(types.strings, "Words that a search finds it by.")]
HEADERS = Setting(types.string_map, "HTTP headers to send.", secret=True)
ToolsAllowed = Annotated[
    tuple[str, ...] | None,
    Setting(types.globs, "Offer only these of its tools.", aliases=("allowedTools", "includeTools")),
]
ToolsDenied = Annotated[
    tuple[str, ...],
    Setting(types.globs, "Do not offer these of its tools, even if allowed.", aliases=("deniedTools", "excludeTools")),
]

ANNOTATIONS = SectionType(
    Annotations,
    settings=(
        Setting(types.boolean, "It changes nothing.", aliases=("readOnlyHint",)).bind("read_only", None),
        Setting(types.boolean, "It may destroy data.", aliases=("destructiveHint",)).bind("destructive", None),
        Setting(types.boolean, "A repeated call has no further effect.", aliases=("idempotentHint",)).bind(
            "idempotent", None
        ),
        Setting(types.boolean, "It reaches outside this system.", aliases=("openWorldHint",)).bind("open_world", None),
    ),
    is_ignored=lambda key: key == "title",
)
ToolAnnotations = Annotated[
    Annotations,
    Setting(
        ANNOTATIONS,
        "What kind of effect it has: `readOnly`, `destructive`, `idempotent`, `openWorld`, each true or false.",
    ),
]
