"""An SMTP server on loopback that stores the mails it receives."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import SMTP as POLICY
from typing import Any

from aiosmtpd.smtp import SMTP, AuthResult, LoginPassword


@dataclass
class Mail:
    """One received mail."""

    sender: str
    recipients: list[str]
    message: EmailMessage
    raw: bytes


@dataclass
class MailServer:
    port: int
    refused_addresses: tuple[str, ...] = ()
    """Recipients that the server refuses."""
    mails: list[Mail] = field(default_factory=list[Mail])
    logins: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    was_encrypted: list[bool] = field(default_factory=list[bool])

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, _: Any) -> str:
        if address in self.refused_addresses:
            return "550 no such mailbox"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        message = message_from_bytes(envelope.content, _class=EmailMessage, policy=POLICY)
        self.mails.append(Mail(envelope.mail_from, list(envelope.rcpt_tos), message, envelope.content))
        self.was_encrypted.append(session.ssl is not None or server.transport.get_extra_info("sslcontext") is not None)
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, data: LoginPassword) -> AuthResult:
        login = data.login.decode(), data.password.decode()
        self.logins.append(login)
        return AuthResult(success=login == ("robot", "hunter2"), handled=False)


@asynccontextmanager
async def mail_server(
    *, context: ssl.SSLContext | None = None, starttls: bool = False, **options: Any
) -> AsyncGenerator[MailServer]:
    """Starts the server. With `context` it uses TLS, from the start or after STARTTLS."""
    smtp_server = MailServer(0, **options)

    def protocol() -> SMTP:
        return SMTP(
            smtp_server,
            hostname="localhost",
            tls_context=context if starttls else None,
            require_starttls=starttls,
            authenticator=smtp_server.authenticate,
            auth_require_tls=False,
            loop=asyncio.get_running_loop(),
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_server(protocol, "127.0.0.1", 0, ssl=None if starttls else context)
    smtp_server.port = server.sockets[0].getsockname()[1]
    try:
        yield smtp_server
    finally:
        server.close()
        await server.wait_closed()
