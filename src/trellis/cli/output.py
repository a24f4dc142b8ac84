"""Terminal output: tables, JSON Lines, messages, and the progress of long commands."""

import json
import re
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trellis.engine.jobs import Priority
from trellis.engine.logs import Log
from trellis.engine.records import Event, Job
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.storage.objects.canonical_json import timestamp

if TYPE_CHECKING:  # loaded where there is a document
    from pydantic import BaseModel

    from trellis.http.shapes import JobDocument

# Tables are for people, JSON Lines for programs; everything else goes to standard error.
# On a terminal a table fits its width; in a pipe nothing is cut, coloured or wrapped. JSON is one object per line, so a
# listing of any length can be read as it arrives.

T = TypeVar("T")
GAP = 2
"""Spaces between two columns."""
WRAP_ROOM = 20
"""Minimum width of a column that wraps, if it needs that much."""
_WORDS = {"state": "status"}
"""Field names that differ between the engine and the gateway."""
YIELD_ROOM = 8
"""Minimum width of a column that gives way."""
_UNSEEN = re.compile(
    # Control characters; a lone carriage return overwrites its line.
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n)"
    # Direction and order of text.
    r"|[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufff9-\ufffb]"
    # Invisible characters.
    r"|[\u00ad\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200d\u2060-\u2065\u206a-\u206f\u2800\u3164]"
    r"|[\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
    # Private use: each font shows another sign, or none. Lone surrogates.
    r"|[\ue000-\uf8ff\U000f0000-\U0010ffff\ud800-\udfff]"
)
"""Characters that control a terminal or are invisible: Unicode controls, and code points without a glyph.

console/app/src/lib/unseen.ts has the same list, for the console.
"""
UNLIMITED_WIDTH = 10_000
"""Wider than any row, so that in a pipe each row is one line."""


@dataclass(frozen=True, kw_only=True)
class ListingColumn(Generic[T]):
    """One column of a listing."""

    title: str
    cell: Callable[[T], str | Text]
    right: bool = False
    gives_way: bool = False
    """Cut with an ellipsis if the terminal is narrow."""
    wraps: bool = False
    """Wrapped to the next line if the terminal is narrow."""


RecordColumn: TypeAlias = ListingColumn[Mapping[str, Any]]
"""A column of records, as commands print them with `--json`."""


class Output:
    """Standard output and standard error of one command."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.console = _console(sys.stdout)
        self.errors = _console(sys.stderr)
        self._log: Log | None = None
        self.typed: Callable[[str], str] = lambda text: text
        """Gives the commands in a note, an error or a remedy the options that name the place of this command."""

    def log_to(self, log: Log) -> None:
        """Send lines, notes and errors to this log from now on, so that the log is the only output."""
        self._log = log

    def line(self, text: str = "", style: str | None = None) -> None:
        """Print one line for people, unchanged."""
        if self._log is not None:
            self._log.info("status", text=escape_terminal_codes(text))
            return
        self.console.print(escape_terminal_codes(text), style=style, markup=False, highlight=False, soft_wrap=True)

    def prose(self, text: str, style: str | None = None) -> None:
        """Print a sentence for people, wrapped at words."""
        self.console.print(escape_terminal_codes(text), style=style, markup=False, highlight=False)

    def note(self, text: str) -> None:
        """Print a message on standard error, apart from the output that programs read."""
        text = self.typed(text)
        if self._log is not None:
            self._log.warning("note", text=escape_terminal_codes(text))
            return
        self.errors.print(escape_terminal_codes(text), style="dim", markup=False, highlight=False, soft_wrap=True)

    def record(self, record: dict[str, Any]) -> None:
        """Print one JSON object on one line, with control and invisible characters escaped as JSON allows."""
        sys.stdout.write(json_line(record) + "\n")
        sys.stdout.flush()

    def answer(self, record: dict[str, Any], line: str, style: str | None = None) -> None:
        """Print what a command did: the record with --json, otherwise the line."""
        if self.as_json:
            self.record(record)
        else:
            self.line(line, style)

    def content(self, job_id: str, name: str, body: bytes) -> None:
        """Print bytes: unchanged to a file or pipe, escaped on a terminal, with --json in a record under `name`."""
        if not self.as_json:
            self.raw(body)
            if not self.console.is_terminal:
                self.line()
            return
        try:
            self.record({"job_id": job_id, name: json.loads(body)})
        except ValueError:
            self.record({"job_id": job_id, name: body.decode("utf-8", "replace")})

    def raw(self, body: bytes) -> None:
        """Print bytes: unchanged to a file or pipe, escaped on a terminal."""
        if self.console.is_terminal:
            self.line(body.decode("utf-8", "replace"))
        else:
            sys.stdout.buffer.write(body)
            sys.stdout.buffer.flush()

    def diff(self, text: str) -> None:
        """Print a unified diff, coloured on a terminal."""
        styles = {"-": "red", "+": "green", "@": "cyan"}
        for line in text.removesuffix("\n").split("\n") if text else []:
            self.line(line, style=styles.get(line[:1]))

    def ids_alone(self, wanted: bool, ids: Iterable[str]) -> bool:  # noqa: FBT001 - the flag as it was given
        """Print the ids, one per line, if `wanted`; returns `wanted`."""
        for id_ in ids if wanted else ():
            self.line(id_)
        return wanted

    def listing(self, items: Iterable[T], columns: Sequence[ListingColumn[T]], *, empty: str) -> None:
        """Print a table, or one JSON object per item."""
        if self.as_json:
            for item in items:
                self.record(as_record(item))
            return
        rows = list(items)
        if rows:
            self.show(table(rows, columns, self.console.width))
        else:
            self.note(empty)

    def show(self, table: Table) -> None:
        """Print a table; in a pipe without trailing spaces."""
        if self.console.is_terminal:
            self.console.print(table)
            return
        with self.console.capture() as drawn:
            self.console.print(table)
        self.console.file.write("".join(f"{line.rstrip()}\n" for line in drawn.get().splitlines()))

    def facts(self, pairs: Iterable[tuple[str, str | Text]]) -> None:
        """Print names and values, one pair per line."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, value in pairs:
            grid.add_row(name, _text(value))
        self.show(grid)

    def error(self, message: str, remedy: str = "") -> None:
        """Print an error and its remedy."""
        message, remedy = self.typed(message), self.typed(remedy)
        if self._log is not None:
            self._log.error("failed", error=escape_terminal_codes(message), remedy=escape_terminal_codes(remedy))
            return
        self.errors.print(
            Text.assemble(("error: ", "bold red"), escape_terminal_codes(message)), soft_wrap=True, highlight=False
        )
        if remedy:
            self.errors.print(
                Text.assemble(("  → ", "bold"), escape_terminal_codes(remedy)), soft_wrap=True, highlight=False
            )


def table(rows: Sequence[T], columns: Sequence[ListingColumn[T]], width: int) -> Table:
    """A table without borders, so that every cell can be copied.

    Ids and other short cells are never cut. Columns that give way share the remaining width.
    """
    cells = [[_text(column.cell(row)) for column in columns] for row in rows]
    natural = [
        max([cell_len(column.title), *(row[index].cell_len for row in cells)]) for index, column in enumerate(columns)
    ]
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for column, most in zip(columns, _widths(columns, natural, width), strict=True):
        justify: Literal["left", "right"] = "right" if column.right else "left"
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if column.gives_way else "fold"
        table.add_column(column.title, justify=justify, overflow=overflow, no_wrap=not column.wraps, max_width=most)
    for row in cells:
        table.add_row(*row)
    return table


def _widths(columns: Sequence[ListingColumn[Any]], natural: Sequence[int], width: int) -> list[int]:
    """The maximum width of each column."""
    fixed = sum(
        min(size, WRAP_ROOM) if column.wraps else size
        for column, size in zip(columns, natural, strict=True)
        if not column.gives_way
    )
    yielding = sum(column.gives_way for column in columns)
    room = max(YIELD_ROOM, (width - fixed - GAP * len(columns)) // max(1, yielding))
    return [min(size, room) if column.gives_way else size for column, size in zip(columns, natural, strict=True)]


def _text(cell: str | Text) -> Text:
    """The cell as plain text without markup. A styled cell with control characters loses its style."""
    words = escape_terminal_codes(str(cell))
    return cell if isinstance(cell, Text) and cell.plain == words else Text(words)


def escape_terminal_codes(text: str) -> str:
    """The text with control and invisible characters escaped, because it may come from an untrusted source."""
    return _UNSEEN.sub(lambda match: _written_out(ord(match[0])), text)


def json_line(record: Mapping[str, Any]) -> str:
    """A record as one line of JSON, with control and invisible characters escaped as JSON allows."""
    text = json.dumps(record, default=str, ensure_ascii=False, separators=(", ", ": "))
    return _UNSEEN.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    """The JSON escape of a character."""
    units = match[0].encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def _written_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def as_record(item: Any) -> dict[str, Any]:
    """An engine value as JSON, in the gateway's terms: `status` for state, and attempts counted from 1.

    A mapping is returned unchanged, and a document of a gateway is brought into the same form.
    """
    if isinstance(item, Mapping):
        return dict(cast("Mapping[str, Any]", item))
    if hasattr(item, "model_dump"):  # a document of a gateway: its library is loaded if there is one
        return _document_record(item)
    if isinstance(item, Event):
        return event_record(item)
    if isinstance(item, Job):
        return {name: value for name, value in _fields(_counted(item)).items() if name != "spared"}
    return _fields(item)


def _document_record(item: "BaseModel") -> dict[str, Any]:
    """A gateway's document in the form that commands print for a ledger: attempts count from 1 (D38)."""
    from trellis.http.shapes import EventShape, JobDocument  # loaded where there is a document

    record = item.model_dump(mode="json")
    for where in (record, record.get("payload") if isinstance(item, EventShape) else None):
        if where is not None and isinstance(where.get("attempt"), int):
            where["attempt"] += 1
    if isinstance(item, JobDocument):
        record["max_attempts"] = _attempts_allowed(item)
        del record["attempts_allowed"]  # commands have one number, and call it max_attempts
    return record


def _attempts_allowed(job: "JobDocument") -> int:
    """How many attempts a job may make. An older gateway tells of a queue job only the retries, which is one less."""
    if job.attempts_allowed is not None:
        return job.attempts_allowed
    return job.max_attempts + (1 if job.lifecycle == QUEUE_JOB.name else 0)


def _counted(job: Job) -> Job:
    """The job with only those attempts that count."""
    return replace(job, attempt=job.attempts_spent, max_attempts=job.attempts_allowed)


def _fields(item: Any) -> dict[str, Any]:
    words = _WORDS if hasattr(item, "job_id") else {}
    return {words.get(field.name, field.name): _plain(field.name, getattr(item, field.name)) for field in fields(item)}


def state_text(lifecycle: str, state: str) -> Text:
    """A state in the colour of its phase."""
    known = LIFECYCLES[lifecycle].by_name[state]
    styles = {Phase.WAITING: "yellow", Phase.HELD: "cyan", Phase.ENDED: "green" if known.success else "red"}
    return Text(state, style=styles[known.phase])


def age(moment: datetime, now: datetime) -> str:
    """The age in the largest fitting unit, such as `5m`."""
    return brief((now - moment).total_seconds())


def brief(seconds: float) -> str:
    """A duration in the largest fitting unit, such as `5m`."""
    seconds = max(0, int(seconds))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def age_column(now: datetime, *, of: str = "created_at") -> RecordColumn:
    """A column with the age of records."""
    return ListingColumn(title="AGE", cell=lambda record: age(datetime.fromisoformat(record[of]), now), right=True)


class _Console(Console):
    """A console that lets the caller handle a closed pipe, because it decides the exit code."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError."""
        raise BrokenPipeError


def _console(stream: Any) -> Console:
    terminal = stream.isatty()
    return _Console(file=stream, width=None if terminal else UNLIMITED_WIDTH, no_color=None if terminal else True)


def event_record(event: Event, trace: str | None = None) -> dict[str, Any]:
    """The nine fields of an event. Its payload holds the transition and, if known, the job's trace."""
    from trellis.engine.tracing import trace_id

    payload = {
        "lifecycle": event.lifecycle,
        "from": event.source,
        "to": event.target,
        "role": event.role.value,
        "generation": event.generation,
        "attempt": event.attempt + 1,
        "epoch": event.epoch,
        "trace_id": trace_id(trace),
        "data": _plain("data", event.data),
    }
    return {
        "id": event.id,
        "job_id": event.job_id,
        "type": event.type,
        "ts": timestamp(event.ts),
        "actor": event.actor,
        "correlation_id": event.correlation_id,
        "cause": event.cause,
        "payload": payload,
        "version": event.version,
    }


def _plain(name: str, value: Any) -> Any:
    match value:
        case bytes():
            return json.loads(value)
        case datetime():
            return timestamp(value)
        case Priority():
            return value.name.lower()
        case Enum():
            return value.value
        case int() if name == "attempt":
            return value + 1
        case _:
            return value


# Progress of a long command: a live counter on a terminal, otherwise a line every ten seconds.

EVERY_S = 10.0

Report: TypeAlias = Callable[[str, int], None]
"""Takes what is counted, and the count so far."""


@contextmanager
def counting(out: Output, monotonic: Callable[[], float] = time.monotonic) -> Generator[Report]:
    """Yields the function to report progress to. It writes to standard error."""
    if not out.errors.is_terminal:
        yield _notes(out, monotonic)
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn  # imported only on a terminal

    columns = (SpinnerColumn(), TextColumn("{task.completed:,} {task.description}"))
    with Progress(*columns, console=out.errors, transient=True) as bars:
        bar = bars.add_task("begun", total=None)
        yield lambda what, count: bars.update(bar, completed=count, description=what)


def _notes(out: Output, monotonic: Callable[[], float]) -> Report:
    last = monotonic()

    def report(what: str, count: int) -> None:
        nonlocal last
        if monotonic() - last >= EVERY_S:
            last = monotonic()
            out.note(f"{count:,} {what}")

    return report
