"""Log records as lines on standard error: for people, or one JSON object each for programs."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import click

from toolspace.cli.options import Options
from toolspace.cli.output import CommandOutput, escape_control_characters
from toolspace.core import json_text
from toolspace.core.names import SEPARATOR, did_you_mean, sanitise
from toolspace.core.secret_masking import mask_secrets
from toolspace.orchestrator.stages.announce import VERBOSE

LEVEL_VARIABLE = "TOOLSPACE_LOG"
FORMAT_VARIABLE = "TOOLSPACE_LOG_FORMAT"
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
_SERVERS = "toolspace.mcp."
_FACTS = ("event", "callId", "runId", "taskId", "tool", "latencyMs", "errorKind", "server")
"""What a record may carry beside its message, in the JSON format."""


def set_up_logs(options: Options, environ: Mapping[str, str]) -> None:
    """Sends the log to standard error, as the options and `TOOLSPACE_LOG` say."""
    chosen = _level(options, environ)
    handler = LogHandler(options.output, as_json=_wants_json(environ))
    if chosen is None:
        # The command says itself why a call failed; once is enough.
        handler.addFilter(lambda record: record.name != "toolspace.calls" or record.levelno > logging.WARNING)
    level = logging.WARNING if chosen is None else chosen
    handler.details = level <= VERBOSE
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(level, logging.WARNING))  # Of other libraries: what they warn of.
    logging.getLogger("toolspace").setLevel(level)
    if options.trace_mcp:
        logging.getLogger("toolspace.mcp").setLevel(logging.DEBUG)
    logging.captureWarnings(True)


def mute_provider_warnings(options: Options, *, of_tool: str | None = None) -> None:
    """Lets the log not say why a provider is not there, where the command says so itself: of all, or of one tool's."""
    if options.verbose:
        return

    def is_news(record: logging.LogRecord) -> bool:
        provider = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
        told = of_tool is None or (provider and sanitise(of_tool).startswith(sanitise(provider) + SEPARATOR))
        return not told or record.levelno > logging.WARNING

    logging.getLogger("toolspace.providers").addFilter(is_news)


class LogHandler(logging.Handler):
    """Writes one record: `[WRN] message`, further lines indented, so that no message can pass for two."""

    def __init__(self, output: CommandOutput, *, as_json: bool) -> None:
        super().__init__()
        self.details = False
        """Whether to show tracebacks."""
        self._output = output
        self._as_json = as_json

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = json_line(record) if self._as_json else self._line(record)
            self._output.err(line)
        except Exception:
            self._output.err(f"[ERR] a log record of {record.name} could not be written")

    def _line(self, record: logging.LogRecord) -> str:
        mark, colour = next((mark, colour) for level, mark, colour in _MARKS if record.levelno >= level)
        head, *rest = escape_control_characters(_whose(record) + _message(record)).splitlines() or [""]
        rest = [line.removeprefix(_INDENT) for line in rest] + self._fault(record)
        return "\n".join(
            [f"{self._output.style_error(f'[{mark}]', fg=colour)} {head}", *(_INDENT + line for line in rest)]
        )

    def _fault(self, record: logging.LogRecord) -> list[str]:
        if not record.exc_info or record.exc_info[1] is None:
            return []
        lines = traceback.format_exception(record.exc_info[1])
        return escape_control_characters(mask_secrets("".join(lines if self.details else lines[-1:]))).splitlines()


def json_line(record: logging.LogRecord) -> str:
    """A record as one JSON object."""
    facts: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": logging.getLevelName(record.levelno).lower(),
        "logger": record.name,
        "message": _message(record),
    }
    facts |= {key: value for key in _FACTS if (value := getattr(record, key, None)) not in (None, "")}
    if record.exc_info and record.exc_info[1] is not None:
        facts["exception"] = mask_secrets("".join(traceback.format_exception(record.exc_info[1])))
    return json_text.encode(facts)


def _whose(record: logging.LogRecord) -> str:
    """The MCP server that a record is about, which has a logger of its own."""
    server = record.name.removeprefix(_SERVERS)
    return f"{server}: " if server != record.name else ""


def _message(record: logging.LogRecord) -> str:
    return mask_secrets(record.getMessage())


def _level(options: Options, environ: Mapping[str, str]) -> int | None:
    """The level that was asked for, or None. A flag says more than a variable."""
    if options.quiet:
        return logging.ERROR
    if options.verbose:
        return VERBOSE
    text = environ.get(LEVEL_VARIABLE, "").strip().lower()
    if not text:
        return None
    if text not in LEVELS:
        hint = did_you_mean(text, LEVELS)
        raise click.UsageError(f"{LEVEL_VARIABLE}={text}: the level is one of {', '.join(LEVELS)}{hint}")
    return LEVELS[text]


def _wants_json(environ: Mapping[str, str]) -> bool:
    text = environ.get(FORMAT_VARIABLE, "").strip().lower()
    if text not in ("", "text", "json"):
        raise click.UsageError(f"{FORMAT_VARIABLE}={text}: the format is text or json")
    return text == "json"
