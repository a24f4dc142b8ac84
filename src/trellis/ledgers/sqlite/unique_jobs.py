"""Unique jobs in an SQLite ledger: who holds a unique key, and what a submit or a requeue does about it.

`engine/uniqueness.py` has the rules. Writers take turns here, so what is read in a transaction holds until its end; the
unique index refuses a second holder all the same.
"""

from typing import NamedTuple

from trellis.engine.errors import UniqueConflict
from trellis.engine.jobs import Actor, JobId, JobKey, NewJob
from trellis.engine.uniqueness import OnConflict, UniqueClaim, WhileHeld
from trellis.ledgers import refusals
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    ENDED_WELL,
    HELD,
    STATE_NAMES,
    STEPS,
    US,
    ActorRef,
    JobRow,
    StepWrite,
    StoredStep,
    sweeping_role,
)
from trellis.ledgers.sqlite.steps import StepBatch, job_row
from trellis.lifecycles import BY_CODE, Progress, Trigger
from trellis.lifecycles.events import Cause

_UNIQUE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/unique_jobs.sql")


class KeyHolder(NamedTuple):
    """The job that holds a unique key, in the column order of the query `holder`."""

    job: JobKey
    job_id: JobId
    unfinished: int
    until: int | None
    first_at: int
    lifecycle: int
    state: int
    place: int

    @property
    def waits(self) -> bool:
        """Whether the job waits to begin."""
        first = BY_CODE[self.lifecycle].initial.name
        return self.place < HELD and STATE_NAMES[self.lifecycle, self.state] == first

    def still_holds(self, now: int) -> bool:
        """Whether the key is still taken."""
        if self.until is not None and self.until > now:
            return True
        return self.place < ENDED_WELL if self.unfinished else self.waits


class FreedKey(NamedTuple):
    """A key that is free for a new job: the job that gives it up, and when the first of those replaced was submitted."""

    replaced: JobId | None
    first_at: int


def find_holder(tx: Transaction, type_: str, scope: str, key: str) -> KeyHolder | None:
    rows = tx.db.execute(_UNIQUE_QUERIES.holder, (type_, scope, key)).fetchall()
    return KeyHolder._make(rows[0]) if rows else None


def free_key(tx: Transaction, actor: Actor, job: NewJob, claim: UniqueClaim) -> JobId | FreedKey:
    """Free the unique key of a new job, or return the job that keeps it. Raises UniqueConflict."""
    holder = find_holder(tx, job.type, job.unique_scope, claim.key)
    if holder is None:
        return FreedKey(None, tx.now)
    holds, replaced, first_at = holder.still_holds(tx.now), None, tx.now
    if holds and claim.on_conflict is OnConflict.REPLACE and holder.waits:
        _cancel(tx, actor, holder, job.job_id)
        replaced, first_at = holder.job_id, holder.first_at
    elif holds and claim.on_conflict is OnConflict.RAISE:
        raise UniqueConflict(job_id=holder.job_id, type=job.type, key=claim.key.removeprefix("key:"))
    elif holds:
        return holder.job_id
    tx.db.execute(_UNIQUE_QUERIES.let_go, (holder.job,))
    return FreedKey(replaced, first_at)


def take_key(tx: Transaction, job: NewJob, number: int, claim: UniqueClaim, taken: FreedKey) -> None:
    """Let a new job hold its key."""
    until = None if claim.window_s is None else tx.now + int(claim.window_s * US)
    unfinished = int(claim.while_ is WhileHeld.UNFINISHED)
    row = (number, job.type, job.unique_scope, claim.key, unfinished, until, taken.first_at, taken.replaced)
    tx.db.execute(_UNIQUE_QUERIES.take, row)


def debounced_delay_us(claim: UniqueClaim, taken: FreedKey, now: int) -> int | None:
    """How long a debounced job waits; None for other jobs."""
    if claim.debounce_s is None or claim.debounce_max_s is None:
        return None
    latest = taken.first_at + int(claim.debounce_max_s * US)
    return max(0, min(int(claim.debounce_s * US), latest - now))


def requeue_refusal(tx: Transaction, row: JobRow, step: StoredStep) -> str | None:
    """Why the step cannot begin a new generation of the job: another job holds its key. Else the job takes it back."""
    rows = tx.db.execute(_UNIQUE_QUERIES.key_of, (row.id,)).fetchall() if step.opens == Progress.GENERATION else []
    if not rows or rows[0][3]:
        return None
    holder = find_holder(tx, *rows[0][:3])
    if holder is not None:
        if holder.still_holds(tx.now):
            return refusals.unique_key_is_taken(holder.job_id)
        tx.db.execute(_UNIQUE_QUERIES.let_go, (holder.job,))
    tx.db.execute(_UNIQUE_QUERIES.take_back, (row.id,))
    return None


def _cancel(tx: Transaction, actor: Actor, holder: KeyHolder, by: JobId) -> None:
    """Cancel the waiting job that holds the key, in the role that sweeps its lifecycle."""
    who = ActorRef(sweeping_role(holder.lifecycle), tx.names.actor_id(actor.name))
    step = STEPS[holder.lifecycle, holder.state, Trigger.CANCEL]
    batch = StepBatch()
    batch.add(job_row(tx, holder.job), StepWrite(step, who, step.end_place, None, cause=Cause.REPLACED % by))
    batch.write(tx)
