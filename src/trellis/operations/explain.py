"""Explains why a job is in its state and what happens next, for every lifecycle."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, cast

from trellis.bus.documents import context_pointer, decision_of, dispatch_of, hold_of, report_of, worker_of
from trellis.engine.attempts import has_attempts
from trellis.engine.event_data import cause_of, data_of, last_traceback
from trellis.engine.jobs import JobId
from trellis.engine.records import DeadLetter, Event, Job, JobPlace, QueueDepth, WorkerRecord
from trellis.engine.text import counted, duration
from trellis.lifecycles import LIFECYCLES, LeaseLoss, Lifecycle, Phase, Progress, Role, State, Transition, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.run import RUN

# Jobs on a topic: which worker has the job, what it waits for, and what the safety kernel decided.

NAMES_MAX = 3
HOLD_PHRASES = {
    "human": "a person to approve it",
    "throttle": "a while, because the safety kernel throttles it",
    "kernel": "an answer of the safety kernel that can be used",
    "order": "an earlier step of its workflow",
    "placement": "a worker that fits",
    "retry": "its next attempt",
    "listener": "a worker that can be reached",
    "tenant": "others of its tenant",
}
BUS_REST_PHRASES = {
    "job_held": "waiting for a person to decide: the safety kernel is asked again",
    "job_deferred": "put off: it is looked at again",
}
"""What a scheduled job on a topic waits for, by its last event. The time is appended."""
RUN_AGAIN = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Final states from which an operator may run the job again, as a new job."""


def why_sentences(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """Yields sentences about why a job on a topic is in its state."""
    if job.lifecycle != BUS_JOB.name:
        return
    hold, decision = hold_of(job, events), decision_of(events)
    if hold is not None:
        reason = f": {hold.reason.rstrip('.')}" if hold.reason else ""
        yield f"It waits for {HOLD_PHRASES.get(hold.kind, hold.kind)}{reason}."
    if decision is not None:
        stated = str(decision.get("reason") or "").rstrip(".")
        reason = f", because {stated}" if stated and stated != f"rule {decision['rule']}" else ""
        yield f"The safety kernel said {decision['decision']} by rule {decision['rule']!r}{reason}."
    if (approved := approval_of(events)) is not None:
        yield f"{approved.actor} approved it{f': {approved.cause}' if approved.cause else ''}."
    yield from _who(job, events)
    if job.state == "SCHEDULED" and job.place is JobPlace.READY:
        yield f"It goes out when a worker for topic {job.type!r} is on the bus and has room; `trellis workers` lists them."


def unreached_phrase(job: Job, last: Event | None) -> str | None:
    """Describes a ready job that was sent but reached no worker, as the middle of a sentence."""
    hold = hold_of(job, [last]) if last is not None and job.lifecycle == BUS_JOB.name else None
    return f"ready, but {hold.reason}" if hold is not None and hold.kind == "listener" else None


def approval_of(events: Sequence[Event]) -> Event | None:
    """Returns a person's approval of the last hold by the safety kernel; None if not approved, or held again since."""
    last = next((event for event in reversed(events) if event.type in {"job_approved", "job_held"}), None)
    return last if last is not None and last.type == "job_approved" else None


def not_sent_phrase(job: Job, alive: Mapping[str, Mapping[str, Any]]) -> str:
    """Names the likely reasons why a ready job on a topic is not sent, as the middle of a sentence; else empty.

    `alive` is what living workers reported about themselves, by name.
    """
    if job.lifecycle != BUS_JOB.name or job.state != "SCHEDULED":
        return ""
    on_bus = {name: heartbeat for name, heartbeat in alive.items() if heartbeat.get("bus")}
    serving = [name for name, heartbeat in on_bus.items() if job.type in heartbeat.get("types", ())]
    if serving:
        more = " and others" if len(serving) > NAMES_MAX else ""
        workers = f"{', '.join(serving[:NAMES_MAX])}{more} may have no room"
    elif on_bus:
        workers = f"of {len(on_bus)} on the bus no worker says that it serves {job.type!r}"
    else:
        workers = "no worker has been heard on the bus lately"
    return f"{workers}, the safety kernel may not answer, "


def _who(job: Job, events: Sequence[Event]) -> Iterator[str]:
    sent, worker = dispatch_of(events), worker_of(job, events)
    if sent is None:
        return
    if job.place is JobPlace.LEASED:
        yield (
            f"Worker {worker} has it."
            if worker
            else "It was sent to whoever listens on its topic; nobody has begun it yet."
        )
        return
    report = report_of(job, events)
    if job.place is JobPlace.ENDED and worker and report.get("execution_ms"):
        yield f"Worker {worker} took {report['execution_ms']} ms over it."


def possible_actions(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """Yields what a person can do: a command, a tab, and what it does."""
    if job.lifecycle != BUS_JOB.name:
        return
    hold = hold_of(job, events)
    if hold is not None and hold.kind == "human":
        if context_pointer(job, events) is not None:
            yield f"trellis job context {job.job_id}\tsee what its worker would be given"
        yield f"trellis job approve {job.job_id}\tlet it go"
        yield f"trellis job deny {job.job_id} --note TEXT\trefuse it"
    if job.state in RUN_AGAIN:
        yield f"trellis job requeue {job.job_id}\trun it again, as a new job"
    if hold is not None and hold.kind in {"placement", "listener"}:
        yield "trellis workers\tsee which workers are on the bus, and what they can do"


# The explanation of a job, in sentences.
#
# Pure functions over the job's row, its events, its lifecycle's table, and what the ledger says about the type, the
# concurrency key and the workers. No state is hard-coded here, so a new lifecycle needs no change. The functions above
# add what is specific to jobs on a topic.

WORKER_SILENT_S = 30.0
"""A worker sends a heartbeat every 10 s. After three missed ones it counts as silent."""
SERVICE_SLOW_S = 5.0
"""A service of `trellis up` moves a job on at once. After this long, none of them runs, or all are busy."""


REASON_PHRASES = {
    "parse_error": "its payload could not be read",
    "validation_failed": "what was asked can never work",
    "dependency_unavailable": "something it needs was not there",
    "timeout": "its deadline passed",
    "exhausted_retries": "every attempt was spent",
    "policy_violation": "a policy forbids it",
    "infrastructure_failure": "its workers died, or the ledger could not keep what came of it",
    "compensation_failed": "it should have undone another job and could not",
}
PEOPLE = frozenset({Role.OWNER, Role.FRONTEND, Role.CONTROL_PLANE})
"""Roles in which people act. In all others, services act."""
REST_PHRASES = {"job_snoozed": "put off by its own handler: it may go on", **BUS_REST_PHRASES}
SUSPENDED = "job_suspended"
"""The event of a job whose handler waits for children, a signal or a time."""
NOT_OPERATOR_TRIGGERS = frozenset({Trigger.DUE, Trigger.EXHAUST, Trigger.DEADLINE, Trigger.CANCEL, Trigger.DEAD_LETTER})
"""Triggers that no operator has to cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSurroundings:
    """What the ledger knows about the surroundings of one job."""

    now: datetime
    queue: QueueDepth | None = None
    workers: tuple[WorkerRecord, ...] | None = ()
    """The worker processes; None if whoever asks may not know them."""
    key_holders: tuple[JobId, ...] = ()
    """The first jobs that hold the slots of this job's concurrency key."""
    key_limit: int | None = None
    """How many jobs of this job's concurrency key may be held at once; None if it is not known."""
    key_has_room: bool = False
    """Whether slots of this job's concurrency key are free. A blocked job then waits for the rate of its key."""
    key_name: str | None = None
    """The concurrency key as it was given, without what the ledger puts before it."""
    letter: DeadLetter | None = None
    bus_problem: str | None = None
    """Why the bus cannot be reached, for a job on a topic that has waited long."""
    open_children: tuple[Job, ...] = ()
    """The first children that have not ended, of a job that waits for children or for its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExplanation:
    """The explanation, in four short paragraphs."""

    where: tuple[str, ...]
    why: tuple[str, ...]
    next: tuple[str, ...]
    you_can: tuple[str, ...]
    """Each entry is a command, a tab, and what it does."""
    traceback: str | None = None
    """The Python traceback of the handler's last failure; None if no attempt failed."""


def explain(job: Job, events: tuple[Event, ...], around: JobSurroundings) -> JobExplanation:
    """Explains one job at one point in time."""
    lifecycle = LIFECYCLES[job.lifecycle]
    state = lifecycle.by_name[job.state]
    last = events[-1] if events else None
    return JobExplanation(
        where=tuple(_where(job, state, last, around)),
        why=(*_bus_down(around), *_why(job, state, last, around), *why_sentences(job, events)),
        next=tuple(_next(job, lifecycle, state, last, around)),
        you_can=(*possible_actions(job, events), *_you_can(job, lifecycle, state, last, around)),
        traceback=last_traceback(events),
    )


def waits_for(job: Job) -> str | None:
    """Returns who must act on a resting job: `a person`, or the role of a service; None if nothing is needed."""
    lifecycle = LIFECYCLES[job.lifecycle]
    onward = [t for t in lifecycle.transitions if t.source == job.state and t.trigger not in NOT_OPERATOR_TRIGGERS]
    becomes_ready = job.due_at is not None and lifecycle.by_name[job.state].claimable
    if not onward or becomes_ready or (job.due_at is None and lifecycle.is_settled(job.state)):
        return None
    actors = frozenset[Role]().union(*(t.actors for t in onward))
    if actors & PEOPLE:
        return "a person"
    return " or ".join(sorted(role.value for role in actors)) if job.due_at is None else None


def timer_phrase(job: Job, now: datetime) -> str | None:
    """Describes where a timer moves the job, as the end of a sentence; None if no timer does or a person may act."""
    if job.place is not JobPlace.SCHEDULED or job.due_at is None or waits_for(job) is not None:
        return None
    moved = _when_due(job)
    then = f"goes to {moved.target}" if moved else "goes on"
    return f"{then} by itself{_until(job.due_at, now)}"


def types_taken(worker: WorkerRecord, lifecycle: str) -> tuple[str, ...]:
    """Returns the types of which a worker takes jobs of this lifecycle.

    A worker on the bus takes jobs on topics only. A worker that claims from the ledger never takes those.
    """
    is_on_bus = bool(worker_info(worker).get("bus"))
    return served_types(worker) if is_on_bus == (lifecycle == BUS_JOB.name) else ()


def served_types(worker: WorkerRecord) -> tuple[str, ...]:
    """Returns the types that a worker reported: of jobs that it claims from the ledger, or topics on the bus."""
    return tuple(str(type_) for type_ in worker_info(worker).get("types", ()))


def worker_info(worker: WorkerRecord) -> dict[str, Any]:
    """Returns what a worker reported about itself."""
    info: Any = json.loads(worker.info) if worker.info else {}
    return cast("dict[str, Any]", info) if isinstance(info, dict) else {}


class WorkerPresence(StrEnum):
    """Whether a worker is available."""

    ALIVE = "alive"
    SILENT = "silent"
    """No heartbeat for too long: the worker is dead or cut off from the ledger."""
    DRAINED = "drained"
    """The worker ended on purpose."""


def worker_presence(worker: WorkerRecord, now: datetime) -> WorkerPresence:
    """Returns whether a worker is alive, silent or drained."""
    if worker_info(worker).get("drained"):
        return WorkerPresence.DRAINED
    silent_s = (now - worker.seen_at).total_seconds()
    return WorkerPresence.ALIVE if silent_s <= WORKER_SILENT_S else WorkerPresence.SILENT


def is_alive(worker: WorkerRecord, now: datetime) -> bool:
    """Whether a worker of jobs sent a heartbeat lately and has not drained. Orchestrators are no such workers."""
    return worker_presence(worker, now) is WorkerPresence.ALIVE and not worker_info(worker).get("drives")


def runs_alone(worker: WorkerRecord) -> str | None:
    """Returns the job that this worker runs alone, because a worker died while running it."""
    alone = worker_info(worker).get("alone")
    return None if alone is None else str(alone)


def event_note(event: Event) -> str:
    """Returns the error or reason in an event; empty if it has none."""
    data = data_of(event)
    error = data.get("error", {"message": data.get("error_message"), "code": data.get("error_code")})
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {"message": error}
    message, code = fields.get("message"), fields.get("code")
    return f"{code}: {message}" if code and message else str(message or cause_of(event) or "")


# --- state -----------------------------------------------------------------------------------------------------------


def _where(job: Job, state: State, last: Event | None, around: JobSurroundings) -> Iterator[str]:
    yield f"Job {job.job_id} ({job.type}) is {job.state}, {_place(job, last, around)}."
    if state.phase is not Phase.ENDED:
        times = "once" if job.generation == 1 else f"{job.generation} times"
        requeued = f", requeued {times}" if job.generation else ""
        attempt = f"This is attempt {job.attempts_spent + 1} of {job.attempts_allowed}{requeued}; it"
        yield f"{attempt if has_attempts(job.lifecycle) else 'It'} was submitted {_ago(job.created_at, around.now)}."
    if job.place is JobPlace.LEASED and job.lease_expires_at is not None:
        yield _lease(job, job.lease_expires_at, around.now)


def _place(job: Job, last: Event | None, around: JobSurroundings) -> str:
    """Describes where the job is and what it waits for, as the end of a sentence."""
    match job.place:
        case JobPlace.READY:
            return unreached_phrase(job, last) or _readiness(job, around)
        case JobPlace.SCHEDULED:
            return _rest(job, last, around.now)
        case JobPlace.BLOCKED:
            key = around.key_name or job.concurrency_key or ""
            rate = key_rate_phrase(around.queue, key) if around.key_has_room else None
            return f"blocked by its concurrency key {key!r}" if rate is None else f"waiting for {rate}"
        case JobPlace.LEASED:
            return f"held by {job.owner}" + (", where it runs alone" if job.runs_alone else "")
        case JobPlace.ENDED:
            return f"ended {_ago(job.updated_at, around.now)}"


def _readiness(job: Job, around: JobSurroundings) -> str:
    if around.queue is not None and around.queue.paused:
        return "but its type is paused, so nobody is handed it"
    if (taker := _taker(job)) is not None:
        return f"ready: the {taker} may take it now"
    if not _serving(job, around):
        return "waiting for a worker: none that serves its type is alive"
    alone = " and will run it alone" if job.runs_alone else ""
    if around.queue is not None and (rate := rate_phrase(around.queue)) is not None:
        return f"ready: a worker may take it as soon as {rate} allows it{alone}"
    return f"ready: a worker may take it now{alone}"


def rate_phrase(queue: QueueDepth) -> str | None:
    """Names the rate limit of a type that is not paused; None without one."""
    return None if queue.paused or queue.rate_limit is None else f"the rate of its type ({queue.rate_limit:g} a second)"


def key_rate_phrase(queue: QueueDepth | None, key: str) -> str | None:
    """Names the rate limit of a concurrency key for jobs of this type; None without one."""
    if queue is None or queue.rate_per_key is None:
        return None
    return f"the rate of its key {key!r} ({queue.rate_per_key:g} a second)"


def _rest(job: Job, last: Event | None, now: datetime) -> str:
    """Describes what a resting job waits for."""
    until, moved = _until(job.due_at, now), _when_due(job)
    if last is not None and last.type == SUSPENDED:
        limit = f", at most {duration((job.due_at - now).total_seconds())} more" if job.due_at is not None else ""
        return f"its handler waits for {wait_phrase(last)}{limit}"
    if job.due_at is None:
        return _rest_for_good(job, last)
    if moved is not None:
        return _rest_until(job, moved, last, until)
    phrases = {
        **REST_PHRASES,
        "job_retry_scheduled": f"pausing after an error: attempt {job.attempts_spent + 1} may begin",
    }
    return phrases.get(last.type if last else "", "waiting for its time: it may begin") + until


def wait_phrase(suspended: Event) -> str:
    """Describes what the handler of a suspended job waits for, from the event that suspended it."""
    wait = _wait(suspended)
    children, signal = wait.get("children"), wait.get("signal")
    parts = [("1 child" if children == 1 else f"{children} children")] if children else []
    parts += [f"the signal {signal!r}"] if signal else []
    batch = wait.get("batch")
    parts += [f"the {'jobs' if batch is True else counted(batch, 'job')} of its batch"] if batch is not None else []
    return " or ".join(parts) or "its time"


def awaited_signal(last: Event) -> str | None:
    """The signal that a job waits for after this event; None if it waits for none."""
    signal = _wait(last).get("signal") if last.type == SUSPENDED else None
    return None if signal is None else str(signal)


def waits_for_jobs(job: Job, last: Event | None) -> bool:
    """Whether a job waits, after this event, for its children or for the jobs of its batch."""
    if last is None or last.type != SUSPENDED or job.place is not JobPlace.SCHEDULED:
        return False
    wait = _wait(last)
    return bool(wait.get("children") or wait.get("batch"))


def _wait(suspended: Event) -> dict[str, Any]:
    data: Any = json.loads(suspended.data) if suspended.data else None
    wait: Any = cast("dict[str, Any]", data).get("waits_for") if isinstance(data, dict) else None
    return cast("dict[str, Any]", wait) if isinstance(wait, dict) else {}


def _rest_for_good(job: Job, last: Event | None) -> str:
    """Describes a resting job without a timer."""
    who = waits_for(job)
    if who is not None:
        return f"waiting for {_with_article(who)} to move it on"
    cancelled = "cancelled, and " if last is not None and _is_cancel(job, last) else ""
    return f"{cancelled}at rest: nothing more happens by itself"


def _rest_until(job: Job, moved: Transition, last: Event | None, until: str) -> str:
    """Describes a resting job with a timer."""
    who = waits_for(job)
    if who is not None:
        return f"waiting for {_with_article(who)}: it goes to {moved.target}{until}"
    if last is not None and last.type == "job_retry_scheduled":
        begins = moved.opens is Progress.ATTEMPT
        then = f"attempt {job.attempts_spent + 2} begins" if begins else f"it goes to {moved.target}"
        return f"pausing after an error: {then} by itself{until}"
    return f"waiting for a timer to move it on{until}"


def _with_article(who: str) -> str:
    return who if who.startswith("a ") else f"the {who}"


def _when_due(job: Job) -> Transition | None:
    """Returns the transition that the timer of a resting job causes."""
    lifecycle = LIFECYCLES[job.lifecycle]
    due, exhaust = lifecycle.pull(job.state, Trigger.DUE), lifecycle.pull(job.state, Trigger.EXHAUST)
    left = job.attempt + 1 < job.max_attempts
    return due if due is not None and (exhaust is None or left) else exhaust


def _is_cancel(job: Job, last: Event) -> bool:
    """Whether the last transition was a cancel, and certainly nothing else.

    If two transitions look alike and lead to a waiting state, only a cancel sets no timer. In a final state they cannot
    be told apart.
    """
    declared = [
        t.trigger
        for t in LIFECYCLES[job.lifecycle].transitions
        if (t.source, t.target, t.event) == (last.source, last.target, last.type) and last.role in t.actors
    ]
    waits = job.place is not JobPlace.ENDED and job.due_at is None
    return Trigger.CANCEL in declared and (len(declared) == 1 or waits)


def _taker(job: Job) -> str | None:
    """Returns the role of `trellis up` that claims the job; None if workers claim it."""
    claim = LIFECYCLES[job.lifecycle].pull(job.state, Trigger.CLAIM)
    return None if claim is None or Role.WORKER in claim.actors else _actors(claim)


def _serving(job: Job, around: JobSurroundings, lifecycle: str | None = None) -> list[WorkerRecord]:
    """Returns the living workers that take such a job, or that would if it had this lifecycle."""
    alive = [worker for worker in around.workers or () if is_alive(worker, around.now)]
    return [worker for worker in alive if job.type in types_taken(worker, lifecycle or job.lifecycle)]


def _names(workers: Sequence[WorkerRecord]) -> str:
    more = " and others" if len(workers) > NAMES_MAX else ""
    return ", ".join(worker.name for worker in workers[:NAMES_MAX]) + more


def _lease(job: Job, until: datetime, now: datetime) -> str:
    left = (until - now).total_seconds()
    if left > 0:
        return f"Its lease (epoch {job.epoch}) holds for {duration(left)} more; each heartbeat extends it."
    return f"Its lease (epoch {job.epoch}) ended {duration(left)} ago: its holder is silent."


# --- why -------------------------------------------------------------------------------------------------------------


def _why(job: Job, state: State, last: Event | None, around: JobSurroundings) -> Iterator[str]:
    if last is not None:
        yield _last_step(last, around.now)
        if _is_cancel(job, last):
            yield f"It was cancelled by {last.actor} ({last.role.value}): {_reason(last)}."
    if around.letter is not None:
        yield from _dead_letter(around.letter, note="" if last is None else event_note(last))
    if job.place is JobPlace.READY:
        yield from _why_not_taken(job, around)
    if job.place is JobPlace.BLOCKED:
        yield _key_taken(around, around.key_name or job.concurrency_key or "")
    if job.place is JobPlace.SCHEDULED:
        yield from _why_not_moved(job, last, around.now)
        yield from _open_children(around.open_children)
    if job.cancel_requested:
        yield f"{_cancel_request(job, around.now)}: its holder learns that with the next heartbeat."
    elif job.cancel_asked_by is not None:
        yield f"{_cancel_request(job, around.now)}: it ended before its handler noticed."
    if job.deaths and state.phase is not Phase.ENDED:
        alone = ", so it runs alone: its worker does nothing else meanwhile" if job.runs_alone else ""
        yield f"{counted(job.deaths, 'worker')} died while running it{alone}."


def _key_taken(around: JobSurroundings, key: str) -> str:
    """Says how many jobs of a concurrency key may be held at once, and which hold its slots."""
    if around.key_has_room and around.queue is not None and around.queue.rate_per_key is not None:
        each = f"{around.queue.rate_per_key:g} a second"
        return f"Jobs of this type with key {key!r} are handed out {each}; priority, then age, decides who is first."
    if around.key_limit == 0:
        return f"The limit of key {key!r} is 0: none of its jobs is handed out until an operator raises it."
    *first, last = around.key_holders or ("another job",)
    holders = f"{', '.join(first)} and {last} hold" if first else f"{last} holds"
    if around.key_limit is None:
        return f"All slots of key {key!r} are taken: {holders} {'them' if first else 'one'}."
    slots = "the slot" if around.key_limit == 1 else "slots"
    return f"At most {counted(around.key_limit, 'job')} with key {key!r} may be held at once, and {holders} {slots}."


def _cancel_request(job: Job, now: datetime) -> str:
    """Says who asked the job to stop, when and why, as the beginning of a sentence."""
    why = f" ({job.cancel_cause.rstrip('.')})" if job.cancel_cause else ""
    when = f", {_ago(job.cancel_asked_at, now)}" if job.cancel_asked_at else ""
    return f"{job.cancel_asked_by or 'Somebody'} asked it to stop{when}{why}"


def _last_step(event: Event, now: datetime) -> str:
    arrow = f"{event.source} → {event.target}" if event.source else f"submitted as {event.target}"
    note = event_note(event).rstrip(".")
    by = f"by {event.actor} ({event.role.value})"
    return f"Last step, {_ago(event.ts, now)}: {event.type}, {arrow}, {by}" + (f": {note}" if note else "") + "."


def _reason(event: Event) -> str:
    """Returns the reason given for a transition."""
    return str(data_of(event).get("reason") or event.cause or "no reason was given").rstrip(".")


def _why_not_moved(job: Job, last: Event | None, now: datetime) -> Iterator[str]:
    """Explains why a suspended job, or one without a timer, is still in its state."""
    who = waits_for(job)
    if last is not None and last.type == SUSPENDED:
        yield "It holds no slot and no lease. Its handler begins again from its journal when that has happened."
    elif job.due_at is not None:
        return
    elif who is None:
        yield "No timer moves it, and nobody has to."
    elif who == "a person":
        yield "No timer moves it: a person decides."
    else:
        yield f"The {who} of a `trellis up` moves it on within a moment."
        if (waited := waited_long(job, now)) is not None:
            yield f"None did for {waited}: no `trellis up` with role {who} runs on this ledger."


def _open_children(children: Sequence[Job]) -> Iterator[str]:
    """Names the first children that have not ended, with type and state."""
    named = [f"{child.job_id} ({child.type}, {child.state})" for child in children[:NAMES_MAX]]
    if named:
        more = " and others" if len(children) > NAMES_MAX else ""
        yield f"Of its children, {', '.join(named)}{more} {'has' if len(children) == 1 else 'have'} not ended."


def waited_long(job: Job, now: datetime) -> str | None:
    """Returns how long a job has been in its state, if longer than a running service would take."""
    waited_s = (now - job.updated_at).total_seconds()
    return duration(waited_s) if waited_s > SERVICE_SLOW_S else None


def _bus_down(around: JobSurroundings) -> Iterator[str]:
    if around.bus_problem is not None:
        yield f"{around.bus_problem.rstrip('.')}."
        yield "Start that server, or correct TRELLIS_BUS: until then jobs on topics wait, and none is lost."


def _dead_letter(letter: DeadLetter, note: str) -> Iterator[str]:
    meaning = REASON_PHRASES.get(letter.reason_code.value, letter.reason_code.value)
    yield (
        f"Dead letter: {letter.reason_code.value} ({meaning}), at stage {letter.stage.value},"
        f" after {counted(letter.attempts, 'attempt')}."
    )
    if letter.last_error != note:
        yield f"Last error: {letter.last_error}"


def _why_not_taken(job: Job, around: JobSurroundings) -> Iterator[str]:
    queue = around.queue
    if queue is not None and queue.paused:
        yield f"Type {job.type!r} is paused: nobody is handed its jobs."
        return
    if (taker := _taker(job)) is not None:
        yield f"The {taker} of a `trellis up` takes it when it has room."
        if around.bus_problem is None and (waited := waited_long(job, around.now)) is not None:
            alive = {
                worker.name: worker_info(worker) for worker in around.workers or () if is_alive(worker, around.now)
            }
            beside = not_sent_phrase(job, alive)
            yield f"None did for {waited}: {beside}no `trellis up` with role {taker} runs on this ledger, or all are busy."
        return
    yield from _who_serves(job, around)
    if queue is not None and queue.rate_limit is not None:
        yield f"At most {queue.rate_limit:g} jobs of this type are handed out a second."
    if queue is not None and queue.ready > 1:
        yield f"{queue.ready} jobs of this type are ready; priority, then age, decides who is first."


def _who_serves(job: Job, around: JobSurroundings) -> Iterator[str]:
    alive = _serving(job, around)
    if around.workers is None:
        yield f"A worker that serves {job.type!r} takes it when it has room."
    elif not alive:
        yield f"No worker that serves {job.type!r} has been seen in the last {WORKER_SILENT_S:.0f} s."
        if on_bus := _serving(job, around, BUS_JOB.name):
            serve = "serves" if len(on_bus) == 1 else "serve"
            yield f"{_names(on_bus)} {serve} it as a topic on the bus, and no job that was submitted without --topic."
    else:
        yield f"{_names(alive)} {'serves' if len(alive) == 1 else 'serve'} this type and will take it when there is room."
        for worker in alive:
            if alone := runs_alone(worker):
                yield f"{worker.name} takes nothing more until job {alone} has ended: it runs that one alone."


# --- what happens next -----------------------------------------------------------------------------------------------


def _next(job: Job, lifecycle: Lifecycle, state: State, last: Event | None, around: JobSurroundings) -> Iterator[str]:
    match job.place:
        case JobPlace.READY:
            yield from _when_claimed(lifecycle, state)
        case JobPlace.BLOCKED:
            waits_for_rate = around.key_has_room and around.queue is not None and around.queue.rate_per_key is not None
            when = "the rate of its key allows another claim" if waits_for_rate else "a slot of its key is free"
            yield f"When {when} the oldest blocked job becomes ready."
        case JobPlace.SCHEDULED:
            if last is not None and waits_for_jobs(job, last):
                yield from _when_they_end(lifecycle, state, last)
            yield from _when_rested(job, lifecycle, state, around.now)
        case JobPlace.LEASED:
            yield from _while_held(job, lifecycle, state, around.now)
        case JobPlace.ENDED:
            yield "Nothing more happens by itself."
    if job.deadline_at is not None and state.phase is not Phase.ENDED:
        deadline = lifecycle.pull(state.name, Trigger.DEADLINE)
        then = f"it goes to {deadline.target}" if deadline else "no further attempt is begun"
        yield f"At its deadline{_until(job.deadline_at, around.now)}, {then}."


def _when_claimed(lifecycle: Lifecycle, state: State) -> Iterator[str]:
    claim = lifecycle.pull(state.name, Trigger.CLAIM)
    if claim is None:
        yield "It keeps its state when it is claimed again."
        return
    start = lifecycle.pull(claim.target, Trigger.START)
    yield f"A claim makes it {claim.target}" + (f", its start {start.target}." if start else ".")


def _when_they_end(lifecycle: Lifecycle, state: State, suspended: Event) -> Iterator[str]:
    """Says how a job goes on that waits for its children or for the jobs of its batch."""
    resumed = lifecycle.pull(state.name, Trigger.DUE)
    if resumed is not None:
        signal = awaited_signal(suspended)
        ends = (
            "the jobs of its batch have ended"
            if "batch" in _wait(suspended)
            else "the children it waits for have ended"
        )
        comes = f", or the signal {signal!r} has come" if signal else ""
        yield f"When {ends}{comes}, it goes to {resumed.target} by itself, and a worker takes it."


def _when_rested(job: Job, lifecycle: Lifecycle, state: State, now: datetime) -> Iterator[str]:
    if job.due_at is not None:
        chosen = _when_due(job)
        if chosen and waits_for(job):
            window_s = (job.due_at - job.updated_at).total_seconds()
            yield f"A person is given {duration(window_s)} in all to look at it."
        then = f"the sweep moves it to {chosen.target}{_timer_reason(job, chosen)}" if chosen else "it becomes ready"
        yield f"When its time comes{_until(job.due_at, now)}, {then}."
        if not chosen:
            return
    onward = [
        t for t in lifecycle.transitions if t.source == state.name and t.trigger not in {Trigger.DUE, Trigger.EXHAUST}
    ]
    for transition in onward:
        yield f"{transition.trigger} by {_actors(transition)} moves it to {transition.target} ({transition.when})."


def _timer_reason(job: Job, moved: Transition) -> str:
    """Says why a timer moves the job there. Attempts are counted from 1, as everywhere in an explanation."""
    if moved.opens is Progress.ATTEMPT:
        return f" for attempt {job.attempts_spent + 2}"
    if moved.trigger == Trigger.EXHAUST:
        return " (its attempts are used up, its error is permanent, or its deadline has passed)"
    return f" ({moved.when})"


def _while_held(job: Job, lifecycle: Lifecycle, state: State, now: datetime) -> Iterator[str]:
    onward = [t for t in lifecycle.transitions if t.source == state.name and t.fenced and t.trigger != state.on_error]
    done = next((t for t in onward if lifecycle.by_name[t.target].success), None) or (onward[0] if onward else None)
    if done is not None:
        yield f"When its holder is done it goes to {done.target}."
    left = job.attempt + 1 < job.max_attempts
    cancel = lifecycle.pull(state.name, Trigger.CANCEL)
    if job.cancel_requested and cancel is not None:
        yield f"It is not retried: an error, or the death of its holder, makes it {cancel.target}."
        yield from _after_cancel_request(job, cancel.target, now)
        return
    error = lifecycle.pull(state.name, state.on_error) if state.on_error else None
    if error is not None and error.trigger == Trigger.FAIL:
        yield f"An error that its holder does not retry makes it {error.target}."
    elif error is not None and left:
        yield f"A retryable error sends it to {error.target} for attempt {job.attempts_spent + 2}."
    elif error is not None:
        yield "This is its last attempt: an error ends it."
    yield _if_lost(job, lifecycle, state, left=left, now=now)


def _after_cancel_request(job: Job, target: str, now: datetime) -> Iterator[str]:
    if job.lifecycle == LEASED_JOB.name:
        yield f"If its handler reads `ctx.cancelled` and returns, it is {target}; a handler that never reads it goes on."
        yield "If that one returns before the grace period is over, the job ends as the handler ends it."
    else:
        yield f"If its holder stops, it is {target}."
    yield (
        f"When the grace period is over{_until(job.cancel_due_at, now)}, the sweep makes it {target}; whatever its holder"
        " does after that is refused."
    )


def _if_lost(job: Job, lifecycle: Lifecycle, state: State, *, left: bool, now: datetime) -> str:
    over = job.lease_expires_at is not None and job.lease_expires_at <= now
    when = (
        "The next sweep finds its lease over"
        if over
        else "If its holder falls silent past the lease, the sweep takes it back"
    )
    if state.lease_loss is LeaseLoss.STAY:
        return f"{when}: it stays {state.name} and may be claimed again."
    lost = lifecycle.pull(state.name, Trigger.EXPIRE if left else Trigger.EXHAUST) or lifecycle.pull(
        state.name, Trigger.EXPIRE
    )
    assert lost is not None, "a lifecycle declares expire for every state whose lease can be lost"
    return f"{when}: it goes to {lost.target}" + (f" for attempt {job.attempts_spent + 2}." if left else ".")


# --- what a person can do --------------------------------------------------------------------------------------------


def _changes(job: Job, lifecycle: Lifecycle, state: State) -> Iterator[str]:
    """Commands that change the job, as far as its state allows them."""
    if lifecycle.pull(state.name, Trigger.CANCEL):
        yield _cancel_command(job)
    if lifecycle.pull(state.name, Trigger.REQUEUE):
        yield f"trellis job requeue {job.job_id}\trun it again with fresh attempts"
    if lifecycle.pull(state.name, Trigger.DISCARD) and lifecycle.pull(state.name, Trigger.REQUEUE):
        yield f"trellis job discard {job.job_id}\tgive it up: nobody needs it"
    if job.place is JobPlace.SCHEDULED and lifecycle.pull(state.name, Trigger.RUN_NOW):
        yield f"trellis job run-now {job.job_id}\tend its delay"


def _you_can(
    job: Job, lifecycle: Lifecycle, state: State, last: Event | None, around: JobSurroundings
) -> Iterator[str]:
    if last is not None and (artifact := _artifact(lifecycle, last)):
        yield f"trellis artifacts show {artifact}\tread its result"
    yield from _changes(job, lifecycle, state)
    if around.queue is not None and around.queue.paused:
        yield f"trellis queues resume {job.type}\thand out its type again"
    if waits_for_jobs(job, last):
        yield f"trellis jobs --parent {job.job_id}\tsee its children and how they stand"
    signal = None if last is None else awaited_signal(last)
    if signal and job.place is JobPlace.SCHEDULED:
        yield f"trellis job signal {job.job_id} {shlex.quote(signal)} --payload JSON\tsend what it waits for"
    if job.place is JobPlace.SCHEDULED and job.due_at is None and waits_for(job) not in {None, "a person"}:
        yield "trellis up\tstart what moves it, if nothing does"
    elif job.place is JobPlace.READY and _taker(job) is not None:
        yield "trellis up\tstart what takes it, if nothing does"
    elif job.place is JobPlace.READY and not _serving(job, around):
        yield "trellis worker MODULE:APP\tstart a worker that serves its type"
    yield f"trellis events {job.job_id}\tsee every step"


def _cancel_command(job: Job) -> str:
    command = f"trellis {'runs' if job.lifecycle == RUN.name else 'job'} cancel {job.job_id}"
    if job.cancel_requested:
        return f"{command} --hard\tend it now, without its holder; what that returns is refused"
    return f"{command}\tend it" + (" (--hard: at once)" if job.place is JobPlace.LEASED else "")


def _artifact(lifecycle: Lifecycle, last: Event) -> str | None:
    """Returns the artifact that the last transition finalized."""
    finalizes = any(t.finalizes and t.event == last.type and t.target == last.target for t in lifecycle.transitions)
    artifact_id = cast("dict[str, Any]", json.loads(last.data)).get("artifact_id") if finalizes and last.data else None
    return None if artifact_id is None else str(artifact_id)


def _actors(transition: Transition) -> str:
    return " or ".join(sorted(role.value for role in transition.actors))


def _until(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return ""
    left = (moment - now).total_seconds()
    return f" in {duration(left)}" if left > 0 else f", due {duration(left)} ago"


def _ago(moment: datetime, now: datetime) -> str:
    return f"{duration((now - moment).total_seconds())} ago"
