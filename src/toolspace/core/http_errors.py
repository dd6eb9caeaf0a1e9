"""What to say of an HTTP request that got no answer. Never repeats the URL's query: a key may be in it."""

from __future__ import annotations

import os
import re

import aiohttp
from yarl import URL

from toolspace.core.secret_masking import mask_secrets

CONNECT_SECONDS = 10.0
HTTP_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What aiohttp raises where there is no answer, or only a part of one."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def describe_http_failure(error: Exception, url: URL) -> str:
    """The failure of a request whose connection had `CONNECT_SECONDS`."""
    place = f"{url.raw_host}:{url.port}"
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"{place} has a certificate that is not trusted: {error.certificate_error}"
        case aiohttp.ClientSSLError():
            return f"cannot open a TLS connection to {place}: {error.strerror or error.os_error}"
        case aiohttp.ClientConnectorDNSError():
            return f"cannot find the address of {place}: {error.strerror or error.os_error}"
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {place}: {os_error_reason(error)}"
        case aiohttp.ServerTimeoutError() | TimeoutError():
            return f"cannot connect to {place} within {CONNECT_SECONDS:g} s"
        case aiohttp.ServerDisconnectedError():
            return f"{place} closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return f"{place} closed the connection in the middle of its answer, or encoded it wrongly"
        case aiohttp.ClientResponseError():
            return f"{place} did not answer in HTTP: {str(mask_secrets(error.message))[:200]}"
        case OSError():
            return f"the connection to {place} failed: {error.strerror or type(error).__name__}"
        case _:
            return f"the request to {place} failed: {type(error).__name__}"


def os_error_reason(error: BaseException) -> str:
    """Why, as the system calls it. Python says only `Connect call failed`, with the address, whatever it was."""
    inner: object = getattr(error, "os_error", None) or error
    if not isinstance(inner, OSError):
        return str(inner) or type(inner).__name__
    text = inner.strerror or str(inner)
    numbers = {inner.errno} if inner.errno else {int(one) for one in _ERRNO.findall(text)}
    if "Connect call failed" in text and len(numbers) == 1:  # Of several addresses, where all failed alike.
        return os.strerror(numbers.pop())
    return text or type(inner).__name__
