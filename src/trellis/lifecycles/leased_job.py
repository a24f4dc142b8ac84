"""leased-job: jobs run by distributed workers (source document 003, both halves)."""

from functools import partial

from trellis.lifecycles.lifecycle import Lifecycle, Progress, Role, Trigger, arrow, ended, held, waiting

SUBMITTERS = frozenset({Role.SUBMITTER, Role.GATEWAY, Role.ORCHESTRATOR, Role.CONTROL_PLANE, Role.WORKER})
CANCELLERS = frozenset({Role.SUBMITTER, Role.CONTROL_PLANE, Role.SWEEPER})
CANCEL = "policy or user action; a soft cancel whose grace is over"
EXPIRE = "lease over or worker orphaned, attempts left"
EXHAUST = "lease lost, attempts spent or the payload kills workers"
SUSPENDED_STATE = "suspended"
"""The state of a job whose handler waits without a holder."""
REJECT = "attempts spent, payload cannot be read or is refused"

_by_holder = partial(arrow, actors=Role.WORKER, fenced=True)
_back = partial(arrow, target="queued", opens=Progress.ATTEMPT, extension=True)
_requeue = partial(
    arrow,
    target="queued",
    trigger=Trigger.REQUEUE,
    actors=Role.CONTROL_PLANE,
    event="job_requeued",
    when="an operator requeues it",
    opens=Progress.GENERATION,
    extension=True,
)
_cancel = partial(
    arrow, target="cancelled", trigger=Trigger.CANCEL, actors=CANCELLERS, event="job_cancelled", when=CANCEL
)
_stop = partial(
    _by_holder, target="cancelled", trigger="stop", event="job_cancelled", when="the worker obeys a soft cancel"
)
_dead = partial(arrow, target="dead_lettered", event="job_dead_lettered")

LEASED_JOB = Lifecycle(
    name="leased-job",
    code=4,
    title="Work under a lease, done by distributed workers",
    swept_by=Role.SWEEPER,
    states=(
        waiting("queued", 0, claimable=True),
        held("assigned", 1, on_error=Trigger.RELEASE, runs_code=False),
        held("running", 2, on_error=Trigger.RETRY),
        ended("succeeded", 3, success=True),
        ended("failed", 3),
        ended("cancelled", 3),
        ended("dead_lettered", 3, dead_letter=True),
        waiting(SUSPENDED_STATE, 0),
        ended("discarded", 4),
    ),
    transitions=(
        arrow(None, "queued", Trigger.SUBMIT, SUBMITTERS, "job_queued", "accepted into the system"),
        arrow("queued", "assigned", Trigger.CLAIM, Role.WORKER, "job_claimed", "claim succeeds, lease acquired"),
        _by_holder("assigned", "running", Trigger.START, event="job_started", when="pre-execution checks ok"),
        _by_holder("running", "succeeded", Trigger.COMPLETE, event="job_succeeded", when="no errors"),
        _by_holder("running", "failed", Trigger.FAIL, event="job_failed", when="permanent, or after the final retry"),
        _back(
            "running",
            trigger=Trigger.RETRY,
            actors=Role.WORKER,
            event="job_retry_scheduled",
            when="retryable error, attempts left",
            fenced=True,
        ),
        _back(
            "running",
            trigger=Trigger.SNOOZE,
            actors=Role.WORKER,
            event="job_snoozed",
            when="the handler asks to be called later",
            fenced=True,
        ),
        *(
            _back(
                source,
                trigger=Trigger.RELEASE,
                actors=Role.WORKER,
                event="job_released",
                when="the worker drains and gives the job back",
                fenced=True,
            )
            for source in ("assigned", "running")
        ),
        *(
            _back(source, trigger=Trigger.EXPIRE, actors=Role.SWEEPER, event="job_lease_expired", when=EXPIRE)
            for source in ("assigned", "running")
        ),
        *(_cancel(source) for source in ("queued", "assigned", "running")),
        *(_stop(source) for source in ("assigned", "running")),
        *(
            _dead(source, trigger=Trigger.DEAD_LETTER, actors=Role.CONTROL_PLANE, when="hard policy violation")
            for source in ("queued", "assigned", "running")
        ),
        *(
            _dead(source, trigger=Trigger.DEADLINE, actors=Role.SWEEPER, when="deadline passed")
            for source in ("queued", "assigned", "running")
        ),
        *(
            _dead(source, trigger=Trigger.EXHAUST, actors=Role.SWEEPER, when=EXHAUST)
            for source in ("assigned", "running")
        ),
        *(
            _dead(source, trigger="reject", actors=Role.WORKER, when=REJECT, fenced=True)
            for source in ("assigned", "running")
        ),
        *(_requeue(source) for source in ("failed", "dead_lettered", "discarded")),
        *(
            arrow(
                source,
                "discarded",
                Trigger.DISCARD,
                Role.CONTROL_PLANE,
                "job_discarded",
                "an operator decides that nobody needs it",
                extension=True,
            )
            for source in ("failed", "dead_lettered")
        ),
        *(
            arrow("queued", "queued", trigger, Role.CONTROL_PLANE, event, when, extension=True)
            for trigger, event, when in (
                (Trigger.RUN_NOW, "job_expedited", "an operator ends its delay"),
                (Trigger.PRIORITIZE, "job_reprioritized", "an operator gives it another priority"),
            )
        ),
        _by_holder(
            "running",
            "suspended",
            Trigger.SUSPEND,
            event="job_suspended",
            when="the handler waits for children, a signal or a time",
            opens=Progress.ATTEMPT,
            extension=True,
        ),
        arrow(
            "queued",
            "suspended",
            Trigger.SUSPEND,
            SUBMITTERS,
            "job_suspended",
            "submitted with a batch of jobs, to start when they have ended",
            opens=Progress.ATTEMPT,
            extension=True,
        ),
        arrow(
            "suspended",
            "queued",
            Trigger.DUE,
            Role.SWEEPER,
            "job_resumed",
            "what it waits for has happened, or its time has come",
            extension=True,
        ),
        _cancel("suspended", extension=True),
        _dead(
            "suspended",
            trigger=Trigger.DEAD_LETTER,
            actors=Role.CONTROL_PLANE,
            when="hard policy violation",
            extension=True,
        ),
        _dead("suspended", trigger=Trigger.DEADLINE, actors=Role.SWEEPER, when="deadline passed", extension=True),
        arrow(
            "succeeded",
            "succeeded",
            Trigger.COMPENSATED,
            Role.WORKER,
            "job_compensated",
            "its compensation succeeded",
            extension=True,
        ),
    ),
)
