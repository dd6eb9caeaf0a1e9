"""The stores of conversations: the contract, and what is special in memory and on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from toolspace.core.extension_points import ConversationStore
from toolspace.core.language_model import UserTurn
from toolspace.errors import StorageError
from toolspace.storage.disk_conversations import DiskConversations
from toolspace.storage.memory_conversations import MemoryConversations
from toolspace.testing import ConversationsContract


class TestMemoryConversations(ConversationsContract):
    @pytest.fixture
    def conversations(self) -> ConversationStore:
        return MemoryConversations()


class TestDiskConversations(ConversationsContract):
    @pytest.fixture
    def conversations(self, tmp_path: Path) -> ConversationStore:
        return DiskConversations(tmp_path / "conversations")


async def test_sessions_in_memory_are_bounded() -> None:
    store = MemoryConversations(max_sessions=2)
    for session in ("a", "b", "c"):
        await store.save(session, [UserTurn("x")], owner="local")
    assert [len(await store.load(session, owner="local")) for session in ("a", "b", "c")] == [0, 1, 1]


async def test_two_stores_of_one_folder_never_have_one_lock(tmp_path: Path) -> None:
    stores = [DiskConversations(tmp_path), DiskConversations(tmp_path)]
    is_active = False

    async def use(store: DiskConversations) -> None:
        nonlocal is_active
        async with store.lock("s", owner="ann"):
            assert not is_active
            is_active = True
            await store.save("s", (*(await store.load("s", owner="ann")), UserTurn("x")), owner="ann")
            is_active = False

    await asyncio.gather(*map(use, stores * 5))
    assert len(await stores[0].load("s", owner="ann")) == 10


async def test_a_save_that_fails_leaves_the_old_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskConversations(tmp_path)
    await store.save("s", [UserTurn("one")], owner="ann")

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        with pytest.raises(StorageError, match=r'session "s" cannot be saved in .*: No space left on device'):
            await store.save("s", [UserTurn("two")], owner="ann")
    assert await store.load("s", owner="ann") == (UserTurn("one"),)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


async def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    store = DiskConversations(tmp_path / "conversations")
    await store.save("s", [UserTurn("one")], owner="ann")
    (file,) = (tmp_path / "conversations").glob("*.json")
    file.rename(tmp_path / "elsewhere.json")
    file.symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(StorageError, match="cannot be read"):
        await store.load("s", owner="ann")
