"""Changes of many jobs on PostgreSQL, a page of them in one transaction."""

from collections.abc import Sequence

from trellis.engine.job_changes import (
    SELECTED_BY_CHARS_MAX,
    ChangeAnswer,
    ChangedJobs,
    ChangeOrder,
    JobToChange,
)
from trellis.engine.jobs import Actor, CancelMode, CancelRequested, NotMoved
from trellis.engine.request_keys import CHANGE_ANSWERS
from trellis.engine.text import storable
from trellis.ledgers import refusals
from trellis.ledgers.postgres import moves, request_keys
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow
from trellis.lifecycles import BY_CODE

CHANGE = "select * from change_jobs($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"


async def change_jobs(
    connection: PostgresConnection, number: int, actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange]
) -> ChangedJobs:
    """Change these jobs in one transaction. `number` is the actor's."""

    async def change() -> ChangedJobs | None:
        rows = await connection.fetch(CHANGE, number, *_arguments(order, jobs))
        if rows and rows[0]["outcome"] == "answered":
            return None
        by_job = {row["job_id"]: row for row in rows}
        answers = tuple(_answer(order, actor, job, by_job.get(job.job_id)) for job in jobs)
        return ChangedJobs(answers=answers, next_cursor=order.next_cursor)

    return await request_keys.answer_once(connection, order.key, CHANGE_ANSWERS, change)


def _arguments(order: ChangeOrder, jobs: Sequence[JobToChange]) -> tuple[object, ...]:
    selected_by = None if order.selected_by is None else (storable(order.selected_by) or "")[:SELECTED_BY_CHARS_MAX]
    return (
        order.change.value,
        [job.job_id for job in jobs],
        [job.version for job in jobs],
        order.request_id,
        storable(order.cause),
        order.mode is CancelMode.SOFT,
        order.grace_s,
        order.priority,
        selected_by,
        request_keys.key_argument(order.key),
    )


def _answer(order: ChangeOrder, actor: Actor, job: JobToChange, row: PostgresRow | None) -> ChangeAnswer:
    if row is None:
        return refusals.no_such_job(job.job_id, order.change)
    lifecycle = BY_CODE[row["lifecycle"]]
    state = lifecycle.state_of(row["source"]).name
    reasons = {
        "version": refusals.version_refusal(row["version"], job.version),
        "not delayed": refusals.NOT_DELAYED,
        "same priority": refusals.HAS_THIS_PRIORITY,
    }
    if row["outcome"] == "requested":
        return CancelRequested(job_id=job.job_id, state=state, version=row["version"])
    if row["outcome"] in reasons:
        target = refusals.trigger_target(lifecycle, state, order.change.value)
        return NotMoved(job_id=job.job_id, state=state, target=target, reason=reasons[row["outcome"]])
    return moves.moved_answer(job.job_id, row, order.change.value, actor.role)
