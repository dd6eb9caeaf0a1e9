"""The values of references to secrets, and their masking in texts and in streams of texts.

`config/secret_references.py` registers them when it reads them. Results of tools and logs are masked with them. Nothing
is masked on the way to a server.
"""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing
from typing import Any

import msgspec

MASK = "[hidden]"
SHORTEST_SECRET = 4
"""Characters. A shorter value is part of too many other texts to be masked."""
_SHORTEST_ANYWHERE = 6
"""Characters. A shorter value is masked only as a whole word: not inside another word or number."""
_LONG_LINE = 16
"""Characters. Lines of a secret, such as a private key, from which on they are masked by themselves."""
_MAX_LINES = 200


class SecretValues:
    """A set of secrets. It only grows: a result may still contain a value that was replaced meanwhile."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        """Longest first: a secret that contains another one has to be masked as a whole."""
        self._words: list[tuple[str, re.Pattern[str]]] = []
        """Short secrets, each with the pattern that finds it as a word."""

    def add(self, value: str) -> None:
        """Masks a value from now on, in every form in which a result may contain it."""
        forms = {form for form in _list_forms(value) if len(form) >= SHORTEST_SECRET}
        texts = {form for form in forms if len(form) >= _SHORTEST_ANYWHERE}
        self.texts = sorted({*self.texts, *texts}, key=len, reverse=True)
        words = {word for word, _ in self._words} | (forms - texts)
        self._words = [(word, re.compile(rf"(?<!\w){re.escape(word)}(?!\w)")) for word in sorted(words)]

    def is_in(self, text: str) -> bool:
        return any(secret in text for secret in self.texts) or any(
            word in text and pattern.search(text) is not None for word, pattern in self._words
        )

    def mask(self, text: str) -> str:
        for secret in self.texts:
            if secret in text:
                text = text.replace(secret, MASK)
        for word, pattern in self._words:
            if word in text:
                text = pattern.sub(MASK, text)
        return text

    def find_open_end(self, text: str) -> int:
        """Returns where a secret may begin that the text does not show to its end; the length of the text if nowhere.

        A short secret at the end is open, too: the next character may show that it is part of a longer word.
        """
        secrets = [*self.texts, *(word for word, _ in self._words)]
        start = min((_find_open_start(text, secret) for secret in secrets), default=len(text))
        while start < len(text):
            # A whole secret that reaches over this place must not be cut there.
            starts = [text.find(secret, max(0, start - len(secret) + 1), start + len(secret) - 1) for secret in secrets]
            first_start = min((position for position in starts if position >= 0), default=start)
            if first_start >= start:
                break
            start = first_start
        return start


class StreamMasking:
    """Masks a stream of values, in which a secret may be spread over several texts."""

    def __init__(self, secrets: SecretValues, mask_data: Callable[[Any], Any]) -> None:
        """`mask_data` masks values that are no text."""
        self._secrets = secrets
        self._mask_data = mask_data
        self._rest = ""
        """The end of the last text, which may be the beginning of a secret."""

    def add(self, value: Any) -> Iterator[Any]:
        """Yields what can be shown now."""
        if not isinstance(value, str):
            yield from self.finish()
            yield self._mask_data(value)
            return
        text = self._rest + value
        end = self._secrets.find_open_end(text)
        self._rest = text[end:]
        if end or not text:
            yield self._secrets.mask(text[:end])

    def finish(self) -> Iterator[str]:
        """Yields the rest of the last text."""
        rest, self._rest = self._rest, ""
        if rest:
            yield self._secrets.mask(rest)

    async def mask_all(self, values: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        async with aclosing(values):
            async for value in values:
                for masked_value in self.add(value):
                    yield masked_value
            for masked_value in self.finish():
                yield masked_value


reference_secrets = SecretValues()
"""The values of `${keyring:…}`, `${file:…}` and `${cmd:…}` that this process has read."""


def _find_open_start(text: str, secret: str) -> int:
    """Returns where the longest beginning of a secret starts with which the text ends."""
    longest = len(secret) - 1 if len(secret) >= _SHORTEST_ANYWHERE else len(secret)
    start = text.find(secret[0], max(0, len(text) - longest))
    while start >= 0:
        if secret.startswith(text[start:]):
            return start
        start = text.find(secret[0], start + 1)
    return len(text)


def _list_forms(value: str) -> Iterable[str]:
    """The value as a text may contain it: as a whole, its long lines, and encoded for JSON, a URL or a header."""
    import json
    from urllib.parse import quote, quote_plus  # Imported here: few configurations have a reference.

    encoded_value = value.encode("utf-8", "replace")
    lines = [line.strip() for line in value.splitlines() if len(line.strip()) >= _LONG_LINE]
    return (
        value,
        value.strip(),
        *lines[:_MAX_LINES],
        msgspec.json.encode(value).decode()[1:-1],
        json.dumps(value)[1:-1],  # Most libraries escape letters that are not ASCII.
        quote(encoded_value),
        quote(encoded_value, safe=""),
        quote_plus(encoded_value),
        base64.b64encode(encoded_value).decode().rstrip("="),
        base64.urlsafe_b64encode(encoded_value).decode().rstrip("="),
    )
