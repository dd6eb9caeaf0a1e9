"""Backups of a gateway: a zip file with the rows of all tables and the files of the state directory.

    manifest.json           when and by which version it was made, and how many rows and files it has; written last
    tables/{name}.jsonl     the rows of a table, one JSON array each
    files/{path}            files of the state directory

Rows are stored as JSON, so that a backup of SQLite can be restored into PostgreSQL and the other way round.
`TableSource` and `TableTarget` are the two databases; `sqlite/backup.py` and `postgres/backup.py` implement them. Used
by the commands `toolspace backup` and `toolspace restore`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from toolspace.core.ids import now_ms
from toolspace.errors import StorageDamaged, StorageError
from toolspace.storage.database import Row
from toolspace.storage.migrations import MIGRATIONS

FORMAT: Final = 1
BATCH_ROWS: Final = 1_000
_MANIFEST: Final = "manifest.json"
_COPY_BYTES: Final = 1024 * 1024
_EXCLUDED_FOLDERS: Final = ("run",)
_EXCLUDED_SUFFIXES: Final = (".db", ".db-wal", ".db-shm", ".db-journal", ".lock", ".sock")
"""Databases are stored as rows; the cache can be made again."""
_KEPT_DATABASE: Final = ".before-restore-"
_MAX_MANIFEST_BYTES: Final = 16 << 20
_MAX_ROW_BYTES: Final = 256 << 20
_READ_ERRORS: Final = (
    OSError,
    KeyError,
    ValueError,  # Also of msgspec.
    ArithmeticError,  # A number that no column can have.
    EOFError,
    RuntimeError,  # An encrypted entry, or an unknown compression.
    zipfile.BadZipFile,
    zlib.error,
)
"""What reading a damaged or forged file raises."""

Progress = Callable[[str], None]
"""Called with what is being copied."""


class BackupManifest(msgspec.Struct, rename="camel", kw_only=True):
    """What a backup has."""

    format: int
    toolspace_version: str
    schema_version: int
    """The number of the newest migration."""
    created_at: int
    tables: dict[str, BackupTable]
    files: int
    is_complete: bool = True
    """False if damaged rows were left out."""


class BackupTable(msgspec.Struct, rename="camel"):
    """One table of a backup."""

    columns: tuple[str, ...]
    rows: int


class TableSource(ABC):
    """One consistent state of a database, to read all of its rows."""

    schema_version: int
    tables: dict[str, tuple[str, ...]]
    """The tables with their columns."""

    @abstractmethod
    def read_rows(self, table: str, *, skip_damaged: bool) -> AsyncIterator[list[Row]]:
        """Yields the rows in batches. Raises `StorageDamaged`, or ends early with `skip_damaged`."""


class TableTarget(ABC):
    """An empty database, to write all rows of a backup."""

    @abstractmethod
    async def create_tables(self, schema_version: int) -> None:
        """Creates the tables of a version."""

    @abstractmethod
    async def order_tables(self, tables: Sequence[str]) -> list[str]:
        """The tables in an order in which a row comes after the rows that it refers to."""

    @abstractmethod
    async def write_rows(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None: ...

    @abstractmethod
    async def finish(self) -> None:
        """Applies the newer migrations, and makes everything durable."""


# Writing


async def write_backup(
    file: Path,
    source: TableSource,
    state_dir: Path,
    *,
    toolspace_version: str,
    skip_damaged: bool = False,
    on_progress: Progress = lambda _: None,
) -> BackupManifest:
    """Writes a backup. The file appears when it is complete, readable by its owner only. Raises `StorageError`."""
    unfinished_file = file.with_name(f"{file.name}.unfinished")
    if await asyncio.to_thread(os.path.lexists, file):
        raise StorageError(f"{file} exists already; name another file")
    try:
        descriptor = os.open(unfinished_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                manifest = BackupManifest(
                    format=FORMAT,
                    toolspace_version=toolspace_version,
                    schema_version=source.schema_version,
                    created_at=now_ms(),
                    tables={},
                    files=0,
                )
                for table, columns in source.tables.items():
                    on_progress(f"table {table}")
                    count, is_complete = await _write_table(archive, source, table, skip_damaged=skip_damaged)
                    manifest.tables[table] = BackupTable(columns, count)
                    manifest.is_complete = manifest.is_complete and is_complete
                on_progress("files")
                manifest.files = await asyncio.to_thread(_write_files, archive, state_dir, {file, unfinished_file})
                archive.writestr(_MANIFEST, msgspec.json.encode(manifest))
            stream.flush()
            os.fsync(stream.fileno())
        os.link(unfinished_file, file)  # Fails if the file exists by now, unlike a rename.
    except FileExistsError:
        raise StorageError(f"{file} exists already; name another file") from None
    except OSError as error:
        raise StorageError(f"{file} cannot be written: {error.strerror or error}") from error
    finally:
        unfinished_file.unlink(missing_ok=True)
    return manifest


async def _write_table(
    archive: zipfile.ZipFile, source: TableSource, table: str, *, skip_damaged: bool
) -> tuple[int, bool]:
    """The number of rows that were written, and whether these are all."""
    count = 0
    with archive.open(f"tables/{table}.jsonl", "w", force_zip64=True) as entry:
        try:
            async for rows in source.read_rows(table, skip_damaged=skip_damaged):
                data = b"".join(msgspec.json.encode(row) + b"\n" for row in map(list, rows))
                await asyncio.to_thread(entry.write, data)
                count += len(rows)
        except StorageDamaged:
            if not skip_damaged:
                raise
            return count, False
    return count, True


def _write_files(archive: zipfile.ZipFile, state_dir: Path, excluded_files: set[Path]) -> int:
    count = 0
    excluded_paths = {path.absolute() for path in excluded_files}
    for path in _list_files(state_dir):
        try:
            if path.absolute() in excluded_paths or not stat.S_ISREG(path.lstat().st_mode):
                continue
            with path.open("rb") as file, archive.open(_entry_name(path, state_dir), "w", force_zip64=True) as entry:
                while data := file.read(_COPY_BYTES):
                    entry.write(data)
        except FileNotFoundError:  # Deleted meanwhile: an output expired, for example.
            continue
        count += 1
    return count


def _entry_name(path: Path, state_dir: Path) -> str:
    return f"files/{path.relative_to(state_dir).as_posix()}"


def _list_files(state_dir: Path) -> Iterator[Path]:
    for folder, folder_names, names in os.walk(state_dir):
        if Path(folder) == state_dir:
            folder_names[:] = [name for name in folder_names if name not in _EXCLUDED_FOLDERS]
        yield from (Path(folder, name) for name in sorted(names) if not _is_excluded(name))


def _is_excluded(name: str) -> bool:
    return name.endswith(_EXCLUDED_SUFFIXES) or _KEPT_DATABASE in name


# Reading


def read_manifest(file: Path) -> BackupManifest:
    """The manifest of a backup. Raises `StorageError` if it is no backup, damaged, or of a newer version."""
    try:
        with zipfile.ZipFile(file) as archive:
            if archive.getinfo(_MANIFEST).file_size > _MAX_MANIFEST_BYTES:
                raise StorageError(f"{file} is not a backup of Toolspace: its {_MANIFEST} is too large")
            manifest = msgspec.json.decode(archive.read(_MANIFEST), type=BackupManifest)
            wrong_names = [*_list_wrong_names(manifest), *filter(_is_wrong_entry, archive.namelist())]
    except FileNotFoundError:
        raise StorageError(f"{file} does not exist") from None
    except _READ_ERRORS as error:
        raise StorageError(f"{file} is not a complete backup of Toolspace: {error}") from error
    if wrong_names:
        raise StorageError(f"{file} has a table, column or file with the wrong name {wrong_names[0]!r}")
    if manifest.format > FORMAT or manifest.schema_version > len(MIGRATIONS):
        raise StorageError(
            f"{file} was written by Toolspace {manifest.toolspace_version}, which is newer than this one; "
            "upgrade Toolspace to restore it"
        )
    return manifest


def check_unpacked_size(file: Path, state_dir: Path) -> None:
    """Raises `StorageError` if the contents of a backup do not fit on the disk. No entry can be larger than it says."""
    folder = next(path for path in (state_dir, *state_dir.absolute().parents) if path.exists())
    with zipfile.ZipFile(file) as archive:
        size = sum(entry.file_size for entry in archive.infolist())
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StorageError(f"{file} has {size:,} bytes of data, and the disk of {state_dir} has only {free:,} free")


def _list_wrong_names(manifest: BackupManifest) -> Iterator[str]:
    for name, table in manifest.tables.items():
        yield from (text for text in (name, *table.columns) if not text.isidentifier())


def _is_wrong_entry(name: str) -> bool:
    """Whether an entry leads out of its folder, or would replace a database or a lock."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        return True
    return parts[0] == "files" and (
        parts[1:2] in [(folder,) for folder in _EXCLUDED_FOLDERS] or _is_excluded(parts[-1])
    )


async def restore_tables(
    file: Path, manifest: BackupManifest, target: TableTarget, on_progress: Progress = lambda _: None
) -> None:
    """Writes the rows of a backup into an empty database. Raises `StorageError`."""
    try:
        await target.create_tables(manifest.schema_version)
        with zipfile.ZipFile(file) as archive:
            for table in await target.order_tables(list(manifest.tables)):
                on_progress(f"table {table}")
                await _restore_table(archive, table, manifest.tables[table], target)
    except _READ_ERRORS as error:
        raise StorageError(f"{file} is damaged: {error}") from error
    await target.finish()


async def _restore_table(archive: zipfile.ZipFile, name: str, table: BackupTable, target: TableTarget) -> None:
    count = 0
    decoder = msgspec.json.Decoder(list[str | int | float | None])
    with archive.open(f"tables/{name}.jsonl") as entry:
        batch: list[Row] = []
        while line := entry.readline(_MAX_ROW_BYTES):
            batch.append(decoder.decode(line))
            if len(batch) == BATCH_ROWS:
                await target.write_rows(name, table.columns, batch)
                count, batch = count + len(batch), []
        if batch:
            await target.write_rows(name, table.columns, batch)
            count += len(batch)
    if count != table.rows:
        raise StorageError(f"the backup has {count} rows of the table {name}, and should have {table.rows}")


def restore_files(file: Path, state_dir: Path) -> int:
    """Writes the files of a backup into the state directory, replacing existing ones. Raises `StorageError`.

    Call `read_manifest` first: it checks the names.
    """
    count = 0
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                folder, *parts = PurePosixPath(entry.filename).parts
                if folder == "files" and parts and not entry.is_dir():
                    _restore_file(archive, entry, state_dir.joinpath(*parts))
                    count += 1
    except _READ_ERRORS as error:
        raise StorageError(f"the files of {file} cannot be restored: {error}") from error
    return count


def _restore_file(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished_file = target.with_name(f"{target.name}.restored")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    with archive.open(entry) as source, os.fdopen(os.open(unfinished_file, flags, 0o600), "wb") as file:
        while data := source.read(_COPY_BYTES):
            file.write(data)
    unfinished_file.replace(target)
