"""Applies decided steps: events, and what goes with them. Used by every verb that moves jobs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import LiteralString

from trellis.engine.errors import JobNotFound
from trellis.engine.jobs import DeathCertificate, JobId, JobKey
from trellis.engine.records import BEGUN_BY_TIMER
from trellis.engine.text import storable
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_death
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import READY, STEPS, Act, Standing, Who, state_of
from trellis.lifecycles import LIFECYCLES, Opens, Trigger
from trellis.lifecycles.causes import Cause


def array(numbers: Iterable[int]) -> str:
    """Numbers as one value that a statement can read with json_each."""
    return f"[{','.join(map(str, numbers))}]"


_BEGUN_BY_TIMER = array(LIFECYCLES[name].code for name in BEGUN_BY_TIMER)
"""Lifecycles whose dead letters count every attempt that began."""
PROMOTED_MAX = 1_000
"""Jobs of one key that are handed slots at once; the sweep hands out the rest."""


class Sql(NamedQueries, file="trellis.ledgers.sqlite:queries/steps.sql"):
    standing: LiteralString
    standings: LiteralString
    insert_events: LiteralString
    insert_dead_letter: LiteralString
    name_artifact: LiteralString
    artifact_of: LiteralString
    final_artifact_of: LiteralString
    spare_attempt: LiteralString
    start_anew: LiteralString
    put_result: LiteralString
    drop_result: LiteralString
    job_id_of: LiteralString
    find_key_of_job: LiteralString
    last_steps_of_epoch: LiteralString
    unasked_step_of_epoch: LiteralString
    step_at: LiteralString
    key_room: LiteralString
    key_limit: LiteralString
    taken_slots: LiteralString
    parked_first: LiteralString
    ready_last: LiteralString
    give_slot: LiteralString
    take_slot_back: LiteralString


@dataclass(slots=True)
class Batch:
    """Steps decided and not yet written. `write` makes them: one statement for all jobs that make the same step."""

    acts: dict[Act, list[JobKey]] = field(default_factory=dict[Act, list[JobKey]])
    deaths: list[tuple[JobKey, DeathCertificate]] = field(default_factory=list[tuple[JobKey, DeathCertificate]])
    results: list[tuple[JobKey, bytes, int | None]] = field(default_factory=list[tuple[JobKey, bytes, int | None]])
    finalized: list[tuple[JobKey, JobKey]] = field(default_factory=list[tuple[JobKey, JobKey]])
    """Jobs that complete, each with its artifact: the database finalizes it with the job's event."""
    spared: list[JobKey] = field(default_factory=list[JobKey])
    restarted: list[JobKey] = field(default_factory=list[JobKey])
    compensated: list[tuple[Standing, Who]] = field(default_factory=list[tuple[Standing, Who]])
    keys: set[int] = field(default_factory=set[int])

    def add(self, row: Standing, act: Act, death: DeathCertificate | None = None) -> None:
        """Take one decided step in; a job may be in a batch once."""
        jobs = self.acts.get(act)
        if jobs is None:
            self.acts[act] = [row.id]
        else:
            jobs.append(row.id)
        step = act.step
        check_death(state_of(step.lifecycle, step.target), death)
        if death is not None and step.ended:
            self.deaths.append((row.id, death))
        if step.opens == Opens.GENERATION:
            self.restarted.append(row.id)
        if row.compensates is not None and step.success:
            self.compensated.append((row, act.who))
        if row.ckey is not None and not step.held:
            self.keys.add(row.ckey)

    def write(self, tx: Transaction) -> None:
        """Everything that was taken in, and what follows from it: recorded compensations, slots handed on."""
        for key, death in self.deaths:
            tx.db.execute(Sql.insert_dead_letter, _letter(key, death, tx.now))
        if self.finalized:
            tx.db.executemany(Sql.name_artifact, self.finalized)
        for act, jobs in self.acts.items():
            write_act(tx, act, jobs)
        if self.results:
            tx.db.executemany(Sql.put_result, self.results)
        for key in self.spared:
            tx.db.execute(Sql.spare_attempt, (key,))
        for key in self.restarted:
            tx.db.execute(Sql.start_anew, {"job": key, "now": tx.now})
            tx.db.execute(Sql.drop_result, (key,))
        for row, who in self.compensated:
            _record_compensation(tx, row, who)
        promote(tx, self.keys)


def write_act(tx: Transaction, act: Act, jobs: Sequence[int]) -> None:
    """The events of jobs that make the same step; the database moves the jobs."""
    tx.db.execute(Sql.insert_events, act.bindings(tx.now, array(jobs)))
    tx.woke |= act.place == READY
    tx.appended = True


def standing(tx: Transaction, key: int) -> Standing:
    """Where one job stands; its key is known to exist."""
    return Standing._make(tx.db.execute(Sql.standing, (key,)).fetchall()[0])


def standings(tx: Transaction, keys: Iterable[int]) -> dict[int, Standing]:
    """Where jobs stand, by key; unknown keys are left out."""
    rows = tx.db.execute(Sql.standings, (array(keys),))
    return {row[0]: Standing._make(row) for row in rows}


def find(tx: Transaction, job_id: JobId) -> Standing:
    """Where the job with this id stands, or JobNotFound."""
    rows = tx.db.execute(Sql.find_key_of_job, (job_id,)).fetchall()
    if not rows:
        raise JobNotFound(job_id=job_id)
    return standing(tx, rows[0][0])


def changed(tx: Transaction) -> int:
    """How many rows the last statement changed."""
    return tx.db.execute("SELECT changes()").fetchall()[0][0]


def job_id_of(tx: Transaction, key: int) -> JobId:
    return tx.db.execute(Sql.job_id_of, (key,)).fetchall()[0][0]


def promote(tx: Transaction, keys: Iterable[int]) -> int:
    """Hand the free slots of keys to the jobs parked first; returns how many became ready."""
    return sum(_promote_one(tx, key) for key in sorted(keys))


def _promote_one(tx: Transaction, key: int) -> int:
    limit: int = tx.db.execute(Sql.key_limit, (key,)).fetchall()[0][0]
    taken: set[int] = {slot for (slot,) in tx.db.execute(Sql.taken_slots, (key,))}
    room = min(limit - len(taken), PROMOTED_MAX)
    promoted = 0
    if room > 0:
        heads = tx.db.execute(Sql.parked_first, (key, room)).fetchall()
        free = (slot for slot in range(limit) if slot not in taken)
        for (job, _), slot in zip(heads, free, strict=False):
            tx.db.execute(Sql.give_slot, (slot, job))
            promoted += 1
    tx.woke |= promoted > 0
    return promoted + _let_urgent_pass(tx, key)


def _let_urgent_pass(tx: Transaction, key: int) -> int:
    """A parked job of a more urgent class takes the slot of a ready one nobody has claimed yet."""
    for passed in range(PROMOTED_MAX):
        first = tx.db.execute(Sql.parked_first, (key, 1)).fetchall()
        last = tx.db.execute(Sql.ready_last, (key,)).fetchall() if first else []
        if not last or first[0][1] >= last[0][1]:
            return passed
        tx.db.execute(Sql.take_slot_back, (last[0][0],))
        tx.db.execute(Sql.give_slot, (last[0][2], first[0][0]))
    return PROMOTED_MAX


def _letter(key: JobKey, death: DeathCertificate, at: int) -> dict[str, str | int | None]:
    return {
        "job": key,
        "reason": death.reason_code.value,
        "stage": death.stage.value,
        "error": storable(death.last_error),
        "begun_by_timer": _BEGUN_BY_TIMER,
        "at": at,
    }


def _record_compensation(tx: Transaction, row: Standing, who: Who) -> None:
    """A compensation succeeded: a versioned event on its original, without a change of state (D36)."""
    assert row.compensates is not None
    original = standings(tx, [row.compensates]).get(row.compensates)
    if original is None:
        return
    step = STEPS.get((original.lifecycle, original.state, Trigger.COMPENSATED))
    if step is None or not step.allows(who.role):
        return
    cause = Cause.COMPENSATED % job_id_of(tx, row.id)
    write_act(tx, Act(step, who, original.place, None, cause=cause), [original.id])
