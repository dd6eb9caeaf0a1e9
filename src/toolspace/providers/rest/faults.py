"""A request that got no answer as a tool's error: says whether anything can have been sent."""

from __future__ import annotations

import aiohttp
from yarl import URL

from toolspace.core.http_errors import explain_fault
from toolspace.errors import ToolTransportError


def fault_of(error: Exception, url: URL) -> ToolTransportError:
    """What one of `FAULTS` means for a call."""
    # A certificate error is both of these, and none of them has sent anything.
    before = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | aiohttp.InvalidURL)
    before = before or isinstance(error, aiohttp.ClientConnectorCertificateError)
    return ToolTransportError(explain_fault(error, url), executed=not before)
