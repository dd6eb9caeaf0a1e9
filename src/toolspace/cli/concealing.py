"""Puts references to variables in the place of what looks like a secret in a server's entry. Rather too many than one
too few: a reference costs a moment, a secret in a file that is shared costs more."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolspace.core.secret_masking import is_secret_name, redact

_MORE_NAMES = re.compile(r"(?:^|[_-])(?:key|keys|pat|auth|jwt|dsn|token|tokens|sid|pw)$", re.IGNORECASE)
_UUID = re.compile(r"[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}", re.IGNORECASE)
_PIECE = re.compile(r"[A-Za-z0-9_]{20,}")
_REFERENCE = re.compile(r"(?<!\$)\$\{[^{}]*\}")
_FLAG = re.compile(r"(--?[\w.-]+)(=)(.+)", re.DOTALL)
_PAIR = re.compile(r"([A-Za-z_][\w-]*)(=|:\s*)(.+)", re.DOTALL)
_SCHEME = re.compile(r"(Bearer|Basic|Token)(\s+)(\S.*)", re.IGNORECASE | re.DOTALL)
_PATHS = ("/", "~/", "./", "../")


class Concealer:
    """Knows the variables that were given to secrets so far, so that no two secrets share one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self._taken: dict[str, str] = {}

    def conceal(self, server: str, entry: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
        """The entry without secrets; and the variables that stand for them, with what each was."""
        one = _Entry(self, server)
        result = dict(entry)
        for section in ("env", "headers"):
            if section in result:
                result[section] = {key: one.pair(section, key, value) for key, value in result[section].items()}
        if "args" in result:
            result["args"] = one.args(result["args"])
        for key in ("url", "command"):
            if key in result and looks_secret("", result[key]):
                result[key] = one.reference(key, result[key], key)
        return result, one.secrets

    def variable(self, server: str, name: str, value: str) -> str:
        """A variable for a value: the plain name, unless that means something else already."""
        plain = re.sub(r"[^A-Za-z0-9_]", "_", name)
        prefixed = re.sub(r"[^A-Za-z0-9_]", "_", f"{server}_{name}".upper())
        candidates = [plain] if re.fullmatch(r"[A-Z_][A-Z0-9_]*", plain) else []
        candidates += [prefixed, *(f"{prefixed}_{number}" for number in range(2, 1000))]
        for candidate in candidates:
            if candidate[0].isdigit():
                candidate = f"_{candidate}"
            known = self._taken.get(candidate, self.environ.get(candidate, value))
            if known == value:
                self._taken[candidate] = value
                return candidate
        raise AssertionError("a thousand secrets of one name")


class _Entry:
    """The secrets of one server."""

    def __init__(self, concealer: Concealer, server: str) -> None:
        self.secrets: dict[str, str] = {}
        self._concealer = concealer
        self._server = server

    def reference(self, name: str, value: str, what: str) -> str:
        # In the file `${` is written `$${`; the variable holds what is meant.
        variable = self._concealer.variable(self._server, name, value.replace("$${", "${"))
        self.secrets[variable] = what
        return f"${{{variable}}}"

    def pair(self, section: str, key: str, value: str) -> str:
        what = f"{section} {key}"
        if section == "headers" and (scheme := _SCHEME.fullmatch(value)) is not None:
            # Of an authorization only what comes after its scheme.
            hidden = self._value(key, scheme[3], "token" if key.casefold() == "authorization" else key, what)
            return f"{scheme[1]}{scheme[2]}{hidden}"
        return self._value(key, value, key, what)

    def args(self, args: list[str]) -> list[str]:
        result: list[str] = []
        flag = ""
        for arg in args:
            if (match := _FLAG.fullmatch(arg) or _PAIR.fullmatch(arg)) is not None:
                name = match[1].lstrip("-")
                value = self.pair("headers", name, match[3]) if ":" in match[2] else self._named_arg(name, match[3])
                # A part that is no secret may still be one together with the rest: a URL is `https:` and more.
                hidden = f"{match[1]}{match[2]}{value}"
                result.append(hidden if hidden != arg else self._value(flag, arg, flag or "arg", "an argument"))
            else:
                result.append(self._value(flag, arg, flag or "arg", f"args {flag}" if flag else "an argument"))
            flag = arg.lstrip("-") if re.fullmatch(r"--?[A-Za-z][\w.-]*", arg) else ""
        return result

    def _named_arg(self, name: str, value: str) -> str:
        return self._value(name, value, name, f"args {name}")

    def _value(self, name: str, value: str, variable: str, what: str) -> str:
        return self.reference(variable, value, what) if looks_secret(name, value) else value


def looks_secret(name: str, value: str) -> bool:
    """Whether a value under a name should not be written into a new file."""
    bare = _REFERENCE.sub("", value)
    if not bare.strip():
        return False
    # References that are there already are no secrets, and neither is what stands around them, mostly.
    if bare != value and redact(bare) == bare:
        return False
    if value.startswith(_PATHS) and Path(value).expanduser().exists():
        return False
    if is_secret_name(name) or _MORE_NAMES.search(name):
        return True
    return redact(value) != value or _UUID.search(value) is not None or any(map(_random, _PIECE.findall(value)))


def _random(piece: str) -> bool:
    """Whether a long word is more likely made by a machine than by a person: letters and digits in a mix."""
    return sum(one.isdigit() for one in piece) >= 3 and sum(one.isalpha() for one in piece) >= 3
