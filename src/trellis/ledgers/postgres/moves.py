"""Moves and requeues on PostgreSQL: steps by roles that hold no lease."""

from collections.abc import Sequence
from math import isfinite

from trellis.engine.errors import JobNotFound, OptionInvalid
from trellis.engine.jobs import (
    CancelRequested,
    Epoch,
    JobId,
    JobKey,
    Lease,
    Move,
    Moved,
    NotMoved,
    RequestId,
    RequestKey,
    SignalSent,
)
from trellis.engine.records import JobFilter
from trellis.engine.text import storable
from trellis.ledgers import refusals
from trellis.ledgers.postgres import request_keys
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow
from trellis.ledgers.postgres.reads import READ_QUERIES, requeueable_codes
from trellis.ledgers.postgres.rows import STORED_PLACES
from trellis.ledgers.postgres.submit import some
from trellis.ledgers.refusals import check_death
from trellis.lifecycles import BY_CODE, Phase, Role, Trigger

# Moves: concurrent moves become the arguments of one function call, and its rows become answers.

MOVES = "select * from moves($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)"


def move_arguments(actor: int, move: Move) -> tuple[object, ...]:
    """The function's arguments for a move by this actor.

    Invalid values are refused here, before the move joins a batch.
    """
    death = move.death
    return (
        actor,
        move.job_id,
        move.target,
        move.request_id,
        move.version,
        move.delay_s,
        _ms("lease_s", move.lease_s),
        _ms("heartbeat_s", move.heartbeat_s),
        storable(move.cause),
        move.data,
        death.reason_code.value if death else None,
        death.stage.value if death else None,
        storable(death.last_error) if death else None,
    )


async def run_moves(
    connection: PostgresConnection, arguments: Sequence[tuple[object, ...]], key: RequestKey | None = None
) -> list[PostgresRow]:
    """The result rows of these moves, in order. Each item holds a move's arguments. A move with a key comes alone."""
    columns = [some(list(column)) for column in zip(*arguments, strict=True)]
    rows = await connection.fetch(MOVES, *columns, request_keys.key_argument(key))
    return sorted(rows, key=lambda row: row["n"])


async def move_with_key(
    connection: PostgresConnection, move: Move, arguments: tuple[object, ...], role: Role
) -> Moved | NotMoved:
    """Make one move in the transaction that stores its request key. Raises IdempotencyMismatch, JobNotFound."""
    assert move.key is not None
    async with connection.transaction():
        (row,) = await run_moves(connection, [arguments], move.key)
        answer = move_answer(move, row, role)
        if move.key.answer is not None and isinstance(answer, Moved):
            await request_keys.store_answer(connection, move.key, move.key.answer)
        return answer


def _ms(option: str, seconds: float) -> int:
    if not isfinite(seconds):
        raise OptionInvalid(option=option, value=seconds, expected="a number of seconds")
    return round(seconds * 1000)


def move_answer(move: Move, row: PostgresRow, role: Role) -> Moved | NotMoved:
    """The answer to a move in this role. Raises JobNotFound, OptionInvalid."""
    if row["outcome"] == "missing":
        raise JobNotFound(job_id=move.job_id)
    lifecycle, source = BY_CODE[row["lifecycle"]], state_name(row["lifecycle"], row["source"])
    match row["outcome"]:
        case "reason":
            check_death(lifecycle.by_name[move.target], None)
            reason = ""
        case "version":
            reason = refusals.version_refusal(row["version"], move.version)
        case "key":
            reason = refusals.KEY_IS_FULL
        case "rate":
            reason = refusals.KEY_RATE_IS_USED
        case "answered":
            reason = refusals.REQUEST_IS_ANSWERED
        case "unknown" | "undeclared" | "actor" | "fenced" | "engine":
            reason = str(refusals.transition_or_refusal(lifecycle, source, move.target, role))
        case str(other) if (taken := _unique_refusal(other)) is not None:
            reason = taken
        case _:
            return moved_answer(move.job_id, row, move.target, role)
    return NotMoved(job_id=move.job_id, state=source, target=move.target, reason=reason)


def _unique_refusal(outcome: str) -> str | None:
    """Why a job is not requeued whose unique key another job holds; None for another outcome."""
    return refusals.unique_key_is_taken(outcome.removeprefix("unique ")) if outcome.startswith("unique ") else None


def state_name(lifecycle: int, code: int) -> str:
    return BY_CODE[lifecycle].state_of(code).name


def moved_answer(job_id: str, row: PostgresRow, trigger: str, role: Role) -> Moved | NotMoved:
    """The answer of a function that moves one job by a trigger."""
    lifecycle, outcome = BY_CODE[row["lifecycle"]], row["outcome"]
    source = lifecycle.state_of(row["source"]).name
    if outcome == "same":
        return Moved(job_id=JobId(job_id), source=source, target=source, version=row["version"], repeated=True)
    if outcome not in {"moved", "repeated"}:
        target = refusals.trigger_target(lifecycle, source, trigger)
        reason = _unique_refusal(outcome) or refusals.trigger_refusal(lifecycle, source, trigger, role)
        return NotMoved(job_id=JobId(job_id), state=source, target=target, reason=reason)
    reached = lifecycle.state_of(row["target"])
    lease = None
    if reached.phase is Phase.HELD:
        lease = Lease(JobKey(row["id"]), Epoch(row["epoch"]), JobId(job_id), lifecycle.name)
    return Moved(
        job_id=JobId(job_id),
        source=source,
        target=reached.name,
        version=row["version"],
        lease=lease,
        repeated=outcome == "repeated",
    )


async def cancel(
    connection: PostgresConnection, job_id: JobId, arguments: tuple[object, ...], role: Role, key: RequestKey | None
) -> Moved | NotMoved | CancelRequested | None:
    """Cancel one job with the function's arguments; None when an answer is stored with the key. Raises JobNotFound."""
    argument = request_keys.key_argument(key)
    rows = await connection.fetch("select * from cancel($1, $2, $3, $4, $5, $6, $7)", *arguments, argument)
    if not rows:
        raise JobNotFound(job_id=job_id)
    row = rows[0]
    if row["outcome"] == "answered":
        return None
    if row["outcome"] == "requested":
        state = state_name(row["lifecycle"], row["source"])
        return CancelRequested(job_id=job_id, state=state, version=row["version"])
    return moved_answer(job_id, row, Trigger.CANCEL, role)


# Requeue: the jobs of a filter are looked up first, then one statement moves them. Two equal requests at the same
# moment may both look up the jobs before either moves them. Both then select the same oldest jobs, and the second finds
# them moved.


async def requeue(
    connection: PostgresConnection,
    arguments: tuple[int, RequestId, str | None],
    jobs: Sequence[JobId] | JobFilter,
    role: Role,
    *,
    limit: int,
    key: RequestKey | None,
) -> list[Moved | NotMoved] | None:
    """The answer for each selected job; None when an answer is stored with the key. Raises JobNotFound."""
    number, request_id, cause = arguments
    filtered = isinstance(jobs, JobFilter)
    chosen = await _requeueable(connection, jobs, limit, request_id) if filtered else list(jobs)
    argument = request_keys.key_argument(key)
    rows = await connection.fetch(
        "select * from requeue($1, $2, $3, $4, $5)", number, chosen, request_id, cause, argument
    )
    if rows and rows[0]["outcome"] == "answered":
        return None
    answers = {row["job_id"]: moved_answer(row["job_id"], row, Trigger.REQUEUE, role) for row in rows}
    missing = [job_id for job_id in chosen if job_id not in answers]
    if missing:
        raise JobNotFound(job_id=missing[0])
    return [answers[job_id] for job_id in chosen]


async def _requeueable(
    connection: PostgresConnection, where: JobFilter, limit: int, request_id: RequestId
) -> list[JobId]:
    """The jobs a filter selects. A repeated request id selects the jobs it took before, and no more."""
    before = await connection.fetch(READ_QUERIES.requested, request_id)
    if before:
        return [JobId(row["job_id"]) for row in before]
    rows = await connection.fetch(
        READ_QUERIES.requeueable,
        limit,
        requeueable_codes(where),
        where.type,
        where.correlation_id,
        where.concurrency_key,
        where.reason_code,
        where.parent_id,
        STORED_PLACES[where.place],
    )
    return [JobId(row["job_id"]) for row in rows]


def signal_sent(job_id: JobId, name: str, rows: Sequence[PostgresRow]) -> SignalSent | None:
    """The answer of the function `send_signal`; None when an answer is stored with the key of the request."""
    row = rows[0]
    if row["outcome"] == "answered":
        return None
    if row["outcome"] == "missing":
        raise JobNotFound(job_id=job_id)
    if row["number"] is None:
        raise refusals.signal_refused(name, job_id, row["state"])
    return SignalSent(
        job_id=job_id,
        number=row["number"],
        state=row["state"],
        repeated=row["outcome"] == "repeated",
    )
