"""`toolspace backup`: writes a backup of the gateway's data to a file, also while the gateway runs."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import click
import msgspec

from toolspace import __version__
from toolspace.cli.config_file import read_config
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import show_status
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.config.configuration import Config
from toolspace.storage.backup import BackupManifest, TableSource, write_backup
from toolspace.storage.database import find_database_file


@click.command("backup", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--skip-damaged", is_flag=True, help="Leave out rows that cannot be read, instead of stopping.")
@click.pass_obj
async def command(options: Options, file: Path, skip_damaged: bool) -> int:
    """Write a backup of the gateway's data to FILE: the database, and the files of the state directory.

    The gateway may run meanwhile. The backup has secrets, such as logins and the secret that signs tokens; only you may
    read the file. It does not have the configuration. toolspace restore FILE reads it.
    """
    set_up_logs(options, os.environ)
    config = await asyncio.to_thread(resolve_process_secrets, read_config(options))
    url, state_dir = config.storage.url, config.state_dir
    database_file = find_database_file(url, state_dir)

    async def write(source: TableSource) -> BackupManifest:
        return await write_backup(file, source, state_dir, toolspace_version=__version__, skip_damaged=skip_damaged)

    async with show_status(options.output, "writing the backup"):
        if database_file is not None:
            from toolspace.storage.sqlite.backup import open_source  # Imported here, because it imports SQLite.

            with open_source(database_file, skip_damaged=skip_damaged) as source:
                manifest = await write(source)
        else:
            from toolspace.storage.postgres.backup import open_source as open_postgres  # asyncpg is optional.

            assert url is not None
            async with open_postgres(url) as source:
                manifest = await write(source)
    _report(options, file, manifest)
    if _can_tools_read(file, config):
        options.output.warning(
            f"tools can read {file}, which has secrets: it is in a folder of tools.allowedPaths; move it elsewhere, "
            "or into the state directory"
        )
    return 0 if manifest.is_complete else 1


def _can_tools_read(file: Path, config: Config) -> bool:
    real_path, allowed_paths = file.resolve(), config.tools.allowed_paths
    if real_path.is_relative_to(config.state_dir.resolve()):
        return False
    roots = (Path.cwd(),) if allowed_paths is None else allowed_paths
    return any(real_path.is_relative_to(root.resolve()) for root in roots)


def _report(options: Options, file: Path, manifest: BackupManifest) -> None:
    size = file.stat().st_size
    rows = sum(table.rows for table in manifest.tables.values())
    if options.json:
        document = {"path": str(file.absolute()), "bytes": size, "rows": rows}
        options.output.document({**document, **msgspec.to_builtins(manifest)})
        return
    options.output.line(f"Wrote {file}: {rows} rows of {len(manifest.tables)} tables and {manifest.files} files.")
    if not manifest.is_complete:
        options.output.warning("rows that cannot be read are missing in this backup")
