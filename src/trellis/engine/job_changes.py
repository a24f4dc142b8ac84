"""Changes of many waiting, held or dead jobs: cancel, discard, run now, move to another priority (decision 0041).

Every ledger has two verbs for them. `select_jobs` finds a page of the jobs that a filter names. `change_jobs` changes
the jobs of one page in one transaction. Invariants:

- Each change is one declared step of the job's lifecycle, with its event. A job that has another version than the page
  says was changed by somebody else: it is skipped, and its answer says so.
- A repeated call with the same request id has its effect once and gets the same answers.
- A page and a transaction are bounded, however many jobs the filter names.
- The administrative act of a change by filter is recorded in the transaction of the change, with what was counted.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from trellis.engine.admin_acts import JOBS_CHANGED, LEDGER_SUBJECT, NewAct
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import (
    Actor,
    CancelMode,
    CancelRequested,
    JobId,
    Moved,
    NotMoved,
    Priority,
    ReasonCode,
    RequestId,
    RequestKey,
)
from trellis.lifecycles import Role, Trigger
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB

CHANGED_MAX = 500
"""The most jobs that one transaction changes."""
FEW_MAX = 10_000
"""If no more jobs than this may be meant, every page of a selection reads their ids together, through indexes."""
WALKED_MAX = 2_000
"""Otherwise the most jobs that one page looks at, in the order of their ids. It may find none and still have a next page."""
SELECTED_BY_CHARS_MAX = 1_000
CHANGEABLE = (LEASED_JOB, QUEUE_JOB, BUS_JOB)
"""The lifecycles whose jobs are changed so. Runs, proposals and artifacts have commands of their own."""


class JobChange(StrEnum):
    """What an operator does to many jobs. The value is the trigger of the step."""

    CANCEL = Trigger.CANCEL
    """End jobs that have not ended. A held one is asked to stop."""
    DISCARD = Trigger.DISCARD
    """Give up failed and dead-lettered jobs: their dead letters are no longer listed, and retention may remove them."""
    RUN_NOW = Trigger.RUN_NOW
    """End the delay of jobs that wait for their time."""
    PRIORITIZE = Trigger.PRIORITIZE
    """Give waiting jobs another priority. Among jobs of that priority they come last."""


PARTICIPLES = MappingProxyType(
    {
        JobChange.CANCEL: "cancelled",
        JobChange.DISCARD: "discarded",
        JobChange.RUN_NOW: "made ready",
        JobChange.PRIORITIZE: "given another priority",
    }
)
"""What becomes of a changed job, for people: it is cancelled."""


class LifecycleState(NamedTuple):
    lifecycle: str
    state: str


def changeable_states(change: JobChange, role: Role | None = None) -> frozenset[LifecycleState]:
    """The states in which jobs can be changed, by this role or by any."""
    return frozenset(
        LifecycleState(lifecycle.name, t.source)
        for lifecycle in CHANGEABLE
        for t in lifecycle.transitions
        if t.trigger == change and t.source is not None and role in {None, *t.actors}
    )


class OwnedBy(NamedTuple):
    """Selects jobs by the recorded name of their submitter."""

    name: str
    party: str | None = None
    """Also all submitters of this group: names that begin so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSelection:
    """Selects the jobs to change. None matches any value."""

    states: frozenset[LifecycleState]
    type: str | None = None
    correlation_id: str | None = None
    concurrency_key: str | None = None
    parent_id: JobId | None = None
    reason_code: ReasonCode | None = None
    """Of the dead letter. Jobs without a stored letter have none."""
    priority: Priority | None = None
    submitted_before: datetime | None = None
    submitted_after: datetime | None = None
    delayed: bool = False
    """Only jobs that wait for their time."""
    other_priority_than: Priority | None = None
    not_asked_to_stop: bool = False
    """Only jobs whose holder was not asked to stop yet."""
    owned_by: OwnedBy | None = None
    """Only jobs that these submitted, and jobs that the reconciler made, whose owner the caller looks up."""


class SelectedJob(NamedTuple):
    job_id: JobId
    version: int
    """The version it had. The change is made only while it has this one."""
    lifecycle: str
    state: str
    type: str
    priority: Priority
    created_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectedPage:
    """Jobs of a selection, oldest first. `cursor` is for the next page; None at the end."""

    jobs: tuple[SelectedJob, ...]
    cursor: str | None


class JobToChange(NamedTuple):
    """A job to change; with a version only while it has that one."""

    job_id: JobId
    version: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeOrder:
    """One change of at most CHANGED_MAX jobs."""

    change: JobChange
    request_id: RequestId
    cause: str | None = None
    mode: CancelMode = CancelMode.SOFT
    """Of a cancel."""
    grace_s: float = 0.0
    """Of a soft cancel: how long a holder may go on."""
    priority: Priority | None = None
    """The new priority of a prioritize."""
    selected_by: str | None = None
    """The filter that selected the jobs, for the administrative act. None for jobs that were named: no act."""
    next_cursor: str | None = None
    """Where the selection goes on. It is part of the answer, so that a repeated request gets the same one."""
    key: RequestKey | None = None


ChangeAnswer = Moved | NotMoved | CancelRequested


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedJobs:
    """What became of the jobs of one change, in their order."""

    answers: tuple[ChangeAnswer, ...]
    next_cursor: str | None = None
    repeated: bool = False
    """An earlier request with the same key was answered so."""


def refusal_facts(answer: NotMoved, actor: Actor) -> dict[str, str]:
    """What an `InvalidTransition` says about a refused step."""
    about = {"job_id": answer.job_id, "source": answer.state, "target": answer.target}
    return {**about, "actor": actor.role.value, "reason": answer.reason}


def check_order(order: ChangeOrder, jobs: Sequence[JobToChange]) -> None:
    """Check a change before the ledger is asked. Raises OptionInvalid."""
    if not 1 <= len(jobs) <= CHANGED_MAX:
        expected = f"from 1 to {CHANGED_MAX} in one call"
        raise OptionInvalid(option="jobs", value=len(jobs), expected=expected)
    if (order.priority is None) is (order.change is JobChange.PRIORITIZE):
        raise OptionInvalid(option="priority", value=order.priority, expected="exactly a prioritize names a priority")


def counts(answers: Sequence[ChangeAnswer]) -> dict[str, int]:
    """How many jobs were changed, were asked to stop, and were skipped."""
    requested = sum(isinstance(answer, CancelRequested) for answer in answers)
    changed = sum(isinstance(answer, Moved) for answer in answers)
    return {"changed": changed, "requested": requested, "skipped": len(answers) - changed - requested}


def act_of(actor: Actor, order: ChangeOrder, jobs: Sequence[JobToChange], answers: Sequence[ChangeAnswer]) -> NewAct:
    """The administrative act of a change by filter. Repeating the request records it once."""
    named = f"{actor.role.value}\n{actor.name}\n{order.request_id}\n{jobs[0].job_id}"
    return NewAct(
        event=JOBS_CHANGED,
        subject=LEDGER_SUBJECT,
        target=order.change.value,
        cause=order.cause,
        facts={"selected_by": (order.selected_by or "")[:SELECTED_BY_CHARS_MAX], **counts(answers)},
        id=f"act-{hashlib.sha256(named.encode()).hexdigest()[:32]}",
    )


RULES_OF_CHANGES: Mapping[JobChange, str] = MappingProxyType(
    {
        JobChange.CANCEL: "jobs.cancel",
        JobChange.DISCARD: "jobs.discard",
        JobChange.RUN_NOW: "jobs.run-now",
        JobChange.PRIORITIZE: "jobs.prioritize",
    }
)
"""The rule of the authority matrices that each change needs."""


def answer_json(answer: ChangeAnswer) -> dict[str, Any]:
    """One answer as HTTP and commands report it."""
    if isinstance(answer, NotMoved):
        return {"job_id": answer.job_id, "outcome": "skipped", "status": answer.state, "reason": answer.reason}
    if isinstance(answer, CancelRequested):
        return {"job_id": answer.job_id, "outcome": "requested", "status": answer.state, "reason": ""}
    return {"job_id": answer.job_id, "outcome": "changed", "status": answer.target, "reason": ""}
