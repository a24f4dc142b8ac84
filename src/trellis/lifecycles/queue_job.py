"""queue-job: the job queue of source document 000 §1. The orchestration layer is its only writer."""

from functools import partial

from trellis.lifecycles.lifecycle import Lifecycle, Progress, Role, Trigger, arrow, ended, held, waiting

SUBMITTERS = frozenset({Role.GATEWAY, Role.ORCHESTRATOR})
STAGES = ("CONTEXT_ASSEMBLY", "NOTEBOOKLM_CALL", "ARTIFACT_WRITE")
ERRORS = {
    "CONTEXT_ASSEMBLY": "memory backend timeout, any other error",
    "NOTEBOOKLM_CALL": "429 / 503 from NLM, any other error",
    "ARTIFACT_WRITE": "write error, any other error",
}
DEADLINE = "deadline passed; the backoff then fails the job at once"

_by_orchestrator = partial(arrow, actors=Role.ORCHESTRATOR)
_requeue = partial(
    arrow,
    target="QUEUED",
    trigger=Trigger.REQUEUE,
    actors=Role.CONTROL_PLANE,
    event="job_requeued",
    when="manual requeue (operator)",
    opens=Progress.GENERATION,
)
_cancel = partial(
    arrow,
    target="FAILED",
    trigger=Trigger.CANCEL,
    actors=frozenset({Role.CONTROL_PLANE, Role.ORCHESTRATOR}),
    event="job_failed",
    when="cancelled; the error says CANCELLED",
    extension=True,
)

QUEUE_JOB = Lifecycle(
    name="queue-job",
    code=2,
    title="A job of the integration layer: context, NotebookLM call, artifact",
    swept_by=Role.ORCHESTRATOR,
    states=(
        waiting("PENDING", 0),
        waiting("QUEUED", 1, claimable=True),
        held("CONTEXT_ASSEMBLY", 2, on_error=Trigger.RETRY),
        held("NOTEBOOKLM_CALL", 3, on_error=Trigger.RETRY),
        held("ARTIFACT_WRITE", 4, on_error=Trigger.RETRY),
        ended("COMPLETE", 6, success=True),
        waiting("RETRY_BACKOFF", 5),
        waiting("FAILED", 6, timer_s=15 * 60.0),
        ended("DEAD", 7),
        ended("DISCARDED", 8),
    ),
    transitions=(
        arrow(None, "PENDING", Trigger.SUBMIT, SUBMITTERS, "job_accepted", "inbox entry or POST /jobs"),
        _by_orchestrator("PENDING", "QUEUED", "validate", event="job_queued", when="validation OK"),
        _by_orchestrator("QUEUED", "CONTEXT_ASSEMBLY", Trigger.CLAIM, event="job_claimed", when="worker pickup"),
        _by_orchestrator(
            "CONTEXT_ASSEMBLY",
            "NOTEBOOKLM_CALL",
            "snapshot_ready",
            event="job_nlm_called",
            when="snapshot ready",
            fenced=True,
        ),
        _by_orchestrator(
            "NOTEBOOKLM_CALL",
            "ARTIFACT_WRITE",
            "response_received",
            event="job_artifact_writing",
            when="NLM response OK",
            fenced=True,
        ),
        _by_orchestrator(
            "ARTIFACT_WRITE",
            "COMPLETE",
            Trigger.COMPLETE,
            event="job_succeeded",
            when="atomic commit OK",
            fenced=True,
            finalizes=True,
        ),
        *(
            _by_orchestrator(
                stage, "RETRY_BACKOFF", Trigger.RETRY, event="job_retry_scheduled", when=ERRORS[stage], fenced=True
            )
            for stage in STAGES
        ),
        *(
            _by_orchestrator(
                stage, "RETRY_BACKOFF", Trigger.EXPIRE, event="job_lease_expired", when="lease lost", extension=True
            )
            for stage in STAGES
        ),
        *(
            _by_orchestrator(
                stage, "RETRY_BACKOFF", Trigger.DEADLINE, event="job_lease_expired", when=DEADLINE, extension=True
            )
            for stage in STAGES
        ),
        _by_orchestrator(
            "RETRY_BACKOFF",
            "QUEUED",
            Trigger.DUE,
            event="job_queued",
            when="backoff elapsed; attempt < 3",
            opens=Progress.ATTEMPT,
        ),
        _by_orchestrator(
            "RETRY_BACKOFF",
            "FAILED",
            Trigger.EXHAUST,
            event="job_failed",
            when="attempt ≥ 3, permanent error or deadline passed",
        ),
        _by_orchestrator("FAILED", "DEAD", Trigger.DUE, event="job_dead_lettered", when="operator window over"),
        _requeue("FAILED"),
        _requeue("DEAD", extension=True),
        _requeue("DISCARDED", extension=True),
        *(
            arrow(
                source,
                "DISCARDED",
                Trigger.DISCARD,
                Role.CONTROL_PLANE,
                "job_discarded",
                "an operator decides that nobody needs it",
                extension=True,
            )
            for source in ("FAILED", "DEAD")
        ),
        *(_cancel(source) for source in ("PENDING", "QUEUED", *STAGES, "RETRY_BACKOFF")),
    ),
)
