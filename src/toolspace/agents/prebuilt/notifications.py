"""The action `send_notification`, and the notifier behind it: it posts to a webhook and sends mail, as configured.

The gateway creates a `ConfiguredNotifier` for itself and for each agent with channels of its own.
"""

from __future__ import annotations

import asyncio
import re
import time
from email.message import EmailMessage
from email.utils import formatdate, parseaddr
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from toolspace.agents.prebuilt.action import ActionCaller, action, text_schema
from toolspace.config.secret_references import load_secrets, resolve_secrets
from toolspace.config.server_settings import NotificationSettings, SmtpSettings, WebhookSettings
from toolspace.core import json_text
from toolspace.core.ids import derived_id, new_id
from toolspace.core.tool import Annotations
from toolspace.errors import ConfigError, ToolExecutionError, ToolPermissionError, ToolValidationError
from toolspace.spaces.call_context import Notification, NotificationResult
from toolspace.storage.queries import entities_and_spaces

if TYPE_CHECKING:
    import smtplib

MAX_TITLE, MAX_BODY = 200, 20_000


@action(
    "Notify people who are in no space with you. It cannot be undone; without `to` it goes to the configured "
    "recipients.",
    {
        "title": {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_TITLE,
            "pattern": "^[^\\u0000]*[^\\s\\u0000][^\\u0000]*$",
            "description": "One line.",
        },
        "body": text_schema(MAX_BODY),
        "to": {**text_schema(254, "A mail address, if you may choose one."), "minLength": 3},
    },
    "title",
    "body",
    # Not idempotent: a mail server cannot tell whether a mail was already sent.
    annotations=Annotations(read_only=False, idempotent=False, open_world=True),
)
async def send_notification(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    notifier = caller.call_host.services.find_notifier(caller.agent_id)
    if notifier is None:
        raise ToolExecutionError(
            "no notification channel is configured; an operator sets notifications.webhook or notifications.smtp",
            executed=False,
        )
    agent = await caller.ledger.read(entities_and_spaces.find_entity, caller.agent_id)
    result = await notifier.send(
        Notification(
            title=" ".join(json_text.valid_text(arguments["title"]).split()),
            body=json_text.valid_text(arguments["body"]),
            to=arguments.get("to"),
            agent_id=caller.agent_id,
            agent_name=agent.name if agent is not None else "",
            id=new_id("ntf") if caller.call_id is None else derived_id("ntf", caller.agent_id, caller.call_id),
        )
    )
    answer: dict[str, Any] = {"success": True, "channels": list(result.channels), "recipients": list(result.recipients)}
    return {**answer, "failed": dict(result.failed)} if result.failed else answer


NOTIFICATION_ACTIONS = (send_notification,)


# Delivery

_TIMEOUT_SECONDS: Final = 15.0
"""The timeout of each step of a delivery."""
_ADDRESS: Final = re.compile(r"""[^\s@<>(),;:"\\\[\]]{1,64}@[^\s@<>(),;:"\\\[\]]{1,189}""")
_PORTS: Final = {"none": 25, "starttls": 587, "tls": 465}
_MAX_REASON: Final = 300


class ConfiguredNotifier:
    """A `Notifier` for the configured channels. Every notification goes to all of them."""

    def __init__(self, webhook: WebhookSettings | None, smtp: SmtpSettings | None) -> None:
        self._webhook = webhook
        self._smtp = smtp

    @classmethod
    def from_config(cls, settings: NotificationSettings) -> ConfiguredNotifier | None:
        """Returns None if no channel is configured."""
        if settings.webhook is None and settings.smtp is None:
            return None
        return cls(settings.webhook, settings.smtp)

    async def send(self, notification: Notification) -> NotificationResult:
        """Raises `ToolError` if the recipient is not allowed, or if no channel worked."""
        try:
            await load_secrets(self._webhook, self._smtp)
            webhook, smtp = resolve_secrets(self._webhook), resolve_secrets(self._smtp)
        except ConfigError as error:
            raise ToolExecutionError(f"nobody was notified: {error}", executed=False) from None
        recipients = _resolve_recipients(smtp, notification.to) if smtp is not None else ()
        problems: dict[str, str | None] = {}
        if webhook is not None:
            problems["webhook"] = await _post(webhook, notification)
        if smtp is not None:
            problems["email"] = await asyncio.to_thread(_send_mail, smtp, recipients, notification)
        failures = {name: problem[:_MAX_REASON] for name, problem in problems.items() if problem is not None}
        channels = [name for name in problems if name not in failures]
        if not channels:
            reasons = "; ".join(f"{channel}: {reason}" for channel, reason in failures.items())
            raise ToolExecutionError(f"nobody was notified: {reasons}", executed=False)
        addresses = [parseaddr(recipient)[1] for recipient in recipients] if "email" in channels else []
        return NotificationResult(channels=channels, recipients=addresses, failed=failures)


def _resolve_recipients(smtp: SmtpSettings, to: str | None) -> tuple[str, ...]:
    """The recipients of a mail: those of the configuration, or the address that the agent chose, if it is allowed."""
    if to is None:
        return smtp.to
    address = to.strip()
    if not _ADDRESS.fullmatch(address) or not address.isprintable():
        raise ToolValidationError(f"to: {to[:100]!r} is no mail address; write one such as ann@example.com")
    configured_addresses = {parseaddr(recipient)[1].lower() for recipient in smtp.to}
    is_allowed = any(fnmatchcase(address.lower(), glob.lower()) for glob in smtp.allowed_recipients)
    if address.lower() not in configured_addresses and not is_allowed:
        raise ToolPermissionError(
            f"you may not send mail to {address}; leave `to` out, or have an operator allow it "
            "(notifications.smtp.allowedRecipients)"
        )
    return (address,)


async def _post(webhook: WebhookSettings, notification: Notification) -> str | None:
    """Posts a notification. Returns None, or why it failed. The operator chose the URL, so it may be any host."""
    import aiohttp
    from yarl import URL

    from toolspace.core.http_client_errors import HTTP_FAILURES, describe_http_failure

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
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_SECONDS)
    try:
        url = URL(webhook.url)
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=True, cookie_jar=aiohttp.DummyCookieJar()) as session,
            # A redirect would send the text and the headers to a host that is not configured.
            session.post(url, data=body, headers=headers, allow_redirects=False) as response,
        ):
            return None if 200 <= response.status < 300 else f"it answered with HTTP {response.status}"
    except aiohttp.InvalidURL:
        return "its URL is not valid"
    except HTTP_FAILURES as error:
        return describe_http_failure(error, URL(webhook.url))


def _send_mail(smtp: SmtpSettings, recipients: tuple[str, ...], notification: Notification) -> str | None:
    """Sends a mail. Returns None, or why it failed. Blocks: runs in a thread."""
    import smtplib

    try:
        with _connect(smtp) as server:
            refusals = server.send_message(
                _build_message(smtp, recipients, notification),
                from_addr=parseaddr(smtp.sender)[1],
                to_addrs=[parseaddr(recipient)[1] for recipient in recipients],
            )
    except smtplib.SMTPRecipientsRefused as error:
        return f"the mail server takes nothing for {', '.join(error.recipients)}"
    except smtplib.SMTPResponseException as error:
        text = error.smtp_error
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return f"the mail server answered {error.smtp_code} {text}"
    except (smtplib.SMTPException, OSError, ValueError) as error:
        return f"the mail server at {smtp.host} did not take it: {error}"
    return f"the mail server takes nothing for {', '.join(refusals)}" if refusals else None


def _connect(smtp: SmtpSettings) -> smtplib.SMTP:
    import smtplib
    import ssl

    port = smtp.port or _PORTS[smtp.tls]
    if smtp.tls == "tls":
        server = smtplib.SMTP_SSL(smtp.host, port, timeout=_TIMEOUT_SECONDS, context=ssl.create_default_context())
    else:
        server = smtplib.SMTP(smtp.host, port, timeout=_TIMEOUT_SECONDS)
    try:
        if smtp.tls == "starttls":
            server.starttls(context=ssl.create_default_context())
        if smtp.username is not None:
            server.login(smtp.username, smtp.password or "")
    except BaseException:
        server.close()
        raise
    return server


def _build_message(smtp: SmtpSettings, recipients: tuple[str, ...], notification: Notification) -> EmailMessage:
    from email.policy import SMTP

    message = EmailMessage(policy=SMTP)  # The policy rejects headers of more than one line.
    title = "".join(letter if letter.isprintable() else " " for letter in notification.title)
    # The library decodes `=?utf-8?q?Hi=0ABcc:_eve?=` and writes the line break into the mail: a title has no such word.
    message["Subject"] = title.replace("=?", "= ?")
    message["From"] = smtp.sender
    message["To"] = ", ".join(recipients)
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{notification.id}@{parseaddr(smtp.sender)[1].rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    message.set_content(notification.body)
    return message
