"""Signals to jobs, the children of cancelled jobs, and batches."""

import json

from trellis.engine.admin_acts import SIGNALLED, NewAct
from trellis.engine.errors import NotABatch
from trellis.engine.job_batches import BatchSubmitted, NewBatch, check_batch_jobs, earlier_batch, members_of
from trellis.engine.jobs import (
    BATCH_ENTRY,
    JOB_SIGNALS_MAX,
    ORPHAN_GRACE_S,
    Actor,
    JobId,
    RequestKey,
    SignalSent,
    Submitted,
    Wait,
    WaitMode,
    accepted,
    submit_parts,
)
from trellis.engine.request_keys import SIGNAL_ANSWERS
from trellis.ledgers.refusals import check_job_signal, signal_refused
from trellis.ledgers.sqlite import control, request_keys
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.moves import request_cancel
from trellis.ledgers.sqlite.plan import (
    HELD,
    ROLE_CODES,
    STATE_NAMES,
    STEPS,
    ActorRef,
    JobRow,
    StepWrite,
    sweeping_role,
    target_place,
)
from trellis.ledgers.sqlite.steps import (
    WAIT_QUERIES,
    StepBatch,
    array,
    children_array,
    find_job_row,
    job_rows,
    resume_if_over,
)
from trellis.ledgers.sqlite.submit import submit
from trellis.lifecycles import Trigger
from trellis.lifecycles.events import Cause


def send_signal(
    tx: Transaction,
    actor: Actor,
    job_id: JobId,
    name: str,
    body: bytes,
    *,
    signal_key: str | None = None,
    key: RequestKey | None = None,
) -> SignalSent:
    """Store a signal, and resume the job if it waits for it."""
    check_job_signal(name, body, signal_key)
    return request_keys.answer_once(
        tx, key, SIGNAL_ANSWERS, lambda: _send_signal(tx, actor, job_id, name, body, signal_key)
    )


def _send_signal(tx: Transaction, actor: Actor, job_id: JobId, name: str, body: bytes, key: str | None) -> SignalSent:
    row = find_job_row(tx, job_id)
    state = STATE_NAMES[row.lifecycle, row.state]
    before = [] if key is None else tx.db.execute(WAIT_QUERIES.signal_with_key, (row.id, key)).fetchall()
    if before:
        return SignalSent(job_id=job_id, number=before[0][0], state=state, repeated=True)
    if row.place > HELD:
        raise signal_refused(name, job_id, state)
    if tx.db.execute(WAIT_QUERIES.count_signals, (row.id,)).fetchall()[0][0] >= JOB_SIGNALS_MAX:
        raise signal_refused(name, job_id, None)
    by = tx.names.actor_id(actor.name)
    number = tx.db.execute(WAIT_QUERIES.put_signal, (row.id, name, tx.now, by, key, body)).fetchall()[0][0]
    control.record(tx, actor, NewAct(event=SIGNALLED, subject=job_id, target=name, job_id=job_id))
    waits = tx.db.execute(WAIT_QUERIES.suspension, (row.id,)).fetchall()
    if waits and waits[0][1] == name:
        resume_if_over(tx, row.id, {Cause.SIGNAL_ARRIVED}, by)
    return SignalSent(job_id=job_id, number=number, state=state)


def cancel_orphans(tx: Transaction, actor: Actor, limit: int) -> int:
    """Cancel the children of cancelled jobs: at once while they wait, by a request while they run."""
    keys = [key for (key,) in tx.db.execute(WAIT_QUERIES.orphans, (limit,))]
    if not keys:
        return 0
    tx.db.execute(WAIT_QUERIES.keep_orphans, (array(keys),))
    batch, by = StepBatch(), tx.names.actor_id(actor.name)
    for row in job_rows(tx, keys).values():
        step = STEPS.get((row.lifecycle, row.state, Trigger.CANCEL))
        if step is None:
            continue
        if row.place == HELD:
            request_cancel(tx, actor, row, grace_s=ORPHAN_GRACE_S, cause=Cause.PARENT_ENDED)
            continue
        place, wait = target_place(step, keyed=row.ckey is not None, delay_us=None)
        who = ActorRef(sweeping_role(row.lifecycle), by)
        batch.add(row, StepWrite(step, who, place, wait, cause=Cause.PARENT_ENDED))
    batch.write(tx)
    return len(keys)


# Batches: their jobs, and the job that starts when all of them have ended.


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
