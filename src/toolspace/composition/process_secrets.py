"""Resolves the references to secrets in the settings of the gateway: database, keys and embeddings.

Used by the gateway and `toolspace doctor`. The other parts resolve theirs when they are built.
"""

from __future__ import annotations

import msgspec

from toolspace.config.configuration import Config
from toolspace.config.secret_references import has_reference, resolve_secrets
from toolspace.config.server_settings import EmbeddingSettings, ServerSettings, StorageSettings
from toolspace.errors import ConfigError

_MINIMUM_LENGTHS = {"secret_key": ("secretKey", 16), "public_key": ("publicKey", 16), "jwt_secret": ("jwtSecret", 32)}


def resolve_process_secrets(config: Config) -> Config:
    """The configuration with the secrets of `storage`, `server` and `embeddings`. Raises `ConfigError`.

    Reads files and runs programs: call it in a thread, or after `load_secrets`.
    """
    return msgspec.structs.replace(
        config,
        storage=_resolve_storage(config),
        server=_resolve_server(config),
        embeddings=_resolve_embeddings(config),
    )


def _resolve_storage(config: Config) -> StorageSettings:
    url = config.storage.url
    if url is None or not has_reference(url):
        return config.storage
    place = config.source("storage", "url")
    scheme, _, rest = _resolve(url, place).strip().partition("://")
    if scheme not in ("postgresql", "postgres") or not rest:
        raise ConfigError(f"{place}: the secret must be a URL that begins with postgresql://")
    return msgspec.structs.replace(config.storage, url=f"postgresql://{rest}")


def _resolve_server(config: Config) -> ServerSettings:
    changes: dict[str, str] = {}
    for attribute, (key, minimum) in _MINIMUM_LENGTHS.items():
        text: str | None = getattr(config.server, attribute)
        if text is not None and has_reference(text):
            place = config.source("server", key)
            value = changes[attribute] = _resolve(text, place)
            if len(value) < minimum or not value.isascii() or not value.isprintable() or " " in value:
                raise ConfigError(f"{place}: the secret must have at least {minimum} plain characters without spaces")
    return msgspec.structs.replace(config.server, **changes)


def _resolve_embeddings(config: Config) -> EmbeddingSettings | None:
    try:
        return resolve_secrets(config.embeddings)
    except ConfigError as error:
        raise ConfigError(f"{config.source('embeddings')}: {error}") from None


def _resolve(text: str, place: str) -> str:
    try:
        return resolve_secrets(text)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
