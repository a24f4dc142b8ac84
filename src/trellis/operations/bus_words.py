"""What `explain` says of a job on a topic beside what it says of any: who has it, what it waits for, what the safety kernel decided."""

from collections.abc import Iterator, Sequence

from trellis.bus.documents import decision_of, dispatch_of, hold_of, report_of, worker_of
from trellis.engine.records import Event, Job, Place
from trellis.lifecycles.bus_job import BUS_JOB

HOLDS = {
    "human": "a person to approve it",
    "throttle": "a while, because the safety kernel throttles it",
    "order": "an earlier step of its workflow",
    "placement": "a worker that fits",
    "retry": "its next attempt",
    "tenant": "others of its tenant",
}


def why(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """Sentences about why it is where it is."""
    if job.lifecycle != BUS_JOB.name:
        return
    hold, decision = hold_of(job, events), decision_of(events)
    if hold is not None:
        reason = f": {hold.reason.rstrip('.')}" if hold.reason else ""
        yield f"It waits for {HOLDS.get(hold.kind, hold.kind)}{reason}."
    if decision is not None:
        reason = f", because {str(decision.get('reason')).rstrip('.')}" if decision.get("reason") else ""
        yield f"The safety kernel said {decision['decision']} by rule {decision['rule']!r}{reason}."
    yield from _who(job, events)
    if job.state == "SCHEDULED" and job.place is Place.READY:
        yield f"It goes out when a worker for topic {job.type!r} is on the bus and has room; `trellis workers` lists them."


def _who(job: Job, events: Sequence[Event]) -> Iterator[str]:
    sent, worker = dispatch_of(events), worker_of(job, events)
    if sent is None:
        return
    if job.place is Place.HELD:
        yield (
            f"Worker {worker} has it."
            if worker
            else "It was sent to whoever listens on its topic; nobody has begun it yet."
        )
        return
    report = report_of(job, events)
    if job.place is Place.ENDED and worker and report.get("execution_ms"):
        yield f"Worker {worker} took {report['execution_ms']} ms over it."


def you_can(job: Job, events: Sequence[Event]) -> Iterator[str]:
    """What a person can do about it, as a command and what it does."""
    if job.lifecycle != BUS_JOB.name:
        return
    hold = hold_of(job, events)
    if hold is not None and hold.kind == "human":
        yield f"trellis job approve {job.job_id}\tlet it go"
        yield f"trellis job deny {job.job_id} --note TEXT\trefuse it"
    if hold is not None and hold.kind == "placement":
        yield "trellis workers\tsee which workers are on the bus, and what they can do"
