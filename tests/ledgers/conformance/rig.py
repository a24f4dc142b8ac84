"""A ledger on a bench: a settable clock, a second view of the same store, and short words for what tests do often.

Everything goes through the port. What a job can do is read from the lifecycle data, so that `drive` walks any job of
any lifecycle into any state.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from trellis.engine.errors import TrellisError
from trellis.engine.job_changes import ChangeOrder, JobChange, JobToChange
from trellis.engine.jobs import (
    Actor,
    Advance,
    CancelMode,
    CancelRequested,
    Claim,
    Claimed,
    ClaimId,
    DeadLetterReason,
    JobId,
    Lease,
    LeaseLost,
    Mismatch,
    Move,
    Moved,
    NewJob,
    NotMoved,
    Priority,
    ReasonCode,
    RequestId,
    RequestKey,
    Stage,
    StepApplied,
    Submitted,
    Turn,
    TurnResult,
    TypeClaim,
    Wait,
)
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, Job, JobFilter, SweepOptions, SweepReport
from trellis.engine.verify import VerifyReport, verify
from trellis.lifecycles import LIFECYCLES, Phase, Role, Transition, Trigger
from trellis.lifecycles.lifecycle import IN_PLACE

LEASE_S = 60.0
HEARTBEAT_S = 15.0
LENGTH_S = 30.5
"""min(lease, 2 heartbeats + 0.5 s) of the two above: how long a silent holder keeps a job."""
STEP_S = 10.0
"""Shorter than half a lease: sweeps this far apart are no outage, so nothing is forgiven."""
DEATH = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.EXEC, last_error="it had to end")


def actor(role: Role, name: str | None = None) -> Actor:
    return Actor(role=role, name=name or f"{role.value}-1")


WORKER = actor(Role.WORKER)
OTHER_WORKER = actor(Role.WORKER, "worker-2")
SUBMITTER = actor(Role.SUBMITTER)
ADMIN = actor(Role.CONTROL_PLANE)
SWEEPER = actor(Role.SWEEPER)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that a refused call must leave as it was."""

    job: Job | None
    events: tuple[Event, ...]
    journal: dict[str, bytes]
    signals: int
    result: bytes | None
    letters: int


@dataclass(kw_only=True)
class Rig:
    """One ledger under test. `reopen` gives another process's view of the same store."""

    kind: str
    ledger: Ledger
    advance: Callable[[float], Awaitable[None]]
    reopen: Callable[[], Awaitable[Ledger]]
    admin_sql: Callable[..., Awaitable[list[tuple]]] | None = None
    admin_url: str | None = None
    """PostgreSQL: run SQL as the superuser."""
    app_url: str = ""
    empty: Callable[["Rig"], Awaitable[Ledger]] | None = None
    used_up: bool = False
    """Its database has partitions and indexes that another test would not expect."""
    numbers: count = field(default_factory=lambda: count(1))
    others: list[Ledger] = field(default_factory=list)
    key_limits: dict[str, int] = field(default_factory=dict)
    """Filled by tests that want `verify` to hold the keys to their limits."""

    async def open_another(self) -> Ledger:
        another = await self.reopen()
        self.others.append(another)
        return another

    async def close(self) -> None:
        for ledger in (*self.others, self.ledger):
            await ledger.close()

    async def lose(self) -> Ledger:
        """Everything in the store is gone; the answer is its owner's view of the empty one. Time goes on."""
        assert self.empty is not None
        return await self.empty(self)

    async def verify(self) -> VerifyReport:
        return await verify(self.ledger, key_limits=self.key_limits)

    # --- names ---------------------------------------------------------------------------------------------------

    def new_id(self, prefix: str = "job") -> JobId:
        return JobId(f"{prefix}-{next(self.numbers)}")

    def request(self) -> RequestId:
        return RequestId(f"request-{next(self.numbers)}")

    def new_job(self, **options) -> NewJob:
        options.setdefault("job_id", self.new_id())
        options.setdefault("type", "work")
        if options.get("lifecycle") == "artifact":
            options.setdefault("parent_id", JobId(f"of-{options['job_id']}"))
        return NewJob(**options)

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def submit(self, n: int = 1, *, by: Actor | None = None, **options) -> list[JobId]:
        """Make n new jobs, each of which must be created."""
        lifecycle = LIFECYCLES[options.get("lifecycle", "leased-job")]
        jobs = [self.new_job(**options) for _ in range(n)]
        answers = await self.ledger.submit(by or actor(_submitter(lifecycle.name)), jobs)
        assert answers == [Submitted(job_id=job.job_id, created=True) for job in jobs]
        return [job.job_id for job in jobs]

    async def submit_one(self, **options) -> JobId:
        return (await self.submit(1, **options))[0]

    async def submit_with_key(self, key: RequestKey) -> list[Submitted | Mismatch]:
        """Submit a new job under the key of a request."""
        return await self.ledger.submit(SUBMITTER, [self.new_job()], key=key)

    async def offer(self, job: NewJob, by: Actor = SUBMITTER) -> Submitted | Mismatch:
        return (await self.ledger.submit(by, [job]))[0]

    async def claim(
        self,
        n: int = 1,
        *,
        types: Sequence[str] = ("work",),
        start: bool = True,
        lifecycle: str = "leased-job",
        by: Actor | None = None,
        claim_id: str | None = None,
        lease_s: float = LEASE_S,
        heartbeat_s: float = HEARTBEAT_S,
        only: JobId | None = None,
        ledger: Ledger | None = None,
    ) -> list[Claimed]:
        claim = Claim(
            claim_id=ClaimId(claim_id or f"claim-{next(self.numbers)}"),
            types=tuple(TypeClaim(type=type_, lease_s=lease_s, heartbeat_s=heartbeat_s) for type_ in types),
            start=n if start else 0,
            prefetch=0 if start else n,
            lifecycle=lifecycle,
            only=only,
        )
        turn = Turn(actor=by or actor(_claimer(lifecycle)), claim=claim)
        return (await (ledger or self.ledger).turn(turn)).claimed

    async def claim_one(self, **options) -> Claimed:
        claimed = await self.claim(1, **options)
        assert len(claimed) == 1, "nothing was there to claim"
        return claimed[0]

    async def running(self, **options) -> Claimed:
        """A new job of the default type, claimed and started."""
        job_id = await self.submit_one(**options)
        claimed = await self.claim_one(types=(options.get("type", "work"),))
        assert claimed.lease.job_id == job_id
        return claimed

    async def pull(
        self, held: Claimed | Lease, trigger: str, *, source: str = "running", by: Actor = WORKER, **options
    ) -> StepApplied | LeaseLost:
        """One step of a held job by its holder."""
        lease = held.lease if isinstance(held, Claimed) else held
        step = Advance(lease=lease, source=source, trigger=trigger, **options)
        return (await self.ledger.turn(Turn(actor=by, advances=(step,)))).outcomes[0]

    async def turn(self, *advances: Advance, by: Actor = WORKER, claim: Claim | None = None) -> TurnResult:
        return await self.ledger.turn(Turn(actor=by, advances=advances, claim=claim))

    async def move(self, job_id: JobId, target: str, *, by: Actor, **options) -> Moved | NotMoved:
        options.setdefault("request_id", self.request())
        return await self.ledger.move(by, Move(job_id=job_id, target=target, **options))

    async def cancel(
        self, job_id: JobId, mode: CancelMode = CancelMode.HARD, *, by: Actor = ADMIN, grace_s: float = 30.0, **options
    ) -> Moved | NotMoved | CancelRequested:
        request_id = options.pop("request_id", None) or self.request()
        return await self.ledger.cancel(
            by, job_id, mode, request_id, grace_s=grace_s, cause=options.pop("cause", "somebody asked")
        )

    async def sweep(self, **options) -> SweepReport:
        options.setdefault("elect", False)
        return await self.ledger.sweep(SWEEPER, SweepOptions(**options))

    async def pass_time(self, seconds: float, *, step_s: float = STEP_S) -> list[SweepReport]:
        """Let time pass with a living sweeper: it sweeps at least every `step_s`."""
        reports = [await self.sweep()]
        left = seconds
        while left > 0:
            step = min(left, step_s)
            left -= step
            await self.advance(step)
            reports.append(await self.sweep())
        return reports

    async def lose_lease(self) -> list[SweepReport]:
        """Every holder falls silent for longer than its lease."""
        return await self.pass_time(LENGTH_S + 1)

    # --- looking -------------------------------------------------------------------------------------------------

    async def job(self, job_id: JobId) -> Job:
        job = await self.ledger.job(job_id)
        assert job is not None
        return job

    async def state(self, job_id: JobId) -> str:
        return (await self.job(job_id)).state

    async def event_types(self, job_id: JobId) -> list[str]:
        return [event.type for event in await self.ledger.events(job_id)]

    async def last_event(self, job_id: JobId) -> Event:
        return (await self.ledger.events(job_id))[-1]

    async def snapshot(self, job_id: JobId) -> Snapshot:
        letters = await self.ledger.dead_letters(JobFilter(), limit=500)
        return Snapshot(
            job=await self.ledger.job(job_id),
            events=tuple(await self.ledger.events(job_id)),
            journal=await self.ledger.read_journal(job_id),
            signals=len(await self.ledger.signals(job_id, limit=100)),
            result=await self.ledger.result(job_id),
            letters=sum(letter.job_id == job_id for letter in letters),
        )

    # --- walking -------------------------------------------------------------------------------------------------

    async def drive(self, job_id: JobId, to: str, lease: Lease | None = None) -> Lease | None:
        """Walk a job to a state by declared steps; returns the lease when the state is held."""
        job = await self.job(job_id)
        for transition in path(job.lifecycle, job.state, to):
            lease = await self.step(job_id, transition, lease)
        assert await self.state(job_id) == to
        return lease

    async def step(
        self, job_id: JobId, transition: Transition, lease: Lease | None, by: Role | None = None
    ) -> Lease | None:
        """Make one declared transition: the holder's with its lease, every other as a move."""
        role = by or min(transition.actors)
        death = DEATH if _needs_death(job_id, transition) else None
        if transition.trigger == Trigger.FINALIZE:
            await self.complete_for(job_id)
            return None
        if transition.fenced:
            assert lease is not None
            finalizes = await self.artifact_of(job_id) if transition.finalizes else None
            outcome = await self.pull(
                lease,
                transition.trigger,
                source=str(transition.source),
                by=actor(role),
                death=death,
                finalizes=finalizes,
                wait=wait_of(transition),
            )
            assert isinstance(outcome, StepApplied)
            return lease
        if transition.trigger in IN_PLACE:
            await self._step_in_place(job_id, JobChange(transition.trigger), actor(role))
            return None
        moved = await self.move(job_id, transition.target, by=actor(role), death=death)
        assert isinstance(moved, Moved), moved
        return moved.lease

    async def _step_in_place(self, job_id: JobId, change: JobChange, by: Actor) -> None:
        """Make a step that keeps the state: another priority, or the end of a delay."""
        other = Priority.BATCH if (await self.job(job_id)).priority is Priority.CRITICAL else Priority.CRITICAL
        priority = other if change is JobChange.PRIORITIZE else None
        order = ChangeOrder(change=change, request_id=self.request(), priority=priority)
        (answer,) = (await self.ledger.change_jobs(by, order, [JobToChange(job_id)])).answers
        assert isinstance(answer, Moved), answer

    async def artifact_of(self, parent: JobId, **options) -> JobId:
        """A staged artifact of a job."""
        return await self.submit_one(lifecycle="artifact", parent_id=parent, **options)

    async def writing(self, **options) -> Lease:
        """A new queue job that has come to write its artifact."""
        lease = await self.drive(await self.submit_one(lifecycle="queue-job", **options), "ARTIFACT_WRITE")
        assert lease is not None
        return lease

    async def complete(self, lease: Lease, artifact: JobId | None, **options) -> StepApplied | LeaseLost:
        """The completion of a queue job that names an artifact."""
        source, by = "ARTIFACT_WRITE", actor(Role.ORCHESTRATOR)
        return await self.pull(lease, Trigger.COMPLETE, source=source, by=by, finalizes=artifact, **options)

    async def complete_for(self, artifact: JobId) -> None:
        """The job that an artifact was staged for comes into being, works and completes with it."""
        parent = (await self.job(artifact)).parent_id
        assert isinstance(await self.complete(await self.writing(job_id=parent), artifact), StepApplied)


def wait_of(transition: Transition) -> Wait | None:
    """A wait without an end, for a step that suspends a job."""
    return Wait(signal="never") if transition.trigger == Trigger.SUSPEND else None


def path(lifecycle_name: str, source: str, target: str) -> list[Transition]:
    """The shortest declared way from one state to another."""
    lifecycle = LIFECYCLES[lifecycle_name]
    ways: dict[str, list[Transition]] = {source: []}
    queue = deque([source])
    while queue and target not in ways:
        state = queue.popleft()
        for transition in lifecycle.transitions:
            of_submit = transition.trigger == Trigger.SUSPEND and not is_anybodys(transition)
            if transition.source == state and transition.target not in ways and not of_submit:
                ways[transition.target] = [*ways[state], transition]
                queue.append(transition.target)
    return ways[target]


def unfenced(lifecycle_name: str, source: str, target: str, role: Role) -> Transition | None:
    """The declared transition a `move` of this role may make, or None."""
    for transition in LIFECYCLES[lifecycle_name].transitions:
        step = (transition.source, transition.target, transition.fenced)
        if step == (source, target, False) and role in transition.actors and is_anybodys(transition):
            return transition
    return None


def is_anybodys(transition: Transition) -> bool:
    """False for what the engine alone writes down, as a part of another step."""
    of_submit = transition.trigger == Trigger.SUSPEND and not transition.fenced
    return transition.trigger not in {Trigger.COMPENSATED, Trigger.FINALIZE} and not of_submit


async def answer_of(call: Awaitable[object]) -> object:
    """What a call returned, or the refusal it raised: some verbs refuse with a value, some with an error."""
    try:
        return await call
    except TrellisError as refused:
        return refused


def by_phase(lifecycle_name: str, phase: Phase) -> list[str]:
    return [state.name for state in LIFECYCLES[lifecycle_name].states if state.phase is phase]


def claimed_ids(claimed: Iterable[Claimed]) -> list[JobId]:
    return [one.lease.job_id for one in claimed]


def _submitter(lifecycle_name: str) -> Role:
    transition = LIFECYCLES[lifecycle_name].pull(None, Trigger.SUBMIT)
    assert transition is not None
    return Role.SUBMITTER if Role.SUBMITTER in transition.actors else min(transition.actors)


def _claimer(lifecycle_name: str) -> Role:
    return next(
        min(transition.actors)
        for transition in LIFECYCLES[lifecycle_name].transitions
        if transition.trigger == Trigger.CLAIM
    )


def _needs_death(job_id: JobId, transition: Transition) -> bool:
    return any(
        transition in lifecycle.transitions and lifecycle.by_name[transition.target].dead_letter
        for lifecycle in LIFECYCLES.values()
    )
