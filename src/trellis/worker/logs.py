"""A handler's log lines: kept with the job, bounded per attempt, and passed on to the process's own log."""

import json
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from trellis.engine.logs import log_of
from trellis.engine.text import safe_repr

LINES_MAX = 200
BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8 * 1024

SIGNAL_LOG = "job_log"


class LogBuffer:
    """Lines of one attempt that the ledger has not got yet. What is over the bound is counted, not kept."""

    def __init__(self) -> None:
        self._pending: list[tuple[str, bytes | None]] = []
        self._lines = 0
        self._bytes = 0
        self._dropped = 0
        self._told = 0

    def add(self, line: dict[str, Any]) -> None:
        """Keep a line, or count it."""
        body = _body(line)
        if body is None or len(body) > LINE_BYTES_MAX:
            body = json.dumps({**line, "event": line["event"][:1000], "fields": {}, "cut": True}).encode()
        if self._lines >= LINES_MAX or self._bytes + len(body) > BYTES_MAX:
            self._dropped += 1
            return
        self._lines += 1
        self._bytes += len(body)
        self._pending.append((SIGNAL_LOG, body))

    def take(self, *, last: bool) -> list[tuple[str, bytes | None]]:
        """What to write now; with `last` also how many lines were left out."""
        taken, self._pending = self._pending, []
        if last and self._dropped > self._told:
            note = {"level": "warning", "event": "log lines over the bound were dropped", "dropped": self._dropped}
            taken.append((SIGNAL_LOG, json.dumps(note).encode()))
            self._told = self._dropped
        return taken


def _body(line: dict[str, Any]) -> bytes | None:
    """The line as it is kept; None when its fields have no JSON form. To log must never fail a handler."""
    with suppress(Exception):  # it may be the fields' own code that fails
        return json.dumps(line, default=partial(safe_repr, how=str), ensure_ascii=False).encode("utf-8", "replace")
    return None


def _text(event: Any, args: tuple[Any, ...]) -> str:
    """With its arguments put in; beside it when they do not fit. An event may be any object."""
    with suppress(Exception):
        return str(event % args) if args else safe_repr(event, str)
    return f"{safe_repr(event, str)} {safe_repr(args)}"


class JobLogger:
    """`ctx.logger`: `info("indexed", pages=3)`; %-arguments work too. Usable from any thread of the handler."""

    def __init__(self, buffer: LogBuffer, elapsed_s: Callable[[], float], **bound: Any) -> None:
        self._buffer = buffer
        self._elapsed_s = elapsed_s
        self._log = log_of("trellis.job").bind(**bound)

    def debug(self, event: str, *args: Any, **fields: Any) -> None:
        """A line for whoever debugs the handler."""
        self._write("debug", event, args, fields)

    def info(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about what happens."""
        self._write("info", event, args, fields)

    def warning(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about something odd."""
        self._write("warning", event, args, fields)

    def error(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about something wrong."""
        self._write("error", event, args, fields)

    def exception(self, event: str, *args: Any, **fields: Any) -> None:
        """A line about the exception being handled, with its traceback."""
        self._write("error", event, args, {**fields, "traceback": traceback.format_exc(limit=20)})

    def _write(self, level: str, event: str, args: tuple[Any, ...], fields: dict[str, Any]) -> None:
        text = _text(event, args)
        at_s = round(self._elapsed_s(), 6)
        self._buffer.add({"at_s": at_s, "level": level, "event": text, "fields": fields})
        getattr(self._log, level)(text, **fields)
