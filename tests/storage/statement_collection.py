"""Collects every SQL statement of the programs in `toolspace.storage.queries`, for the test that looks at their plans.

Each program runs with sample arguments on a small database in memory. The arguments follow from the names and types of
the parameters: each optional one is also left out, and each pair of filters is used together. `Collection.missed_lines`
names the lines of programs that never ran, so a new statement is either collected or reported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import pkgutil
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

from tests.storage.statement_samples import LATER, VALUES, seed, special_samples
from toolspace.core.ids import now_ms
from toolspace.errors import RefusedError
from toolspace.storage import queries
from toolspace.storage.database import READ_CLOCK, Program, RowBatch, StaleError
from toolspace.storage.migrations import migrate
from toolspace.storage.queries import quotas

_HELPERS: Final = "statement_builder"
_IDS_BEFORE: Final = {"approvals": "call_done", "call_lists": "call_done", "runs": "run_2", "tasks": "task_1"}
"""The value of `before`, if it is an id, by module."""


def _module_of(function: Callable[..., Any]) -> str:
    return function.__module__.rpartition(".")[2]


def _modules() -> list[ModuleType]:
    names = [info.name for info in pkgutil.iter_modules(queries.__path__)]
    return [importlib.import_module(f"{queries.__name__}.{name}") for name in names if name != _HELPERS]


def list_programs() -> list[Callable[..., Program[Any]]]:
    """The public functions of `storage/queries` that return a program."""
    return [
        function
        for module in _modules()
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and function.__module__ == module.__name__
        and not name.startswith("_")
        and str(function.__annotations__.get("return")).startswith("Program[")
        and name not in ("transition", "run_once", "select_calls")  # They get statements or programs; others call them.
    ]


def _values(function: Callable[..., Any], parameter: inspect.Parameter, hint: Any) -> list[Any]:
    """What to pass for a parameter. An optional one starts with its default: None, or an empty sequence."""
    name, options = parameter.name, get_args(hint)
    values: list[Any]
    if name == "before" and (hint is str or str in options):
        values = [_IDS_BEFORE[_module_of(function)]]
    elif get_origin(hint) is Literal:
        values = list(options)
    elif name in VALUES and (name != "keys" or "Sequence[str]" in str(function.__annotations__[name])):
        values = list(VALUES[name])
        if name == "status" and hint is int:
            values = [200]
    elif hint is bool:
        values = [False, True]
    elif hint is int or int in options:
        values = [LATER]
    elif hint is str or str in options:
        values = ["text"]
    else:
        values = [{}]
    if parameter.default is not inspect.Parameter.empty and parameter.default not in values:
        values.insert(0, parameter.default)
    elif type(None) in options and None not in values:
        values.append(None)
    return values


def samples_of(function: Callable[..., Program[Any]]) -> Iterator[Callable[[], Program[Any]]]:
    """Calls of a program: one parameter varies at a time, and each pair of the optional ones."""
    hints = get_type_hints(function)
    parameters = list(inspect.signature(function).parameters.values())
    choices = {parameter.name: _values(function, parameter, hints[parameter.name]) for parameter in parameters}
    base = {name: values[0] for name, values in choices.items()}
    changes: list[dict[str, Any]] = [{}]
    changes += [{name: value} for name, values in choices.items() for value in values[1:]]
    optional = [parameter.name for parameter in parameters if parameter.default is not inspect.Parameter.empty]
    changes += [
        {first: choices[first][-1], second: choices[second][-1]}
        for first, second in itertools.combinations(optional, 2)
    ]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for change in changes:
        arguments = {**base, **change}
        places = [arguments.pop(name) for name in positional]
        yield partial(function, *places, **arguments)


# Running


class Runner:
    """A small database in memory. Everything that a sample changes is undone."""

    def __init__(self) -> None:
        self._connection = sqlite3.connect(":memory:", isolation_level=None)
        self._connection.execute("PRAGMA foreign_keys = ON")
        self.statements: dict[str, tuple[Sequence[Any], str]] = {}
        """The values and the program of each statement, by its SQL."""
        self.program_name = ""
        self.run(migrate())
        for program in seed():
            self.run(program)
        self.statements.clear()

    def close(self) -> None:
        self._connection.close()

    def run(self, program: Program[Any]) -> Any:
        rows: list[Any] | None = None
        while True:
            try:
                sql, values = program.send(rows) if rows is not None else next(program)
            except StopIteration as stop:
                return stop.value
            if sql is READ_CLOCK:
                rows = [(now_ms(),)]
                continue
            batch: Sequence[Any] = values if isinstance(values, RowBatch) else [values]
            if batch:
                self.statements.setdefault(sql, (batch[0], self.program_name))
            rows = []
            for row in batch:
                rows = self._connection.execute(sql, row).fetchall()

    def try_out(self, name: str, sample: Callable[[], Program[Any]]) -> None:
        self.program_name = name
        self._connection.execute("SAVEPOINT sample")
        try:
            self.run(sample())
        except (RefusedError, quotas.QuotaExceeded, StaleError, sqlite3.IntegrityError):
            pass  # A refusal is one way for a program to end.
        except Exception as error:
            error.add_note(f"while running {name}; give its parameters a sample in statement_samples.py")
            raise
        finally:
            self._connection.execute("ROLLBACK TO sample")
            self._connection.execute("RELEASE sample")


class Collection:
    """All statements of `storage/queries`, and which lines of programs did not run."""

    def __init__(self) -> None:
        executed_lines: set[tuple[str, int]] = set()
        files = {inspect.getsourcefile(module) or "" for module in _modules()}

        def trace(frame: FrameType, event: str, _: object) -> Any:
            if frame.f_code.co_filename not in files:
                return None
            executed_lines.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        runner = Runner()
        special = special_samples(runner.run)
        previous_trace = sys.gettrace()
        sys.settrace(trace)
        try:
            for function in dict.fromkeys((*list_programs(), *special)):
                name = f"{_module_of(function)}.{function.__name__}"
                for sample in special.get(function) or samples_of(function):
                    runner.try_out(name, sample)
        finally:
            sys.settrace(previous_trace)
            runner.close()
        self.statements = runner.statements
        self.missed_lines = [
            f"{Path(file).name}:{line}: {text}"
            for file in sorted(files)
            for line, end, text in _program_lines(Path(file))
            if not any((file, number) in executed_lines for number in range(line, end + 1))
        ]


def _program_lines(file: Path) -> Iterator[tuple[int, int, str]]:
    """Where functions that return a program run statements or other programs: the first and the last line of each."""
    source = file.read_text("utf-8")
    lines = source.splitlines()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.returns is None:
            continue
        if not ast.unparse(function.returns).startswith("Program"):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.stmt) or isinstance(node, ast.FunctionDef):
                continue
            body: list[ast.stmt] | None = getattr(node, "body", None)
            end = max((body[0].lineno - 1 if body else node.end_lineno) or 0, node.lineno)
            parts = [part for part in ast.walk(node) if getattr(part, "lineno", 0) <= end]
            runs_statement = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts)
            if runs_statement or (isinstance(node, ast.Return) and isinstance(node.value, ast.Call)):
                yield node.lineno, end, lines[node.lineno - 1].strip()
