"""Random lives of leased jobs on a real ledger beside a model small enough to be read as the rules themselves.

The model does not say which of several waiting jobs is claimed, only which sets are right: every rule leaves the
ledger in a state that the model predicts job by job.
"""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.ledgers.conformance.opening import postgres_rig, sqlite_rig
from tests.ledgers.conformance.rig import ADMIN, DEATH, LENGTH_S, WORKER, Rig
from trellis.engine.errors import InvalidTransition
from trellis.engine.jobs import (
    DEATHS_DEFAULT,
    CancelMode,
    JobId,
    Lease,
    LeaseLost,
    Moved,
    NotMoved,
    Renewed,
    StepApplied,
)
from trellis.engine.records import JobFilter, JobPlace
from trellis.lifecycles import LIFECYCLES, Progress, Transition, Trigger
from trellis.lifecycles import Phase as StatePhase

LEASED = LIFECYCLES["leased-job"]
DEATHS_MAX = DEATHS_DEFAULT
JOBS_MAX = 12
EXAMPLES = 30
STEPS = 50
TRIGGERS = st.sampled_from(["start", "complete", "fail", "retry", "snooze", "release", "stop", "reject"])
SITUATIONS = {
    *("refused", "repeated", "start lost", "step lost", "renewed", "renewal lost"),
    *("requeued", "amnesty", "due", "expired", "exhausted", "repeated after another's move"),
}


@dataclass
class Modelled:
    """One job as the rules say it must be."""

    job_id: JobId
    key: str | None
    submitted_attempts: int
    max_attempts: int
    state: str = "queued"
    attempt: int = 0
    generation: int = 0
    version: int = 1
    epoch: int = 0
    deaths: int = 0
    due_s: float | None = None
    until_s: float | None = None

    @property
    def held(self) -> bool:
        return LEASED.by_name[self.state].phase is StatePhase.HELD

    @property
    def ended(self) -> bool:
        return LEASED.by_name[self.state].phase is StatePhase.ENDED

    @property
    def waits(self) -> bool:
        return self.state == "queued" and self.due_s is None

    def take(self, trigger: str) -> Transition:
        transition = LEASED.by_trigger[self.state, trigger]
        self.state = transition.target
        self.version += 1
        self.attempt += transition.opens is Progress.ATTEMPT
        if transition.opens is Progress.GENERATION:
            self.generation, self.attempt, self.deaths = self.generation + 1, 0, 0
            self.max_attempts = self.submitted_attempts
        if not self.held:
            self.until_s = None
        return transition


@dataclass
class World:
    """What outlives an example: the ledger, its loop, its clock and its last sweep."""

    rig: Rig
    loop: asyncio.AbstractEventLoop
    now_s: float = 0.0
    last_tick_s: float | None = None
    numbers: count = field(default_factory=lambda: count(1))
    seen: Counter[str] = field(default_factory=Counter)
    """How often each situation came up: a run that never met one proves nothing about it."""


class LeasedJobs(RuleBasedStateMachine):
    """Every verb against the model."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.rig = world.rig
        self.type = f"model-{next(world.numbers)}"
        self.jobs: dict[JobId, Modelled] = {}
        self.leases: list[Lease] = []
        self.effects: dict[tuple[JobId, int], tuple[Transition, int]] = {}
        """The last step a holder made with its epoch, and the version of that step."""
        self.overtaken: set[tuple[JobId, int]] = set()
        """Epochs in which somebody else moved the job after its holder had let it go."""
        # Each example begins just after a sweep, so that it does not depend on the one before.
        self.run(self.rig.sweep())
        world.last_tick_s = world.now_s

    def run(self, call):
        return self.world.loop.run_until_complete(call)

    def pick(self, number: int) -> Modelled:
        return list(self.jobs.values())[number % len(self.jobs)]

    # --- verbs ---------------------------------------------------------------------------------------------------

    @initialize(keys=st.lists(st.sampled_from([None, None, "a", "b"]), min_size=4, max_size=6), start=st.booleans())
    def begin_at_work(self, keys: list[str | None], start: bool) -> None:
        for key in keys:
            self.submit(0.0, key, attempts=3)
        self.claim(3, start)

    @precondition(lambda self: len(self.jobs) < JOBS_MAX)
    @rule(delay_s=st.sampled_from([0.0, 0.0, 7.0]), key=st.sampled_from([None, "a", "b"]), attempts=st.integers(1, 3))
    def submit(self, delay_s: float, key: str | None, attempts: int) -> None:
        named = f"{self.type}:{key}" if key else None
        job_id = self.run(
            self.rig.submit_one(type=self.type, delay_s=delay_s, concurrency_key=named, max_attempts=attempts)
        )
        due_s = self.world.now_s + delay_s if delay_s else None
        self.jobs[job_id] = Modelled(
            job_id=job_id, key=named, submitted_attempts=attempts, max_attempts=attempts, due_s=due_s
        )

    @rule(n=st.integers(1, 4), start=st.booleans())
    def claim(self, n: int, start: bool) -> None:
        free = self.claimable()
        claimed = self.run(self.rig.claim(n, types=(self.type,), start=start))
        assert len(claimed) == min(n, free)
        for one in claimed:
            job = self.jobs[one.lease.job_id]
            assert job.waits
            made = job.take(Trigger.CLAIM)
            if start:
                made = job.take(Trigger.START)
            job.epoch += 1
            job.until_s = self.world.now_s + LENGTH_S
            assert (one.lease.epoch, one.state, one.attempt, one.deaths) == (
                job.epoch,
                job.state,
                job.attempt,
                job.deaths,
            )
            self.leases.append(one.lease)
            self.effects[job.job_id, job.epoch] = (made, job.version)

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 50), trigger=TRIGGERS, delay_s=st.sampled_from([0.0, 7.0]))
    def settle_any(self, number: int, trigger: str, delay_s: float) -> None:
        self.settle(self.leases[-1 - number % len(self.leases)], trigger, delay_s)

    @precondition(lambda self: self.living())
    @rule(number=st.integers(0, 50), trigger=TRIGGERS, delay_s=st.sampled_from([0.0, 7.0]))
    def settle_living(self, number: int, trigger: str, delay_s: float) -> None:
        living = self.living()
        self.settle(living[number % len(living)], trigger, delay_s)

    def living(self) -> list[Lease]:
        return [lease for lease in self.leases if self.is_living(lease)]

    def is_living(self, lease: Lease) -> bool:
        job = self.jobs[lease.job_id]
        return job.held and job.epoch == lease.epoch

    def settle(self, lease: Lease, trigger: str, delay_s: float) -> None:
        job, current = self.jobs[lease.job_id], self.is_living(lease)
        made, version = self.effects[lease.job_id, lease.epoch]
        source = self.source(job, trigger, made, current=current)
        declared = LEASED.pull(source, trigger)
        options = {
            "delay_s": delay_s if trigger in {"retry", "snooze"} else 0.0,
            "spare_attempt": trigger in {"snooze", "release"},
            "death": DEATH if trigger == "reject" else None,
        }
        if declared is None:
            with pytest.raises(InvalidTransition):
                self.run(self.rig.pull(lease, trigger, source=source, **options))
            self.world.seen["refused"] += 1
            return
        outcome = self.run(self.rig.pull(lease, trigger, source=source, **options))
        if current and job.state == source:
            self.apply(job, trigger, **options)
            assert outcome == StepApplied(version=job.version)
            self.effects[job.job_id, lease.epoch] = (declared, job.version)
            self.world.seen[f"step {trigger}"] += 1
            return
        # Who repeats a start goes on to run the job, so that its lease must still be good.
        still = current or LEASED.by_name[made.target].phase is not StatePhase.HELD
        if made == declared and still:
            assert outcome == StepApplied(version=version, repeated=True)
            overtaken = (lease.job_id, lease.epoch) in self.overtaken
            self.world.seen["repeated after another's move" if overtaken else "repeated"] += 1
        else:
            assert outcome == LeaseLost(lease)
            self.world.seen["start lost" if trigger == "start" else "step lost"] += 1

    def source(self, job: Modelled, trigger: str, made: Transition, *, current: bool) -> str:
        """Where the holder believes its job is: it repeats its last step as it sent it."""
        if trigger == made.trigger and not (current and trigger != Trigger.START):
            return str(made.source)
        return "assigned" if trigger == Trigger.START else (job.state if current else "running")

    def apply(self, job: Modelled, trigger: str, *, delay_s: float, spare_attempt: bool, death) -> None:
        job.max_attempts += spare_attempt
        job.take(trigger)
        if job.held:
            job.until_s = self.world.now_s + LENGTH_S
        if job.state == "queued" and delay_s:
            job.due_s = self.world.now_s + delay_s

    @precondition(lambda self: self.leases)
    @rule(number=st.integers(0, 50))
    def renew(self, number: int) -> None:
        lease = self.leases[-1 - number % len(self.leases)]
        job = self.jobs[lease.job_id]
        (answer,) = self.run(self.rig.ledger.renew(WORKER, [lease]))
        if self.is_living(lease):
            assert answer == Renewed(cancel=False)
            self.world.seen["renewed"] += 1
            job.until_s = self.world.now_s + LENGTH_S
        else:
            assert answer == LeaseLost(lease)
            self.world.seen["renewal lost"] += 1

    @precondition(lambda self: len(self.jobs) > JOBS_MAX // 2)
    @rule(number=st.integers(0, 50))
    def cancel(self, number: int) -> None:
        job = self.pick(number)
        answer = self.run(self.rig.cancel(job.job_id, CancelMode.HARD))
        if job.ended:
            assert isinstance(answer, NotMoved)
            assert answer.state == job.state
            return
        self.world.seen["held cancelled" if job.held else "waiting cancelled"] += 1
        self.overtaken |= set() if job.held else {(job.job_id, job.epoch)}
        job.epoch += job.held
        job.due_s = None
        job.take(Trigger.CANCEL)
        assert isinstance(answer, Moved)
        assert answer.version == job.version

    @precondition(lambda self: self.jobs)
    @rule(number=st.integers(0, 50))
    def requeue_any(self, number: int) -> None:
        self.requeue(self.pick(number))

    @precondition(lambda self: self.dead())
    @rule(number=st.integers(0, 50))
    def requeue_dead(self, number: int) -> None:
        dead = self.dead()
        self.requeue(dead[number % len(dead)])

    def dead(self) -> list[Modelled]:
        return [job for job in self.jobs.values() if job.state in {"failed", "dead_lettered"}]

    def requeue(self, job: Modelled) -> None:
        (answer,) = self.run(self.rig.ledger.requeue(ADMIN, [job.job_id], self.rig.request(), limit=1, cause=None))
        if job.state in {"failed", "dead_lettered"}:
            self.overtaken.add((job.job_id, job.epoch))
            job.take(Trigger.REQUEUE)
            self.world.seen["requeued"] += 1
            assert isinstance(answer, Moved)
        else:
            assert isinstance(answer, NotMoved)

    @rule(seconds=st.sampled_from([1.0, 8.0, 15.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.run(self.rig.advance(seconds))
        self.world.now_s += seconds

    @rule()
    def holders_fall_silent(self) -> None:
        """Longer than a lease, with a living sweeper all along."""
        for _ in range(4):
            self.time_passes(8.0)
            self.sweep()

    @rule()
    def sweep(self) -> None:
        report = self.run(self.rig.sweep())
        now, last = self.world.now_s, self.world.last_tick_s
        since = now if last is None else last
        # A lease that was renewed since the last sweep was in an outage only after that.
        outages = [(job, now - max(since, (job.until_s or 0.0) - LENGTH_S)) for job in self.jobs.values() if job.held]
        forgiven = [job for job, outage_s in outages if 2 * outage_s > LENGTH_S]
        assert report.amnesty == len(forgiven)
        self.world.seen["amnesty"] += len(forgiven)
        for job in forgiven:
            job.until_s = now + LENGTH_S
        self.world.last_tick_s = now
        for job in self.jobs.values():
            if job.until_s is not None and job.until_s <= now:
                self.lose(job)
            elif job.due_s is not None and job.due_s <= now:
                job.due_s = None
                self.world.seen["due"] += 1

    def lose(self, job: Modelled) -> None:
        job.deaths += LEASED.by_name[job.state].runs_code
        job.epoch += 1
        spared = not LEASED.by_name[job.state].runs_code
        spent = job.deaths >= DEATHS_MAX or (job.attempt + 1 >= job.max_attempts and not spared)
        job.max_attempts += spared
        self.world.seen["exhausted" if spent else "expired"] += 1
        job.take(Trigger.EXHAUST if spent else Trigger.EXPIRE)

    # --- what must hold ------------------------------------------------------------------------------------------

    def claimable(self) -> int:
        """How many jobs a claim may take now: one of each key that nobody holds, and all without a key."""
        busy = {job.key for job in self.jobs.values() if job.held}
        waiting = [job.key for job in self.jobs.values() if job.waits and (job.key is None or job.key not in busy)]
        return waiting.count(None) + len(set(waiting) - {None})

    @invariant()
    def the_ledger_says_what_the_model_says(self) -> None:
        page = self.run(self.rig.ledger.jobs(JobFilter(type=self.type), limit=100))
        assert {job.job_id for job in page.jobs} == set(self.jobs)
        slots: Counter[str | None] = Counter()
        for job in page.jobs:
            model = self.jobs[job.job_id]
            assert (job.state, job.attempt, job.generation, job.version, job.epoch, job.deaths, job.max_attempts) == (
                model.state,
                model.attempt,
                model.generation,
                model.version,
                model.epoch,
                model.deaths,
                model.max_attempts,
            )
            assert (job.place is JobPlace.LEASED) == model.held
            assert (job.place is JobPlace.ENDED) == model.ended
            assert (job.place is JobPlace.SCHEDULED) == (model.due_s is not None)
            slots[job.concurrency_key] += job.place in {JobPlace.READY, JobPlace.LEASED}
            assert job.concurrency_key is not None or job.place is not JobPlace.BLOCKED
        for key in {job.key for job in self.jobs.values() if job.key}:
            wanted = any(job.held or job.waits for job in self.jobs.values() if job.key == key)
            assert slots[key] == wanted, "a key has one owner of its slot as soon as anyone wants it"

    def teardown(self) -> None:
        for job in self.jobs.values():
            if not job.ended:
                self.run(self.rig.cancel(job.job_id, CancelMode.HARD))


@pytest.mark.requirement("D1", "D2", "D31", "D38", "D49", "DJ-2", "DJ-3", "DJ-7", "DJ-8", "DJ-21")
def test_random_lives_follow_the_model(rig_server, tmp_path: Path):
    kind, server = rig_server
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        stack = AsyncExitStack()
        opened = postgres_rig(server, kind) if server else sqlite_rig(tmp_path / "ledger.db")
        rig = loop.run_until_complete(stack.enter_async_context(opened))
        try:
            world = World(rig=rig, loop=loop)
            run_state_machine_as_test(lambda: LeasedJobs(world), settings=SETTINGS)  # pyright: ignore[reportArgumentType]
            report = loop.run_until_complete(rig.verify())
            assert report.ok, report.violations[:10]
            assert report.jobs > 100
            assert SITUATIONS - world.seen.keys() == set()
        finally:
            loop.run_until_complete(stack.aclose())


SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
