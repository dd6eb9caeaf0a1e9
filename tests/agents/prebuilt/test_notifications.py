"""Notifications, with a real webhook and a real mail server on the loopback interface."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import HttpTestServer, http_server
from tests.servers.smtp import MailServer, mail_server
from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import ToolResult
from toolspace.agents.prebuilt.notifications import ConfiguredNotifier
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, PrebuiltProvider
from toolspace.config.server_settings import NotificationSettings, SmtpSettings, WebhookSettings
from toolspace.spaces.call_context import AgentServices
from toolspace.storage.sqlite.database import SqliteDatabase

pytestmark = [pytest.mark.spec("9.5")]

SENDER = "Robot <robot@example.com>"
TO = ("Ann <ann@example.com>", "bob@example.com")


class NotifyingAgent:
    def __init__(self, harness: ServiceHarness, run_id: str) -> None:
        self.harness = harness
        self.run_id = run_id

    def configure(self, **channels: Any) -> None:
        self.harness.pending_calls.services = AgentServices(
            notifier=ConfiguredNotifier.from_config(NotificationSettings(**channels))
        )

    async def notify(self, title: str = "Done", body: str = "It is done.", **more: Any) -> ToolResult:
        return await self.harness.call(self.run_id, "send_notification", {"title": title, "body": body, **more})


@pytest.fixture
async def act(tmp_path: Path) -> AsyncIterator[NotifyingAgent]:
    async with service_harness(await SqliteDatabase.open(tmp_path / "toolspace.db")) as open_harness:
        open_harness.ts.orchestrator.register(PrebuiltProvider())
        yield NotifyingAgent(open_harness, await open_harness.open_run())


async def accept(_: web.Request) -> web.Response:
    return web.Response(status=204)


@pytest.fixture
async def hook() -> AsyncIterator[HttpTestServer]:
    async with http_server(accept) as server:
        yield server


@pytest.fixture
async def post() -> AsyncIterator[MailServer]:
    async with mail_server() as server:
        yield server


def smtp(server: MailServer, **more: Any) -> SmtpSettings:
    options: dict[str, Any] = {"host": "127.0.0.1", "port": server.port, "tls": "none", "sender": SENDER, "to": TO}
    return SmtpSettings(**{**options, **more})


async def test_without_a_channel_the_error_names_the_settings(act: NotifyingAgent) -> None:
    act.configure()
    result = await act.notify()
    assert (result.error_kind, result.executed) == ("execution_error", False)
    assert "notifications.webhook or notifications.smtp" in (result.error or "")


async def test_a_webhook_receives_the_notification_as_json(act: NotifyingAgent, hook: HttpTestServer) -> None:
    act.configure(webhook=WebhookSettings(url=hook.url("/hooks/s3cret"), headers={"x-token": "t0ken"}))
    receipt = (await act.notify("Build\nfailed", "Twice.\n\nLook.", to="whoever@example.com")).unwrap()
    assert receipt == {"success": True, "channels": ["webhook"], "recipients": []}
    (request,) = hook.requests
    body = json.loads(request.body)
    assert (request.method, request.path, request.headers["x-token"]) == ("POST", "/hooks/s3cret", "t0ken")
    assert (body["title"], body["body"], body["to"]) == ("Build failed", "Twice.\n\nLook.", "whoever@example.com")
    assert body["agent"] == {"id": act.harness.agent, "name": "Ada"}
    assert request.headers["idempotency-key"] == body["id"]
    assert isinstance(body["timestamp"], int)


@pytest.mark.parametrize("status", [302, 307, 400, 500])
async def test_a_webhook_that_fails_or_redirects_is_an_error(act: NotifyingAgent, status: int) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": "/external_tool"})

    async with http_server(answer) as hook:
        act.configure(webhook=WebhookSettings(url=hook.url("/hooks/s3cret")))
        result = await act.notify()
        assert result.error == f"nobody was notified: webhook: it answered with HTTP {status}"
        assert len(hook.requests) == 1


async def test_a_webhook_error_does_not_contain_the_url_secrets(act: NotifyingAgent) -> None:
    async with http_server(accept) as hook:
        pass
    act.configure(webhook=WebhookSettings(url=hook.url("/hooks/s3cret?key=k3y")))
    result = await act.notify()
    assert "cannot connect" in (result.error or "")
    assert not any(secret in (result.error or "") for secret in ("s3cret", "k3y"))


async def test_a_mail_goes_to_the_configured_recipients(act: NotifyingAgent, post: MailServer) -> None:
    act.configure(smtp=smtp(post, username="robot", password="hunter2"))
    receipt = (await act.notify("Grüße: 完了", "Es ist fertig.\n.\nEnde ✓")).unwrap()
    assert receipt == {"success": True, "channels": ["email"], "recipients": ["ann@example.com", "bob@example.com"]}
    (mail,) = post.mails
    assert (mail.sender, mail.recipients) == ("robot@example.com", ["ann@example.com", "bob@example.com"])
    assert mail.message["Subject"] == "Grüße: 完了"
    assert mail.message["From"] == "Robot <robot@example.com>"
    assert mail.message["To"] == "Ann <ann@example.com>, bob@example.com"
    assert mail.message["Message-ID"].endswith("@example.com>")
    assert mail.message.get_content().replace("\r\n", "\n") == "Es ist fertig.\n.\nEnde ✓\n"
    assert post.logins == [("robot", "hunter2")]


async def test_a_title_cannot_add_mail_headers(act: NotifyingAgent, post: MailServer) -> None:
    act.configure(smtp=smtp(post))
    for break_ in ("\r\n", "\n", "\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028"):
        (
            await act.notify(f"Hi{break_}Bcc: eve@example.com{break_}{break_}body", f"x{break_}Bcc: eve@example.com")
        ).unwrap()
    for mail in post.mails:
        assert mail.recipients == ["ann@example.com", "bob@example.com"]
        assert mail.message["Bcc"] is None
        assert mail.message["Subject"] == "Hi Bcc: eve@example.com body"
    for to in (
        "ann@example.com\r\nBcc: eve@example.com",
        "ann@example.com, eve@example.com",
        "a b@example.com",
        "@",
        "x",
    ):
        result = await act.notify(to=to)
        assert result.error_kind == "invalid_parameters", to
    assert len(post.mails) == 8


@pytest.mark.parametrize(
    "word",
    [
        "=?utf-8?q?Hi=0D=0ABcc:_eve@example.com?=",
        "=?utf-8?B?SGkNCkJjYzogZXZlQHguY29t?=",
        "==??utf-8?q?Hi=0AX-Evil:_1?=",
    ],
)
@pytest.mark.parametrize("start", ["", "Hi ", "é ", "a" * 100 + " ", "=\n?utf-8?q?a?= "])
async def test_an_encoded_word_in_a_title_is_not_decoded(
    act: NotifyingAgent, post: MailServer, start: str, word: str
) -> None:
    act.configure(smtp=smtp(post))
    (await act.notify(start + word)).unwrap()
    (await act.notify("Hi")).unwrap()
    mail, plain_mail = post.mails
    assert mail.message.keys() == plain_mail.message.keys()
    assert mail.message["Subject"] == " ".join((start + word).split()).replace("=?", "= ?")
    assert mail.message.get_content() == plain_mail.message.get_content()


async def test_an_agent_can_choose_only_allowed_recipients(act: NotifyingAgent, post: MailServer) -> None:
    act.configure(smtp=smtp(post, allowed_recipients=("*@team.example.com", "boss@example.com")))
    for to in ("ANN@example.com", "carl@team.example.com", "boss@example.com"):
        assert (await act.notify(to=to)).unwrap()["recipients"] == [to]
    for to in ("eve@example.com", "eve@evil.com", "carl@team.example.com.evil.com"):
        result = await act.notify(to=to)
        assert result.error_kind == "not_permitted", to
        assert "allowedRecipients" in (result.error or "")
    assert [mail.recipients for mail in post.mails] == [
        ["ANN@example.com"],
        ["carl@team.example.com"],
        ["boss@example.com"],
    ]


async def test_the_error_of_the_mail_server_reaches_the_agent(act: NotifyingAgent) -> None:
    async with mail_server(refused_addresses=("ann@example.com", "bob@example.com")) as post:
        act.configure(smtp=smtp(post))
        assert "takes nothing for ann@example.com, bob@example.com" in ((await act.notify()).error or "")
        act.configure(smtp=smtp(post, username="robot", password="wrong"))
        error = (await act.notify()).error or ""
        assert "the mail server answered 535" in error
        assert "wrong" not in error
    act.configure(smtp=smtp(post))
    assert "did not take it" in ((await act.notify()).error or "")


async def test_one_working_channel_is_enough(act: NotifyingAgent, hook: HttpTestServer, post: MailServer) -> None:
    act.configure(webhook=WebhookSettings(url=hook.url()), smtp=smtp(post))
    assert (await act.notify()).unwrap()["channels"] == ["webhook", "email"]
    async with mail_server(refused_addresses=("bob@example.com", "ann@example.com")) as other_server:
        act.configure(webhook=WebhookSettings(url=hook.url()), smtp=smtp(other_server))
        receipt = (await act.notify()).unwrap()
    assert (receipt["channels"], receipt["recipients"], list(receipt["failed"])) == (["webhook"], [], ["email"])
    refusal = await act.notify(to="eve@example.com")
    assert refusal.error_kind == "not_permitted"
    assert len(hook.requests) == 2  # Nothing was sent of what is not permitted.


@pytest.mark.parametrize("tls", ["starttls", "tls"])
async def test_mail_uses_tls_and_verifies_the_certificate(
    act: NotifyingAgent, tls: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = await asyncio.to_thread(_certificate, tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with mail_server(context=context, starttls=tls == "starttls") as post:
        act.configure(smtp=smtp(post, tls=tls, host="localhost"))
        assert "certificate verify failed" in ((await act.notify()).error or "")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert (await act.notify()).ok
        assert post.was_encrypted == [True]


async def test_an_agent_with_its_own_channels_uses_those(act: NotifyingAgent, hook: HttpTestServer) -> None:
    own_notifier = ConfiguredNotifier.from_config(NotificationSettings(webhook=WebhookSettings(url=hook.url("/own"))))
    assert own_notifier is not None
    act.harness.pending_calls.services = AgentServices(notifiers={act.harness.agent: own_notifier})
    assert (await act.notify()).ok
    assert act.harness.pending_calls.services.find_notifier("another") is None


def test_send_notification_is_not_idempotent() -> None:
    assert ALL_ACTIONS["send_notification"].annotations.idempotent is False
    assert ALL_ACTIONS["send_notification"].annotations.read_only is False


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate for `localhost` that signs itself."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    paths[1].write_bytes(private)
    return paths
