"""Submitting a batch to an SQLite ledger: its jobs, and the job that starts when all of them have ended."""

import json

from trellis.engine.errors import NotABatch
from trellis.engine.job_batches import (
    BatchSubmitted,
    NewBatch,
    check_batch_jobs,
    earlier_batch,
    members_of,
)
from trellis.engine.jobs import BATCH_ENTRY, Actor, Submitted, Wait, WaitMode, accepted, submit_parts
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ROLE_CODES, STEPS, ActorRef, JobRow, StepWrite, target_place
from trellis.ledgers.sqlite.steps import WAIT_QUERIES, StepBatch, children_array, find_job_row
from trellis.ledgers.sqlite.submit import submit
from trellis.lifecycles import Trigger


def submit_batch(tx: Transaction, actor: Actor, batch: NewBatch) -> BatchSubmitted:
    """Submit the completion job, then the jobs, then suspend it until they have ended."""
    check_batch_jobs(batch.completion, batch.members)
    answer = accepted(submit(tx, actor, [batch.completion])[0])
    row = find_job_row(tx, answer.job_id)
    stored = tx.db.execute(WAIT_QUERIES.batch_entry, (row.id,)).fetchall()
    if stored:
        return earlier_batch(batch, answer, stored[0][0])
    if not answer.created:
        raise NotABatch(job_id=answer.job_id)
    answers: list[Submitted] = []
    for part in submit_parts(batch.members):
        answers += map(accepted, submit(tx, actor, part))
    created = {one.job_id for one in answers if one.created}
    values = {"parent": row.id, "children": children_array(created, set() if batch.abandon else created)}
    tx.db.execute(WAIT_QUERIES.link_members, values)
    _suspend(tx, actor, row, members_of(batch, answer, answers).body(), len(answers))
    return BatchSubmitted(completion=answer, members=tuple(answers))


def _suspend(tx: Transaction, actor: Actor, row: JobRow, entry: bytes, count: int) -> None:
    """Suspend the completion job. If all jobs of its batch have ended, this resumes it at once."""
    step = STEPS[row.lifecycle, row.state, Trigger.SUSPEND]
    place, wait = target_place(step, keyed=row.ckey is not None, delay_us=None)
    who = ActorRef(ROLE_CODES[actor.role], tx.names.actor_id(actor.name))
    steps = StepBatch(spared=[row.id], waits=[(row.id, Wait(mode=WaitMode.BATCH, entry=(BATCH_ENTRY, entry)))])
    steps.add(row, StepWrite(step, who, place, wait, data=json.dumps({"waits_for": {"batch": count}}).encode()))
    steps.write(tx)
