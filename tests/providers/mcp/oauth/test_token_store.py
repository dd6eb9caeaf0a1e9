"""Stored logins: readable by the owner only, written atomically, one writer at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.token_store import LoginFile, StoredLogin, TokenStore

pytestmark = pytest.mark.spec("3.16")

LOGIN = StoredLogin(
    access_token="at-secret", refresh_token="rt-secret", token_endpoint="https://a.example/token", client_id="c"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "tokens"


@pytest.fixture
def login_file(folder: Path) -> LoginFile:
    return login_file_in(folder)


def login_file_in(
    folder: Path, *, name: str = "git", url: str = "https://mcp.example/x?key=1", client: str | None = None
):
    return TokenStore(folder).login_file(name=name, url=url, client_id=client)


def file_in(folder: Path) -> Path:
    (file,) = folder.glob("*.json")
    return file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def test_stored_login_is_read_back(login_file: LoginFile, folder: Path) -> None:
    assert login_file.read() is None
    login_file.write(LOGIN)
    assert login_file_in(folder).read() == LOGIN


def test_reading_creates_no_folder(login_file: LoginFile, folder: Path) -> None:
    assert login_file.read() is None
    assert not folder.exists()


@pytest.mark.usefixtures("no_umask")
async def test_only_the_owner_can_read_with_any_umask(login_file: LoginFile, folder: Path) -> None:
    async with login_file.lock():
        login_file.write(LOGIN)
    assert mode(folder) == 0o700
    assert {mode(file) for file in folder.iterdir()} == {0o600}


def test_strict_umask_does_not_lock_the_owner_out(login_file: LoginFile, folder: Path) -> None:
    before = os.umask(0o777)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o700)
        folder.mkdir()
        folder.chmod(0o700)
        login_file.write(LOGIN)
    finally:
        os.umask(before)
    assert mode(file_in(folder)) == 0o600


def test_file_names_reveal_nothing(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    assert file_in(folder).stem.isalnum()
    for word in ("git", "mcp", "example", "secret"):
        assert word not in file_in(folder).name


def test_name_url_and_client_have_separate_logins(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    assert login_file_in(folder, name="other").read() is None
    assert login_file_in(folder, url="https://evil.example").read() is None
    assert login_file_in(folder, client="mine").read() is None


def test_readable_file_is_protected_and_reported(
    login_file: LoginFile, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    login_file.write(LOGIN)
    file_in(folder).chmod(0o644)
    folder.chmod(0o755)
    assert login_file.read() == LOGIN
    assert (mode(file_in(folder)), mode(folder)) == (0o600, 0o700)
    assert "readable by other users" in caplog.text
    assert "secret" not in caplog.text


def test_symbolic_link_is_neither_read_nor_written(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    file = file_in(folder)
    target = folder.parent / "target"
    file.rename(target)
    file.symlink_to(target)
    assert login_file.read() is None
    login_file.write(StoredLogin(access_token="new", token_endpoint="https://a.example", client_id="c"))
    assert not file.is_symlink()
    assert b"at-secret" in target.read_bytes()


def test_symbolic_link_as_folder_is_refused(login_file: LoginFile, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProviderError, match="must be a real folder"):
        login_file.write(LOGIN)
    assert login_file.read() is None
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_pipe_in_place_of_the_file_does_not_hang(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    file = file_in(folder)
    file.unlink()
    os.mkfifo(file)
    assert login_file.read() is None


def test_hard_link_is_not_read(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    os.link(file_in(folder), folder.parent / "copy")
    assert login_file.read() is None


def test_damaged_file_is_no_login_and_reported_once(
    login_file: LoginFile, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    login_file.write(LOGIN)
    file_in(folder).write_text('{"accessToken": "at-secret", "clientId": 5}')
    with caplog.at_level(logging.DEBUG):
        assert [login_file.read(), login_file.read(), login_file.read()] == [None, None, None]
    assert caplog.text.count("is damaged") == 1
    assert "secret" not in caplog.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(text=st.binary(max_size=300) | st.text(alphabet='[{"', max_size=2000).map(str.encode))
def test_reading_any_content_never_fails(login_file: LoginFile, folder: Path, text: bytes) -> None:
    login_file.write(LOGIN)
    file_in(folder).write_bytes(text)
    assert login_file.read() is None


def test_leftover_of_a_killed_writer_is_removed(login_file: LoginFile, folder: Path) -> None:
    login_file.write(LOGIN)
    leftover = file_in(folder).with_suffix(".new")
    leftover.write_text("half a tok")
    login_file.write(LOGIN)
    assert not leftover.exists()
    assert login_file.read() == LOGIN


def test_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProviderError, match="cannot keep logins in"):
        login_file_in(tmp_path / "file" / "tokens").write(LOGIN)


def test_remove_returns_whether_there_was_a_login(login_file: LoginFile) -> None:
    login_file.write(LOGIN)
    assert [login_file.remove(), login_file.remove()] == [True, False]
    assert login_file.read() is None


async def test_lock_is_exclusive(login_file: LoginFile, folder: Path) -> None:
    holders = most = 0

    async def work(own_file: LoginFile) -> None:
        nonlocal holders, most
        async with own_file.lock():
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0)
            holders -= 1

    await asyncio.gather(*(work(login_file_in(folder)) for _ in range(10)))
    assert most == 1


_HOLDER = """
import asyncio, sys
from pathlib import Path
from toolspace.providers.mcp.oauth.token_store import TokenStore
async def main():
    async with TokenStore(Path(sys.argv[1])).login_file(name="git", url="u", client_id=None).lock():
        print("stored_login", flush=True)
        sys.stdin.readline()
asyncio.run(main())
"""


async def test_lock_of_another_process_holds_until_it_ends(folder: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"stored_login\n"

    async def take() -> None:
        async with login_file_in(folder, url="u").lock():
            pass

    lock_task = asyncio.create_task(take())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not lock_task.done()
    holder.kill()
    await holder.wait()
    await lock_task


def test_repr_shows_no_secret(login_file: LoginFile, folder: Path) -> None:
    for item in (LOGIN, login_file, TokenStore(folder)):
        assert "secret" not in f"{item!r} {item}"
