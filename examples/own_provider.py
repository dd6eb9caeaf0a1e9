"""A custom provider: stores notes in an SQLite file. `docs/providers.md` explains it."""

import asyncio
import sqlite3
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolspace import Tool, ToolContext, ToolExecutionError, ToolNotFoundError, ToolProvider, ToolResult, Toolspace

TITLE = {"type": "string", "minLength": 1, "maxLength": 100}


class NotesProvider(ToolProvider):
    """Tools that write a note, read one, and wait until one is written."""

    kind = "notes"
    namespace = "notes"

    def __init__(self, file: str | Path, *, max_length: int = 1000) -> None:
        super().__init__()
        self._file = file
        self._max_length = max_length
        self._database: sqlite3.Connection | None = None  # Opened by `warmup`: creating a provider must be cheap.
        self._titles: list[str] = []
        self._note_written = asyncio.Condition()
        self.waiting_count = 0

    async def warmup(self) -> None:
        self._database = sqlite3.connect(self._file)
        self._database.execute("CREATE TABLE IF NOT EXISTS notes (title TEXT PRIMARY KEY, text TEXT NOT NULL)")
        self._update_titles()

    async def aclose(self) -> None:
        if self._database is not None:  # `warmup` may have failed, or not have run.
            self._database.close()

    def list_tools(self) -> Sequence[Tool]:
        note = {"title": TITLE, "text": {"type": "string"}}
        tools = [
            Tool("write", "Writes a note.", _object(note)),
            Tool("wait_for", "Waits until a note with this title is written.", _object({"title": TITLE}), timeout=300),
        ]
        if self._titles:
            titles = {"title": {"enum": self._titles}}
            tools.append(Tool("read", "Reads a note.", _object(titles)))
        return tools

    def get_instructions(self) -> str:
        return "Notes are kept after the conversation. Give each note a descriptive title."

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        match name:
            case "write":
                return ToolResult(ok=True, result=await self._write(parameters["title"], parameters["text"]))
            case "read":
                return ToolResult(ok=True, result=self._read(parameters["title"]))
            case "wait_for":
                return ToolResult(ok=True, result=await self._wait_for(parameters["title"]))
        raise ToolNotFoundError(f'there is no tool "{name}"')

    async def _write(self, title: str, text: str) -> str:
        if len(text) > self._max_length:
            raise ToolExecutionError(f"a note can have at most {self._max_length} characters", executed=False)
        with self._connection as database:
            database.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (title, text))
        if title not in self._titles:
            self._update_titles()
        async with self._note_written:
            self._note_written.notify_all()
        return f"{title}: {len(text)} characters"

    def _read(self, title: str) -> str:
        row = self._connection.execute("SELECT text FROM notes WHERE title = ?", (title,)).fetchone()
        if row is None:
            raise ToolExecutionError(f'there is no note "{title}"')
        return row[0]

    async def _wait_for(self, title: str) -> str:
        self.waiting_count += 1
        try:
            async with self._note_written:
                await self._note_written.wait_for(lambda: title in self._titles)
            return self._read(title)
        finally:
            self.waiting_count -= 1  # Also if the call is cancelled, which raises an exception in the wait.

    def _update_titles(self) -> None:
        self._titles = [title for (title,) in self._connection.execute("SELECT title FROM notes ORDER BY title")]
        self.notify_changed()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._database is None:
            raise ToolExecutionError("the database is not open", executed=False)
        return self._database


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with Toolspace(providers=[NotesProvider(Path(folder) / "notes.db")]) as ts:
            wait_call = asyncio.create_task(ts.call("notes__wait_for", {"title": "shopping"}))
            print((await ts.call("notes__write", {"title": "shopping", "text": "bread, milk"})).text)
            print((await wait_call).text)
            print((await ts.call("notes__read", {"title": "shoping"})).text)


if __name__ == "__main__":
    asyncio.run(main())
