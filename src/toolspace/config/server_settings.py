"""The sections `storage`, `server`, `notifications` and `embeddings`: the settings of the process and its services.

Used by `agent_settings` and `configuration`. Opens nothing.
"""

from pathlib import Path
from typing import Annotated, Literal

from toolspace.config import value_types as types
from toolspace.config.provider_settings import Headers
from toolspace.config.validation import SECRET, Section, SettingOptions
from toolspace.config.value_types import Count, Duration, Globs, HttpUrl, Name, NullableCount, NullableRate, RateSetting
from toolspace.core import defaults

CacheKind = Literal["memory", "disk"]
SmtpTls = Literal["none", "starttls", "tls"]


class OutputSettings(Section, frozen=True, kw_only=True):
    """How many bytes of stored results there may be. A result beyond a limit is not stored, and its call fails."""

    per_session: Annotated[NullableCount, "How many bytes one session may have stored; null: any number."] = (
        defaults.OUTPUT_BYTES_PER_SESSION
    )
    per_principal: Annotated[
        NullableCount, "How many bytes one principal may have stored, over all its sessions; null: any number."
    ] = defaults.OUTPUT_BYTES_PER_PRINCIPAL
    total: Annotated[NullableCount, "How many bytes may be stored in all; null: any number."] = (
        defaults.OUTPUT_BYTES_IN_TOTAL
    )


class StorageSettings(Section, frozen=True, kw_only=True):
    """Where state is stored."""

    url: Annotated[
        str | None,
        types.database_url,
        "The gateway's database: `postgresql://…` for several replicas, or a SQLite file; without it "
        "`toolspace.db` in `dir`.",
        SECRET,
    ] = None
    """`postgresql://…`, or `sqlite:///` and an absolute path. None: SQLite in the state directory."""
    redis: Annotated[str | None, "A Redis for events, queues and cache of several replicas.", SECRET] = None
    dir: Annotated[
        Path | None,
        "The state directory; without it `.toolspace` beside the configuration file; without a file "
        "`$XDG_STATE_HOME/toolspace`, else `~/.local/state/toolspace`.",
    ] = None
    """As written; `Config.state_dir` has the value in force."""
    cache: Annotated[CacheKind, "Where cached results are stored."] = "memory"
    outputs: Annotated[OutputSettings, "How many bytes of stored results there may be."] = OutputSettings()


class ServerSettings(Section, frozen=True, kw_only=True):
    """The gateway: its address, its credentials and its limits."""

    host: Annotated[str, "The address that the gateway listens on."] = "127.0.0.1"
    port: Annotated[int, types.integer(0, 65535), "Its port; 0: any free port."] = 8787
    public_url: Annotated[HttpUrl | None, "The URL that clients use, if the gateway is behind a proxy."] = None
    secret_key: Annotated[
        str | None,
        types.secret_string(16),
        "A secret key that is accepted besides the created ones; never stored.",
        SECRET,
    ] = None
    public_key: Annotated[
        str | None, types.secret_string(16), "A public key that is accepted besides the created ones."
    ] = None
    jwt_secret: Annotated[
        str | None,
        types.secret_string(32),
        "The secret that signs entity tokens; without it one is created at the first start.",
        SECRET,
    ] = None
    jwks_url: Annotated[HttpUrl | None, "The URL of the public keys (JWKS) of another token issuer."] = None
    jwt_claim: Annotated[str, "The claim of a token that names the entity."] = "sub"
    jwt_audience: Annotated[str | None, "Accept only tokens for this audience."] = None
    jwt_issuer: Annotated[str | None, "Accept only tokens of this issuer."] = None
    allowed_hosts: Annotated[
        tuple[str, ...], "Host names that requests may use, besides the loopback names and `publicUrl`."
    ] = ()
    allowed_origins: Annotated[tuple[str, ...], "Origins (CORS) that browsers may call it from, besides its own."] = ()
    max_body_bytes: Annotated[Count, "A larger request is refused with 413."] = 4 * 1024 * 1024
    max_streams: Annotated[Count, "How many event streams may be open; one more gets 503."] = 10_000
    max_streams_per_caller: Annotated[
        Count, "How many event streams one key or entity may have open; one more gets 429."
    ] = 2_000
    rate_limit: Annotated[
        NullableRate, "The rate limit of requests of one entity with a public key; null: any number."
    ] = RateSetting(count=100, seconds=1.0)
    secret_rate_limit: Annotated[
        NullableRate, "The rate limit of requests with one secret or tool key; null: any number."
    ] = None
    failed_login_limit: Annotated[
        NullableRate, "The rate limit of requests with wrong credentials from one address; null: any number."
    ] = RateSetting(count=60, seconds=60.0)
    max_concurrent_requests: Annotated[
        Count, "How many requests may run at once, besides streams; one more gets 503."
    ] = 4_000
    max_pending_calls_per_caller: Annotated[
        NullableCount,
        "How many calls of one tool key or entity may wait for a worker, a person or a timer; null: any number.",
    ] = 1_000
    max_connections_per_address: Annotated[
        NullableCount,
        "How many connections one address may have open, at most half of what the system allows the process; "
        "one more gets 503; null: any number.",
    ] = 4_000
    heartbeat: Annotated[Duration, "How often an idle event stream sends a comment to keep the connection open."] = 15.0
    stop_timeout: Annotated[Duration, "How long running calls may take to finish when the gateway stops."] = 10.0
    event_retention: Annotated[Duration, "How long stream events are stored for subscribers that reconnect."] = (
        defaults.EVENT_RETENTION_SECONDS
    )
    retention: Annotated[
        Duration, "How long finished calls, runs and tasks and acknowledged inbox events are stored; messages stay."
    ] = defaults.RETENTION_SECONDS
    read_timeout: Annotated[
        Duration, "How long the database may take for a read of a request; a longer one is ended with 503."
    ] = defaults.READ_TIMEOUT_SECONDS
    worker_grace: Annotated[
        Duration, "How long a disconnected worker may take to return before its calls are offered to others."
    ] = defaults.WORKER_GRACE_SECONDS
    max_active_agents: Annotated[Count, "How many agents may run a cycle at once."] = defaults.MAX_ACTIVE_AGENTS


class WebhookSettings(Section, frozen=True, kw_only=True):
    """The URL that notifications are posted to."""

    shorthand = "url"

    url: Annotated[HttpUrl, "Each notification is posted to this URL, as JSON.", SECRET]
    headers: Headers = {}


class SmtpSettings(Section, frozen=True, kw_only=True):
    """The mail server that sends notifications."""

    host: Annotated[Name, "The mail server."]
    port: Annotated[int | None, types.integer(1, 65535), "Its port; without it 25, 587 or 465, depending on `tls`."] = (
        None
    )
    sender: Annotated[str, types.mail_address, "The sender of the mails.", SettingOptions(key="from")]
    to: Annotated[tuple[str, ...], types.mail_addresses, "The recipients of the mails."]
    allowed_recipients: Annotated[
        Globs, "Further recipients that an agent may choose: addresses, or globs (`*@example.com`)."
    ] = ()
    username: Annotated[str | None, "The account to log in with.", SECRET] = None
    password: Annotated[str | None, "The password of the account.", SECRET] = None
    tls: Annotated[
        SmtpTls, "How the connection is encrypted: not at all, after a plain greeting, or from the start."
    ] = "starttls"


class NotificationSettings(Section, frozen=True, kw_only=True):
    """How `send_notification` reaches people. With neither it fails."""

    webhook: Annotated[WebhookSettings | None, "Post notifications to a URL."] = None
    smtp: Annotated[SmtpSettings | None, "Send notifications by mail."] = None


class EmbeddingSettings(Section, frozen=True, kw_only=True):
    """The embedding model of `search_knowledge`."""

    shorthand = "model"

    model: Annotated[
        Name,
        "The embedding model: `openai:text-embedding-3-small`, `ollama:nomic-embed-text`; without a provider "
        "OpenAI's, or the server at `baseUrl`.",
    ]
    base_url: Annotated[HttpUrl | None, "The URL of the API up to `/embeddings`; without it the provider's own."] = None
    api_key: Annotated[str | None, "The API key; without it the provider's environment variable.", SECRET] = None
    headers: Headers = {}
