"""The logins on disk: for their owner only, whole or not at all, one writer at a time."""

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
def slot(folder: Path) -> LoginFile:
    return slot_in(folder)


def slot_in(folder: Path, *, name: str = "git", url: str = "https://mcp.example/x?key=1", client: str | None = None):
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


def test_a_login_comes_back_as_it_was_stored(slot: LoginFile, folder: Path) -> None:
    assert slot.read() is None
    slot.write(LOGIN)
    assert slot_in(folder).read() == LOGIN


def test_looking_for_a_login_makes_no_folder(slot: LoginFile, folder: Path) -> None:
    assert slot.read() is None
    assert not folder.exists()


@pytest.mark.usefixtures("no_umask")
async def test_only_the_owner_can_read_whatever_the_umask(slot: LoginFile, folder: Path) -> None:
    async with slot.lock():
        slot.write(LOGIN)
    assert mode(folder) == 0o700
    assert {mode(file) for file in folder.iterdir()} == {0o600}


def test_a_strict_umask_does_not_lock_the_owner_out(slot: LoginFile, folder: Path) -> None:
    before = os.umask(0o777)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.parent.chmod(0o700)
        folder.mkdir()
        folder.chmod(0o700)
        slot.write(LOGIN)
    finally:
        os.umask(before)
    assert mode(file_in(folder)) == 0o600


def test_names_of_files_tell_nothing(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    assert file_in(folder).stem.isalnum()
    for told in ("git", "mcp", "example", "secret"):
        assert told not in file_in(folder).name


def test_another_name_url_or_client_is_another_login(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    assert slot_in(folder, name="other").read() is None
    assert slot_in(folder, url="https://evil.example").read() is None
    assert slot_in(folder, client="mine").read() is None


def test_a_file_that_others_could_read_is_closed_to_them_and_told_of(
    slot: LoginFile, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot.write(LOGIN)
    file_in(folder).chmod(0o644)
    folder.chmod(0o755)
    assert slot.read() == LOGIN
    assert (mode(file_in(folder)), mode(folder)) == (0o600, 0o700)
    assert "readable by other users" in caplog.text
    assert "secret" not in caplog.text


def test_a_symbolic_link_is_not_read_and_what_it_leads_to_is_not_written(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    file = file_in(folder)
    target = folder.parent / "target"
    file.rename(target)
    file.symlink_to(target)
    assert slot.read() is None
    slot.write(StoredLogin(access_token="new", token_endpoint="https://a.example", client_id="c"))
    assert not file.is_symlink()
    assert b"at-secret" in target.read_bytes()


def test_a_folder_that_is_a_symbolic_link_is_refused(slot: LoginFile, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ProviderError, match="must be a real folder"):
        slot.write(LOGIN)
    assert slot.read() is None
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_planted_pipe_hangs_nobody(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    file = file_in(folder)
    file.unlink()
    os.mkfifo(file)
    assert slot.read() is None


def test_a_hard_link_is_not_read(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    os.link(file_in(folder), folder.parent / "copy")
    assert slot.read() is None


def test_a_damaged_file_is_no_login_and_told_of_once(
    slot: LoginFile, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot.write(LOGIN)
    file_in(folder).write_text('{"accessToken": "at-secret", "clientId": 5}')
    with caplog.at_level(logging.DEBUG):
        assert [slot.read(), slot.read(), slot.read()] == [None, None, None]
    assert caplog.text.count("is damaged") == 1
    assert "secret" not in caplog.text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(text=st.binary(max_size=300) | st.text(alphabet='[{"', max_size=2000).map(str.encode))
def test_whatever_is_in_the_file_reading_never_fails(slot: LoginFile, folder: Path, text: bytes) -> None:
    slot.write(LOGIN)
    file_in(folder).write_bytes(text)
    assert slot.read() is None


def test_what_a_killed_writer_left_is_cleared_away(slot: LoginFile, folder: Path) -> None:
    slot.write(LOGIN)
    left = file_in(folder).with_suffix(".new")
    left.write_text("half a tok")
    slot.write(LOGIN)
    assert not left.exists()
    assert slot.read() == LOGIN


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProviderError, match="cannot keep logins in"):
        slot_in(tmp_path / "file" / "tokens").write(LOGIN)


def test_removing_says_whether_there_was_one(slot: LoginFile) -> None:
    slot.write(LOGIN)
    assert [slot.remove(), slot.remove()] == [True, False]
    assert slot.read() is None


async def test_the_lock_lets_in_one_at_a_time(slot: LoginFile, folder: Path) -> None:
    inside = most = 0

    async def work(own: LoginFile) -> None:
        nonlocal inside, most
        async with own.lock():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(work(slot_in(folder)) for _ in range(10)))
    assert most == 1


_HOLDER = """
import asyncio, sys
from pathlib import Path
from toolspace.providers.mcp.oauth.token_store import TokenStore
async def main():
    async with TokenStore(Path(sys.argv[1])).login_file(name="git", url="u", client_id=None).lock():
        print("held", flush=True)
        sys.stdin.readline()
asyncio.run(main())
"""


async def test_the_lock_of_another_process_holds_and_goes_with_it(folder: Path) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, str(folder), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    assert await holder.stdout.readline() == b"held\n"

    async def take() -> None:
        async with slot_in(folder, url="u").lock():
            pass

    taking = asyncio.create_task(take())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not taking.done()
    holder.kill()
    await holder.wait()
    await taking


def test_nothing_secret_is_shown(slot: LoginFile, folder: Path) -> None:
    for shown in (LOGIN, slot, TokenStore(folder)):
        assert "secret" not in f"{shown!r} {shown}"
