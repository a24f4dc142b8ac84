"""`verify`: replays every job's history through its lifecycle and compares it with the job's current row.

It checks the following, without trusting the code that wrote the ledger:

- Each history replays: versions 1, 2, 3 … without a gap, each step declared for its role, with its event type; progress
  (generation, attempt, rank) never decreases; nothing follows an end but what the lifecycle declares.
- The row agrees with the history: state, version, generation, attempt, correlation id, and a place that fits the state.
- The epoch never falls from event to event and rises wherever a lease is granted or revoked. A held job has a holder, a
  lease and an epoch.
- Every dead letter is complete and belongs to an event. A state that requires a dead letter has exactly one.
- No concurrency key is held beyond its stored limit, nor beyond a limit the caller names.
- A job that completed with an artifact has exactly one finalized artifact; a job that has not completed has none.

Memory is bounded: one history at a time, the first VIOLATIONS_MAX findings, and a counter per key that is held now.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from trellis.engine.jobs import JobId
from trellis.engine.records import (
    DeadLetter,
    Event,
    Job,
    JobHistory,
    JobPlace,
    KeyOverLimit,
    UnpairedArtifact,
    event_id,
)
from trellis.lifecycles import LIFECYCLES
from trellis.lifecycles.events import Cause
from trellis.lifecycles.lifecycle import Lifecycle, Phase, State
from trellis.lifecycles.replay import RecordedStep, Replayed, replay

VIOLATIONS_MAX = 1_000
BATCH_DEFAULT = 500
PROGRESS_EVERY = 1_000

WAITING_PLACES = frozenset({JobPlace.READY, JobPlace.SCHEDULED, JobPlace.BLOCKED})


class VerifyRule(StrEnum):
    """The kind of rule that a violation breaks."""

    HISTORY = "history"
    """The events do not replay through the lifecycle."""
    ROW = "row"
    """The row disagrees with its events."""
    PLACE = "place"
    """The job's place does not fit its state, or the job is in two places."""
    LEASE = "lease"
    """A held job lacks holder, lease or epoch, or a job that is not held has a lease."""
    EPOCH = "epoch"
    """The epoch fell, or did not rise when a lease was granted or revoked."""
    DEAD_LETTER = "dead_letter"
    """A dead letter is missing, duplicated, incomplete or belongs to no event."""
    KEY_LIMIT = "key_limit"
    """More jobs of a concurrency key are held than its limit."""
    ARTIFACT = "artifact"
    """A job completed without its artifact, or an artifact was finalized without its job's completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyViolation:
    """One broken rule. `version` is the event where it shows, if it shows at one."""

    rule: VerifyRule
    job_id: JobId | None
    detail: str
    version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What `verify` read and found. `found` also counts violations that did not fit into `violations`."""

    jobs: int
    events: int
    found: int
    violations: tuple[VerifyViolation, ...]

    @property
    def ok(self) -> bool:
        """Whether no violation was found."""
        return self.found == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyProgress:
    jobs: int
    events: int
    found: int


class Histories(Protocol):
    """The part of a ledger that `verify` reads."""

    def histories(self, *, batch: int = 500) -> AsyncIterator[JobHistory]:
        """Every job with all its events."""
        ...

    async def keys_over(self) -> list[KeyOverLimit]:
        """Concurrency keys held beyond their stored limit, as of one moment."""
        ...

    async def unpaired(self) -> list[UnpairedArtifact]:
        """Jobs whose completion and finalized artifacts do not match, as of one moment."""
        ...


async def verify(
    ledger: Histories,
    *,
    key_limits: Mapping[str, int] | None = None,
    on_progress: Callable[[VerifyProgress], None] | None = None,
    batch: int = BATCH_DEFAULT,
) -> VerifyReport:
    """Read every history and report each broken rule.

    Stored limits of concurrency keys are checked as of one instant. `key_limits` names further limits. Those are
    reliable only on a ledger at rest, because jobs are read one after the other.
    """
    limits = key_limits or {}
    held: Counter[str] = Counter()
    kept: list[VerifyViolation] = []
    jobs = events = violations_total = 0
    previous: JobId | None = None
    async for history in ledger.histories(batch=batch):
        violations = list(_violations(history))
        if history.job.job_id == previous:
            violations.append(
                _violation(VerifyRule.PLACE, history.job, "the job was listed twice: it is in two places")
            )
        previous = history.job.job_id
        jobs += 1
        events += len(history.events)
        violations_total += len(violations)
        kept += violations[: VIOLATIONS_MAX - len(kept)]
        if history.job.concurrency_key in limits and history.job.place is JobPlace.LEASED:
            held[str(history.job.concurrency_key)] += 1
        if on_progress is not None and jobs % PROGRESS_EVERY == 0:
            on_progress(VerifyProgress(jobs=jobs, events=events, found=violations_total))
    stored = await ledger.keys_over()
    over = [*map(_key_over_limit, stored), *_keys_over(held, limits), *map(_unpaired_artifact, await ledger.unpaired())]
    return VerifyReport(jobs=jobs, events=events, found=violations_total + len(over), violations=(*kept, *over))


def check_history(history: JobHistory) -> list[VerifyViolation]:
    """The violations of one job, judged by its own rows alone."""
    return list(_violations(history))


def _violations(history: JobHistory) -> Iterator[VerifyViolation]:
    job = history.job
    lifecycle = LIFECYCLES.get(job.lifecycle)
    if lifecycle is None:
        yield _violation(VerifyRule.ROW, job, f"there is no lifecycle {job.lifecycle}")
        return
    yield from _history(lifecycle, job, history.events)
    yield from _event_fields(job, history.events)
    yield from _epochs(lifecycle, job, history.events)
    state = lifecycle.by_name.get(job.state)
    if state is None:
        yield _violation(VerifyRule.ROW, job, f"{job.lifecycle} has no state {job.state}")
        return
    yield from _check_place(job, state)
    yield from _lease(job)
    yield from _dead_letters(lifecycle, history, state)


def _history(lifecycle: Lifecycle, job: Job, events: tuple[Event, ...]) -> Iterator[VerifyViolation]:
    outcome = replay(lifecycle, [recorded_step(event) for event in events])
    if not isinstance(outcome, Replayed):
        yield _violation(VerifyRule.HISTORY, job, f"{outcome.rule}: {outcome.detail}", version=outcome.version)
        return
    if job.version != len(events):
        yield _violation(VerifyRule.ROW, job, f"the row has version {job.version} and there are {len(events)} events")
    stored = (outcome.state, outcome.generation, outcome.attempt)
    written = (job.state, job.generation, job.attempt)
    if stored != written:
        yield _violation(VerifyRule.ROW, job, f"the events end at {stored} and the row says {written}")


def recorded_step(event: Event) -> RecordedStep:
    """The fields of an event that replay needs."""
    return RecordedStep(
        version=event.version,
        source=event.source,
        target=event.target,
        role=event.role,
        event=event.type,
        generation=event.generation,
        attempt=event.attempt,
    )


def _event_fields(job: Job, events: tuple[Event, ...]) -> Iterator[VerifyViolation]:
    for event in events:
        expected = (event_id(job.job_id, event.version), job.job_id, job.lifecycle, job.correlation_id)
        fields = (event.id, event.job_id, event.lifecycle, event.correlation_id)
        if fields != expected:
            yield _violation(
                VerifyRule.ROW, job, f"the event names {fields} instead of {expected}", version=event.version
            )


def _epochs(lifecycle: Lifecycle, job: Job, events: tuple[Event, ...]) -> Iterator[VerifyViolation]:
    highest = 0
    for event in events:
        if event.epoch < highest:
            yield _violation(
                VerifyRule.EPOCH, job, f"the epoch fell from {highest} to {event.epoch}", version=event.version
            )
        elif event.epoch == highest and _changes_holder(lifecycle, event):
            detail = f"the epoch stayed {highest} from {event.source} to {event.target}"
            yield _violation(VerifyRule.EPOCH, job, detail, version=event.version)
        highest = max(highest, event.epoch)
    if job.epoch < highest:
        yield _violation(VerifyRule.EPOCH, job, f"the row has epoch {job.epoch} and an event had {highest}")


def _changes_holder(lifecycle: Lifecycle, event: Event) -> bool:
    """Whether this step grants or revokes a lease. The epoch must rise with it (D2)."""
    source, target = lifecycle.by_name.get(event.source or ""), lifecycle.by_name.get(event.target)
    if source is None or target is None:
        return False
    if source.phase is not Phase.HELD:
        return target.phase is Phase.HELD
    if event.cause == Cause.CANCEL_LET_GO:
        return False  # older SQLite ledgers recorded this step without raising the epoch
    made_by = [
        t
        for t in lifecycle.transitions
        if (t.source, t.target, t.event) == (event.source, event.target, event.type) and event.role in t.actors
    ]
    return bool(made_by) and not any(t.fenced for t in made_by)


def _check_place(job: Job, state: State) -> Iterator[VerifyViolation]:
    if job.place not in _places(state):
        yield _violation(VerifyRule.PLACE, job, f"a job in {job.state} cannot be {job.place}")
    if job.place is JobPlace.BLOCKED and job.concurrency_key is None:
        yield _violation(VerifyRule.PLACE, job, "the job is parked and has no concurrency key")
    if job.place is JobPlace.SCHEDULED and state.claimable and job.due_at is None:
        yield _violation(VerifyRule.PLACE, job, "the job may be claimed and rests without a time to end it")


def _places(state: State) -> frozenset[JobPlace]:
    if state.phase is Phase.ENDED:
        return frozenset({JobPlace.ENDED})
    if state.phase is Phase.HELD:
        taken_over = {JobPlace.READY, JobPlace.BLOCKED} if state.claimable else set[JobPlace]()
        return frozenset({JobPlace.LEASED, *taken_over})
    return WAITING_PLACES if state.claimable else frozenset({JobPlace.SCHEDULED})


def _lease(job: Job) -> Iterator[VerifyViolation]:
    if job.place is not JobPlace.LEASED:
        if job.lease_expires_at is not None:
            yield _violation(
                VerifyRule.LEASE, job, f"nobody holds the job and its lease runs until {job.lease_expires_at}"
            )
        return
    missing = [
        name
        for name, there in (
            ("holder", job.owner),
            ("lease", job.lease_expires_at),
            ("epoch", job.epoch),
        )
        if not there
    ]
    if missing:
        yield _violation(VerifyRule.LEASE, job, f"the job is held without {', '.join(missing)}")


def _dead_letters(lifecycle: Lifecycle, history: JobHistory, state: State) -> Iterator[VerifyViolation]:
    job = history.job
    by_version = {event.version: event for event in history.events}
    seen = Counter(letter.version for letter in history.dead_letters)
    for letter in history.dead_letters:
        event = by_version.get(letter.version)
        if event is None or event.target != letter.state:
            yield _violation(
                VerifyRule.DEAD_LETTER, job, f"no event entered {letter.state} at this version", version=letter.version
            )
            continue
        for lack in _lacks(lifecycle, history, letter, event):
            yield _violation(VerifyRule.DEAD_LETTER, job, f"the dead letter {lack}", version=letter.version)
    for version, count in seen.items():
        if count > 1:
            yield _violation(VerifyRule.DEAD_LETTER, job, f"{count} dead letters for one event", version=version)
    if state.dead_letter and job.version not in seen:
        yield _violation(
            VerifyRule.DEAD_LETTER, job, f"the job is {job.state} without a dead letter", version=job.version
        )


def _lacks(lifecycle: Lifecycle, history: JobHistory, letter: DeadLetter, event: Event) -> Iterator[str]:
    """What a dead letter lacks. The events of its generation show whether there was a lease."""
    if not letter.last_error.strip():
        yield "has no last_error"
    # Spared attempts do not count. How many an earlier generation spared is not stored, and older dead letters counted
    # them.
    job, begun = history.job, event.attempt + 1
    spared = job.spared if event.generation == job.generation else event.attempt
    if not max(1, begun - spared) <= letter.attempts <= begun:
        yield f"counts {letter.attempts} attempts and the event says {begun}"
    if letter.correlation_id != history.job.correlation_id:
        yield f"has correlation {letter.correlation_id!r}"
    if (letter.last_owner is None) != (letter.last_lease_expires_at is None):
        yield "has one of last_owner and last_lease_expires_at without the other"
    held_states = {state.name for state in lifecycle.states if state.phase is Phase.HELD}
    was_held = any(
        past.generation == event.generation and past.version < event.version and past.target in held_states
        for past in history.events
    )
    if was_held != (letter.last_owner is not None):
        yield "names no last owner" if was_held else "names a last owner and nobody ever held the job"


def _keys_over(held: Counter[str], limits: Mapping[str, int]) -> Iterator[VerifyViolation]:
    for key, count in held.items():
        if count > limits[key]:
            yield _key_over_limit(KeyOverLimit(key=key, held=count, limit=limits[key]))


def _key_over_limit(key: KeyOverLimit) -> VerifyViolation:
    detail = f"{key.held} jobs of key {key.key!r} are held and its limit is {key.limit}"
    return VerifyViolation(rule=VerifyRule.KEY_LIMIT, job_id=None, detail=detail)


def _unpaired_artifact(job: UnpairedArtifact) -> VerifyViolation:
    if not job.complete:
        detail = f"{job.artifacts} of its artifacts are finalized and the job has not completed"
    elif job.artifacts == 0:
        detail = "the job completed and none of its artifacts is finalized"
    else:
        detail = f"the job completed with {job.artifacts} finalized artifacts instead of one"
    return VerifyViolation(rule=VerifyRule.ARTIFACT, job_id=job.job_id, detail=detail)


def _violation(rule: VerifyRule, job: Job, detail: str, *, version: int | None = None) -> VerifyViolation:
    return VerifyViolation(rule=rule, job_id=job.job_id, detail=detail, version=version)
