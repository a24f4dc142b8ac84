"""Restores lost jobs. Each event is inserted again, so that the triggers of the database check it as when it was made.

Two rules are suspended inside the transaction while histories are written:

- The limits of concurrency keys, because jobs held one after the other are written at once. Jobs that hold a slot
  beyond the limit may continue, as after a lowered limit. The others are parked, and the sweep hands out free slots.
- The link between a job and the artifact it completed with, but only for jobs without any event. Each half comes back
  by itself, in any order, and `verify` checks that both exist. Still refused are a second final artifact of a job, and
  a final artifact of an existing job that has not completed.
"""

from collections.abc import Sequence
from datetime import datetime

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import RESTORE_MAX, Actor, JobId
from trellis.engine.records import JobPlace, JobToRestore, RecordedEvent, Submission, UniqueKey
from trellis.engine.restoration import RestoredPlace, check_restorable, restored_place, restored_priority
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ENDED_OTHERWISE, ENDED_WELL, HELD, PARKED, READY, RESTING, ROLE_CODES
from trellis.ledgers.sqlite.submit import SUBMIT_QUERIES, existing, last_job
from trellis.lifecycles import Lifecycle, Phase, event_code

LEASE_US = 1
"""The length of a restored lease. It has ended, so its original length does not matter."""
NO_LIMIT = 2**31 - 1


_RESTORE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/restore.sql")


def restore(tx: Transaction, actor: Actor, jobs: Sequence[JobToRestore]) -> list[bool]:  # noqa: ARG001 - events name theirs
    """True for each restored job, False for one that exists. If one job cannot be restored, nothing is written."""
    if len(jobs) > RESTORE_MAX:
        raise OptionInvalid(option="jobs", value=len(jobs), expected=f"at most {RESTORE_MAX} in one call")
    lifecycles = [check_restorable(job) for job in jobs]
    there = existing(tx, [job.job_id for job in jobs])
    # Start from a number that the lost ledger cannot have given out: it counted from 1, or from an earlier time like
    # this.
    number = max(last_job(tx), tx.now)
    keys = _UnlimitedKeys(tx)
    answers: list[bool] = []
    tx.db.execute(_RESTORE_QUERIES.begin_restoring)
    for job, lifecycle in zip(jobs, lifecycles, strict=True):
        answers.append(job.job_id not in there)
        if answers[-1]:
            number += 1
            there[job.job_id] = number
            _put_back(tx, keys, job, lifecycle, number, there)
    tx.db.execute(_RESTORE_QUERIES.end_restoring)
    tx.db.execute(_RESTORE_QUERIES.begin_numbers_of_signals)
    tx.db.execute(_RESTORE_QUERIES.raise_numbers_of_signals, (tx.now,))
    keys.set_back()
    return answers


class _UnlimitedKeys:
    """The concurrency keys of a batch, without a limit until `set_back`."""

    def __init__(self, tx: Transaction) -> None:
        self._tx = tx
        self._limits: dict[int, int] = {}

    def number(self, name: str, limit: int) -> int:
        key = self._tx.names.key_id(name, limit)
        if key not in self._limits:
            self._limits[key] = self._tx.db.execute(_RESTORE_QUERIES.limit_of_key, (key,)).fetchall()[0][0]
            self._tx.db.execute(_RESTORE_QUERIES.set_limit_of_key, (NO_LIMIT, key))
        return key

    def set_back(self) -> None:
        self._tx.db.executemany(
            _RESTORE_QUERIES.set_limit_of_key, [(limit, key) for key, limit in self._limits.items()]
        )


def _put_back(
    tx: Transaction, keys: _UnlimitedKeys, job: JobToRestore, lifecycle: Lifecycle, number: int, there: dict[JobId, int]
) -> None:
    first, submission = job.records[0].event, job.records[0].submission
    assert submission is not None, "a checked job says what was asked"
    now = restored_place(job, rows.moment(tx.now))
    ckey = (
        None
        if submission.concurrency_key is None
        else keys.number(submission.concurrency_key, submission.concurrency_limit)
    )
    type_id = tx.names.type_id(lifecycle.code, submission.type)
    original = None if submission.compensates is None else _number_of(tx, submission.compensates, there)
    deadline = None if now.deadline_at is None else rows.microseconds(now.deadline_at)
    tx.db.execute(
        _RESTORE_QUERIES.add_job,
        (number, lifecycle.code, type_id, int(restored_priority(job)), now.max_attempts, deadline, ckey, original),
    )
    tx.db.execute(SUBMIT_QUERIES.insert_submission, _submission(job, submission, number))
    tx.db.execute(_RESTORE_QUERIES.begin_history, (number,))
    tx.appended = True
    for one in job.records:
        _write_event(tx, lifecycle, one, number, keyed=ckey is not None)
    tx.db.execute(_RESTORE_QUERIES.end_history, (number,))
    at = rows.microseconds(first.ts)
    tx.db.executemany(
        _RESTORE_QUERIES.add_key, [(key.scope, key.key, number, key.fingerprint, at) for key in submission.keys]
    )
    last = job.records[-1].event
    kept = [(number, entry, last.epoch, rows.microseconds(last.ts), body) for entry, body in job.journal.items()]
    tx.db.executemany(_RESTORE_QUERIES.add_journal, kept)
    _settle(tx, job.records[-1], now, number, keyed=ckey is not None)
    if submission.unique is not None:
        tx.db.execute(_RESTORE_QUERIES.add_unique_key, _unique_key(submission.type, submission.unique, number, tx.now))


def _unique_key(type_: str, unique: UniqueKey, number: int, now: int) -> dict[str, str | int | None]:
    return {
        "job": number,
        "type": type_,
        "scope": unique.scope,
        "key": unique.key,
        "unfinished": int(unique.unfinished),
        "until": None if unique.until is None else rows.microseconds(unique.until),
        "first_at": rows.microseconds(unique.first_at),
        "now": now,
    }


def _settle(tx: Transaction, last: RecordedEvent, now: RestoredPlace, number: int, *, keyed: bool) -> None:
    tx.db.execute(_RESTORE_QUERIES.comes_back, {"job": number, "epoch": now.epoch, "deaths": now.deaths, "now": tx.now})
    if now.place is JobPlace.SCHEDULED and now.due_at is not None and now.due_at != last.due_at:
        tx.db.execute(_RESTORE_QUERIES.due_at, (rows.microseconds(now.due_at), number))
    if now.place is JobPlace.READY:
        if last.due_at is not None:
            tx.db.execute(_RESTORE_QUERIES.rest_is_over, {"job": number, "place": PARKED if keyed else READY})
        tx.woke = True


def _number_of(tx: Transaction, job_id: JobId, there: dict[JobId, int]) -> int | None:
    return there.get(job_id) or existing(tx, [job_id]).get(job_id)


def _submission(job: JobToRestore, submission: Submission, number: int) -> tuple[object, ...]:
    first = job.records[0].event
    correlation = None if first.correlation_id == first.job_id else first.correlation_id
    return (
        number,
        first.job_id,
        rows.microseconds(first.ts),
        submission.max_attempts,
        submission.max_deaths,
        correlation,
        submission.trace,
        submission.parent_id,
        submission.payload,
        submission.deadline_us,
        None if submission.concurrency_key is None else submission.concurrency_limit,
        submission.compensates,
    )


def _write_event(tx: Transaction, lifecycle: Lifecycle, one: RecordedEvent, number: int, *, keyed: bool) -> None:
    event, letter = one.event, one.dead_letter
    at = rows.microseconds(event.ts)
    if letter is not None:
        ended = None if letter.last_lease_expires_at is None else rows.microseconds(letter.last_lease_expires_at)
        letter_fields = (
            letter.reason_code.value,
            letter.stage.value,
            letter.last_error,
            letter.attempts,
            letter.last_owner,
        )
        tx.db.execute(_RESTORE_QUERIES.add_dead_letter, (number, event.version, *letter_fields, ended, at))
    place, wait = _landing(lifecycle, event.target, one.due_at, at, keyed=keyed)
    tx.db.execute(
        _RESTORE_QUERIES.add_event,
        (
            number,
            event.version,
            event_code(event.type),
            lifecycle.code_of(event.source),
            lifecycle.code_of(event.target),
            ROLE_CODES[event.role],
            tx.names.actor_id(event.actor, event.node or ""),
            event.epoch,
            event.generation,
            event.attempt,
            at,
            place,
            wait,
            event.cause,
            event.data,
            one.request,
        ),
    )


def _landing(
    lifecycle: Lifecycle, target: str, due_at: datetime | None, at: int, *, keyed: bool
) -> tuple[int, int | None]:
    """The place an event led to, as far as the history needs it."""
    state = lifecycle.by_name[target]
    if state.phase is Phase.HELD:
        return HELD, LEASE_US
    if state.phase is Phase.ENDED:
        return (ENDED_WELL if state.success else ENDED_OTHERWISE), None
    if due_at is not None or not state.claimable:
        return RESTING, None if due_at is None else rows.microseconds(due_at) - at
    return (PARKED if keyed else READY), None
