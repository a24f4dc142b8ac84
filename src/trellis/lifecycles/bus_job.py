"""bus-job: jobs sent over the bus in CAP (source document 004)."""

from functools import partial

from trellis.lifecycles.lifecycle import Lifecycle, Progress, Role, Trigger, arrow, ended, held, waiting

HELD = ("DISPATCHED", "RUNNING")
OPEN = ("PENDING", "SCHEDULED", *HELD)

_by_scheduler = partial(arrow, actors=Role.SCHEDULER)
_by_worker = partial(arrow, actors=Role.WORKER, fenced=True)
_by_reconciler = partial(arrow, actors=Role.RECONCILER)
_cancel = partial(
    arrow,
    target="CANCELLED",
    trigger=Trigger.CANCEL,
    actors=frozenset({Role.CONTROL_PLANE, Role.SUBMITTER, Role.RECONCILER}),
    event="job_cancelled",
    when="control plane or user cancels",
)

BUS_JOB = Lifecycle(
    name="bus-job",
    code=5,
    title="A job that travels over the bus to a pool of workers",
    swept_by=Role.RECONCILER,
    states=(
        waiting("PENDING", 0),
        waiting("SCHEDULED", 1, claimable=True),
        held("DISPATCHED", 2, on_error=Trigger.RETRY, runs_code=False),
        held("RUNNING", 3, on_error=Trigger.RETRY),
        ended("SUCCEEDED", 4, success=True),
        ended("FAILED", 4),
        ended("CANCELLED", 4),
        ended("DENIED", 4),
        ended("TIMEOUT", 4),
    ),
    transitions=(
        arrow(
            None,
            "PENDING",
            Trigger.SUBMIT,
            frozenset({Role.GATEWAY, Role.SUBMITTER, Role.RECONCILER}),
            "job_accepted",
            "gateway accepts the job",
        ),
        _by_scheduler("PENDING", "SCHEDULED", "validate", event="job_scheduled", when="scheduler validates"),
        _by_scheduler("SCHEDULED", "DISPATCHED", Trigger.CLAIM, event="job_dispatched", when="pool or subject picked"),
        _by_worker("DISPATCHED", "RUNNING", Trigger.START, event="job_started", when="worker starts"),
        _by_worker("RUNNING", "SUCCEEDED", Trigger.COMPLETE, event="job_succeeded", when="JobResult SUCCEEDED"),
        _by_worker("RUNNING", "FAILED", Trigger.FAIL, event="job_failed", when="JobResult FAILED"),
        arrow(
            "SCHEDULED",
            "DENIED",
            "deny",
            frozenset({Role.SCHEDULER, Role.OWNER, Role.CONTROL_PLANE}),
            "job_denied",
            "safety kernel rejects, or a person refuses",
        ),
        *(
            arrow("SCHEDULED", "SCHEDULED", trigger, actors, event, when, extension=True)
            for trigger, actors, event, when in (
                ("hold", frozenset({Role.SAFETY_KERNEL}), "job_held", "safety kernel requires a person"),
                ("defer", frozenset({Role.SCHEDULER}), "job_deferred", "throttled, not its turn, or nobody fits"),
                ("approve", frozenset({Role.OWNER, Role.CONTROL_PLANE}), "job_approved", "a person approves"),
            )
        ),
        *(
            arrow(
                source,
                "SCHEDULED",
                Trigger.RETRY,
                Role.SCHEDULER,
                "job_retry_scheduled",
                "retryable result, attempts left",
                opens=Progress.ATTEMPT,
                fenced=True,
                extension=True,
            )
            for source in HELD
        ),
        *(
            _by_reconciler(
                source,
                "SCHEDULED",
                Trigger.EXPIRE,
                event="job_lease_expired",
                when="not started or stale, attempts left",
                opens=Progress.ATTEMPT,
                extension=True,
            )
            for source in HELD
        ),
        *(
            _by_reconciler(
                source, "TIMEOUT", Trigger.EXHAUST, event="job_timed_out", when="not started or stale, none left"
            )
            for source in HELD
        ),
        *(
            _by_reconciler(
                source,
                "TIMEOUT",
                Trigger.DEADLINE,
                event="job_timed_out",
                when="deadline passed",
                extension=source not in HELD,
            )
            for source in OPEN
        ),
        arrow(
            "SUCCEEDED",
            "SUCCEEDED",
            Trigger.COMPENSATED,
            Role.WORKER,
            "job_compensated",
            "its compensation succeeded",
            extension=True,
        ),
        *(_cancel(source) for source in OPEN),
    ),
)
