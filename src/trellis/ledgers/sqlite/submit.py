"""Submitting to an SQLite ledger: in its own transaction or in the caller's, with the options of the job's type.

A second submit with the same idempotency key returns the first job. `unique_jobs` has what unique keys do.
"""

import json
from array import array as numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

from trellis.engine.admin_acts import TYPE_OPTIONS, NewAct, this_node
from trellis.engine.errors import JobNotFound, OptionInvalid, QueueFull
from trellis.engine.jobs import (
    DECLARED,
    DECLARED_MAX,
    SUBMIT_MAX,
    Actor,
    AlikeJobs,
    ChosenOptions,
    JobId,
    JobKey,
    Mismatch,
    NewJob,
    Priority,
    ResolvedOptions,
    Submitted,
    TypeOptions,
    all_created,
    check_new_id,
    check_new_ids,
    different_ones,
    ids_of,
    options_text,
    payloads_of,
    resolve_options,
)
from trellis.engine.key_rates import key_rate
from trellis.engine.uniqueness import UniqueClaim, UniqueRule, merged, resolve, rule_from_text
from trellis.ledgers.alike_jobs import join_alike
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_declared, check_may
from trellis.ledgers.sqlite import control
from trellis.ledgers.sqlite.connection import Database, bound_array, refuse_old_library
from trellis.ledgers.sqlite.key_rates import rate_changed
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.names import NameNumbers
from trellis.ledgers.sqlite.plan import (
    READY,
    ROLE_CODES,
    STEPS,
    US,
    ActorRef,
    StepWrite,
    StoredStep,
    lifecycle_code,
    target_place,
)
from trellis.ledgers.sqlite.schema import check_version
from trellis.ledgers.sqlite.steps import StepRuns, array, promote
from trellis.ledgers.sqlite.unique_jobs import FreedKey, debounced_delay_us, free_key, take_key
from trellis.lifecycles import BY_CODE, LIFECYCLES, Trigger

# Declared type options: written by workers, read by every submit.


_TYPE_OPTION_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/type_options.sql")


def declare(tx: Transaction, actor: Actor, types: Sequence[TypeOptions], *, only_new: bool = False) -> None:
    """Store the options of types. Each change is one administrative act. Unchanged options are not written again."""
    check_declared(types)
    by = tx.names.actor_id(actor.name)
    for one in types:
        row = _row(one)
        stored = tx.db.execute(_TYPE_OPTION_QUERIES.declared, (row[1], one.type)).fetchall()
        if not stored or (not only_new and stored[0] != row):
            tx.db.execute(_TYPE_OPTION_QUERIES.declare, (*row, by, tx.now))
            before = options_text(_options(stored[0])) if stored else None
            act = NewAct(event=TYPE_OPTIONS, subject=one.type, source=before, target=options_text(one), cause=DECLARED)
            control.record(tx, actor, act)
            rate_before = _options(stored[0]).key_rate if stored else None
            if one.key_rate != rate_before:
                number = tx.names.known_type(LIFECYCLES[one.lifecycle].code, one.type)
                rate_changed(tx, number, rate_before, one.key_rate)


def declared(tx: Transaction, lifecycle: int, type_: str) -> TypeOptions | None:
    rows = tx.cursor.execute(_TYPE_OPTION_QUERIES.declared, (lifecycle, type_)).fetchall()
    return _options(rows[0]) if rows else None


def every_declared(tx: Transaction, type_: str | None = None) -> list[TypeOptions]:
    rows = tx.db.execute(_TYPE_OPTION_QUERIES.every_declared, {"type": type_, "limit": DECLARED_MAX}).fetchall()
    return [_options(row) for row in rows]


def _row(options: TypeOptions) -> tuple[str | int | float | None, ...]:
    """The options in the column order of the queries."""
    return (
        options.type,
        lifecycle_code(options.lifecycle),
        int(options.priority),
        options.max_attempts,
        options.max_deaths,
        options.deadline_s,
        options.concurrency_limit,
        int(options.keyed),
        options.compensation,
        None if options.unique is None else options.unique.text(),
        None if options.key_rate is None else options.key_rate.per_second,
        None if options.key_rate is None else options.key_rate.burst,
    )


def _options(row: Sequence[Any]) -> TypeOptions:
    type_, lifecycle, prio, max_attempts, max_deaths, deadline_s, limit, keyed, compensation, unique, rate, burst = row
    return TypeOptions(
        type=type_,
        lifecycle=BY_CODE[lifecycle].name,
        priority=Priority(prio),
        max_attempts=max_attempts,
        max_deaths=max_deaths,
        deadline_s=deadline_s,
        concurrency_limit=limit,
        keyed=bool(keyed),
        compensation=compensation,
        unique=rule_from_text(unique),
        key_rate=key_rate(rate, burst),
    )


# Submitting: all answers are decided first, then all new jobs are written with one statement per table.

GIVEN_ID_SCOPE = "job_id"
"""The scope of job ids that callers choose; callers' own scopes are separate."""
CALLER_SCOPE = "key:"
"""The prefix of every caller's scope."""


ARRAY_BYTES_MAX = 1024 * 1024
"""Longer payloads go in one by one: the driver holds an array until the statement that read it runs again."""
SUBMIT_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/submit.sql")
_ONE_NEW = SUBMIT_QUERIES.new.replace("{known}", SUBMIT_QUERIES.existing_one)
_MANY_NEW = SUBMIT_QUERIES.new.replace("{known}", SUBMIT_QUERIES.existing_of_array)


@dataclass(slots=True)
class _NewRows:
    """Rows to insert, by table."""

    jobs: dict[tuple[int | None, ...], list[int]] = field(default_factory=dict[tuple[int | None, ...], list[int]])
    """Keys of new jobs, grouped by the values their `job` rows share."""
    submissions: list[tuple[object, ...]] = field(default_factory=list[tuple[object, ...]])
    keys: list[tuple[str, str, int, bytes, int]] = field(default_factory=list[tuple[str, str, int, bytes, int]])
    steps: StepRuns = field(default_factory=StepRuns)
    concurrency: set[int] = field(default_factory=set[int])
    ids: dict[str, tuple[NewJob, int]] = field(default_factory=dict[str, tuple[NewJob, int]])
    waiting: dict[str, int] = field(default_factory=dict[str, int])
    """How many jobs of each concurrency key wait among those of this call."""
    seen: dict[tuple[str, str], tuple[bytes, JobId]] = field(default_factory=dict[tuple[str, str], tuple[bytes, JobId]])

    def written(self) -> None:
        """Forget the rows, which are written. What was submitted in this call is still known."""
        for rows in (self.jobs, self.submissions, self.keys, self.concurrency, self.waiting):
            rows.clear()
        self.steps = StepRuns()


def submit_calls(tx: Transaction, actor: Actor, calls: Sequence[Sequence[NewJob]]) -> list[Submitted | Mismatch]:
    alike = join_alike(calls)
    answers = None if alike is None or len(alike) > SUBMIT_MAX else _submit_alike(tx, actor, alike)
    return _submit_each(tx, actor, [job for call in calls for job in call]) if answers is None else answers


def submit(tx: Transaction, actor: Actor, jobs: Sequence[NewJob]) -> list[Submitted | Mismatch]:
    """One answer per job, in order. If one job is refused, nothing is written."""
    return submit_calls(tx, actor, (jobs,))


def _submit_each(tx: Transaction, actor: Actor, jobs: Sequence[NewJob]) -> list[Submitted | Mismatch]:
    if len(jobs) > SUBMIT_MAX:
        raise OptionInvalid(option="jobs", value=len(jobs), expected=f"at most {SUBMIT_MAX} in one call")
    steps = {name: _submit_step(actor, name) for name in dict.fromkeys(job.lifecycle for job in jobs)}
    known = existing(tx, [job.job_id for job in jobs])
    who = ActorRef(ROLE_CODES[actor.role], tx.names.actor_id(actor.name))
    last = last_job(tx)
    new, declared_once = _NewRows(), cache(partial(declared, tx))
    answers: list[Submitted | Mismatch] = []
    for job in jobs:
        answer = _earlier(tx, job, known, new)
        if answer is None:
            check_new_id(job.job_id, job.lifecycle, actor.role)
            of_type = (
                None if job.chosen == ChosenOptions.ALL else declared_once(steps[job.lifecycle].lifecycle, job.type)
            )
            options = resolve_options(job, of_type)
            rule = job.unique if of_type is None else merged(job.unique, of_type.unique)
            claimed = None if rule is None else _claim_unique_key(tx, actor, job, rule, new)
            if isinstance(claimed, Submitted):
                answers.append(claimed)
                continue
            _refuse_full(tx, job, new)
            last += 1
            delay = _delay_us(job, tx.now) if claimed is None else claimed.delay_us(job, tx.now)
            _take_in(tx, new, job, options, steps[job.lifecycle], who, last, delay)
            if claimed is not None:
                take_key(tx, job, last, claimed.claim, claimed.taken)
            answer = Submitted(job_id=job.job_id, created=True, replaced=claimed and claimed.taken.replaced)
        answers.append(answer)
    _write(tx, new)
    return answers


class _Plan(NamedTuple):
    """What a submit of jobs that differ only in id and payload writes besides those, their numbers and the time.

    It is worked out once for a request, an actor and the declared options of the type.
    """

    common: NewJob
    actor: Actor
    step: StoredStep
    declared: tuple[Any, ...]
    """The columns of the declared options, all NULL where the type has none."""
    job: tuple[int, ...]
    length_us: int | None
    """Until the deadline."""
    submission: tuple[int | str | None, ...]
    event: tuple[int, ...]
    place: tuple[int, int | None]


def _planned(
    tx: Transaction, common: NewJob, actor: Actor, step: StoredStep, declared: tuple[Any, ...]
) -> _Plan | None:
    """The plan of such a submit; None if the type declares unique jobs."""
    of_type = None if declared[0] is None or common.chosen == ChosenOptions.ALL else _options(declared)
    if of_type is not None and of_type.unique is not None:
        return None
    options = resolve_options(common, of_type)
    type_id = tx.names.type_id(step.lifecycle, common.type)
    who = (ROLE_CODES[actor.role], tx.names.actor_id(actor.name))
    origin = (common.correlation_id, common.trace, common.parent_id)
    return _Plan(
        common=common,
        actor=actor,
        step=step,
        declared=declared,
        job=(step.lifecycle, type_id, int(options.priority), options.max_attempts),
        length_us=_deadline_us(options),
        submission=(options.max_attempts, options.max_deaths, *origin),
        event=(step.event, step.source, step.target, *who),
        place=target_place(step, keyed=False, delay_us=step.timer_us),
    )


def _submit_alike(tx: Transaction, actor: Actor, jobs: Sequence[NewJob]) -> list[Submitted | Mismatch] | None:
    """Submit jobs that differ only in id and payload. None, and nothing is written, where they need more.

    They need more if an id exists, as after an unknown outcome, or if their type declares unique jobs.
    """
    common, ids, payloads = different_ones(jobs)[0], ids_of(jobs), payloads_of(jobs)
    if len(ids) > 1 and (not tx.has_arrays or len(set(ids)) < len(ids)):
        return None
    if common.correlation_id is not None and common.correlation_id in ids:  # stored as NULL
        return None
    kept: _Plan | None = tx.names.plans.get((id(common), id(actor)))
    step = _submit_step(actor, common.lifecycle) if kept is None else kept.step
    query, new_ids = (_ONE_NEW, ids[0]) if len(ids) == 1 else (_MANY_NEW, bound_array(tuple(ids)))
    rows = tx.cursor.execute(query, (step.lifecycle, common.type, new_ids)).fetchall()
    if not rows:
        return None
    number, *declared = rows[0]
    check_new_ids(ids, common.lifecycle, actor.role)
    plan = kept if kept is not None and kept.declared == tuple(declared) else None
    if plan is None:
        plan = _planned(tx, common, actor, step, tuple(declared))
        if plan is None:
            return None
        if isinstance(jobs, AlikeJobs):  # a job by itself comes once, with its payload
            tx.names.keep_plan((id(common), id(actor)), plan)
    _write_alike(tx, plan, number, ids, payloads)
    return all_created(ids)


def _write_alike(tx: Transaction, plan: _Plan, number: int, ids: Sequence[JobId], payloads: Sequence[bytes]) -> None:
    deadline = None if plan.length_us is None else tx.now + plan.length_us
    before, after = (tx.now, *plan.submission), (plan.length_us, None, None)
    if len(ids) == 1:
        tx.cursor.execute(SUBMIT_QUERIES.insert_job, (number, *plan.job, deadline))
        tx.cursor.execute(SUBMIT_QUERIES.insert_submission, (number, ids[0], *before, payloads[0], *after))
        tx.cursor.execute(SUBMIT_QUERIES.insert_first_event, (number, *plan.event, tx.now, *plan.place))
    else:
        keys = range(number, number + len(ids))
        key_array = bound_array(numbers("q", keys))
        tx.cursor.execute(SUBMIT_QUERIES.insert_alike_jobs, (*plan.job, deadline, key_array))
        if (values := _ids_with_payloads(ids, payloads)) is not None:
            width = len(ids[0])
            rows = (number - 1, width, *before, width + 1, plan.length_us, bound_array(values))
            tx.cursor.execute(SUBMIT_QUERIES.insert_alike_submissions, rows)
        else:
            each = [(key, one, *before, body, *after) for key, one, body in zip(keys, ids, payloads, strict=True)]
            tx.cursor.executemany(SUBMIT_QUERIES.insert_submission, each)
        tx.cursor.execute(SUBMIT_QUERIES.insert_first_events, (*plan.event, tx.now, *plan.place, key_array))
    tx.woke |= plan.place[0] == READY
    tx.appended = True


def _ids_with_payloads(ids: Sequence[JobId], payloads: Sequence[bytes]) -> tuple[bytes, ...] | None:
    """The id and the payload of each job as one value; None where the ids are not of one length, or it would be much."""
    if len(set(map(len, ids))) > 1 or not "".join(ids).isascii() or sum(map(len, payloads)) > ARRAY_BYTES_MAX:
        return None
    return tuple(map(bytes.__add__, map(str.encode, ids), payloads))


class _ClaimedKey(NamedTuple):
    """The unique key that a new job of this call takes."""

    claim: UniqueClaim
    taken: FreedKey

    def delay_us(self, job: NewJob, now: int) -> int | None:
        debounced = debounced_delay_us(self.claim, self.taken, now)
        return _delay_us(job, now) if debounced is None else debounced or None


def _claim_unique_key(
    tx: Transaction, actor: Actor, job: NewJob, rule: UniqueRule, new: _NewRows
) -> _ClaimedKey | Submitted:
    """Free the job's unique key; or the job that keeps it, to which a new idempotency key is bound.

    The jobs of this call that are not written yet are written first: one of them may hold the key.
    """
    claim = resolve(rule, job.payload, job.type)
    _write(tx, new)
    new.written()
    taken = free_key(tx, actor, job, claim)
    if isinstance(taken, FreedKey):
        return _ClaimedKey(claim, taken)
    _bind(new, job, existing(tx, [taken])[taken], tx.now, taken)
    return Submitted(job_id=taken, created=False)


def _submit_step(actor: Actor, name: str) -> StoredStep:
    check_may(actor.role, Trigger.SUBMIT, name)
    return STEPS[LIFECYCLES[name].code, 0, Trigger.SUBMIT]


def existing(tx: Transaction, job_ids: Sequence[JobId]) -> dict[JobId, int]:
    if len(job_ids) == 1:
        return dict(tx.db.execute(SUBMIT_QUERIES.existing_one, (job_ids[0],)).fetchall())
    return dict(tx.db.execute(SUBMIT_QUERIES.existing, (json.dumps(job_ids),)).fetchall())


def last_job(tx: Transaction) -> int:
    """The highest number ever given to a job."""
    return tx.db.execute(SUBMIT_QUERIES.last_job).fetchall()[0][0]


def _earlier(tx: Transaction, job: NewJob, known: dict[JobId, int], new: _NewRows) -> Submitted | Mismatch | None:
    """The answer of an earlier submit with the same idempotency key or id; None when this is the first."""
    if job.idempotency_key is not None:
        answer = _by_key(tx, job, _scope(job), job.idempotency_key, new)
        if answer is not None:
            return answer
    if job.job_id in known:
        answer = _by_id(tx, job, known[job.job_id])
        if isinstance(answer, Submitted):
            _bind(new, job, known[job.job_id], tx.now)
        return answer
    if job.job_id not in new.ids:
        return None
    twin, number = new.ids[job.job_id]
    same = twin.fingerprint == job.fingerprint if twin.id_is_given else _request(twin) == _request(job)
    if same:
        _bind(new, job, number, tx.now)
    return _same_id(job, same=same)


def _refuse_full(tx: Transaction, job: NewJob, new: _NewRows) -> None:
    """Raise QueueFull when the job's concurrency key has no room. All waiting jobs count, whoever submitted them."""
    key = job.concurrency_key
    if key is None:
        return
    if job.waiting_max is not None:
        waiting = tx.db.execute(SUBMIT_QUERIES.waiting, (key,)).fetchall()[0][0] + new.waiting.get(key, 0)
        if waiting >= job.waiting_max:
            raise QueueFull(key=key, waiting=waiting, limit=job.waiting_max)
    new.waiting[key] = new.waiting.get(key, 0) + 1


def _bind(new: _NewRows, job: NewJob, key: int, now: int, to: JobId | None = None) -> None:
    """Bind a free idempotency key to the existing job of the same request."""
    if job.idempotency_key is not None:
        new.keys.append((_scope(job), job.idempotency_key, key, job.fingerprint, now))
        new.seen[_scope(job), job.idempotency_key] = (job.fingerprint, to or job.job_id)


def _by_key(tx: Transaction, job: NewJob, scope: str, key: str, new: _NewRows) -> Submitted | Mismatch | None:
    stored = new.seen.get((scope, key)) or _used(tx, scope, key)
    return None if stored is None else _repeated_answer(key, stored, job.fingerprint)


def find_by_idempotency_key(tx: Transaction, scope: str, key: str, fingerprint: bytes) -> Submitted | Mismatch | None:
    """The answer to a submit with this idempotency key; None when the key is free."""
    stored = _used(tx, CALLER_SCOPE + scope, key)
    return None if stored is None else _repeated_answer(key, stored, fingerprint)


def _used(tx: Transaction, scope: str, key: str) -> tuple[bytes, JobId] | None:
    rows = tx.db.execute(SUBMIT_QUERIES.find_key, (scope, key)).fetchall()
    return (rows[0][1], rows[0][2]) if rows else None


def _repeated_answer(key: str, earlier: tuple[bytes, JobId], fingerprint: bytes) -> Submitted | Mismatch:
    if earlier[0] != fingerprint:
        return Mismatch(key=key, job_id=earlier[1])
    return Submitted(job_id=earlier[1], created=False)


def _by_id(tx: Transaction, job: NewJob, key: int) -> Submitted | Mismatch:
    """The answer for a known id. A chosen id is compared by fingerprint, a generated one by the request itself."""
    rows = tx.db.execute(SUBMIT_QUERIES.find_key, (GIVEN_ID_SCOPE, job.job_id)).fetchall()
    if rows:
        same = rows[0][1] == job.fingerprint
    else:
        same = tx.db.execute(SUBMIT_QUERIES.same_request, (key,)).fetchall()[0] == _request(job)
    return _same_id(job, same=same)


def _same_id(job: NewJob, *, same: bool) -> Submitted | Mismatch:
    return Submitted(job_id=job.job_id, created=False) if same else Mismatch(key=job.job_id, job_id=job.job_id)


def _request(job: NewJob) -> tuple[int, str, bytes]:
    """The request's fields, in the column order of the query `same_request`."""
    return (LIFECYCLES[job.lifecycle].code, job.type, job.payload)


def _take_in(
    tx: Transaction,
    new: _NewRows,
    job: NewJob,
    options: ResolvedOptions,
    step: StoredStep,
    who: ActorRef,
    key: int,
    delay_us: int | None,
) -> None:
    ckey = None
    if job.concurrency_key is not None:
        ckey = tx.names.key_id(job.concurrency_key, options.concurrency_limit)
        new.concurrency.add(ckey)
    length = _deadline_us(options)
    deadline = None if length is None else tx.now + length
    type_id = tx.names.type_id(step.lifecycle, job.type)
    original = None if job.compensates is None else _original(tx, job.compensates)
    alike = (step.lifecycle, type_id, int(options.priority), options.max_attempts, deadline, ckey, original)
    new.jobs.setdefault(alike, []).append(key)
    new.submissions.append(_submission_row(job, options, tx.now, ckey, key, job.job_id, job.payload))
    place, wait = target_place(step, keyed=ckey is not None, delay_us=delay_us or step.timer_us)
    new.steps.add(StepWrite(step, who, place, wait), JobKey(key))
    _remember(new, job, key, tx.now)


def _deadline_us(options: ResolvedOptions) -> int | None:
    return None if options.deadline_s is None else int(options.deadline_s * US)


def _submission_row(
    job: NewJob, options: ResolvedOptions, now: int, ckey: int | None, key: int, job_id: JobId, payload: bytes
) -> tuple[int | str | bytes | None, ...]:
    """The values of the query `insert_submission` for a job like `job`, with this number, id and payload."""
    return (
        key,
        job_id,
        now,
        options.max_attempts,
        options.max_deaths,
        None if job.correlation_id == job_id else job.correlation_id,
        job.trace,
        job.parent_id,
        payload,
        _deadline_us(options),
        None if ckey is None else options.concurrency_limit,
        job.compensates,
    )


def _remember(new: _NewRows, job: NewJob, key: int, now: int) -> None:
    new.ids[job.job_id] = (job, key)
    if job.idempotency_key is not None:
        new.keys.append((_scope(job), job.idempotency_key, key, job.fingerprint, now))
        new.seen[_scope(job), job.idempotency_key] = (job.fingerprint, job.job_id)
    if job.id_is_given:
        new.keys.append((GIVEN_ID_SCOPE, job.job_id, key, job.fingerprint, now))
        new.seen[GIVEN_ID_SCOPE, job.job_id] = (job.fingerprint, job.job_id)


def _scope(job: NewJob) -> str:
    return CALLER_SCOPE + job.idempotency_scope


def _delay_us(job: NewJob, now: int) -> int | None:
    """How long the job is delayed: the later of its delay and its requested time; None without delay."""
    delay = int(job.delay_s * US)
    if job.run_at is not None:
        delay = max(delay, int(job.run_at.timestamp() * US) - now)
    return delay if delay > 0 else None


def _original(tx: Transaction, job_id: JobId) -> int:
    rows = tx.db.execute(SUBMIT_QUERIES.existing_one, (job_id,)).fetchall()
    if not rows:
        raise JobNotFound(job_id=job_id)
    return rows[0][1]


def _write(tx: Transaction, new: _NewRows) -> None:
    for alike, keys in new.jobs.items():
        tx.db.execute(SUBMIT_QUERIES.insert_jobs, (*alike, array(keys)))
    if new.keys:
        tx.db.executemany(SUBMIT_QUERIES.insert_key, new.keys)
    if not new.jobs:
        return
    tx.db.executemany(SUBMIT_QUERIES.insert_submission, new.submissions)
    new.steps.write(tx)
    promote(tx, new.concurrency)


# Submitting inside the caller's own transaction, on the caller's connection to the ledger's file.
#
# The job exists once the caller commits, and never if it rolls back. The caller's SQLite library must not damage files
# (3.51.3 or later); the standard library's `sqlite3` is often older.


class OuterConnection(Database, Protocol):
    """The caller's open connection, of any SQLite driver that has `execute` and `executemany`."""


def submit_on(
    connection: OuterConnection, actor: Actor, jobs: Sequence[NewJob], now: int
) -> list[Submitted | Mismatch]:
    """Submit in the transaction that is open on `connection`. The caller commits it or rolls it back."""
    refuse_old_library(connection.execute("SELECT sqlite_version()").fetchall()[0][0])
    if not getattr(connection, "in_transaction", True):
        raise OptionInvalid(option="connection", value="not in a transaction", expected="begin one first")
    check_version(connection)
    connection.execute("SAVEPOINT trellis_submit")
    submitted = False
    try:
        transaction = Transaction(connection, NameNumbers(connection, this_node()), now, connection)
        answers = submit(transaction, actor, jobs)
        submitted = True
    finally:
        if not submitted:  # a part may have been written: a waiting job may have been replaced
            connection.execute("ROLLBACK TO trellis_submit")
        connection.execute("RELEASE trellis_submit")
    return answers
