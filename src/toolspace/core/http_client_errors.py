"""Messages for HTTP requests that got no complete response. They never repeat the URL's query, which may hold a key."""

from __future__ import annotations

import os
import re

import aiohttp
from yarl import URL

from toolspace.core.secret_masking import mask_secrets

CONNECT_SECONDS = 10.0
HTTP_FAILURES = (aiohttp.ClientError, TimeoutError, OSError)
"""What aiohttp raises if there is no response, or only a part of one."""
_ERRNO = re.compile(r"\[Errno (\d+)\]")


def describe_http_failure(error: Exception, url: URL) -> str:
    """Returns a message for the failure of a request whose connect timeout was `CONNECT_SECONDS`."""
    host = f"{url.raw_host}:{url.port}"
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return f"{host} has a certificate that is not trusted: {error.certificate_error}"
        case aiohttp.ClientSSLError():
            return f"cannot open a TLS connection to {host}: {error.strerror or error.os_error}"
        case aiohttp.ClientConnectorDNSError():
            return f"cannot find the address of {host}: {error.strerror or error.os_error}"
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {host}: {os_error_reason(error)}"
        case aiohttp.ServerTimeoutError() | TimeoutError():
            return f"cannot connect to {host} within {CONNECT_SECONDS:g} s"
        case aiohttp.ServerDisconnectedError():
            return f"{host} closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return f"{host} closed the connection in the middle of its answer, or encoded it wrongly"
        case aiohttp.ClientResponseError():
            return f"{host} did not answer in HTTP: {str(mask_secrets(error.message))[:200]}"
        case OSError():
            return f"the connection to {host} failed: {error.strerror or type(error).__name__}"
        case _:
            return f"the request to {host} failed: {type(error).__name__}"


def os_error_reason(error: BaseException) -> str:
    """Returns the operating system's reason. Python's own message is `Connect call failed` for every reason."""
    cause: object = getattr(error, "os_error", None) or error
    if not isinstance(cause, OSError):
        return str(cause) or type(cause).__name__
    text = cause.strerror or str(cause)
    numbers = {cause.errno} if cause.errno else {int(number) for number in _ERRNO.findall(text)}
    if "Connect call failed" in text and len(numbers) == 1:  # Several addresses, which all failed alike.
        return os.strerror(numbers.pop())
    return text or type(cause).__name__
