"""What `explain` says of a job on a topic beside what it says of any: who has it, what it waits for, what the safety kernel decided."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trellis.bus.documents import context_pointer, decision_of, dispatch_of, hold_of, report_of, worker_of
from trellis.engine.records import Event, Job, JobPlace
from trellis.lifecycles.bus_job import BUS_JOB

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
REST_PHRASES = {
    "job_held": "waiting for a person to decide: the safety kernel is asked again",
    "job_deferred": "put off: it is looked at again",
}
"""What it does meanwhile, by its last event, before the words for when."""
RUN_AGAIN = frozenset({"FAILED", "TIMEOUT", "DENIED"})
"""Ends after which an operator may have it run again, as a new job."""


def why_sentences(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """Sentences about why it is where it is."""
    if job.lifecycle != BUS_JOB.name:
        return
    hold, decision = hold_of(job, events), decision_of(events)
    if hold is not None:
        reason = f": {hold.reason.rstrip('.')}" if hold.reason else ""
        yield f"It waits for {HOLD_PHRASES.get(hold.kind, hold.kind)}{reason}."
    if decision is not None:
        said = str(decision.get("reason") or "").rstrip(".")
        reason = f", because {said}" if said and said != f"rule {decision['rule']}" else ""
        yield f"The safety kernel said {decision['decision']} by rule {decision['rule']!r}{reason}."
    if (approved := approval_of(events)) is not None:
        yield f"{approved.actor} approved it{f': {approved.cause}' if approved.cause else ''}."
    yield from _who(job, events)
    if job.state == "SCHEDULED" and job.place is JobPlace.READY:
        yield f"It goes out when a worker for topic {job.type!r} is on the bus and has room; `trellis workers` lists them."


def unreached_phrase(job: Job, last: Event | None) -> str | None:
    """Where a ready job is that was sent and reached nobody, as the middle of a sentence."""
    hold = hold_of(job, [last]) if last is not None and job.lifecycle == BUS_JOB.name else None
    return f"ready, but {hold.reason}" if hold is not None and hold.kind == "listener" else None


def approval_of(events: Sequence[Event]) -> Event | None:
    """A person's approval of what the safety kernel held last; None when nobody gave it, or it was held again since."""
    last = next((event for event in reversed(events) if event.type in {"job_approved", "job_held"}), None)
    return last if last is not None and last.type == "job_approved" else None


def not_sent_phrase(job: Job, alive: Mapping[str, Mapping[str, Any]]) -> str:
    """What keeps a ready job most likely, before what keeps any, as the middle of a sentence; nothing for a job of another kind.

    `alive`: what living workers said about themselves, by their names.
    """
    if job.lifecycle != BUS_JOB.name or job.state != "SCHEDULED":
        return ""
    on_bus = {name: said for name, said in alive.items() if said.get("bus")}
    serving = [name for name, said in on_bus.items() if job.type in said.get("types", ())]
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
    """What a person can do about it, as a command and what it does."""
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
