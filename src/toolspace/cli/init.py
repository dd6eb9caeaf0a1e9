"""`toolspace init`: writes a commented configuration to start from."""

from __future__ import annotations

from pathlib import Path

import click

from toolspace.cli.options import Command, Options
from toolspace.config.locate import CONFIG_NAMES
from toolspace.config.starter import starter_config

_NAME = CONFIG_NAMES[0]


@click.command("init", cls=Command)
@click.argument("path", type=click.Path(), default=".")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
@click.pass_obj
def command(options: Options, path: str, force: bool) -> int:
    """Write a commented toolspace.yaml to PATH: a folder (by default this one), or a file.

    It changes nothing until you take a line of it in.
    """
    target = Path(path)
    if target.is_dir():
        target /= _NAME
    if target.suffix not in (".yaml", ".yml"):
        raise click.UsageError(f"{target}: there is no such folder; a file must be called .yaml, which it is")
    try:
        # "x" refuses in one step, so that a file that appears meanwhile is safe too.
        with target.open("w" if force else "x", encoding="utf-8") as file:
            file.write(starter_config())
    except FileExistsError:
        raise click.UsageError(f"{target} is there already; --force replaces it") from None
    except OSError as error:
        raise click.UsageError(f"{target} cannot be written: {error.strerror or error}") from None
    if options.json:
        options.output.document({"path": str(target.absolute())})
        return 0
    options.output.line(f"Wrote {target}.")
    where = "" if target.absolute() == Path.cwd() / _NAME else f" --config {target}"
    for line in ("Now try:", f"  toolspace list{where}", f"  toolspace doctor{where}"):
        options.output.note(line)
    return 0
