"""Reaching people outside of any space: a notification goes to a webhook, by mail, or both, as is configured."""

from __future__ import annotations

import asyncio
import re
import time
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from toolspace.agents.prebuilt.action import NO_NUL, Action, ActionCaller, object_schema
from toolspace.config.server_settings import NotificationSettings, SmtpSettings, WebhookSettings
from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.errors import ToolExecutionError, ToolPermissionError, ToolValidationError
from toolspace.spaces.services import Notification, NotificationResult
from toolspace.storage.queries import entities

MAX_TITLE, MAX_BODY = 200, 20_000


async def _send_notification(actor: ActionCaller, given: dict[str, Any]) -> Any:
    notifier = actor.room.services.find_notifier(actor.agent_id)
    if notifier is None:
        raise ToolExecutionError(
            "no way to notify anyone is configured; an operator sets notifications.webhook or notifications.smtp",
            executed=False,
        )
    agent = await actor.ledger.read(entities.find_entity, actor.agent_id)
    sent = await notifier.send(
        Notification(
            title=" ".join(json_text.valid_text(given["title"]).split()),
            body=json_text.valid_text(given["body"]),
            to=given.get("to"),
            agent_id=actor.agent_id,
            agent_name=agent.name if agent is not None else "",
            id=new_id("ntf") if actor.call_id is None else derived_id("ntf", actor.agent_id, actor.call_id),
        )
    )
    answer: dict[str, Any] = {"success": True, "channels": list(sent.channels), "recipients": list(sent.recipients)}
    return {**answer, "failed": dict(sent.failed)} if sent.failed else answer


NOTIFICATION_ACTIONS = (
    Action(
        name="send_notification",
        description=(
            "Notify people who are in no space with you. It cannot be taken back; without `to` it goes to whoever is "
            "configured."
        ),
        input_schema=object_schema(
            {
                "title": {
                    "type": "string",
                    "minLength": 1,
                    "maxLength": MAX_TITLE,
                    "pattern": "^[^\\u0000]*[^\\s\\u0000][^\\u0000]*$",
                    "description": "One line.",
                },
                "body": {"type": "string", "minLength": 1, "maxLength": MAX_BODY, "pattern": NO_NUL},
                "to": {
                    "type": "string",
                    "minLength": 3,
                    "maxLength": 254,
                    "pattern": NO_NUL,
                    "description": "A mail address, if you may choose one.",
                },
            },
            "title",
            "body",
        ),
        run=_send_notification,
        category=ToolCategory.AGENT,
        # Neither harmless nor to be done twice: mail has no way to say that it was sent already.
        annotations=Annotations(read_only=False, idempotent=False, open_world=True),
    ),
)


# MERGED from notifier: Carries notifications to where configuration says: posts them to a webhook, sends them by m…

if TYPE_CHECKING:
    import smtplib

_SECONDS: Final = 15.0
"""For each step of a delivery."""
_ADDRESS: Final = re.compile(r"""[^\s@<>(),;:"\\\[\]]{1,64}@[^\s@<>(),;:"\\\[\]]{1,189}""")
_PORTS: Final = {"none": 25, "starttls": 587, "tls": 465}
_LONGEST_REASON: Final = 300


class ConfiguredNotifier:
    """A `Notifier` over the channels that are configured: each of them gets every notification."""

    def __init__(self, webhook: WebhookSettings | None, smtp: SmtpSettings | None) -> None:
        self._webhook = webhook
        self._smtp = smtp

    @classmethod
    def from_config(cls, configured: NotificationSettings) -> ConfiguredNotifier | None:
        """None where no channel is configured."""
        if configured.webhook is None and configured.smtp is None:
            return None
        return cls(configured.webhook, configured.smtp)

    async def send(self, notification: Notification) -> NotificationResult:
        # All of it is checked before any of it is sent.
        recipients = _resolve_recipients(self._smtp, notification.to) if self._smtp is not None else ()
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
        return NotificationResult(channels=channels, recipients=reached, failed=failed)


def _note(channel: str, problem: str | None, channels: list[str], failed: dict[str, str]) -> None:
    if problem is None:
        channels.append(channel)
    else:
        failed[channel] = problem[:_LONGEST_REASON]


def _resolve_recipients(smtp: SmtpSettings, to: str | None) -> tuple[str, ...]:
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


async def _post(webhook: WebhookSettings, notification: Notification) -> str | None:
    """Posts a notification; why that failed, if it did. Where to is the operator's word, so it may be any host."""
    import aiohttp
    from yarl import URL

    from toolspace.core.http_errors import HTTP_FAILURES, describe_http_failure

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
    except HTTP_FAILURES as fault:
        return (
            describe_http_failure(fault, URL(webhook.url))
            if not isinstance(fault, aiohttp.InvalidURL)
            else "its URL is none"
        )


def _mail(smtp: SmtpSettings, recipients: tuple[str, ...], notification: Notification) -> str | None:
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


def _connected(smtp: SmtpSettings) -> smtplib.SMTP:
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


def _message(smtp: SmtpSettings, recipients: tuple[str, ...], notification: Notification) -> EmailMessage:
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
