"""Copies the rows of a ledger, and compares both ledgers row by row and job by job."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trellis.engine.ledger import Ledger
from trellis.engine.records import JobHistory, KeyOverLimit, UnpairedArtifact
from trellis.ledgers.moving.parts import PARTS, LedgerPart, MovedRow
from trellis.ledgers.moving.source import SqliteSource
from trellis.ledgers.moving.target import FINISHED, PostgresTarget

DIGEST_BITS = 256
DIFFERENCES_MAX = 10

Progress = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class PartDigest:
    """How many rows a part has, and a hash over all of them that does not depend on their order."""

    rows: int
    sha256: str


class _RowDigest:
    """The sum of the hashes of rows: equal for equal rows in any order, and changed by a row more, less or twice."""

    def __init__(self) -> None:
        self._rows = self._sum = 0

    def add(self, row: MovedRow) -> None:
        body = repr(tuple(map(_plain, row))).encode("utf-8", "surrogatepass")
        self._sum = (self._sum + int.from_bytes(hashlib.sha256(body).digest())) % 2**DIGEST_BITS
        self._rows += 1

    def result(self) -> PartDigest:
        return PartDigest(rows=self._rows, sha256=f"{self._sum:064x}")


def _plain(value: Any) -> Any:
    """A value as both databases have it: a whole number is an int in each of them, and a float stays one."""
    return int(value) if isinstance(value, bool | Decimal) else value


async def copy_rows(source: SqliteSource, target: PostgresTarget, move_id: str, on_progress: Progress) -> None:
    """Copy what the target does not have yet. A page and its place are one transaction, so nothing is written twice."""
    places = await target.places()
    for part in PARTS:
        place = list(part.start) if part.repeats else places.get(part.name, list(part.start))
        rows = 0
        while place != FINISHED:
            page = await asyncio.to_thread(source.page, part, place)
            rows += len(page)
            place = list(page[-1][: len(part.start)]) if page else FINISHED
            await target.write(move_id, part, page, place)
            on_progress(f"rows of {part.name} copied", rows)
    await target.set_numbers(move_id, await asyncio.to_thread(source.numbers))


async def digest_source(source: SqliteSource, part: LedgerPart, on_progress: Progress) -> PartDigest:
    digest, place = _RowDigest(), part.start
    while page := await asyncio.to_thread(source.page, part, place):
        for row in page:
            digest.add(row)
        place = page[-1][: len(part.start)]
        on_progress(f"rows of {part.name} compared", digest.result().rows)
    return digest.result()


async def digest_target(target: PostgresTarget, part: LedgerPart) -> PartDigest:
    start = part.target_start or part.start
    digest, place = _RowDigest(), start
    while page := await target.page(part, place):
        for row in page:
            digest.add(part.in_order(row))
        place = page[-1][: len(start)]
    return digest.result()


async def compare_rows(
    source: SqliteSource, target: PostgresTarget, on_progress: Progress
) -> tuple[dict[str, int], list[str]]:
    """The number of rows of every part, and what differs. An error of a database is raised, and is no difference."""
    counts: dict[str, int] = {}
    differences: list[str] = []
    for part in PARTS:
        if part.target is None:
            continue
        here, there = await digest_source(source, part, on_progress), await digest_target(target, part)
        counts[part.name] = here.rows
        if here.rows != there.rows:
            differences.append(f"{part.name}: {here.rows} rows here and {there.rows} there")
        elif here != there:
            differences.append(f"{part.name}: the rows differ ({here.sha256[:12]} here, {there.sha256[:12]} there)")
    return counts, differences


class ComparedHistories:
    """The jobs of the target, each compared with the same job of the source while they are read.

    `differences` has what differs, in the words of a reader: every job with its events and dead letters is compared.
    What a listing does not show (the payload, the progress, who asked to stop) is compared with the rows.
    """

    def __init__(self, here: Ledger, there: Ledger) -> None:
        self._here, self._there = here, there
        self.differences: list[str] = []

    async def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        """Every job of the target with all its events."""
        ours = self._here.histories(batch=batch)
        async for history in self._there.histories(batch=batch):
            own = await anext(ours, None)
            if own is None or _as_listed(own) != _as_listed(history):
                self._note(f"job {history.job.job_id}: readers see other values there")
            yield history
        if await anext(ours, None) is not None:
            self._note("jobs: some are missing there")

    async def keys_over(self) -> list[KeyOverLimit]:
        """Those of the target."""
        return await self._there.keys_over()

    async def unpaired(self) -> list[UnpairedArtifact]:
        """Those of the target."""
        return await self._there.unpaired()

    def _note(self, difference: str) -> None:
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)


def _as_listed(history: JobHistory) -> JobHistory:
    unlisted: dict[str, None] = dict.fromkeys(
        ("payload", "progress", "cancel_asked_by", "cancel_asked_at", "cancel_cause")
    )
    return replace(history, job=replace(history.job, **unlisted))
