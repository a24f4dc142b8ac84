"""Every verb that writes, as a case: how it is arranged, asked with fixed ids, and how often it has had its effect."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.ledgers.conformance.rig import ADMIN, DEATH, LEASE_S, SUBMITTER, SWEEPER, WORKER, Rig, actor
from trellis.engine.alerts import AlertObservation, AlertRound
from trellis.engine.job_batches import BatchSubmitted, NewBatch, checked_batch
from trellis.engine.job_changes import ChangeOrder, JobChange, JobToChange
from trellis.engine.jobs import (
    Actor,
    Advance,
    CancelMode,
    CancelRequested,
    Claim,
    Claimed,
    ClaimId,
    JobId,
    Lease,
    Move,
    Moved,
    NewJob,
    Priority,
    Renewed,
    RequestId,
    RequestKey,
    StepApplied,
    Submitted,
    Turn,
    TypeClaim,
    TypeOptions,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import AuditHead, JobFilter, RetentionOptions, SweepOptions, SweepReport
from trellis.engine.schedules import ScheduleRecord, ScheduleSpec, new_record
from trellis.lifecycles import Role

ORCHESTRATOR = actor(Role.ORCHESTRATOR)


@dataclass(frozen=True, kw_only=True)
class Verb:
    """`arrange` prepares a situation, `act` asks for the effect, `effects` counts how often it is there."""

    name: str
    sql: str
    arrange: Callable[[Rig], Awaitable[Any]]
    act: Callable[[Ledger, Any], Awaitable[Any]]
    effects: Callable[[Rig, Any], Awaitable[float]]
    accepts: Callable[[Any], bool]
    accepts_again: Callable[[Any], bool] | None = None
    """What a second call of the caller's own must answer after the first had its effect, where that is not the same."""
    one_statement: bool = True
    """False: the verb is a transaction of several exchanges, so a late COMMIT leaves it open on the server."""


async def count_events(rig: Rig, job_id: JobId, *types: str) -> int:
    return sum(event.type in types for event in await rig.ledger.events(job_id))


# --- submit ----------------------------------------------------------------------------------------------------------


def submit(
    name: str, sql: str, n: int = 1, *, mixed: bool = False, with_request_key: bool = False, **options: Any
) -> Verb:
    """Whatever was lost on the way, one call answers that it made the job. A second call is told that the job was there."""

    async def arrange(rig: Rig) -> list[NewJob]:
        unique = rig.new_id("case")
        filled = {key: value.format(unique) if isinstance(value, str) else value for key, value in options.items()}
        jobs = [rig.new_job(**filled) for _ in range(n)]
        return [*jobs, rig.new_job(concurrency_key=f"key-{unique}")] if mixed else jobs

    async def act(ledger: Ledger, jobs: list[NewJob]) -> list[Any]:
        key = RequestKey(scope="s", key=jobs[0].job_id, fingerprint=b"f", about="jobs", given="k")
        return await ledger.submit(SUBMITTER, jobs, key=key if with_request_key else None)

    async def effects(rig: Rig, jobs: list[NewJob]) -> float:
        return sum([len(await rig.ledger.events(job.job_id)) for job in jobs]) / len(jobs)

    def all_say(answers: list[Any], *, created: bool) -> bool:
        return all(isinstance(answer, Submitted) and answer.created is created for answer in answers)

    return Verb(
        name=name,
        sql=sql,
        arrange=arrange,
        act=act,
        effects=effects,
        accepts=partial(all_say, created=True),
        accepts_again=partial(all_say, created=False),
        one_statement=not with_request_key,
    )


def batch(name: str, *, named: bool) -> Verb:
    """A batch of two jobs. Its second call is answered with the same jobs."""

    async def arrange(rig: Rig) -> NewBatch:
        key = {"idempotency_key": str(rig.new_id("batch")), "fingerprint": b"f"} if named else {}
        return checked_batch(rig.new_job(**key), [rig.new_job(), rig.new_job()])

    async def act(ledger: Ledger, case: NewBatch) -> tuple[NewBatch, BatchSubmitted]:
        return case, await ledger.submit_batch(SUBMITTER, case)

    async def effects(rig: Rig, case: NewBatch) -> float:
        return sum([len(await rig.ledger.events(job.job_id)) for job in (case.completion, *case.members)]) / 4

    def says(answer: tuple[NewBatch, BatchSubmitted], *, created: bool) -> bool:
        case, submitted = answer
        same = [one.job_id for one in submitted.members] == [job.job_id for job in case.members]
        return same and all(one.created is created for one in (submitted.completion, *submitted.members))

    return Verb(
        name=name,
        sql="COMMIT",
        arrange=arrange,
        act=act,
        effects=effects,
        accepts=partial(says, created=True),
        accepts_again=partial(says, created=not named),
        one_statement=False,
    )


SUBMITS = (
    submit("submit_one", "select submit_"),  # `submit_alike_jobs`, and `submit_one` when it is repeated
    # `submit_plain`, and `submit_keyed` when it is repeated
    submit("submit_many", " submit_", 3, deadline_s=1_000_000.0),
    submit("submit_delayed", "submit_one(", delay_s=60.0),
    submit("submit_concurrency_key", "submit_keyed(", 2, concurrency_key="user:{}"),
    submit("submit_idempotency_key", "submit_one(", idempotency_key="once-{}", fingerprint=b"f"),
    submit("submit_given_id", "submit_one(", id_is_given=True, fingerprint=b"f"),
    submit("submit_mixed", "submit_keyed(", 2, mixed=True),
    submit("submit_with_request_key", "COMMIT", 2, with_request_key=True),
    batch("submit_batch", named=False),
    batch("submit_batch_with_key", named=True),
)


# --- turns -----------------------------------------------------------------------------------------------------------


def claim(name: str, *, start: int, prefetch: int, events: tuple[str, ...]) -> Verb:
    async def arrange(rig: Rig) -> tuple[list[JobId], Claim]:
        type_ = str(rig.new_id("type"))
        jobs = await rig.submit(2, type=type_)
        lease = TypeClaim(type=type_, lease_s=LEASE_S)
        return jobs, Claim(claim_id=ClaimId(rig.new_id("claim")), types=(lease,), start=start, prefetch=prefetch)

    async def act(ledger: Ledger, case: tuple[list[JobId], Claim]) -> list[Claimed]:
        return (await ledger.turn(Turn(actor=WORKER, claim=case[1]))).claimed

    async def effects(rig: Rig, case: tuple[list[JobId], Claim]) -> float:
        return sum([await count_events(rig, job, *events) for job in case[0]]) / (2 * len(events))

    def accepts(claimed: list[Claimed]) -> bool:
        return len(claimed) == 2 and {job.lease.epoch for job in claimed} == {1}

    return Verb(name=name, sql="from turn", arrange=arrange, act=act, effects=effects, accepts=accepts)


def advance(name: str, trigger: str, event: str, *, start: bool = True, **options: Any) -> Verb:
    """One step of a holder; `start` false leaves the job only claimed."""
    submitted = options.pop("submitted", {})

    async def arrange(rig: Rig) -> Advance:
        type_ = str(rig.new_id("type"))
        await rig.submit_one(type=type_, **{name: value.format(type_) for name, value in submitted.items()})
        held = await rig.claim_one(types=(type_,), start=start)
        return Advance(lease=held.lease, source="running" if start else "assigned", trigger=trigger, **options)

    return Verb(
        name=name,
        sql="from turn",
        arrange=arrange,
        act=lambda ledger, step: act_turn(ledger, WORKER, step),
        effects=lambda rig, step: count_events(rig, step.lease.job_id, event),
        accepts=lambda outcome: isinstance(outcome, StepApplied),
    )


async def act_turn(ledger: Ledger, by: Actor, step: Advance) -> Any:
    return (await ledger.turn(Turn(actor=by, advances=(step,)))).outcomes[0]


def complete_compensation() -> Verb:
    async def arrange(rig: Rig) -> tuple[JobId, Advance]:
        type_ = str(rig.new_id("type"))
        original = await rig.submit_one(type=type_)
        await rig.pull(await rig.claim_one(types=(type_,)), "complete")
        await rig.submit_one(type=type_, compensates=original)
        undo = await rig.claim_one(types=(type_,))
        return original, Advance(lease=undo.lease, source="running", trigger="complete")

    return Verb(
        name="complete_compensation",
        sql="from turn",
        arrange=arrange,
        act=lambda ledger, case: act_turn(ledger, WORKER, case[1]),
        effects=lambda rig, case: count_events(rig, case[0], "job_compensated"),
        accepts=lambda outcome: isinstance(outcome, StepApplied),
    )


def stage_step() -> Verb:
    async def arrange(rig: Rig) -> Advance:
        job_id = await rig.submit_one(type=str(rig.new_id("type")), lifecycle="queue-job")
        lease = await rig.drive(job_id, "CONTEXT_ASSEMBLY")
        assert lease is not None
        return Advance(lease=lease, source="CONTEXT_ASSEMBLY", trigger="snapshot_ready")

    return Verb(
        name="stage_step",
        sql="from turn",
        arrange=arrange,
        act=lambda ledger, step: act_turn(ledger, ORCHESTRATOR, step),
        effects=lambda rig, step: count_events(rig, step.lease.job_id, "job_nlm_called"),
        accepts=lambda outcome: isinstance(outcome, StepApplied),
    )


def self_transition() -> Verb:
    """A step from a state to itself: the job's version says which of them it is."""

    async def arrange(rig: Rig) -> Advance:
        job_id = await rig.submit_one(type=str(rig.new_id("type")), lifecycle="run")
        lease = await rig.drive(job_id, "running")
        assert lease is not None
        version = (await rig.job(job_id)).version
        return Advance(lease=lease, source="running", trigger="step", version=version, data=b'{"steps_completed": 1}')

    return Verb(
        name="self_transition",
        sql="from turn",
        arrange=arrange,
        act=lambda ledger, step: act_turn(ledger, ORCHESTRATOR, step),
        effects=lambda rig, step: count_events(rig, step.lease.job_id, "run.step.completed"),
        accepts=lambda outcome: isinstance(outcome, StepApplied),
    )


def retry_of_a_job_to_be_cancelled() -> Verb:
    """A step back into the queue that a wish to cancel turns into the cancel."""

    async def arrange(rig: Rig) -> Advance:
        held = await rig.running(type=str(rig.new_id("type")))
        await rig.cancel(held.lease.job_id, CancelMode.SOFT)
        return Advance(lease=held.lease, source="running", trigger="retry")

    return Verb(
        name="retry_of_a_job_to_be_cancelled",
        sql="from turn",
        arrange=arrange,
        act=lambda ledger, step: act_turn(ledger, WORKER, step),
        effects=lambda rig, step: count_events(rig, step.lease.job_id, "job_cancelled"),
        accepts=lambda outcome: isinstance(outcome, StepApplied),
    )


TURNS = (
    claim("claim_and_start", start=2, prefetch=0, events=("job_claimed", "job_started")),
    claim("claim_only", start=0, prefetch=2, events=("job_claimed",)),
    advance("start", "start", "job_started", start=False),
    advance("complete", "complete", "job_succeeded"),
    advance("complete_with_result", "complete", "job_succeeded", result=b'{"n": 1}', result_ttl_s=60.0),
    advance("complete_with_data", "complete", "job_succeeded", data=b'{"n": 1}', cause="told", result=b"2"),
    advance("fail", "fail", "job_failed", cause="no", death=DEATH),
    advance("retry", "retry", "job_retry_scheduled", delay_s=5.0),
    advance("retry_now", "retry", "job_retry_scheduled"),
    advance("retry_keyed", "retry", "job_retry_scheduled", submitted={"concurrency_key": "user:{}"}),
    advance("snooze", "snooze", "job_snoozed", delay_s=5.0, spare_attempt=True),
    advance("release", "release", "job_released", start=False, spare_attempt=True),
    advance("stop", "stop", "job_cancelled"),
    advance("reject", "reject", "job_dead_lettered", death=DEATH),
    complete_compensation(),
    stage_step(),
    self_transition(),
    retry_of_a_job_to_be_cancelled(),
)


# --- what a holder does between steps ------------------------------------------------------------------------------------


async def _running(rig: Rig) -> Lease:
    return (await rig.running(type=str(rig.new_id("type")))).lease


async def _act_renew(ledger: Ledger, lease: Lease) -> Any:
    return (await ledger.renew(WORKER, [lease]))[0]


async def _late_in_lease(rig: Rig) -> Lease:
    lease = await _running(rig)
    await rig.advance(5)
    return lease


async def _renewed(rig: Rig, lease: Lease) -> float:
    job = await rig.job(lease.job_id)
    assert job.lease_expires_at is not None
    return float((job.lease_expires_at - await rig.ledger.now()).total_seconds() > 30.0)


async def _checkpoints(rig: Rig, lease: Lease) -> float:
    assert rig.admin_sql is not None
    rows = await rig.admin_sql("select body from trellis.checkpoint where id = $1", lease.key)
    return float(rows == [(b'{"at": 7}',)])


async def _journalled(rig: Rig, lease: Lease) -> float:
    return float(await rig.ledger.read_journal(lease.job_id) == {"charge": b"17"})


async def _signals(rig: Rig, lease: Lease) -> float:
    return len(await rig.ledger.signals(lease.job_id, limit=100)) / 2


HOLDER = (
    Verb(
        name="renew",
        sql="from renew(",
        arrange=_late_in_lease,
        act=_act_renew,
        effects=_renewed,
        accepts=lambda answer: answer == Renewed(cancel=False),
    ),
    Verb(
        name="checkpoint",
        sql="save_checkpoint(",
        arrange=_running,
        act=lambda ledger, lease: ledger.save_checkpoint(lease, b'{"at": 7}'),
        effects=_checkpoints,
        accepts=lambda answer: isinstance(answer, StepApplied),
    ),
    Verb(
        name="journal",
        sql="journal_entr",
        arrange=_running,
        act=lambda ledger, lease: ledger.journal(lease, "charge", b"17"),
        effects=_journalled,
        accepts=lambda answer: answer == b"17",
    ),
    Verb(
        name="signal",
        sql="add_signals(",
        arrange=_running,
        act=lambda ledger, lease: ledger.signal(lease, [("job_heartbeat", b"1"), ("job_log", b'"x"')]),
        effects=_signals,
        accepts=lambda answer: isinstance(answer, StepApplied),
    ),
)


# --- by roles without a lease ----------------------------------------------------------------------------------------------


def move(name: str, source: str, target: str, event: str) -> Verb:
    async def arrange(rig: Rig) -> Move:
        job_id = await rig.submit_one(type=str(rig.new_id("type")), lifecycle="queue-job")
        await rig.drive(job_id, source)
        return Move(job_id=job_id, target=target, request_id=rig.request())

    return Verb(
        name=name,
        sql="from moves(",
        arrange=arrange,
        act=lambda ledger, wanted: ledger.move(ORCHESTRATOR, wanted),
        effects=lambda rig, wanted: count_events(rig, wanted.job_id, event),
        accepts=lambda answer: isinstance(answer, Moved) and answer.target == target,
    )


def cancel(name: str, mode: CancelMode, *, held: bool, keyed: bool = False) -> Verb:
    """With a key the change and the key's row are one transaction of several exchanges."""
    soft = mode is CancelMode.SOFT and held

    async def arrange(rig: Rig) -> tuple[JobId, RequestId]:
        type_ = str(rig.new_id("type"))
        job_id = (await rig.running(type=type_)).lease.job_id if held else await rig.submit_one(type=type_)
        return job_id, rig.request()

    async def act(ledger: Ledger, case: tuple[JobId, RequestId]) -> Any:
        key = RequestKey(scope="s", key=case[1], fingerprint=b"f", about=case[0], given="k") if keyed else None
        return await ledger.cancel(ADMIN, case[0], mode, case[1], grace_s=30.0, cause="asked", key=key)

    async def effects(rig: Rig, case: tuple[JobId, RequestId]) -> float:
        if soft:
            return float((await rig.job(case[0])).cancel_requested)
        return await count_events(rig, case[0], "job_cancelled")

    return Verb(
        name=name,
        sql="COMMIT" if keyed else "from cancel(",
        arrange=arrange,
        act=act,
        effects=effects,
        accepts=lambda answer: isinstance(answer, CancelRequested if soft else Moved),
        one_statement=not keyed,
    )


def change(name: str, wanted: JobChange, event: str, *, keyed: bool = False) -> Verb:
    """Two jobs in one transaction. Its administrative act is recorded once, too."""

    async def arrange(rig: Rig) -> tuple[list[JobId], RequestId]:
        return await rig.submit(2, type=str(rig.new_id("type")), delay_s=60.0), rig.request()

    async def act(ledger: Ledger, case: tuple[list[JobId], RequestId]) -> Any:
        jobs, request = case
        key = RequestKey(scope="s", key=request, fingerprint=b"f", about="many", given="k") if keyed else None
        priority = Priority.CRITICAL if wanted is JobChange.PRIORITIZE else None
        order = ChangeOrder(change=wanted, request_id=request, priority=priority, selected_by=jobs[0], key=key)
        return await ledger.change_jobs(ADMIN, order, [JobToChange(job_id, 1) for job_id in jobs])

    async def effects(rig: Rig, case: tuple[list[JobId], RequestId]) -> float:
        acts = [act for act in await rig.ledger.acts() if act.facts.get("selected_by") == case[0][0]]
        return (sum([await count_events(rig, job_id, event) for job_id in case[0]]) + len(acts)) / 3

    return Verb(
        name=name,
        sql="COMMIT" if keyed else "from change_jobs(",
        arrange=arrange,
        act=act,
        effects=effects,
        accepts=lambda done: all(isinstance(answer, Moved) for answer in done.answers),
        one_statement=not keyed,
    )


async def _failed(rig: Rig, n: int = 1) -> tuple[str, list[JobId], RequestId]:
    type_ = str(rig.new_id("type"))
    jobs = await rig.submit(n, type=type_)
    for held in await rig.claim(n, types=(type_,)):
        await rig.pull(held, "fail")
    return type_, jobs, rig.request()


async def _requeued(rig: Rig, case: tuple[str, list[JobId], RequestId]) -> float:
    return sum([await count_events(rig, job, "job_requeued") for job in case[1]])


async def _act_requeue(ledger: Ledger, case: tuple[str, list[JobId], RequestId]) -> Any:
    return await ledger.requeue(ADMIN, case[1], case[2], limit=10, cause="again")


async def _act_requeue_by_filter(ledger: Ledger, case: tuple[str, list[JobId], RequestId]) -> Any:
    where = JobFilter(lifecycle="leased-job", type=case[0], state="failed")
    return await ledger.requeue(ADMIN, where, case[2], limit=1, cause="again")


MOVES = (
    move("move", "PENDING", "QUEUED", "job_queued"),
    move("move_into_held", "QUEUED", "CONTEXT_ASSEMBLY", "job_claimed"),
    cancel("cancel_hard", CancelMode.HARD, held=True),
    cancel("cancel_soft", CancelMode.SOFT, held=True),
    cancel("cancel_waiting", CancelMode.SOFT, held=False),
    cancel("cancel_soft_with_key", CancelMode.SOFT, held=True, keyed=True),
    change("change_cancel", JobChange.CANCEL, "job_cancelled"),
    change("change_run_now", JobChange.RUN_NOW, "job_expedited"),
    change("change_prioritize_with_key", JobChange.PRIORITIZE, "job_reprioritized", keyed=True),
    Verb(
        name="requeue",
        sql="from requeue(",
        arrange=_failed,
        act=_act_requeue,
        effects=_requeued,
        accepts=lambda answers: len(answers) == 1 and isinstance(answers[0], Moved),
    ),
    Verb(
        name="requeue_by_filter",
        sql="from requeue(",
        arrange=lambda rig: _failed(rig, 3),
        act=_act_requeue_by_filter,
        effects=_requeued,
        accepts=lambda answers: len(answers) == 1 and isinstance(answers[0], Moved),
    ),
)


# --- the rest ----------------------------------------------------------------------------------------------------------------


async def _expired(rig: Rig) -> JobId:
    lease = await _running(rig)
    for _ in range(4):
        await rig.sweep()
        await rig.advance(10)
    return lease.job_id


SWEEPS_MAX = 1_000


async def _sweep(ledger: Ledger, _: JobId) -> SweepReport:
    """Sweeps as a sweeper does: again and again, until no other sweep of the instance is under way.

    The server may still work on a sweep whose caller was cut off. A second one is then not elected and does nothing.
    """
    report = await ledger.sweep(SWEEPER, SweepOptions(elect=False))
    sweeps = 1
    while not report.elected and sweeps < SWEEPS_MAX:
        report = await ledger.sweep(SWEEPER, SweepOptions(elect=False))
        sweeps += 1
    return report


async def _depth(rig: Rig, type_: str) -> Any:
    return next(depth for depth in await rig.ledger.queues() if depth.type == type_)


async def _paused(rig: Rig, type_: str) -> float:
    return float((await _depth(rig, type_)).paused)


async def _rated(rig: Rig, type_: str) -> float:
    return float((await _depth(rig, type_)).rate_limit == 5.0)


async def _declared(rig: Rig, type_: str) -> float:
    return float([one.max_attempts for one in await rig.ledger.declared_types(type_)] == [9])


async def _new_schedule(rig: Rig) -> ScheduleRecord:
    spec = ScheduleSpec(name=rig.new_id("schedule"), cron="0 * * * *", type="work")
    return new_record(spec, "anna", await rig.ledger.now())


async def _stored_schedule(rig: Rig) -> ScheduleRecord:
    record = await _new_schedule(rig)
    assert await rig.ledger.save_schedule(ADMIN, record)
    return (await rig.ledger.schedules(record.name))[0]


async def _schedules(rig: Rig, record: ScheduleRecord) -> float:
    return sum(act.subject == record.name for act in await rig.ledger.acts())


async def _removed_schedules(rig: Rig, record: ScheduleRecord) -> float:
    return await _schedules(rig, record) - 1


async def _advances(rig: Rig, record: ScheduleRecord) -> float:
    return (await rig.ledger.schedules(record.name))[0].version - 1


async def _queue(rig: Rig) -> str:
    type_ = str(rig.new_id("type"))
    await rig.submit_one(type=type_)
    return type_


async def _keyed_pair(rig: Rig) -> tuple[str, list[JobId]]:
    type_ = str(rig.new_id("type"))
    return f"key-{type_}", await rig.submit(2, type=type_, concurrency_key=f"key-{type_}")


async def _both_ready(rig: Rig, case: tuple[str, list[JobId]]) -> float:
    return float([(await rig.job(job)).place for job in case[1]] == ["ready", "ready"])


async def _ended_long_ago(rig: Rig) -> JobId:
    job_id = await rig.submit_one(type=str(rig.new_id("type")))
    await rig.cancel(job_id)
    await rig.advance(100)
    await rig.ledger.feed(None, limit=1)  # gives its events their places; what has none is not sealed
    return job_id


async def _gone(rig: Rig, job_id: JobId) -> float:
    return float(await rig.ledger.job(job_id) is None)


async def _next_heads(rig: Rig) -> tuple[AuditHead | None, AuditHead]:
    """The newest block of the audit chain, and the one after it."""
    head = await rig.ledger.audit_head()
    number = 0 if head is None else head.number + 1
    everything = f"{'9' * 18}.{'9' * 18}.{'9' * 9}"  # so that retention may remove what the other verbs made
    return head, AuditHead(number=number, sha256=f"{number:064x}", position=everything)


async def _is_the_head(rig: Rig, heads: tuple[AuditHead | None, AuditHead]) -> float:
    head = await rig.ledger.audit_head()
    return float(head is not None and head.sha256 == heads[1].sha256)


async def _seen(rig: Rig, name: str) -> float:
    return float([w.info for w in await rig.ledger.workers() if w.name == name] == [json.dumps(name).encode()])


async def _worker_name(rig: Rig) -> str:
    return str(rig.new_id("worker"))


async def _observed(rig: Rig) -> AlertRound:
    """A round that raises one alert, and has it reported."""
    name = str(rig.new_id("alert"))
    seen = AlertObservation(id=name, name="jobs-wait", subject=name, value=301.0, text="it waits")
    return AlertRound(mark=0, scopes=(), observed=(seen,), report_types=("trellis.alert.webhook",))


async def _reported(rig: Rig, checked: AlertRound) -> float:
    """How many alerts and reports there are, as a share of the one and the other."""
    (seen,) = checked.observed
    opened = sum(alert.subject == seen.subject for alert in await rig.ledger.alerts(only_open=True))
    return (opened + await count_events(rig, JobId(f"{seen.id}-raised-webhook"), "job_queued")) / 2


REST = (
    Verb(
        name="sweep",
        sql="from sweep(",
        arrange=_expired,
        act=_sweep,
        effects=lambda rig, job_id: count_events(rig, job_id, "job_lease_expired"),
        accepts=lambda report: report.elected,
    ),
    Verb(
        name="pause",
        sql="set_paused(",
        arrange=_queue,
        act=lambda ledger, type_: ledger.pause(ADMIN, type_, paused=True),
        effects=_paused,
        accepts=lambda _: True,
    ),
    Verb(
        name="limit_rate",
        sql="set_rate(",
        arrange=_queue,
        act=lambda ledger, type_: ledger.limit_rate(ADMIN, type_, 5.0, 2),
        effects=_rated,
        accepts=lambda _: True,
    ),
    Verb(
        name="declare_types",
        sql="declare_types(",
        arrange=_queue,
        act=lambda ledger, type_: ledger.declare_types(ADMIN, [TypeOptions(type=type_, max_attempts=9)]),
        effects=_declared,
        accepts=lambda _: True,
    ),
    Verb(
        name="save_schedule",
        sql="save_schedule(",
        arrange=_new_schedule,
        act=lambda ledger, record: ledger.save_schedule(ADMIN, record),
        effects=_schedules,
        accepts=lambda saved: saved is True,
    ),
    Verb(
        name="remove_schedule",
        sql="remove_schedule(",
        arrange=_stored_schedule,
        act=lambda ledger, record: ledger.remove_schedule(ADMIN, record.name),
        effects=_removed_schedules,
        accepts=lambda _: True,
    ),
    Verb(
        name="advance_schedule",
        sql="advance_schedule(",
        arrange=_stored_schedule,
        act=lambda ledger, record: ledger.advance_schedule(WORKER, record),
        effects=_advances,
        accepts=lambda _: True,
    ),
    Verb(
        name="limit_key",
        sql="set_key_limit(",
        arrange=_keyed_pair,
        act=lambda ledger, case: ledger.limit_key(ADMIN, case[0], 2),
        effects=_both_ready,
        accepts=lambda _: True,
    ),
    Verb(
        name="retain",
        sql="from retain(",
        arrange=_ended_long_ago,
        act=lambda ledger, _: ledger.retain(RetentionOptions(ended_s=50.0, batch=10_000, testing=True)),
        effects=_gone,
        accepts=lambda _: True,
    ),
    Verb(
        name="observe_alerts",
        sql="COMMIT",
        arrange=_observed,
        act=lambda ledger, checked: ledger.observe_alerts(ADMIN, checked),
        effects=_reported,
        accepts=lambda _: True,
        one_statement=False,
    ),
    Verb(
        name="extend_audit_chain",
        sql="extend_audit_chain(",
        arrange=_next_heads,
        act=lambda ledger, heads: ledger.extend_audit_chain(actor(Role.PROJECTOR), heads[1], after=heads[0]),
        effects=_is_the_head,
        accepts=lambda answer: answer is True,
    ),
    Verb(
        name="beat",
        sql="beat(",
        arrange=_worker_name,
        act=lambda ledger, name: ledger.heartbeat_worker(actor(Role.WORKER, name), json.dumps(name).encode()),
        effects=_seen,
        accepts=lambda _: True,
    ),
)

GROUPS = {"submit": SUBMITS, "turn": TURNS, "holder": HOLDER, "move": MOVES, "rest": REST}
VERBS = tuple(verb for group in GROUPS.values() for verb in group)
