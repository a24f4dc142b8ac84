"""Parses option values. An invalid value is refused with what would be valid."""

import difflib
import json
import re
import sys
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import typer

from trellis.engine.errors import (
    InputError,
    OptionInvalid,
    PayloadInvalid,
    PayloadTooLarge,
    SettingsInvalid,
    UnknownLifecycle,
)
from trellis.engine.jobs import PAYLOAD_BYTES_MAX, ReasonCode
from trellis.lifecycles import EVENT_TYPES, LIFECYCLES

STATUS_OPTIONS = "--status (or --state)"
"""Both names of the option: whoever typed the second one must find it in the error."""
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
UNIQUE_OPTIONS = {
    "unique": "--unique",
    "while_": "--while",
    "window_s": "--window",
    "on_conflict": "--on-conflict",
    "debounce_s": "--debounce",
    "debounce_max_s": "--debounce-max",
}
"""The options of `submit` that are about unique jobs, by their fields."""
_DURATION = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([a-z]*)")
_DURATION_EXPECTED = "write a number of seconds, or 500ms, 30s, 10m, 2h, 1d"


def seconds(option: str, text: str | None) -> float | None:
    """Seconds from `90`, `90s` or `1.5h`; never negative."""
    if text is None:
        return None
    match = _DURATION.fullmatch(text.strip().lower())
    if match is None or (match[2] and match[2] not in UNITS_S):
        raise OptionInvalid(option=option, value=text, expected=_DURATION_EXPECTED)
    value = float(match[1]) * UNITS_S[match[2] or "s"]
    if value < 0:
        raise OptionInvalid(option=option, value=text, expected="it must not be negative")
    return value


def moment(option: str, text: str | None) -> datetime | None:
    """A moment in ISO 8601 with a time zone, without which it would be ambiguous."""
    if text is None:
        return None
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        expected = "write ISO 8601, such as 2026-03-01T06:00:00+01:00"
        raise OptionInvalid(option=option, value=text, expected=expected) from None
    if value.tzinfo is None:
        raise OptionInvalid(option=option, value=text, expected="say the time zone too: add Z or +01:00")
    return value


def payload(type_: str, text: str | None) -> Any:
    """JSON from text, @file, or standard input (-); its size is checked before parsing."""
    if text is None:
        return None
    body = _bytes(text)
    if len(body) > PAYLOAD_BYTES_MAX:
        raise PayloadTooLarge(size=f"more than {PAYLOAD_BYTES_MAX}", limit=PAYLOAD_BYTES_MAX)
    try:
        return json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        detail = f"it is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise PayloadInvalid(type=type_, detail=detail) from error
    except RecursionError:
        raise PayloadInvalid(type=type_, detail="it is nested too deeply") from None
    except ValueError as error:
        raise PayloadInvalid(type=type_, detail=f"it is not JSON: {error}") from error


def lifecycle(name: str | None) -> str | None:
    """A lifecycle by name."""
    if name is not None and name not in LIFECYCLES:
        known = ", ".join(LIFECYCLES)
        raise UnknownLifecycle(name=name, known=f"{known}{did_you_mean(name, LIFECYCLES)}")
    return name


def state(name: str | None, of: str | None) -> tuple[str | None, str | None]:
    """A state and its lifecycle. Without a lifecycle: leased-job first, then the only other one that has the state."""
    if name is None:
        return None, of
    owners = [one for one in ([of] if of else ["leased-job", *LIFECYCLES]) if name in LIFECYCLES[one].by_name]
    if owners:
        return name, owners[0]
    known = list(LIFECYCLES[of].by_name) if of else [s for one in LIFECYCLES.values() for s in one.by_name]
    if hint := did_you_mean(name, known).removeprefix("; "):
        raise OptionInvalid(
            option=STATUS_OPTIONS, value=name, expected=f"{hint}; `trellis lifecycles` lists all there are"
        )
    lifecycles = [of] if of else ["leased-job", *(one for one in LIFECYCLES if one != "leased-job")]
    says = "; ".join(f"{one} has {', '.join(LIFECYCLES[one].by_name)}" for one in lifecycles)
    raise OptionInvalid(option=STATUS_OPTIONS, value=name, expected=says)


def reason(name: str | None) -> ReasonCode | None:
    """A reason code of a dead letter."""
    return None if name is None else ReasonCode(_one_of("--reason", name, list(ReasonCode)))


def event_type(name: str | None) -> str | None:
    """An event type."""
    return None if name is None else _one_of("--type", name, list(EVENT_TYPES))


def limit(value: int, most: int) -> int:
    """Validate a number of rows."""
    if not 1 <= value <= most:
        raise OptionInvalid(option="--limit", value=value, expected=f"it must be from 1 to {most}")
    return value


def confirm(would: str, question: str, *, dry_run: str = "count only") -> None:
    """Ask before a change of many things. Raises InputError if there is nobody to ask, and Abort for a no."""
    if not sys.stdin.isatty():
        raise InputError(detail=f"{would}: say --yes to do it, --dry-run to {dry_run}.")
    typer.confirm(question, abort=True, err=True)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is closest to a mistyped one."""
    names = list(known)
    by_lower = {one.lower(): one for one in reversed(names)}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = difflib.get_close_matches(name, names, n=1)
    near = near or [by_lower[one] for one in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    return near[0] if near else None


def _one_of(option: str, name: str, known: list[str]) -> str:
    if name not in known:
        near = nearest(name, known)
        hint = "" if near is None else f"perhaps you mean {near}; "
        expected = f"{hint}choose one of {', '.join(known)}"
        raise OptionInvalid(option=option, value=name, expected=expected)
    return name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name, with a suggestion."""
    near = nearest(name, known)
    return f"; perhaps you mean {near}" if near else ""


def other_type(type_: str, seen: Iterable[str]) -> str:
    """A sentence with the job type that was probably meant, where a filter found nothing; empty if none is close."""
    types = set(seen)
    near = None if type_ in types else nearest(type_, sorted(types))
    return "" if near is None else f" Did you mean --type {near}?"


def _bytes(text: str) -> bytes:
    if text == "-":
        return _bounded(sys.stdin.buffer)
    if not text.startswith("@"):
        return text.encode("utf-8", "surrogateescape")
    try:
        with Path(text[1:]).open("rb") as file:
            return _bounded(file)
    except OSError as error:
        raise OptionInvalid(
            option="PAYLOAD", value=text, expected=f"the file cannot be read ({error.strerror})"
        ) from error


def _bounded(stream: BinaryIO) -> bytes:
    """Read at most one byte more than is allowed, which is enough to detect the excess."""
    return stream.read(PAYLOAD_BYTES_MAX + 1)


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if value in {float("inf"), float("-inf")}:
        raise ValueError(f"{text} is too large for a number")
    return value


def pairs(option: str, texts: Iterable[str], form: str = "NAME=TEXT") -> dict[str, str]:
    """Parse `name=text` values of a repeatable option, which its help writes like this."""
    parsed: dict[str, str] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not mark or not name:
            raise OptionInvalid(option=option, value=text, expected=f"write {form}")
        parsed[name] = value
    return parsed


def params_of(pairs: list[str]) -> dict[str, Any]:
    """Parse `k=v` pairs as parameters of a run; JSON values are decoded. Raises SettingsInvalid."""
    params: dict[str, Any] = {}
    for pair in pairs:
        name, separator, text = pair.partition("=")
        if not separator or not name:
            raise SettingsInvalid(source="--param", detail=f"{pair!r} is no name=value")
        try:
            params[name] = json.loads(text)
        except ValueError:
            params[name] = text
    return params
