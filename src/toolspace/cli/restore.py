"""`toolspace restore`: loads a backup into the database of the configuration."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import click
import msgspec

from toolspace.cli.config_file import read_config
from toolspace.cli.logs import set_up_logs
from toolspace.cli.options import Command, Options
from toolspace.cli.output import show_status
from toolspace.composition.process_secrets import resolve_process_secrets
from toolspace.storage.backup import check_unpacked_size, read_manifest, restore_files, restore_tables
from toolspace.storage.database import describe_database, find_database_file


@click.command("restore", cls=Command)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--replace", is_flag=True, help="Replace an SQLite database; the old file is kept under another name.")
@click.pass_obj
async def command(options: Options, file: Path, replace: bool) -> int:
    """Load the backup FILE into the database of this configuration.

    Stop the gateway first. The database must be empty; with --replace an SQLite file may exist, and is kept under
    another name. A backup of SQLite can be loaded into PostgreSQL, and the other way round. If something fails, the
    database stays as it was.
    """
    set_up_logs(options, os.environ)
    config = await asyncio.to_thread(resolve_process_secrets, read_config(options))
    url, state_dir = config.storage.url, config.state_dir
    database_file = find_database_file(url, state_dir)
    manifest = await asyncio.to_thread(read_manifest, file)
    await asyncio.to_thread(check_unpacked_size, file, state_dir)
    async with show_status(options.output, "restoring the backup"):
        if database_file is not None:
            from toolspace.storage.sqlite.backup import open_target  # Imported here, because it imports SQLite.

            with open_target(database_file, replace=replace) as target:
                await restore_tables(file, manifest, target)
        else:
            from toolspace.storage.postgres.backup import open_target as open_postgres  # asyncpg is optional.

            assert url is not None
            async with open_postgres(url) as target:
                await restore_tables(file, manifest, target)
        await asyncio.to_thread(restore_files, file, state_dir)
    place = describe_database(url, state_dir)
    if options.json:
        options.output.document({"data": place, "state": str(state_dir), **msgspec.to_builtins(manifest)})
        return 0
    rows = sum(table.rows for table in manifest.tables.values())
    created_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_at / 1000))
    options.output.line(f"Restored {rows} rows and {manifest.files} files of {created_at} into {place}.")
    return 0
