"""Submit on PostgreSQL: chooses the function for each job and builds its array arguments."""

import json
from collections.abc import Awaitable, Callable, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, groupby
from typing import Any, TypeAlias

from trellis.engine.errors import ChildExists, NotABatch
from trellis.engine.job_batches import BatchSubmitted, NewBatch, earlier_batch, members_of
from trellis.engine.jobs import (
    JobId,
    Lease,
    LeaseLost,
    Mismatch,
    NewJob,
    RequestKey,
    Submitted,
    TypeOptions,
    accepted,
    different_ones,
    ids_of,
    payloads_of,
    submit_parts,
)
from trellis.ledgers.alike_jobs import are_alike, join_alike
from trellis.ledgers.postgres.connection import InsufficientPrivilege, PostgresConnection
from trellis.ledgers.postgres.notifier import CARRIED_HINT, CarriedHint
from trellis.ledgers.postgres.request_keys import key_argument
from trellis.lifecycles import LIFECYCLES

SUBMIT_PLAIN = "select submit_plain($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)"
SUBMIT_ALIKE = "select submit_alike_jobs($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
SUBMIT_ALIKE_AND_HINT = f"{SUBMIT_ALIKE}, {CARRIED_HINT}"
SUBMIT_KEYED = "select outcome, job_id, replaced from submit_keyed($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27)"
SUBMIT_ONE = f"select submit_one({', '.join(f'${number}' for number in range(1, 27))})"
SUBMIT_ONE_AND_HINT = f"{SUBMIT_ONE}, {CARRIED_HINT}"
BATCH_ENTRY_OF = "select o.body from job j join journal o on o.id = j.id and o.entry = '@batch' where j.job_id = $1"
PLAIN_REFUSED = "TR013"
SubmitCall: TypeAlias = tuple[int, Sequence[NewJob]]
"""The jobs of one call of submit, with the number of the actor that submits them."""
SubmitCalls: TypeAlias = Sequence[SubmitCall]
GIVEN_ID_SCOPE = "job_id"
CALLER_SCOPE = "key:"
"""The prefix of every caller's scope, so that none collides with the scope of chosen job ids."""


def are_plain(jobs: Sequence[NewJob], unique_types: AbstractSet[str]) -> bool:
    """Whether the jobs of a call have no key of any kind, and one lifecycle. Such jobs are inserted set-wise.

    If only some are plain, none is: jobs of one call become claimable in the order of the call.
    """
    if are_alike(jobs):
        return different_ones(jobs)[0].type not in unique_types
    return len({job.lifecycle for job in jobs}) <= 1 and not any(
        job.idempotency_key
        or job.concurrency_key
        or job.compensates
        or job.id_is_given
        or job.unique is not None
        or job.type in unique_types
        for job in jobs
    )


def grouped(
    calls: Sequence[SubmitCall], unique_types: AbstractSet[str], *, compare: bool
) -> tuple[dict[int, list[NewJob]], dict[int, list[NewJob]]]:
    """The jobs of calls by actor: those that are inserted set-wise, and those that are submitted one by one.

    To `compare` jobs with those that have their ids, all are submitted one by one.
    """
    plain: dict[int, list[NewJob]] = {}
    keyed: dict[int, list[NewJob]] = {}
    for actor, jobs in calls:
        group = plain if not compare and are_plain(jobs, unique_types) else keyed
        group.setdefault(actor, []).extend(jobs)
    return plain, keyed


def type_to_submit_with_keys(error: Exception) -> str | None:
    """The job type whose jobs `submit_plain` refuses because they are unique; None for another error."""
    return str(getattr(error, "detail", "")) if getattr(error, "sqlstate", "") == PLAIN_REFUSED else None


def some(values: list[Any]) -> list[Any] | None:
    """The values; None if all are None. The driver looks at each element of an array."""
    return None if values.count(None) == len(values) else values


def _shared(values: list[int]) -> list[int]:
    """The values; one for all if they are alike. The driver checks and encodes each number of an array."""
    return values[:1] if values.count(values[0]) == len(values) else values


async def submit_plain(
    connection: PostgresConnection, actor: int, jobs: Sequence[NewJob], types: dict[str, int]
) -> None:
    """Submit jobs without keys for the first time, one statement per lifecycle."""
    for lifecycle, group in groupby(sorted(jobs, key=lambda j: j.lifecycle), key=lambda j: j.lifecycle):
        same = list(group)
        if are_alike(same) and await submit_alike(connection, actor, same, types):
            continue
        await connection.execute(
            SUBMIT_PLAIN,
            actor,
            LIFECYCLES[lifecycle].code,
            False,
            [job.job_id for job in same],
            _shared([types[job.type] for job in same]),
            _shared([job.priority for job in same]),
            [job.payload for job in same],
            _shared([job.max_attempts for job in same]),
            _shared([job.max_deaths for job in same]),
            some([job.delay_s or None for job in same]),
            some([job.run_at for job in same]),
            some([job.deadline_s for job in same]),
            some([job.correlation_id for job in same]),
            some([job.trace for job in same]),
            some([job.parent_id for job in same]),
            _shared([job.chosen for job in same]),
        )


def joined(calls: Sequence[SubmitCall]) -> Sequence[NewJob] | None:
    """The jobs of calls as one list, if one actor submits them all and they differ only in id and payload."""
    actor = calls[0][0]
    return join_alike([jobs for _, jobs in calls]) if all(by == actor for by, _ in calls) else None


async def _carrying(
    connection: PostgresConnection, plain: str, and_hint: str, hint: CarriedHint | None, arguments: Sequence[object]
) -> Any:
    """The answer of a statement that submits, which is its transaction. It carries the hint of its work if that is wanted."""
    if hint is None or not hint.is_wanted:
        return await connection.fetchval(plain, *arguments)
    try:
        ((answer, hint.is_heard),) = await connection.fetch(and_hint, *arguments)
    except InsufficientPrivilege:  # the login may not hint, which is no reason to refuse its job; or it may not submit
        return await connection.fetchval(plain, *arguments)
    return answer


async def submit_alike(
    connection: PostgresConnection,
    actor: int,
    jobs: Sequence[NewJob],
    types: dict[str, int],
    hint: CarriedHint | None = None,
) -> bool:
    """Submit jobs that differ only in id and payload, for the first time. False, and nothing is sent, if an id has a space."""
    first, ids = different_ones(jobs)[0], " ".join(ids_of(jobs))
    if ids.count(" ") >= len(jobs):
        return False
    payloads = payloads_of(jobs)
    ends = accumulate(map(len, payloads), initial=0)
    arguments = (
        actor,
        LIFECYCLES[first.lifecycle].code,
        types[first.type],
        first.priority,
        first.max_attempts,
        first.max_deaths,
        first.correlation_id,
        first.trace,
        first.parent_id,
        first.chosen,
        ids,
        " ".join(map(str, ends)),
        b"".join(payloads),
    )
    await _carrying(connection, SUBMIT_ALIKE, SUBMIT_ALIKE_AND_HINT, hint, arguments)
    return True


async def submit_one(
    connection: PostgresConnection,
    actor: int,
    job: NewJob,
    types: dict[str, int],
    hint: CarriedHint | None = None,
    *,
    repeat: bool,
) -> Submitted | Mismatch:
    """Submit one job, with keys or without, by one statement."""
    scope, key = _key(job)
    arguments = (
        actor,
        LIFECYCLES[job.lifecycle].code,
        job.job_id,
        types[job.type],
        job.priority,
        job.payload,
        job.max_attempts,
        job.max_deaths,
        job.delay_s or None,
        job.run_at,
        job.deadline_s,
        job.correlation_id,
        job.trace,
        job.parent_id,
        job.compensates,
        job.concurrency_key,
        job.concurrency_limit,
        scope,
        key,
        job.fingerprint,
        repeat,
        job.id_is_given,
        job.waiting_max,
        job.chosen,
        None if job.unique is None else job.unique.text(),
        job.unique_scope,
    )
    answer = await _carrying(connection, SUBMIT_ONE, SUBMIT_ONE_AND_HINT, hint, arguments)
    return Submitted(job_id=job.job_id, created=True) if answer is None else _answer(job, *answer)


def declaring(actor: int, types: Sequence[TypeOptions], *, only_new: bool) -> tuple[Any, ...]:
    """The verb, the statement and the arguments that declare the options of types."""
    return (
        "declare_types",
        "select declare_types($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)",
        actor,
        only_new,
        [LIFECYCLES[one.lifecycle].code for one in types],
        [one.type for one in types],
        [int(one.priority) for one in types],
        [one.max_attempts for one in types],
        [one.max_deaths for one in types],
        [one.deadline_s for one in types],
        [one.concurrency_limit for one in types],
        [one.keyed for one in types],
        [one.compensation for one in types],
        [None if one.unique is None else one.unique.text() for one in types],
        [None if one.key_rate is None else one.key_rate.per_second for one in types],
        [None if one.key_rate is None else one.key_rate.burst for one in types],
    )


async def lock_waiting(connection: PostgresConnection, jobs: Sequence[NewJob]) -> None:
    """Lock the bounded keys of all calls first: each call alone would lock in its own order and could deadlock."""
    bounded = [job.concurrency_key for job in jobs if job.waiting_max is not None]
    if bounded:
        await connection.execute("select lock_waiting($1)", bounded)


async def submit_keyed(
    connection: PostgresConnection,
    actor: int,
    jobs: Sequence[NewJob],
    types: dict[str, int],
    *,
    repeat: bool,
    key: RequestKey | None = None,
) -> list[Submitted | Mismatch] | None:
    """Submit jobs with keys, one by one inside one statement; None when an answer is stored with the request's key."""
    keys = [_key(job) for job in jobs]
    rows = await connection.fetch(
        SUBMIT_KEYED,
        actor,
        [LIFECYCLES[job.lifecycle].code for job in jobs],
        [job.job_id for job in jobs],
        [types[job.type] for job in jobs],
        [int(job.priority) for job in jobs],
        [job.payload for job in jobs],
        [job.max_attempts for job in jobs],
        [job.max_deaths for job in jobs],
        some([job.delay_s or None for job in jobs]),
        some([job.run_at for job in jobs]),
        some([job.deadline_s for job in jobs]),
        some([job.correlation_id for job in jobs]),
        some([job.trace for job in jobs]),
        some([job.parent_id for job in jobs]),
        some([job.compensates for job in jobs]),
        some([job.concurrency_key for job in jobs]),
        [job.concurrency_limit for job in jobs],
        [scope for scope, _ in keys],
        [key for _, key in keys],
        [job.fingerprint for job in jobs],
        repeat,
        [job.id_is_given for job in jobs],
        some([job.waiting_max for job in jobs]),
        [job.chosen for job in jobs],
        key_argument(key),
        some([None if job.unique is None else job.unique.text() for job in jobs]),
        some([job.unique_scope or None for job in jobs]),
    )
    if rows and rows[0]["outcome"] == "answered":
        return None
    return [_answer(job, *row) for job, row in zip(jobs, rows, strict=True)]


async def submit_groups(
    connection: PostgresConnection,
    plain: dict[int, list[NewJob]],
    keyed: dict[int, list[NewJob]],
    types: dict[str, int],
    *,
    repeat: bool,
) -> dict[int, Submitted | Mismatch]:
    """Submit jobs by actor: plain ones set-wise, then those with keys. Returns the answers of the latter, by `id(job)`."""
    answers: dict[int, Submitted | Mismatch] = {}
    for actor, jobs in plain.items():
        await submit_plain(connection, actor, jobs, types)
    for actor, jobs in keyed.items():
        outcomes = await submit_keyed(connection, actor, jobs, types, repeat=repeat) or []
        answers.update((id(job), answer) for job, answer in zip(jobs, outcomes, strict=True))
    return answers


SPAWN_LOST, SPAWN_NEW, SPAWN_REPEATED = range(3)
"""The answers of the function `begin_spawn`."""
SubmitPart: TypeAlias = Callable[[Sequence[NewJob]], Awaitable[list[Submitted | Mismatch]]]
"""Submits some jobs, up to SUBMIT_MAX, in a transaction that is open."""


async def spawn(
    connection: PostgresConnection,
    lease: Lease,
    jobs: Sequence[NewJob],
    entry: tuple[str, bytes],
    submit_part: SubmitPart,
    *,
    cancelled: Sequence[bool],
) -> bytes | LeaseLost:
    """Submit children of a held job and journal them. `cancelled` says which are cancelled with it. One transaction."""
    held = (lease.key, lease.epoch)
    async with connection.transaction():
        begun = await connection.fetchval("select begin_spawn($1, $2, $3, $4)", *held, *entry)
        if begun == SPAWN_LOST:
            return LeaseLost(lease)
        if begun == SPAWN_REPEATED:
            stored = "select body from journal where id = $1 and entry = $2"
            return (await connection.fetch(stored, lease.key, entry[0]))[0][0]
        ids = [job.job_id for job in jobs]
        there = await connection.fetch("select job_id from job where job_id = any($1)", ids)
        if there:
            raise ChildExists(job_id=there[0][0], parent_id=lease.job_id)
        for answer in await submit_part(jobs):
            if isinstance(answer, Mismatch) or not answer.created:
                raise ChildExists(job_id=answer.job_id, parent_id=lease.job_id)
        await connection.execute("select link_children($1, $2, $3, $4)", *held, ids, cancelled)
    return entry[1]


async def submit_batch(
    connection: PostgresConnection,
    actor: int,
    batch: NewBatch,
    submit_part: SubmitPart,
) -> BatchSubmitted:
    """Submit the completion job, then the jobs, then suspend it until they have ended. One transaction."""
    async with connection.transaction():
        jobs = (batch.completion, *batch.members)
        await lock_waiting(connection, jobs)
        keys = {job.concurrency_key for job in jobs if job.concurrency_key is not None}
        if len(keys) > 1:
            await connection.execute("select lock_keys($1)", list(keys))
        answer = accepted((await submit_part([batch.completion]))[0])
        stored = await connection.fetchval(BATCH_ENTRY_OF, answer.job_id)
        if stored is not None:
            return earlier_batch(batch, answer, stored)
        if not answer.created:
            raise NotABatch(job_id=answer.job_id)
        answers: list[Submitted] = []
        for part in submit_parts(batch.members):
            answers += map(accepted, await submit_part(part))
        members = members_of(batch, answer, answers)
        await connection.execute(
            "select complete_batch($1, $2, $3, $4, $5)",
            actor,
            answer.job_id,
            list(members.ids),
            json.dumps(members.runs()),
            batch.abandon,
        )
    return BatchSubmitted(completion=answer, members=tuple(answers))


def _key(job: NewJob) -> tuple[str | None, str | None]:
    if job.idempotency_key is not None:
        return CALLER_SCOPE + job.idempotency_scope, job.idempotency_key
    return (GIVEN_ID_SCOPE, job.job_id) if job.id_is_given else (None, None)


def _answer(job: NewJob, outcome: str, job_id: JobId, replaced: JobId | None) -> Submitted | Mismatch:
    if outcome == "mismatched_id":
        return Mismatch(key=job.job_id, job_id=job_id)
    if outcome == "mismatch":
        return Mismatch(key=job.idempotency_key or job.job_id, job_id=job_id)
    created = outcome == "created"
    return Submitted(job_id=job_id, created=created, replaced=replaced if created else None)
