"""References to secrets, with real files, programs and a keyring backend."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keyring
import keyring.backend
import pytest

from toolspace import ConfigError, Toolspace
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config import secret_references
from toolspace.config.load import load_config
from toolspace.config.secret_references import resolve_secrets
from toolspace.core.secret_masking import mask_secrets, register_secrets
from toolspace.errors import ModelError

pytestmark = pytest.mark.spec("21.3")


class MemoryKeyring(keyring.backend.KeyringBackend):
    """A keyring in memory."""

    priority = 1  # pyright: ignore

    def __init__(self) -> None:
        super().__init__()
        self.passwords: dict[tuple[str, str], str] = {}

    def get_password(self, service: str, username: str) -> str | None:
        return self.passwords.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.passwords[service, username] = password

    def delete_password(self, service: str, username: str) -> None:
        del self.passwords[service, username]


@pytest.fixture
def backend() -> Iterator[MemoryKeyring]:
    previous = keyring.get_keyring()
    backend = MemoryKeyring()
    keyring.set_keyring(backend)
    yield backend
    keyring.set_keyring(previous)


def write(folder: Path, text: str) -> Path:
    path = folder / "toolspace.yaml"
    path.write_text(text)
    return path


def write_program(folder: Path, code: str, name: str = "secret-program") -> Path:
    """A program that also appends a line to `runs` at each start."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\nopen({str(folder / 'runs')!r}, 'a').write('x')\n{code}\n")
    path.chmod(0o700)
    return path


def count_runs(folder: Path) -> int:
    path = folder / "runs"
    return len(path.read_text()) if path.exists() else 0


def headers_of(path: Path) -> Any:
    return resolve_secrets(load_config(path).mcp_servers["a"]).headers


def server(value: str) -> str:
    return f"mcpServers:\n  a:\n    url: http://127.0.0.1:9/mcp\n    headers: {{X-Key: '{value}'}}\n"


def test_a_reference_that_contains_another_secret_is_masked_as_a_whole(tmp_path: Path) -> None:
    register_secrets(["inner-secret"])
    (tmp_path / "key").write_text("outer-inner-secret-end")
    headers_of(write(tmp_path, server("${file:key}")))

    assert mask_secrets("it is outer-inner-secret-end!") == "it is [hidden]!"


def test_a_file_beside_the_configuration_loses_one_newline(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("file-secret-1\n\n")
    path = write(tmp_path, server("Bearer ${file:key}"))

    assert headers_of(path) == {"X-Key": "Bearer file-secret-1\n"}
    assert "file-secret-1" not in repr(load_config(path))
    assert mask_secrets("it is file-secret-1\n!") == "it is [hidden]!"


def test_a_program_runs_without_a_shell_once_for_the_process(tmp_path: Path) -> None:
    write_program(tmp_path, "print('cmd-secret:' + '|'.join(sys.argv[1:]))")
    path = write(tmp_path, server('${cmd:./secret-program "a b" $HOME;x}'))

    assert headers_of(path) == {"X-Key": "cmd-secret:a b|$HOME;x"}
    assert headers_of(path) == {"X-Key": "cmd-secret:a b|$HOME;x"}
    assert count_runs(tmp_path) == 1


def test_the_keyring_has_a_service_of_its_own_or_a_named_one(tmp_path: Path, backend: MemoryKeyring) -> None:
    backend.set_password("toolspace", "github", "keyring-secret-1")
    backend.set_password("other", "github", "keyring-secret-2")

    assert headers_of(write(tmp_path, server("${keyring:github}"))) == {"X-Key": "keyring-secret-1"}
    assert headers_of(write(tmp_path, server("${keyring:other/github}"))) == {"X-Key": "keyring-secret-2"}
    with pytest.raises(ConfigError, match="no such entry; store it with `keyring set toolspace nobody`"):
        headers_of(write(tmp_path, server("${keyring:nobody}")))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keyring", None)
    with pytest.raises(ConfigError, match=r"pip install 'toolspace\[keyring\]'"):
        headers_of(write(tmp_path, server("${keyring:without_library}")))


def test_an_escaped_reference_and_a_variable_named_file_stay_as_they_are(tmp_path: Path) -> None:
    path = write(tmp_path, server("$${file:key} ${file:-x} ${NO_SUCH_VARIABLE:-${file:key}}"))
    (tmp_path / "key").write_text("file-secret-2")
    assert headers_of(path) == {"X-Key": "${file:key} x file-secret-2"}


def test_the_output_of_a_failed_program_is_not_in_the_error(tmp_path: Path) -> None:
    write_program(tmp_path, "print('leaked-1'); print('leaked-2', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ConfigError, match="failed with exit code 3") as error:
        Toolspace.open(write(tmp_path, server("${cmd:./secret-program}")))
    assert "leaked" not in str(error.value)
    assert "toolspace.yaml:2 (mcpServers.a): ${cmd:" in str(error.value)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("${file:missing}", "there is no such file"),
        ("${file:empty}", "it is empty"),
        ("${file:large}", "longer than 65,536 bytes"),
        ("${file:binary}", "not UTF-8"),
        ("${file:.}", "no regular file|cannot be read"),
        ("${file:pipe}", "no regular file"),
        ("${cmd:./no-such-program}", "there is no such program"),
        ("${cmd:./endless}", "longer than 65,536 bytes"),
        ("${cmd:./sleepy}", "no result after 0.5 s"),
    ],
)
def test_a_secret_that_cannot_be_read_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "large").write_text("x" * 65_537)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xfd")
    os.mkfifo(tmp_path / "pipe")
    write_program(tmp_path, "while True: print('x' * 1000)", "endless")
    write_program(tmp_path, "import time; time.sleep(600)", "sleepy")
    if "sleepy" in reference:
        monkeypatch.setattr(secret_references, "COMMAND_SECONDS", 0.5)
    with pytest.raises(ConfigError, match=message):
        headers_of(write(tmp_path, server(reference)))


@pytest.mark.parametrize(
    "text",
    [
        "agent: {name: a, system: '${file:key}'}\n",
        "storage: {dir: '${file:key}'}\n",
        "server: {host: '${cmd:hostname}'}\n",
        "mcpServers: {a: {command: x, cwd: '${file:key}'}}\n",
        "mcpServers: {a: {command: '${cmd:}'}}\n",
    ],
)
def test_a_reference_in_another_setting_is_an_error_of_the_file(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"toolspace\.yaml:1: "):
        load_config(write(tmp_path, text))


async def test_only_what_is_built_reads_its_secret(tmp_path: Path) -> None:
    write_program(tmp_path, "print('cmd-secret-9')")
    path = write(
        tmp_path,
        "mcpServers:\n  off: {url: 'http://127.0.0.1:9', enabled: false, headers: {a: '${cmd:./secret-program 1}'}}\n"
        "  on: {url: 'http://127.0.0.1:9', headers: {a: '${cmd:./secret-program 2}'}}\n"
        "tools:\n  webSearch: {provider: tavily, apiKey: '${cmd:./secret-program 3}'}\n  definitions:\n"
        "    - {name: fetch, executionType: gateway, description: d,\n"
        "       execution: {url: 'http://127.0.0.1:9/${cmd:./secret-program 4}'}}\n",
    )
    load_config(path)
    async with Toolspace.open(path, single_tool="json_parse"):
        assert count_runs(tmp_path) == 0
    ts = Toolspace.open(path)
    try:
        assert count_runs(tmp_path) == 3
        definition = ts.registry.get("fetch")
        assert definition is not None
        assert "cmd-secret-9" not in str(definition.execution)
    finally:
        await ts.aclose()


async def test_a_reload_reads_again_and_keeps_the_old_value_if_it_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = tmp_path / "key"
    key.write_text("search-secret-1")
    path = write(tmp_path, "tools:\n  webSearch: {provider: tavily, apiKey: '${file:key}'}\n")

    def current_key(ts: Toolspace) -> Any:
        return (ts.orchestrator.context.web_search or {})["apiKey"]

    async with Toolspace.open(path) as ts:
        assert current_key(ts) == "search-secret-1"
        key.write_text("search-secret-2")
        await ts.reload()
        assert current_key(ts) == "search-secret-2"
        key.unlink()
        with caplog.at_level(logging.WARNING), pytest.raises(ConfigError, match=r"tools\.webSearch\.apiKey: \$\{file:"):
            await ts.reload()
        assert current_key(ts) == "search-secret-2"


async def test_an_agent_without_its_secret_cannot_run_and_says_which(tmp_path: Path) -> None:
    path = write(tmp_path, "agent: {name: ann}\nmodel: {provider: openai, name: m, apiKey: '${file:no-key}'}\n")
    async with Toolspace.open(path) as ts:
        with pytest.raises(ModelError, match=r'"ann" has no credentials: \$\{file:.*no-key\}: there is no such file'):
            async with ts.agents.acquire("ann"):
                pass
        (tmp_path / "no-key").write_text("model-secret-1")
        async with ts.agents.acquire("ann"):
            pass


def test_the_keys_of_the_gateway_are_checked_when_they_are_resolved(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k" * 20)
    config = load_config(write(tmp_path, "server: {secretKey: '${file:key}'}\n"))
    assert resolve_process_secrets(config).server.secret_key == "k" * 20
    with pytest.raises(ConfigError, match=r"server\.jwtSecret\): the secret must have at least 32 plain characters"):
        resolve_process_secrets(load_config(write(tmp_path, "server: {jwtSecret: '${file:key}'}\n")))
    with pytest.raises(ConfigError, match="begins with postgresql://"):
        resolve_process_secrets(load_config(write(tmp_path, "storage: {url: '${file:key}'}\n")))
