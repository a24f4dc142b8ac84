"""Writes decided steps: events, and the rows that go with them. Used by every verb that moves jobs."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trellis.engine.errors import JobNotFound
from trellis.engine.job_batches import BatchMembers
from trellis.engine.jobs import RESTART_ENTRY, DeadLetterReason, JobId, JobKey, Wait, WaitMode
from trellis.engine.records import BEGUN_BY_TIMER
from trellis.engine.text import storable
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_death
from trellis.ledgers.sqlite.key_rates import RATE_QUERIES, KeyHead, any_rate, due_keys, key_heads, look_again, look_at
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import (
    PARKED,
    READY,
    STEPS,
    ActorRef,
    JobRow,
    StepWrite,
    StoredStep,
    row_reader,
    state_of,
    sweeping_role,
    target_place,
)
from trellis.lifecycles import LIFECYCLES, Progress, Trigger
from trellis.lifecycles.events import Cause


def array(numbers: Iterable[int]) -> str:
    """Numbers as one JSON value that a statement reads with json_each."""
    return f"[{','.join(map(str, numbers))}]"


_BEGUN_BY_TIMER = array(LIFECYCLES[name].code for name in BEGUN_BY_TIMER)
"""Lifecycles whose dead letters count every attempt that began."""
PROMOTED_MAX = 1_000
"""The most jobs of one key that get slots at once. The sweep hands out the rest."""


STEP_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/steps.sql")


@dataclass(slots=True)
class StepRuns:
    """Steps in the order in which jobs make them. One statement writes all jobs of a run, which make the same step.

    A job's place in its queue is the number of its event. So a step that makes a job claimable begins a new run if the
    last such step was another one.
    """

    runs: list[tuple[StepWrite, list[JobKey]]] = field(default_factory=list[tuple[StepWrite, list[JobKey]]])
    _open: dict[StepWrite, list[JobKey]] = field(default_factory=dict[StepWrite, list[JobKey]])
    _last_claimable: StepWrite | None = None
    _last: tuple[StepWrite, list[JobKey]] | None = None

    def add(self, act: StepWrite, job: JobKey) -> None:
        if self._last is not None and (act is self._last[0] or act == self._last[0]):
            self._last[1].append(job)
            return
        if act.place in {READY, PARKED} and act != self._last_claimable:
            if self._last_claimable is not None:
                del self._open[self._last_claimable]
            self._last_claimable = act
        jobs = self._open.get(act)
        if jobs is None:
            jobs = self._open[act] = []
            self.runs.append((act, jobs))
        jobs.append(job)
        self._last = (act, jobs)

    def write(self, tx: Transaction) -> None:
        for act, jobs in self.runs:
            write_step(tx, act, jobs)


@dataclass(slots=True)
class StepBatch:
    """Decided steps that are not written yet, with what goes with them."""

    steps: StepRuns = field(default_factory=StepRuns)
    deaths: list[tuple[JobKey, DeadLetterReason]] = field(default_factory=list[tuple[JobKey, DeadLetterReason]])
    results: list[tuple[JobKey, bytes, int | None]] = field(default_factory=list[tuple[JobKey, bytes, int | None]])
    finalized: list[tuple[JobKey, JobKey]] = field(default_factory=list[tuple[JobKey, JobKey]])
    """Completing jobs, each with its artifact, which the database finalizes with the job's event."""
    spared: list[JobKey] = field(default_factory=list[JobKey])
    restarted: list[JobKey] = field(default_factory=list[JobKey])
    compensated: list[tuple[JobRow, ActorRef]] = field(default_factory=list[tuple[JobRow, ActorRef]])
    keys: set[int] = field(default_factory=set[int])
    ended: dict[JobKey, StoredStep] = field(default_factory=dict[JobKey, StoredStep])
    waits: list[tuple[JobKey, Wait]] = field(default_factory=list[tuple[JobKey, Wait]])
    """Jobs that are suspended, each with what it waits for."""
    waits_over: list[JobKey] = field(default_factory=list[JobKey])
    actor: int = 0
    """Who made the last step. The jobs that it resumes say so."""

    def add(self, row: JobRow, act: StepWrite, death: DeadLetterReason | None = None) -> None:
        """Add one decided step. A job may be in a batch once."""
        self.steps.add(act, row.id)
        step = act.step
        if death is not None or step.dead_letter:
            check_death(state_of(step.lifecycle, step.target), death)
        if death is not None and step.ended and step.trigger != Trigger.DISCARD:
            self.deaths.append((row.id, death))
        if step.opens == Progress.GENERATION:
            self.restarted.append(row.id)
        if row.compensates is not None and step.success:
            self.compensated.append((row, act.who))
        if row.ckey is not None and not step.held:
            self.keys.add(row.ckey)
        if step.ended:
            self.ended[row.id] = step
        if step.ends_wait:
            self.waits_over.append(row.id)
        self.actor = act.who.actor

    def add_plain(self, key: JobKey, act: StepWrite, ckey: int | None) -> None:
        """Add a step that neither buries a job nor opens a generation, of a job that compensates none and waits for none."""
        self.steps.add(act, key)
        if act.step.ended:
            self.ended[key] = act.step
        if ckey is not None and not act.step.held:
            self.keys.add(ckey)
        self.actor = act.who.actor

    def write(self, tx: Transaction) -> None:
        """Write all steps and their consequences: recorded compensations, slots handed on."""
        for key, death in self.deaths:
            tx.db.execute(STEP_QUERIES.insert_dead_letter, _dead_letter_row(key, death, tx.now))
        if self.finalized:
            tx.db.executemany(STEP_QUERIES.name_artifact, self.finalized)
        self.steps.write(tx)
        if self.results:
            tx.db.executemany(STEP_QUERIES.put_result, self.results)
        for key in self.spared:
            tx.db.execute(STEP_QUERIES.spare_attempt, (key,))
        for key in self.restarted:
            tx.db.execute(STEP_QUERIES.start_anew, {"job": key, "now": tx.now})
            tx.db.execute(STEP_QUERIES.drop_result, (key,))
        for row, who in self.compensated:
            _record_compensation(tx, row, who)
        if self.ended or self.waits or self.waits_over:
            _settle_waits(tx, self)
        promote(tx, self.keys)


# Waits of suspended jobs: a job that ends resumes the job that waits for it, in the same transaction.

CANCELLING = frozenset({Trigger.CANCEL, "stop"})
"""The triggers that cancel a job. The children of a cancelled job are cancelled; those of a failed one may be needed again."""
WAIT_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/waits.sql")


def children_array(children: Iterable[JobId], cancelled: Collection[JobId]) -> str:
    """Children as the statements read them: each with whether it is cancelled with its parent."""
    return json.dumps([[child, int(child in cancelled)] for child in children])


def batch_members(tx: Transaction, key: JobKey) -> tuple[JobId, ...]:
    """The jobs of the batch that this job completes; none if it completes no batch."""
    rows = tx.db.execute(WAIT_QUERIES.batch_entry, (key,)).fetchall()
    return BatchMembers.read(rows[0][0]).ids if rows else ()


def _settle_waits(tx: Transaction, batch: StepBatch) -> None:
    for key in batch.waits_over:
        if tx.db.execute(WAIT_QUERIES.drop_suspension, (key,)).fetchall():
            tx.db.execute(WAIT_QUERIES.stop_awaiting, (key,))
    causes: dict[JobKey, set[Cause]] = {}
    if batch.ended:
        for child, parent, awaited in tx.db.execute(WAIT_QUERIES.end_children, (array(batch.ended),)).fetchall():
            if awaited:
                cause = Cause.CHILDREN_ENDED if batch.ended[child].success else Cause.CHILD_FAILED
                causes.setdefault(parent, set()).add(cause)
        for key, step in batch.ended.items():
            if step.trigger in CANCELLING:
                tx.db.execute(WAIT_QUERIES.orphan_children, (key,))
    for key, wait in batch.waits:
        causes[key] = _begin_wait(tx, key, wait)
    for key in sorted(causes):
        resume_if_over(tx, key, causes[key], batch.actor)


def _begin_wait(tx: Transaction, key: JobKey, wait: Wait) -> set[Cause]:
    """Store what a job waits for. Returns what of it has happened already."""
    tx.db.execute(WAIT_QUERIES.put_suspension, (key, int(wait.mode), wait.signal, wait.after))
    happened: set[Cause] = set()
    if wait.restart_with is not None:
        tx.db.execute(WAIT_QUERIES.empty_journal, (key,))
        tx.db.execute(WAIT_QUERIES.drop_signals, {"job": key, "input": wait.restart_with.decode()})
        happened.add(Cause.BEGINS_ANEW)
    entry = wait.entry if wait.restart_with is None else (RESTART_ENTRY, wait.restart_with)
    if entry is not None:
        tx.db.execute(WAIT_QUERIES.put_entry, {"job": key, "entry": entry[0], "body": entry[1], "now": tx.now})
    if wait.mode is WaitMode.BATCH:
        members = children_array(batch_members(tx, key), set())
        values = {"parent": key, "children": members}
        tx.db.execute(WAIT_QUERIES.link_members, values)
        if not tx.db.execute(WAIT_QUERIES.await_children, values).fetchall():
            happened.add(Cause.BATCH_ENDED)
    elif wait.children:
        # A child that runs again after it had ended is nobody's to cancel but the operator's who requeued it.
        values = {"parent": key, "children": children_array(wait.children, set())}
        tx.db.execute(WAIT_QUERIES.link_children, values)
        unfinished = len(tx.db.execute(WAIT_QUERIES.await_children, values).fetchall())
        if unfinished < len(wait.children):
            unlucky = tx.db.execute(WAIT_QUERIES.unlucky_children, (values["children"],)).fetchall()
            happened.add(Cause.CHILD_FAILED if unlucky else Cause.CHILDREN_ENDED)
    later = (key, wait.signal, wait.after)
    if wait.signal is not None and tx.db.execute(WAIT_QUERIES.later_signal, later).fetchall():
        happened.add(Cause.SIGNAL_ARRIVED)
    return happened


def resume_if_over(tx: Transaction, key: JobKey, happened: set[Cause], actor: int) -> None:
    """Resume a suspended job if what has happened is what it waits for."""
    rows = tx.db.execute(WAIT_QUERIES.suspension, (key,)).fetchall()
    if not rows or not happened:
        return
    mode, signal, _ = rows[0]
    if Cause.BEGINS_ANEW in happened:
        cause = Cause.BEGINS_ANEW
    elif Cause.SIGNAL_ARRIVED in happened:
        cause = Cause.SIGNAL_ARRIVED % signal
    elif mode == WaitMode.ALL_OR_FAILURE and Cause.CHILD_FAILED in happened:
        cause = Cause.CHILD_FAILED
    elif mode == WaitMode.ANY or not tx.db.execute(WAIT_QUERIES.awaits_others, (key,)).fetchall():
        cause = Cause.BATCH_ENDED if mode == WaitMode.BATCH else Cause.CHILDREN_ENDED
    else:
        return
    row = job_row(tx, key)
    step = STEPS[row.lifecycle, row.state, Trigger.DUE]
    place, wait = target_place(step, keyed=row.ckey is not None, delay_us=None)
    batch = StepBatch()
    batch.add(row, StepWrite(step, ActorRef(sweeping_role(row.lifecycle), actor), place, wait, cause=cause))
    batch.write(tx)


def write_step(tx: Transaction, act: StepWrite, jobs: Sequence[int]) -> None:
    """Insert the events of jobs that make the same step. Triggers of the database move the jobs."""
    tx.db.execute(STEP_QUERIES.insert_events, act.bindings(tx.now, array(jobs)))
    tx.woke |= act.place == READY
    tx.appended = True


_job_row = row_reader(JobRow)


def job_row(tx: Transaction, key: int) -> JobRow:
    """The row of one job. Its key must exist."""
    return JobRow._make(tx.db.execute(STEP_QUERIES.standing, (key,)).fetchall()[0])


def job_rows(tx: Transaction, keys: Iterable[int]) -> dict[int, JobRow]:
    """The rows of jobs, by key. Unknown keys are left out."""
    rows = tx.db.execute(STEP_QUERIES.standings, (array(keys),))
    return {row[0]: _job_row(row) for row in rows}


def find_job_row(tx: Transaction, job_id: JobId) -> JobRow:
    """The row of the job with this id. Raises JobNotFound."""
    rows = tx.db.execute(STEP_QUERIES.find_key_of_job, (job_id,)).fetchall()
    if not rows:
        raise JobNotFound(job_id=job_id)
    return job_row(tx, rows[0][0])


def rows_changed(tx: Transaction) -> int:
    """How many rows the last statement changed."""
    return tx.db.execute("SELECT changes()").fetchall()[0][0]


def job_id_of(tx: Transaction, key: int) -> JobId:
    return tx.db.execute(STEP_QUERIES.job_id_of, (key,)).fetchall()[0][0]


def promote(tx: Transaction, keys: Iterable[int]) -> int:
    """Give the free slots and tokens of keys to the jobs parked first. Returns how many became ready."""
    numbers = sorted(keys)
    rated = bool(numbers) and any_rate(tx)
    return sum(_promote_one(tx, key, rated=rated) for key in numbers)


def promote_due(tx: Transaction, limit: int) -> int:
    """Let jobs become ready whose keys have tokens again, of at most so many keys. Returns how many became ready."""
    return promote(tx, due_keys(tx, limit))


def _promote_one(tx: Transaction, key: int, *, rated: bool) -> int:
    limit, due_at = tx.db.execute(STEP_QUERIES.key_limit, (key,)).fetchall()[0]
    taken: set[int] = {slot for (slot,) in tx.db.execute(STEP_QUERIES.taken_slots, (key,))}
    free = (slot for slot in range(limit) if slot not in taken)
    room = min(limit - len(taken), PROMOTED_MAX)
    if rated:
        promoted = _promote_by_rate(tx, key, free, room)
        passed = sum(_let_urgent_pass(tx, key, head) for head in key_heads(tx, key))
    else:
        heads = tx.db.execute(STEP_QUERIES.parked_first, (key, room)).fetchall() if room > 0 else []
        promoted = _give_slots(tx, [job for job, _ in heads], free)
        passed = _let_urgent_pass(tx, key, None)
        if due_at is not None:
            look_at(tx, key, None)
    tx.woke |= promoted > 0
    return promoted + passed


def _give_slots(tx: Transaction, jobs: Sequence[int], free: Iterator[int]) -> int:
    for job, slot in zip(jobs, free, strict=False):
        tx.db.execute(STEP_QUERIES.give_slot, (slot, job))
    return len(jobs)


def _promote_by_rate(tx: Transaction, key: int, free: Iterator[int], room: int) -> int:
    """Give the free slots of a key to the jobs parked first whose types have tokens. Note when to look again."""
    promoted = 0
    while True:
        heads = key_heads(tx, key)
        head = next((one for one in heads if one.tokens != 0), None)
        if head is None or promoted >= room:
            break
        most = room - promoted if head.tokens is None else min(room - promoted, head.tokens)
        values = (key, head.type, most if len(heads) == 1 else 1)
        promoted += _give_slots(tx, [job for job, _ in tx.db.execute(RATE_QUERIES.parked_of_type, values)], free)
    look_again(tx, key, heads, in_vain=not promoted)
    return promoted


def _let_urgent_pass(tx: Transaction, key: int, head: KeyHead | None) -> int:
    """Give the slot of a ready, unclaimed job to a parked job of a more urgent priority.

    `head` names the type of the parked jobs. One whose type has a rate takes the token with the slot, and so passes only
    a job of its type.
    """
    for passed in range(PROMOTED_MAX):
        if head is None:
            first = tx.db.execute(STEP_QUERIES.parked_first, (key, 1)).fetchall()
            last = tx.db.execute(STEP_QUERIES.ready_last, (key,)).fetchall() if first else []
        else:
            of_type = {"key": key, "type": head.type, "rated": head.tokens is not None}
            first = tx.db.execute(RATE_QUERIES.parked_of_type, (key, head.type, 1)).fetchall()
            last = tx.db.execute(RATE_QUERIES.ready_last_for, of_type).fetchall() if first else []
        if not last or first[0][1] >= last[0][1]:
            return passed
        tx.db.execute(STEP_QUERIES.take_slot_back, (last[0][0],))
        tx.db.execute(STEP_QUERIES.give_slot, (last[0][2], first[0][0]))
    return PROMOTED_MAX


def overtake(tx: Transaction, row: JobRow) -> None:
    """Give a parked job the slot of the last ready, unclaimed job of its key, if there is one.

    A job of its own type comes first: if the type has a rate per key, its token is free with the slot.
    """
    last = tx.db.execute(STEP_QUERIES.ready_last_to_overtake, (row.ckey, row.type)).fetchall()
    if not last:
        return
    limit: int = tx.db.execute(STEP_QUERIES.key_limit, (row.ckey,)).fetchall()[0][0]
    tx.db.execute(STEP_QUERIES.take_slot_back, (last[0][0],))
    taken = {slot for (slot,) in tx.db.execute(STEP_QUERIES.taken_slots, (row.ckey,))}
    tx.db.execute(STEP_QUERIES.give_slot, (next(slot for slot in range(limit) if slot not in taken), row.id))


def _dead_letter_row(key: JobKey, death: DeadLetterReason, at: int) -> dict[str, str | int | None]:
    return {
        "job": key,
        "reason": death.reason_code.value,
        "stage": death.stage.value,
        "error": storable(death.last_error),
        "begun_by_timer": _BEGUN_BY_TIMER,
        "at": at,
    }


def _record_compensation(tx: Transaction, row: JobRow, who: ActorRef) -> None:
    """Record a succeeded compensation as a versioned event on its original, without a change of state (D36)."""
    assert row.compensates is not None
    original = job_rows(tx, [row.compensates]).get(row.compensates)
    if original is None:
        return
    step = STEPS.get((original.lifecycle, original.state, Trigger.COMPENSATED))
    if step is None or not step.allows(who.role):
        return
    cause = Cause.COMPENSATED % job_id_of(tx, row.id)
    write_step(tx, StepWrite(step, who, original.place, None, cause=cause), [original.id])
