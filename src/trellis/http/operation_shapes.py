"""Documents about an instance at work: health, events, explanations, queues, workers, alerts, rights and schedules."""

from datetime import datetime
from typing import Any, Literal

import pydantic

from trellis.http.shapes import EventShape, JobDocument, Page


class Live(pydantic.BaseModel):
    """The process answers."""

    status: Literal["ok"]


class Health(pydantic.BaseModel):
    """`ok` when everything behind the gateway answers."""

    status: Literal["ok", "degraded"]
    checks: dict[str, str]
    version: str | None = pydantic.Field(None, description="The version of the program that answers.")


class BatchShape(pydantic.BaseModel):
    """A batch as it was submitted: the job that starts when all of its jobs have ended, and those jobs in order."""

    job_id: str = pydantic.Field(description="The job that completes the batch.")
    type: str
    jobs: list[str] = pydantic.Field(description="The ids of the jobs of the batch.")


class BatchSubmittedShape(BatchShape):
    """A batch as it was submitted; not `created`: an earlier request with the same key made it."""

    created: bool = True


class EventListed(EventShape):
    """One transition of a job, with the lifecycle of the job."""

    lifecycle: str


class EventPage(pydantic.BaseModel):
    """Events, oldest first. `position` is where the feed goes on; null for events that were looked up."""

    items: list[EventListed]
    position: str | None


class ChangedJob(pydantic.BaseModel):
    """What became of one job: it was `changed`, its holder was `requested` to stop, or it was `skipped` for a reason."""

    job_id: str
    outcome: str
    status: str
    reason: str


class JobsChanged(pydantic.BaseModel):
    """One batch of a change of many jobs, which was one transaction. `next_cursor` asks for the next batch; null at the end."""

    change: str
    changed: int
    requested: int
    """Held jobs whose holder was asked to stop."""
    skipped: int
    """Jobs that had changed meanwhile, or whose state does not allow the change."""
    items: list[ChangedJob]
    next_cursor: str | None


class ChangeExample(pydantic.BaseModel):
    """A job that a change would concern."""

    job_id: str
    lifecycle: str
    type: str
    status: str
    priority: str
    created_at: str


class JobsPreview(pydantic.BaseModel):
    """What a change of many jobs would concern: how many, or `more` than that, and the oldest of them."""

    change: str
    matched: int
    more: bool
    examples: list[ChangeExample]


class JobExplained(pydantic.BaseModel):
    """Why a job is where it is, in sentences. An entry of `you_can` is a command, a tab, and what the command does."""

    job_id: str
    where: list[str]
    why: list[str]
    next: list[str]
    you_can: list[str]
    traceback: str | None = pydantic.Field(
        None, description="The Python traceback of the handler's last failure; null if no attempt failed."
    )


class JobListed(JobDocument):
    """A job in a listing."""

    waits_for: str | None = pydantic.Field(
        None, description="What it waits for, in a few words; null if it is ready, held or has ended."
    )


class QueueShape(pydantic.BaseModel):
    """How many jobs of one type are in each place; `rate_limit` and `rate_per_key` are in claims per second."""

    model_config = pydantic.ConfigDict(from_attributes=True)

    type: str
    lifecycle: str
    ready: int
    scheduled: int = pydantic.Field(description="Jobs that wait for a time, a person or a role.")
    blocked: int = pydantic.Field(description="Jobs that wait for a slot or for the rate of their concurrency key.")
    held: int
    paused: bool
    oldest_ready_s: float | None
    rate_limit: float | None
    rate_per_key: float | None = pydantic.Field(None, description="How often jobs of one concurrency key are claimed.")


class QueuePaused(pydantic.BaseModel):
    """Whether the jobs of a type are handed out."""

    type: str
    paused: bool


class WorkerShape(pydantic.BaseModel):
    """A worker process as the ledger last saw it. `info` is what the worker reported about itself."""

    name: str
    seen_at: str
    silent_s: float
    state: Literal["alive", "silent", "drained"]
    held: int
    info: Any


class AlertShape(pydantic.BaseModel):
    """An alert: something that needs an operator. `subject` is empty if it is about the whole instance.

    `value` and `text` are as last observed; `action` is what to do first, `runbook` the command that prints
    the page with more.
    """

    id: str
    name: str
    subject: str
    value: float
    text: str
    state: Literal["open", "resolved"]
    raised_at: str
    last_seen_at: str
    resolved_at: str | None
    action: str
    runbook: str


class AlertPage(Page[AlertShape]):
    """Alerts, and whether anybody looks for them."""

    evaluated: bool = True
    """False if no process with the role `alerts` evaluates them now: then no alert means nothing.

    It is false three intervals (`alert_interval_s`) after the last round.
    """
    evaluated_at: str | None = None
    """When they were evaluated last; null if they never were."""


class RunRequestShape(pydantic.BaseModel):
    """What a run was started with. Start the same agent with the same parameters to do it again."""

    run_id: str
    agent_slug: str
    trigger: str
    params: dict[str, Any]


class RuleShape(pydantic.BaseModel):
    """One column of an authority matrix: `yes`, `own` or `no` for each role."""

    name: str
    action: str
    source: str
    grants: dict[str, str]


class ScheduleShape(pydantic.BaseModel):
    """When an agent runs by itself, or a job is submitted by itself. Exactly one of `agent`, `type` and `topic` is set.

    `last_run` is the last run of an agent's schedule, `last_job` the last job of another. `skipped` says why the last
    instant began none.
    """

    name: str
    agent: str | None = None
    type: str | None = None
    topic: str | None = None
    cron: str | None
    tz: str = "UTC"
    paused: bool = False
    owner: str | None = None
    registered_at: datetime | None = None
    next_at: datetime | None
    last_at: datetime | None
    last_run: str | None = None
    last_job: str | None = None
    skipped: str | None


class SloShape(pydantic.BaseModel):
    """One service level objective, and how it stands over its window.

    `value` must be above or below `target`, as `goal` says. `bad` samples spend the error budget. `error_budget_left` is
    the unspent part: 1 is all of it, below 0 is overspent. `partial` says that the window has more samples than these,
    which are the newest.
    """

    name: str
    title: str
    status: Literal["met", "missed", "no data"]
    value: float | None
    unit: Literal["ratio", "seconds"]
    goal: Literal["above", "below"]
    target: float
    window_s: float
    samples: int
    bad: int
    error_budget_left: float | None
    partial: bool
    counts: str


class ScheduleDetail(ScheduleShape):
    """A schedule of jobs with its payload and policies, and when its next instants fire."""

    payload: Any = None
    concurrency_key: str | None = None
    misfire: Literal["skip", "once", "all"]
    overlap: Literal["allow", "skip", "queue"]
    jitter_s: float
    next: list[datetime]


class ScheduleRemoved(pydantic.BaseModel):
    """The name of a schedule that was removed."""

    name: str


class ScheduleRun(pydantic.BaseModel):
    """The job that a schedule submitted now."""

    name: str
    job_id: str
