"""Random stories of verbs, played through two ledgers at once: every answer and every record of both must be the same.

What happens next is drawn from a seed and from what the first ledger says; the second must have said the same until then,
or the story has ended with the difference. Leases are compared without the ledger's own number of the job. Several stories are
played in the same two ledgers, one after the other, because opening one costs more than a story: every name has its seed in it, and
what a story leaves behind goes on to fall due beside the next.

One difference is allowed by decision 0022: while claims come back full, PostgreSQL may pass over a ready job whose position is older
than the jobs it took last, for half a second of real time. Only a job with a concurrency key keeps an older position. So when such
a job is ready, both claimers first claim a type that has no jobs: after a claim that finds nothing, PostgreSQL searches from the
beginning. Every other claim goes on from where the last one ended, and is compared as it is.

Another is open: a claim lets jobs of as many due keys become ready as it takes jobs, and which of the keys that are due at the same
moment come first is each ledger's own. So while a type has a rate per key, a claim of less than two jobs comes after a sweep, which
looks at all keys, and each story takes its rates away in the end.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from tests.ledgers.conformance.rig import ADMIN, HEARTBEAT_S, LEASE_S, SWEEPER, WORKER, Rig, actor, answer_of
from trellis.engine.errors import TrellisError
from trellis.engine.job_changes import ChangeOrder, JobChange, JobToChange
from trellis.engine.jobs import (
    Advance,
    CancelMode,
    Claim,
    Claimed,
    ClaimId,
    DeadLetterReason,
    JobId,
    JobKey,
    Lease,
    LeaseLost,
    Move,
    Moved,
    NewJob,
    Priority,
    ReasonCode,
    RequestId,
    Stage,
    StepApplied,
    Turn,
    TurnResult,
    TypeClaim,
    TypeOptions,
    Wait,
    WaitMode,
)
from trellis.engine.key_rates import key_rate
from trellis.engine.records import Job, JobFilter, JobPlace, SweepOptions, SweepReport
from trellis.lifecycles import LIFECYCLES, Lifecycle, Role, Trigger
from trellis.lifecycles.events import Cause

TOLD_MAX = 40
"""How many of the last steps a difference is shown with."""
LIVES = (*["leased-job"] * 8, "bus-job", "queue-job", "run", "nlm-job", "proposal")
KEYS = (None, None, None, "k1", "k2")
STARTED_BECAUSE = "the holder says why it starts"
HAPPENS = {
    *(
        *(Cause.CANCEL_LET_GO, Cause.CANCEL_HOLDER_GONE, Cause.ATTEMPTS_SPENT, Cause.WORKER_DIED % 2),
        "job_claimed",
        "job_started",
        "job_succeeded",
        "job_failed",
        "job_retry_scheduled",
        "job_snoozed",
        "job_released",
    ),
    *("job_lease_expired", "job_dead_lettered", "job_cancelled", "job_requeued", "job_suspended", "job_resumed"),
    STARTED_BECAUSE,
    *(Cause.CHILDREN_ENDED, Cause.CHILD_FAILED, Cause.SIGNAL_ARRIVED % "go", Cause.PARENT_ENDED, Cause.BEGINS_ANEW),
    *(
        "a soft cancel is carried out",
        "a hard cancel",
        "a deadline passes",
        "succeeded though asked to stop",
        "with a key",
    ),
}
"""What must have come up among the events of many stories: stories in which it never did prove nothing about it."""
DEATH = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.INPUT, last_error="no good")
CANCELLERS = (Role.CONTROL_PLANE, Role.SUBMITTER, Role.ORCHESTRATOR, Role.NLM_BACKEND, Role.FRONTEND)
Act = Callable[["Player"], Awaitable[object]]


@dataclass(kw_only=True)
class Player:
    """One ledger with its own view of what it gave out."""

    rig: Rig
    leases: list[Lease] = field(default_factory=list)

    def note(self, answer: object) -> None:
        if isinstance(answer, TurnResult):
            self.leases += [one.lease for one in answer.claimed]
        elif isinstance(answer, Moved) and answer.lease is not None:
            self.leases.append(answer.lease)


@dataclass(kw_only=True)
class Story:
    """A seed, the two ledgers and what was done so far."""

    seed: int
    players: tuple[Player, Player]
    random: Random = field(init=False)
    told: list[str] = field(default_factory=list)
    jobs: list[JobId] = field(default_factory=list)
    with_key: list[JobId] = field(default_factory=list)
    """The jobs that have a concurrency key."""
    claims: list[str] = field(default_factory=list)
    requests: list[RequestId] = field(default_factory=list)
    spawned: dict[JobId, list[JobId]] = field(default_factory=dict)
    """The children of each job that has some, whether they were submitted or refused."""
    rated: bool = False
    """Whether a type of this story may have a rate per key."""
    types: tuple[str, ...] = field(init=False)
    numbers: int = 0

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.types = (self._named("a"), self._named("b"))

    def _named(self, name: str) -> str:
        return f"{self.seed}-{name}"

    async def play(self, steps: int) -> None:
        await self._open()
        for _ in range(steps):
            await self._do(*await self._next())
        await self._take_rates_away()
        await self._compare_records()

    async def _do(self, told: str, act: Act) -> None:
        self.told.append(told)
        answers = [await answer_of(act(player)) for player in self.players]
        for player, answer in zip(self.players, answers, strict=True):
            player.note(answer)
        self._compare("the answer", *map(bare, answers))

    def _compare(self, what: str, first: object, second: object) -> None:
        if first != second:
            story = "\n  ".join(self.told[-TOLD_MAX:])
            raise AssertionError(
                f"seed {self.seed}: {what} differs after step {len(self.told)}\n  {first}\n  {second}\n  {story}"
            )

    async def _compare_records(self) -> None:
        """The rows, results and journals of this story's jobs, and how much of its types waits."""
        found = [await _records(player.rig, self.jobs, self.types) for player in self.players]
        for name, first in found[0].items():
            for one, other in zip(first, found[1][name], strict=True):
                self._compare(name, one, other)

    async def _take_rates_away(self) -> None:
        if self.rated:
            none = [TypeOptions(type=type_) for type_ in self.types]
            await self._do("declare no rates", lambda player: player.rig.ledger.declare_types(WORKER, none))
            await self._do(*await self._sweep())

    # --- how it begins -------------------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Every story begins with an end that random steps seldom reach; the seed says with which."""
        match self.seed % 12:
            case 0:  # The holder releases a job that somebody asked to cancel.
                job = await self._opening_claim()
                await self._opening_cancel(job)
                await self._opening_step("running", Trigger.RELEASE)
            case 1:  # A job is started that somebody asked to cancel.
                job = await self._opening_claim(start=0)
                await self._opening_cancel(job)
                await self._opening_step("assigned", Trigger.START)
            case 2:  # The holder of a job that somebody asked to cancel is gone.
                job = await self._opening_claim()
                await self._opening_cancel(job)
                await self._do(*await self._fall_silent())
            case 3:  # A job kills two workers.
                await self._opening_claim(max_deaths=2, max_attempts=3)
                await self._do(*await self._fall_silent())
                await self._claim_first()
                await self._do(*await self._fall_silent())
            case 4:  # A lost lease was the last attempt.
                await self._opening_claim(max_attempts=1, max_deaths=0)
                await self._do(*await self._fall_silent())
            case 5:  # A timer finds no attempts left, and another one ends the job for good.
                await self._opening_claim(lifecycle="queue-job", by=Role.ORCHESTRATOR, max_attempts=1)
                await self._opening_step("CONTEXT_ASSEMBLY", Trigger.RETRY, by=Role.ORCHESTRATOR)
                for _ in range(6):
                    await self._do("8.0 s pass", lambda player: player.rig.advance(8.0))
                    await self._do(*await self._sweep())
            case 6:  # A job is claimed by its name, past another of its key that nobody has claimed, and snoozed.
                key, ids = self._named("k1"), [JobId(self._named(f"job-{self._number()}")) for _ in range(2)]
                jobs = [NewJob(job_id=job_id, type=self.types[0], concurrency_key=key) for job_id in ids]
                self.jobs, self.with_key = [*ids], [*ids]
                await self._do(f"submit {jobs}", lambda player: player.rig.ledger.submit(actor(Role.SUBMITTER), jobs))
                await self._claim_first(only=ids[1])
                await self._opening_step("running", Trigger.SNOOZE)
                await self._claim_first()
                await self._opening_step("running", Trigger.RELEASE)
            case 7 | 8 | 9 | 10:
                await self._open_with_wait()
            case _:  # A job succeeds although somebody asked to cancel it.
                job = await self._opening_claim()
                await self._opening_cancel(job)
                await self._opening_step("running", Trigger.COMPLETE)

    async def _open_with_wait(self) -> None:
        """Beginnings in which a job is suspended."""
        match self.seed % 12:
            case 7:  # A job waits for two children, of which one fails.
                await self._opening_wait(WaitMode.ALL_OR_FAILURE, Trigger.FAIL)
            case 8:  # A job waits for all of its children, however they end.
                await self._opening_wait(WaitMode.ALL, Trigger.FAIL, Trigger.COMPLETE)
            case 9:  # A job waits for a signal, and is cancelled with its children when it waits once more.
                job = await self._opening_claim()
                await self._opening_step("running", Trigger.SUSPEND, wait=Wait(signal="go"))
                await self._do("signal go", lambda player: _signal(player, job))
                await self._claim_first()
                (child, *_) = await self._opening_spawn(job)
                await self._opening_step("running", Trigger.SUSPEND, wait=Wait(children=(child,)))
                request = self._request()
                await self._do(
                    f"cancel {job}",
                    lambda player: player.rig.ledger.cancel(
                        ADMIN, job, CancelMode.HARD, request, grace_s=1.0, cause=None
                    ),
                )
                await self._do(*await self._sweep())
            case _:  # A job is started, and its holder says why; then its handler begins anew.
                await self._opening_claim(start=0)
                await self._opening_step("assigned", Trigger.START, cause=STARTED_BECAUSE)
                await self._opening_step("running", Trigger.SUSPEND, wait=Wait(restart_with=b"1"))

    async def _opening_claim(
        self, *, lifecycle: str = "leased-job", by: Role = Role.WORKER, start: int = 1, **options: Any
    ) -> JobId:
        job_id = JobId(self._named(f"job-{self._number()}"))
        job = NewJob(job_id=job_id, type=self.types[0], lifecycle=lifecycle, **options)
        self.jobs.append(job_id)
        submitter = actor(_role_of(LIFECYCLES[lifecycle], Trigger.SUBMIT))
        await self._do(f"submit {job}", lambda player: player.rig.ledger.submit(submitter, [job]))
        if lifecycle == "queue-job":
            move = Move(job_id=job_id, target="QUEUED", request_id=self._request())
            await self._do(f"move {move}", lambda player: player.rig.ledger.move(actor(by), move))
        await self._claim_first(lifecycle=lifecycle, by=by, start=start)
        return job_id

    async def _claim_first(
        self,
        *,
        lifecycle: str = "leased-job",
        by: Role = Role.WORKER,
        start: int = 1,
        only: JobId | None = None,
    ) -> None:
        claim = Claim(
            claim_id=ClaimId(self._named(f"claim-{self._number()}")),
            types=(TypeClaim(type=self.types[0], lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S),),
            start=start,
            prefetch=1 - start,
            lifecycle=lifecycle,
            only=only,
        )
        await self._do(
            f"claim {claim}", lambda player: player.rig.ledger.turn(Turn(actor=actor(by, "w1"), claim=claim))
        )

    async def _opening_cancel(self, job_id: JobId) -> None:
        request = self._request()
        await self._do(
            f"cancel {job_id} soft",
            lambda player: player.rig.ledger.cancel(
                ADMIN, job_id, CancelMode.SOFT, request, grace_s=600.0, cause="asked"
            ),
        )

    async def _opening_wait(self, mode: WaitMode, *ends: str) -> None:
        """A job spawns children and waits for them; some of them end."""
        job = await self._opening_claim()
        children = await self._opening_spawn(job)
        await self._opening_step("running", Trigger.SUSPEND, wait=Wait(children=children, mode=mode))
        for trigger in ends:
            await self._claim_first()
            await self._opening_step("running", trigger)

    async def _opening_spawn(self, parent: JobId) -> tuple[JobId, ...]:
        ids = tuple(JobId(self._named(f"job-{self._number()}")) for _ in range(2))
        jobs = [NewJob(job_id=job_id, type=self.types[0], parent_id=parent) for job_id in ids]
        self.jobs += ids
        self.spawned[parent] = [*ids]
        by = actor(Role.WORKER, "w1")
        await self._do(
            f"spawn {ids}",
            lambda player: player.rig.ledger.spawn(by, player.leases[-1], jobs, "s", b"1", abandoned=frozenset()),
        )
        return ids

    async def _opening_step(
        self, source: str, trigger: str, *, by: Role = Role.WORKER, wait: Wait | None = None, cause: str | None = None
    ) -> None:
        def act(player: Player) -> Awaitable[object]:
            step = Advance(lease=player.leases[-1], source=source, trigger=trigger, delay_s=7.0, wait=wait, cause=cause)
            return player.rig.ledger.turn(Turn(actor=actor(by, "w1"), advances=(step,)))

        await self._do(f"{trigger} the job claimed last", act)

    # --- what happens next ---------------------------------------------------------------------------------------

    async def _next(self) -> tuple[str, Act]:
        if not self.jobs:
            return await self._submit()
        chosen = self.random.choices(
            (
                self._submit,
                self._claim,
                self._turn,
                self._renew,
                self._cancel,
                self._sweep,
                self._pass_time,
                self._move,
                self._requeue,
                self._control,
                self._note,
                self._fall_silent,
                self._spawn,
                self._send_signal,
                self._change,
            ),
            (13, 18, 38, 4, 12, 11, 10, 7, 4, 3, 3, 2, 6, 4, 5),
        )[0]
        return await chosen()

    def _number(self) -> int:
        self.numbers += 1
        return self.numbers

    def _request(self) -> RequestId:
        if self.requests and self.random.random() < 0.15:
            return self.random.choice(self.requests)
        self.requests.append(RequestId(self._named(f"request-{self._number()}")))
        return self.requests[-1]

    async def _some_job(self) -> Job | None:
        recent = self.jobs[-12:] if self.random.random() < 0.8 else self.jobs
        return await self.players[0].rig.ledger.job(self.random.choice(recent)) if recent else None

    async def _submit(self) -> tuple[str, Act]:
        rng = self.random
        name = rng.choice(LIVES)
        again = bool(self.jobs) and rng.random() < 0.06
        limited = rng.choice(KEYS)
        alike = NewJob(
            job_id=rng.choice(self.jobs) if again else JobId("job"),
            type=rng.choice(self.types),
            payload=b'"p"',
            lifecycle=name,
            delay_s=rng.choice((0.0, 0.0, 0.0, 7.0)),
            deadline_s=rng.choice((None, None, None, None, 20.0, 45.0)),
            max_deaths=rng.choice((0, 1, 2)),
            concurrency_key=limited and self._named(limited),
            concurrency_limit=2 if limited == "k2" else 1,
            idempotency_key=rng.choice((None, None, None, *map(self._named, ("i1", "i2", "i3")))),
            fingerprint=rng.choice((b"one", b"one", b"two")),
            id_is_given=again or rng.random() < 0.5,
            correlation_id=rng.choice((None, "c")),
        )
        jobs = [replace(alike, priority=rng.choice(tuple(Priority)), max_attempts=rng.choice((1, 2, 3)))]
        if not again:
            more = 2 if alike.idempotency_key is None and rng.random() < 0.3 else 0
            jobs = [
                replace(job, job_id=JobId(self._named(f"job-{self._number()}"))) for job in (*jobs, *[jobs[0]] * more)
            ]
        submit = LIFECYCLES[name].pull(None, Trigger.SUBMIT)
        assert submit is not None
        by = actor(rng.choice(sorted(submit.actors)))
        self.jobs += [job.job_id for job in jobs if job.job_id not in self.jobs]
        self.with_key += [job.job_id for job in jobs if job.concurrency_key is not None]
        return f"submit {jobs}", lambda player: player.rig.ledger.submit(by, jobs)

    async def _living(self) -> list[int]:
        """Where the newest leases that are still good stand in the players' lists, counted from the end."""
        ledger, held = self.players[0].rig.ledger, self.players[0].leases
        found: list[int] = []
        for n in range(-1, -1 - min(len(held), 8), -1):
            job = await ledger.job(held[n].job_id)
            if job is not None and job.place is JobPlace.LEASED and job.epoch == held[n].epoch:
                found.append(n)
        return found

    async def _ready(self) -> Job | None:
        """One of the newest jobs that can be claimed."""
        newest = [await self.players[0].rig.ledger.job(job_id) for job_id in self.jobs[-8:]]
        ready = [job for job in newest if job is not None and job.place is JobPlace.READY]
        return self.random.choice(ready) if ready else None

    def _new_claim(self, lifecycle: str, type_: str) -> Claim:
        rng = self.random
        if self.claims and rng.random() < 0.1:
            claim_id = rng.choice(self.claims[-4:])
        else:
            claim_id = self._named(f"claim-{self._number()}")
            self.claims.append(claim_id)
        return Claim(
            claim_id=ClaimId(claim_id),
            types=(TypeClaim(type=type_, lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S),),
            start=rng.choice((0, 1, 1, 2)),
            prefetch=rng.choice((0, 1)),
            lifecycle=lifecycle,
        )

    async def _claim(self) -> tuple[str, Act]:
        ready = await self._ready() if self.random.random() < 0.75 else None
        name = self.random.choice(LIVES) if ready is None else ready.lifecycle
        claim = self._new_claim(name, self.random.choice(self.types) if ready is None else ready.type)
        if self.random.random() < 0.15 and (chosen := await self._some_job()) is not None:
            claim = replace(claim, only=chosen.job_id)
        by = actor(_role_of(LIFECYCLES[name], Trigger.CLAIM), self.random.choice(("w1", "w1", "w2")))
        empty = replace(claim, claim_id=ClaimId(self._named(f"claim-{self._number()}")), types=self._no_jobs(), start=1)
        claims = [empty, claim] if self.rated or await self._older_ready(claim) else [claim]
        sweeps = self.rated and claim.start + claim.prefetch < len({*KEYS} - {None})

        async def act(player: Player) -> object:
            if sweeps:
                await player.rig.ledger.sweep(SWEEPER, SweepOptions(elect=False))
            answers = [await player.rig.ledger.turn(Turn(actor=by, claim=one)) for one in claims]
            return answers[-1]

        before = ", after a sweep" * sweeps + ", after an empty claim" * (len(claims) - 1)
        return f"claim {claim} by {by}{before}", act

    def _no_jobs(self) -> tuple[TypeClaim, ...]:
        return (TypeClaim(type=self._named("no-jobs"), lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S),)

    async def _older_ready(self, claim: Claim) -> bool:
        """Whether a job that this claim may take has a key, and so may have a position before the jobs taken last."""
        rows = [await self.players[0].rig.ledger.job(job_id) for job_id in self.with_key]
        return any(
            row is not None
            and row.place is JobPlace.READY
            and row.lifecycle == claim.lifecycle
            and row.type == claim.types[0].type
            for row in rows
        )

    async def _turn(self) -> tuple[str, Act]:
        """A step of a holder, now and then two or three, now and then of somebody who is no holder any more."""
        held = self.players[0].leases
        if not held:
            return await self._claim()
        rng = self.random
        living = await self._living() if rng.random() < 0.7 else []
        first = rng.choice(living) if living else -1 - rng.randrange(min(len(held), 8 if rng.random() < 0.8 else 40))
        lifecycle = LIFECYCLES[held[first].lifecycle]
        steps = [await self._step(first)]
        while rng.random() < 0.25 and len(steps) < 3:
            other = -1 - rng.randrange(min(len(held), 6))
            if held[other].lifecycle == lifecycle.name:
                steps.append(await self._step(other if rng.random() < 0.5 else first))
        fenced = [t for t in lifecycle.transitions if t.fenced]
        roles = sorted({role for t in fenced for role in t.actors})
        by = actor(rng.choice(roles), rng.choice(("w1", "w2")))
        told = f"steps {[(held[n].job_id, held[n].epoch, options) for n, options in steps]} by {by}"

        def act(player: Player) -> Awaitable[object]:
            advances = tuple(Advance(lease=player.leases[n], **options) for n, options in steps)
            return player.rig.ledger.turn(Turn(actor=by, advances=advances))

        return told, act

    async def _step(self, n: int) -> tuple[int, dict[str, Any]]:
        rng, lease = self.random, self.players[0].leases[n]
        lifecycle = LIFECYCLES[lease.lifecycle]
        job = await self.players[0].rig.ledger.job(lease.job_id)
        assert job is not None
        fenced = [t for t in lifecycle.transitions if t.fenced]
        fitting = [t for t in fenced if t.source == job.state] if rng.random() < 0.8 else fenced
        fitting += [
            t
            for t in fitting
            if t.trigger in {Trigger.SNOOZE, Trigger.RETRY, Trigger.COMPLETE}
            or (t.trigger == Trigger.SUSPEND and job.job_id in self.spawned)
        ]
        done = [t for t in fitting if t.trigger == Trigger.COMPLETE and job.cancel_requested]
        transition = done[0] if done and rng.random() < 0.7 else rng.choice(fitting or fenced)
        buried = lifecycle.by_name[transition.target].dead_letter
        suspends = (transition.trigger == Trigger.SUSPEND) is (rng.random() < 0.97)
        return n, {
            "wait": self._wait(lease.job_id) if suspends else None,
            "source": transition.source,
            "trigger": transition.trigger,
            "delay_s": rng.choice((0.0, 0.0, 7.0)),
            "spare_attempt": rng.random() < 0.2,
            "cause": rng.choice((None, None, "because")),
            "data": rng.choice((None, None, b'{"a": 1}')),
            "result": rng.choice((None, b'"r"')),
            "death": DEATH if buried else rng.choice((None, None, None, DEATH)),
            "version": rng.choice((None, None, None, None, job.version, job.version, job.version - 1)),
            "unless_cancelled": rng.random() < 0.05,
        }

    def _wait(self, job_id: JobId) -> Wait:
        """What a job waits for: some of its children, a signal, a time, or several of these."""
        rng, children = self.random, self.spawned.get(job_id, [])
        return Wait(
            children=tuple(children) if rng.random() < 0.8 else (),
            mode=rng.choice(tuple(WaitMode)),
            signal=rng.choice((None, "go", "stop")),
            after=0,
            timeout_s=rng.choice((None, 7.0, 7.0)),
            entry=rng.choice((None, (f"wait-{self._number()}", b"1"))),
            restart_with=rng.choice((None, None, None, None, b"2")),
        )

    async def _spawn(self) -> tuple[str, Act]:
        held = self.players[0].leases
        if not held:
            return await self._claim()
        rng, living = self.random, await self._living()
        n = rng.choice(living) if living and rng.random() < 0.9 else -1
        parent = held[n]
        if parent.lifecycle != "leased-job":
            return await self._claim()
        jobs = [
            NewJob(
                job_id=JobId(self._named(f"job-{self._number()}")),
                type=rng.choice(self.types),
                parent_id=parent.job_id,
                max_attempts=rng.choice((1, 2)),
                concurrency_key=rng.choice((None, None, self._named("k1"))),
                delay_s=rng.choice((0.0, 0.0, 7.0)),
            )
            for _ in range(rng.choice((1, 2, 3)))
        ]
        self.jobs += [job.job_id for job in jobs]
        self.with_key += [job.job_id for job in jobs if job.concurrency_key is not None]
        self.spawned.setdefault(parent.job_id, []).extend(job.job_id for job in jobs)
        left = frozenset({jobs[0].job_id} if rng.random() < 0.2 else set[JobId]())
        entry, by = rng.choice(("spawn", f"spawn-{self._number()}")), actor(Role.WORKER, "w1")
        return (
            f"spawn {[job.job_id for job in jobs]} of {parent.job_id} as {entry}",
            lambda player: player.rig.ledger.spawn(by, player.leases[n], jobs, entry, b"[]", abandoned=left),
        )

    async def _send_signal(self) -> tuple[str, Act]:
        rng, job = self.random, await self._some_job()
        if job is None:
            return await self._submit()
        name, key = rng.choice(("go", "stop")), rng.choice((None, None, "once"))
        by = actor(rng.choice((Role.SUBMITTER, Role.CONTROL_PLANE, Role.WORKER, Role.PROJECTOR)))

        async def act(player: Player) -> object:
            sent = await player.rig.ledger.send_signal(by, job.job_id, name, b"1", signal_key=key)
            return replace(sent, number=0)

        return f"signal {name} to {job.job_id} by {by.role} {key}", act

    async def _renew(self) -> tuple[str, Act]:
        count = self.random.choice((1, 3, 6))
        by = actor(Role.WORKER, "w1")
        return f"renew {count}", lambda player: player.rig.ledger.renew(by, list(dict.fromkeys(player.leases[-count:])))

    async def _cancel(self) -> tuple[str, Act]:
        rng, job = self.random, await self._some_job()
        living = await self._living() if rng.random() < 0.6 else []
        if living:
            job = await self.players[0].rig.ledger.job(self.players[0].leases[rng.choice(living)].job_id)
        if job is None:
            return await self._submit()
        mode = CancelMode.SOFT if rng.random() < 0.6 else CancelMode.HARD
        grace_s, request = rng.choice((5.0, 20.0)), self._request()
        declared = LIFECYCLES[job.lifecycle].pull(job.state, Trigger.CANCEL)
        may = sorted(declared.actors) if declared is not None and rng.random() < 0.8 else CANCELLERS
        by = actor(rng.choice(may))
        told = f"cancel {job.job_id} {mode} {grace_s} {request} by {by.role}"
        return told, lambda player: player.rig.ledger.cancel(
            by, job.job_id, mode, request, grace_s=grace_s, cause=rng.choice(("asked",))
        )

    async def _change(self) -> tuple[str, Act]:
        """Change a few jobs at once, some of them under a version they may no longer have."""
        rng, change = self.random, self.random.choice(list(JobChange))
        jobs = [job for _ in range(rng.randint(1, 4)) if (job := await self._some_job()) is not None]
        if not jobs:
            return await self._submit()
        wanted = [
            JobToChange(job_id, rng.choice((None, version, version + 1)))
            for job_id, version in {job.job_id: job.version for job in jobs}.items()
        ]
        order = ChangeOrder(
            change=change,
            request_id=self._request(),
            cause="many",
            mode=rng.choice(list(CancelMode)),
            grace_s=20.0,
            priority=rng.choice(list(Priority)) if change is JobChange.PRIORITIZE else None,
            selected_by=rng.choice((None, "type=a")),
        )
        by = actor(rng.choice((Role.CONTROL_PLANE, Role.CONTROL_PLANE, Role.SUBMITTER)))
        return f"change {wanted} {order} by {by.role}", lambda player: player.rig.ledger.change_jobs(by, order, wanted)

    async def _sweep(self) -> tuple[str, Act]:
        options = SweepOptions(elect=False, windows_s={("queue-job", "FAILED"): 30.0})
        return "sweep", lambda player: player.rig.ledger.sweep(SWEEPER, options)

    async def _pass_time(self) -> tuple[str, Act]:
        seconds = self.random.choice((1.0, 4.0, 8.0, 8.0, 8.0, 8.0, 31.0))
        return f"{seconds} s pass", lambda player: player.rig.advance(seconds)

    async def _fall_silent(self) -> tuple[str, Act]:
        """Longer than a lease without a renewal, while somebody sweeps: nothing is forgiven."""

        async def act(player: Player) -> object:
            reports: list[SweepReport] = []
            for _ in range(4):
                await player.rig.advance(8.0)
                reports.append(await player.rig.ledger.sweep(SWEEPER, SweepOptions(elect=False)))
            return reports

        return "holders fall silent", act

    async def _move(self) -> tuple[str, Act]:
        rng, job = self.random, await self._some_job()
        if job is None:
            return await self._submit()
        lifecycle = LIFECYCLES[job.lifecycle]
        fitting = [t for t in lifecycle.transitions if t.source == job.state and not t.fenced]
        if fitting and rng.random() < 0.8:
            transition = rng.choice(fitting)
            target, role = transition.target, rng.choice(sorted(transition.actors))
        else:
            target, role = rng.choice(lifecycle.states).name, rng.choice(tuple(Role))
        buried = lifecycle.by_name[target].dead_letter
        move = Move(
            job_id=job.job_id,
            target=target,
            request_id=self._request(),
            version=rng.choice((None, None, job.version, job.version + 1)),
            delay_s=rng.choice((None, None, 7.0)),
            cause=rng.choice((None, "moved")),
            data=rng.choice((None, b"{}")),
            death=DEATH if buried else rng.choice((None, None, DEATH)),
        )
        return f"move {move} by {role}", lambda player: player.rig.ledger.move(actor(role), move)

    async def _requeue(self) -> tuple[str, Act]:
        rng, job = self.random, await self._some_job()
        if job is None:
            return await self._submit()
        some = await self.players[0].rig.ledger.dead_letters(JobFilter(type=rng.choice(self.types)), limit=3)
        which = [job.job_id] if rng.random() < 0.5 or not some else [letter.job_id for letter in some]
        meant = which if rng.random() < 0.8 else JobFilter(type=rng.choice(self.types), lifecycle=rng.choice(LIVES))
        request, role = self._request(), rng.choice((Role.CONTROL_PLANE,) * 5 + (Role.WORKER,))
        meant = list(dict.fromkeys(meant)) if isinstance(meant, list) else meant
        return f"requeue {meant} {request} by {role}", lambda player: player.rig.ledger.requeue(
            actor(role), meant, request, limit=2, cause="again"
        )

    async def _control(self) -> tuple[str, Act]:
        rng, type_ = self.random, self.random.choice(self.types)
        match rng.randrange(5):
            case 0:
                paused = rng.random() < 0.3
                return f"pause {type_} {paused}", lambda p: p.rig.ledger.pause(ADMIN, type_, paused=paused)
            case 1:
                rate, burst = rng.choice((None, None, 0.5, 2.0)), rng.choice((1, 3))
                return f"rate {type_} {rate} {burst}", lambda p: p.rig.ledger.limit_rate(ADMIN, type_, rate, burst)
            case 2:
                limit = rng.choice((None, 1, 3))
                return f"held {type_} {limit}", lambda p: p.rig.ledger.limit_held(ADMIN, type_, limit)
            case 3:
                self.rated = True
                options = TypeOptions(type=type_, key_rate=key_rate(*rng.choice(((None, None), (0.07, 1), (0.3, 2)))))
                return f"declare {options}", lambda p: p.rig.ledger.declare_types(WORKER, [options])
            case _:
                key, limit = self._named(rng.choice(("k1", "k2"))), rng.choice((1, 2, 3))
                return f"key {key} {limit}", lambda p: p.rig.ledger.limit_key(ADMIN, key, limit)

    async def _note(self) -> tuple[str, Act]:
        held = self.players[0].leases
        if not held:
            return await self._claim()
        n, entry = -1 - self.random.randrange(min(len(held), 8)), self.random.choice(("e1", "e2"))
        body = f'"{self._number()}"'.encode()
        if self.random.random() < 0.5:
            return f"checkpoint {held[n]}", lambda p: p.rig.ledger.save_checkpoint(p.leases[n], body)
        return f"journal {held[n]} {entry}", lambda p: p.rig.ledger.journal(p.leases[n], entry, body)


async def _signal(player: Player, job_id: JobId) -> object:
    return replace(await player.rig.ledger.send_signal(ADMIN, job_id, "go", b"1"), number=0)


def bare(answer: object) -> object:  # noqa: PLR0911 - one answer for each kind
    """An answer without what each ledger numbers for itself; a refusal by its kind and its words."""
    if isinstance(answer, Lease):
        return answer._replace(key=JobKey(0))
    if isinstance(answer, TurnResult):
        return [bare(one) for one in answer.outcomes], [bare(one) for one in answer.claimed]
    if isinstance(answer, TrellisError):
        return type(answer).__name__, str(answer)
    if isinstance(answer, SweepReport):
        return replace(answer, next_due_s=None)  # one looks an interval ahead, the other as far as there is something
    if isinstance(answer, list):
        return [bare(one) for one in answer]
    if isinstance(answer, Moved):
        return replace(answer, lease=None), bare(answer.lease)
    if isinstance(answer, Claimed | StepApplied | LeaseLost):
        return tuple(map(bare, answer))
    return answer


async def _records(rig: Rig, jobs: Sequence[JobId], types: Sequence[str]) -> dict[str, list[Any]]:
    ledger = rig.ledger
    rows = [await ledger.job(job_id) for job_id in jobs]
    found = [row for row in rows if row is not None]
    return {
        "rows": rows,
        "results": [await ledger.result(row.job_id) for row in found if row.place is JobPlace.ENDED],
        "journals": [await ledger.read_journal(row.job_id) for row in found if row.epoch],
        "queues": sorted(
            (
                replace(one, oldest_ready_s=None)
                for one in await ledger.queues()
                if one.type in types and one.ready + one.scheduled + one.blocked + one.held
            ),
            key=lambda one: (one.type, one.lifecycle),
        ),
    }


def _role_of(lifecycle: Lifecycle, trigger: str) -> Role:
    return next(min(t.actors) for t in lifecycle.transitions if t.trigger == trigger)
