"""Requeue on PostgreSQL: which jobs a filter means is looked up first, and one statement moves them.

Two equal requests at the very same moment may both look before either has moved anything; they mean the same oldest jobs then, and the
second finds them moved.
"""

from collections.abc import Sequence

from trellis.engine.jobs import JobId, RequestId
from trellis.engine.records import JobFilter, JobPlace
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow
from trellis.ledgers.postgres.reads import ReadQueries, lifecycle_named, state_pairs


async def requeue(
    connection: PostgresConnection,
    asked: tuple[int, RequestId, str | None],
    jobs: Sequence[JobId] | JobFilter,
    *,
    limit: int,
) -> tuple[list[JobId], list[PostgresRow]]:
    """The jobs that were meant, and what came of each."""
    number, request_id, cause = asked
    filtered = isinstance(jobs, JobFilter)
    chosen = await _requeueable(connection, jobs, limit, request_id) if filtered else list(jobs)
    call = "select * from requeue($1, $2, $3, $4)"
    return chosen, await connection.fetch(call, number, chosen, request_id, cause)


async def _requeueable(
    connection: PostgresConnection, where: JobFilter, limit: int, request_id: RequestId
) -> list[JobId]:
    """The jobs a filter means: those this request took before, if it did, so that asking again takes no more."""
    before = await connection.fetch(ReadQueries.requested, request_id)
    if before:
        return [JobId(row["job_id"]) for row in before]
    if where.place not in {None, JobPlace.ENDED}:
        return []
    pairs = state_pairs(where)
    rows = await connection.fetch(
        ReadQueries.requeueable,
        limit,
        lifecycle_named(where.lifecycle).code if where.lifecycle else None,
        [state for _, state in pairs] if pairs is not None else None,
        where.type,
        where.correlation_id,
        where.concurrency_key,
        where.reason_code,
        [lifecycle.code for lifecycle, _ in pairs or []],
        where.parent_id,
    )
    return [JobId(row["job_id"]) for row in rows]
