"""Writes log records to standard error: as text for people, or as one JSON object per line for programs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from toolspace.cli.config_file import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE
from toolspace.cli.options import Options
from toolspace.cli.output import CommandOutput, escape_control_characters
from toolspace.core import json_text
from toolspace.core.names import SEPARATOR, did_you_mean, sanitise
from toolspace.core.secret_masking import mask_secrets
from toolspace.orchestrator.stages.call_events import VERBOSE

LEVELS = {
    "debug": logging.DEBUG,
    "verbose": VERBOSE,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_MARKS = (
    (logging.ERROR, "ERR", "red"),
    (logging.WARNING, "WRN", "yellow"),
    (logging.INFO, "INF", "blue"),
    (VERBOSE, "VRB", "cyan"),
    (logging.NOTSET, "DBG", "bright_black"),
)
_INDENT = "    "
_SERVER_LOGGERS = "toolspace.mcp."
_EXTRA_FIELDS = ("event", "callId", "runId", "taskId", "tool", "latencyMs", "errorKind", "server")
"""The attributes of a record that the JSON format adds to its message."""


def set_up_logs(options: Options, environ: Mapping[str, str]) -> None:
    """Sends the log to standard error, with the level of the options or of `TOOLSPACE_LOG`."""
    chosen_level = _choose_level(options, environ)
    handler = LogHandler(options.output, as_json=_is_json_format(environ))
    if chosen_level is None:
        # The command prints why its call failed, so the log need not.
        handler.addFilter(lambda record: record.name != "toolspace.calls" or record.levelno > logging.WARNING)
    level = logging.WARNING if chosen_level is None else chosen_level
    handler.shows_tracebacks = level <= VERBOSE
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # Other libraries log only warnings and errors.
    logging.getLogger("toolspace").setLevel(level)
    if options.trace_mcp:
        logging.getLogger("toolspace.mcp").setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def mute_provider_warnings(options: Options, *, of_tool: str | None = None) -> None:
    """Drops warnings about providers that did not start, because the command reports them itself.

    With `of_tool` only those of the provider of that tool.
    """
    if options.verbose:
        return

    def is_logged(record: logging.LogRecord) -> bool:
        provider = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        is_muted = of_tool is None or (provider and sanitise(of_tool).startswith(sanitise(provider) + SEPARATOR))
        return not is_muted or record.levelno > logging.WARNING

    logging.getLogger("toolspace.providers").addFilter(is_logged)


class LogHandler(logging.Handler):
    """Writes records as `[WRN] message`. Further lines are indented, so that one message cannot look like two."""

    def __init__(self, output: CommandOutput, *, as_json: bool) -> None:
        super().__init__()
        self.shows_tracebacks = False
        self._output = output
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = json_line(record) if self._as_json else self._text_line(record)
            self._output.err(line)
        except Exception:
            self._output.err(f"[ERR] a log record of {record.name} could not be written")

    def _text_line(self, record: logging.LogRecord) -> str:
        mark, colour = next((mark, colour) for level, mark, colour in _MARKS if record.levelno >= level)
        head, *rest = escape_control_characters(_server_prefix(record) + _message(record)).splitlines() or [""]
        rest = [line.removeprefix(_INDENT) for line in rest] + self._exception_lines(record)
        return "\n".join(
            [f"{self._output.style_error(f'[{mark}]', fg=colour)} {head}", *(_INDENT + line for line in rest)]
        )

    def _exception_lines(self, record: logging.LogRecord) -> list[str]:
        if not record.exc_info or record.exc_info[1] is None:
            return []
        lines = traceback.format_exception(record.exc_info[1])
        text = "".join(lines if self.shows_tracebacks else lines[-1:])
        return escape_control_characters(mask_secrets(text)).splitlines()


def json_line(record: logging.LogRecord) -> str:
    """Returns a record as one JSON object."""
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": logging.getLevelName(record.levelno).lower(),
        "logger": record.name,
        "message": _message(record),
    }
    fields |= {key: value for key in _EXTRA_FIELDS if (value := getattr(record, key, None)) not in (None, "")}
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = mask_secrets("".join(traceback.format_exception(record.exc_info[1])))
    return json_text.encode(fields)


def _server_prefix(record: logging.LogRecord) -> str:
    """Returns the name of the MCP server, if the record comes from the logger of one."""
    server = record.name.removeprefix(_SERVER_LOGGERS)
    return f"{server}: " if server != record.name else ""


def _message(record: logging.LogRecord) -> str:
    return mask_secrets(record.getMessage())


def _choose_level(options: Options, environ: Mapping[str, str]) -> int | None:
    """Returns the level of the options or of the variable, or None if neither is set. Options win."""
    if options.quiet:
        return logging.ERROR
    if options.verbose:
        return VERBOSE
    text = environ.get(LOG_LEVEL_VARIABLE, "").strip().lower()
    if not text:
        return None
    if text not in LEVELS:
        hint = did_you_mean(text, LEVELS)
        raise click.UsageError(f"{LOG_LEVEL_VARIABLE}={text}: the level is one of {', '.join(LEVELS)}{hint}")
    return LEVELS[text]


def _is_json_format(environ: Mapping[str, str]) -> bool:
    text = environ.get(LOG_FORMAT_VARIABLE, "").strip().lower()
    if text not in ("", "text", "json"):
        raise click.UsageError(f"{LOG_FORMAT_VARIABLE}={text}: the format is text or json")
    return text == "json"
