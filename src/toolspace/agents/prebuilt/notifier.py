"""Carries notifications to where configuration says: posts them to a webhook, sends them by mail."""

from __future__ import annotations

import asyncio
import re
import time
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

from toolspace.config.model import Notifications, Smtp, Webhook
from toolspace.core import json_text
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError
from toolspace.spaces.services import Notification, Sent

if TYPE_CHECKING:
    import smtplib

_SECONDS: Final = 15.0
"""For each step of a delivery."""
_ADDRESS: Final = re.compile(r"""[^\s@<>(),;:"\\\[\]]{1,64}@[^\s@<>(),;:"\\\[\]]{1,189}""")
_PORTS: Final = {"none": 25, "starttls": 587, "tls": 465}
_LONGEST_REASON: Final = 300


class ConfiguredNotifier:
    """A `Notifier` over the channels that are configured: each of them gets every notification."""

    def __init__(self, webhook: Webhook | None, smtp: Smtp | None) -> None:
        self._webhook = webhook
        self._smtp = smtp

    @classmethod
    def of(cls, configured: Notifications) -> ConfiguredNotifier | None:
        """None where no channel is configured."""
        if configured.webhook is None and configured.smtp is None:
            return None
        return cls(configured.webhook, configured.smtp)

    async def send(self, notification: Notification) -> Sent:
        # All of it is checked before any of it is sent.
        recipients = _recipients(self._smtp, notification.to) if self._smtp is not None else ()
        channels: list[str] = []
        failed: dict[str, str] = {}
        if self._webhook is not None:
            _note("webhook", await _post(self._webhook, notification), channels, failed)
        if self._smtp is not None:
            problem = await asyncio.to_thread(_mail, self._smtp, recipients, notification)
            _note("email", problem, channels, failed)
        if not channels:
            reasons = "; ".join(f"{channel}: {reason}" for channel, reason in failed.items())
            raise ToolExecutionError(f"nobody was notified: {reasons}", executed=False)
        reached = [parseaddr(one)[1] for one in recipients] if "email" in channels else []
        return Sent(channels=channels, recipients=reached, failed=failed)


def _note(channel: str, problem: str | None, channels: list[str], failed: dict[str, str]) -> None:
    if problem is None:
        channels.append(channel)
    else:
        failed[channel] = problem[:_LONGEST_REASON]


def _recipients(smtp: Smtp, to: str | None) -> tuple[str, ...]:
    """Whom a mail goes to: who is configured, or the one that the agent names, if it may."""
    if to is None:
        return smtp.to
    address = to.strip()
    if not _ADDRESS.fullmatch(address) or not address.isprintable():
        raise ToolValidationError(f"to: {to[:100]!r} is no mail address; write one such as ann@example.com")
    own = {parseaddr(one)[1].lower() for one in smtp.to}
    allowed = any(fnmatchcase(address.lower(), glob.lower()) for glob in smtp.allowed_recipients)
    if address.lower() not in own and not allowed:
        raise ToolPermissionError(
            f"you may not send mail to {address}; leave `to` out, or have an operator allow it "
            "(notifications.smtp.allowedRecipients)"
        )
    return (address,)


async def _post(webhook: Webhook, notification: Notification) -> str | None:
    """Posts a notification; why that failed, if it did. Where to is the operator's word, so it may be any host."""
    import aiohttp
    from yarl import URL

    from toolspace.core.http_errors import FAULTS, explain_fault

    body = json_text.encode_bytes(
        {
            "id": notification.id,
            "title": notification.title,
            "body": notification.body,
            "to": notification.to,
            "agent": {"id": notification.agent_id, "name": notification.agent_name},
            "timestamp": round(time.time() * 1000),
        }
    )
    headers = {"Content-Type": "application/json", "Idempotency-Key": notification.id, **webhook.headers}
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    try:
        url = URL(webhook.url)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()) as session,
            # A redirect would take what is said, and the headers with it, to where nobody configured.
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return None if 200 <= response.status < 300 else f"it answered with HTTP {response.status}"
    except FAULTS as fault:
        return (
            explain_fault(fault, URL(webhook.url)) if not isinstance(fault, aiohttp.InvalidURL) else "its URL is none"
        )


def _mail(smtp: Smtp, recipients: tuple[str, ...], notification: Notification) -> str | None:
    """Sends a mail; why that failed, if it did. Waits for the network: not on the event loop."""
    import smtplib

    try:
        with _connected(smtp) as server:
            refused = server.send_message(
                _message(smtp, recipients, notification),
                from_addr=parseaddr(smtp.sender)[1],
                to_addrs=[parseaddr(one)[1] for one in recipients],
            )
    except smtplib.SMTPRecipientsRefused as error:
        return f"the mail server takes nothing for {', '.join(error.recipients)}"
    except smtplib.SMTPResponseException as error:
        said = error.smtp_error.decode("utf-8", "replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        return f"the mail server answered {error.smtp_code} {said}"
    except (smtplib.SMTPException, OSError, ValueError) as error:
        return f"the mail server at {smtp.host} did not take it: {error}"
    return f"the mail server takes nothing for {', '.join(refused)}" if refused else None


def _connected(smtp: Smtp) -> smtplib.SMTP:
    import smtplib
    import ssl

    port = smtp.port or _PORTS[smtp.tls]
    if smtp.tls == "tls":
        server = smtplib.SMTP_SSL(smtp.host, port, timeout=_SECONDS, context=ssl.create_default_context())
    else:
        server = smtplib.SMTP(smtp.host, port, timeout=_SECONDS)
    try:
        if smtp.tls == "starttls":
            server.starttls(context=ssl.create_default_context())
        if smtp.username is not None:
            server.login(smtp.username, smtp.password or "")
    except BaseException:
        server.close()
        raise
    return server


def _message(smtp: Smtp, recipients: tuple[str, ...], notification: Notification) -> EmailMessage:
    from email.policy import SMTP

    message = EmailMessage(policy=SMTP)  # Which refuses a header of more than one line.
    message["Subject"] = "".join(letter if letter.isprintable() else " " for letter in notification.title)
    message["From"] = smtp.sender
    message["To"] = ", ".join(recipients)
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{notification.id}@{parseaddr(smtp.sender)[1].rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(notification.body)
    return message
