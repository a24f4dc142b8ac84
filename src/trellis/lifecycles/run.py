"""run: one agent run (source document 002)."""

from functools import partial

from trellis.lifecycles.lifecycle import LeaseLoss, Lifecycle, Role, Trigger, arrow, ended, held, waiting

_by_orchestrator = partial(arrow, actors=Role.ORCHESTRATOR)

RUN = Lifecycle(
    name="run",
    code=1,
    title="One agent run, from request to reviewed proposals",
    swept_by=Role.ORCHESTRATOR,
    states=(
        waiting("requested", 0),
        waiting("queued", 1, claimable=True),
        held("running", 2, lease_loss=LeaseLoss.STAY, on_error=Trigger.FAIL),
        ended("completed", 3, success=True),
        ended("failed", 3),
    ),
    transitions=(
        arrow(
            None,
            "requested",
            Trigger.SUBMIT,
            frozenset({Role.GATEWAY, Role.ORCHESTRATOR}),
            "run.requested",
            "POST /agents/run, or a schedule or event the orchestration layer serves",
        ),
        _by_orchestrator("requested", "queued", "accept", event="run.queued", when="orchestration layer acknowledges"),
        _by_orchestrator("queued", "running", Trigger.CLAIM, event="run.started", when="concurrency slot free"),
        _by_orchestrator(
            "running", "running", "step", event="run.step.completed", when="a step is stored", fenced=True
        ),
        _by_orchestrator(
            "running", "completed", Trigger.COMPLETE, event="run.completed", when="last step stored", fenced=True
        ),
        _by_orchestrator(
            "running", "failed", Trigger.FAIL, event="run.failed", when="error after exhaustion of retries", fenced=True
        ),
        _by_orchestrator("running", "failed", Trigger.DEADLINE, event="run.failed", when="run timeout"),
        *(
            _by_orchestrator(
                source,
                "failed",
                Trigger.CANCEL,
                event="run.failed",
                when="cancelled; the error says CANCELLED",
                extension=source != "running",
            )
            for source in ("requested", "queued", "running")
        ),
    ),
)
