"""artifact: the output of a queue job (decision D15). Only its job's completion finalizes it."""

from trellis.lifecycles.lifecycle import Lifecycle, Role, Trigger, arrow, ended, waiting

STAGED_S = 7 * 24 * 3600.0
"""How long a staged artifact waits for its job: longer than any job with its retries and its operator window."""

ARTIFACT = Lifecycle(
    name="artifact",
    code=8,
    title="What a queue job leaves behind: staged, then finalized together with its job",
    swept_by=Role.ORCHESTRATOR,
    states=(
        waiting("staged", 0, timer_s=STAGED_S),
        waiting("finalized", 1),
        ended("discarded", 2),
        ended("removed", 2),
    ),
    transitions=(
        arrow(None, "staged", Trigger.SUBMIT, Role.NLM_BACKEND, "artifact.staged", "POST /artifacts"),
        arrow(
            "staged",
            "finalized",
            Trigger.FINALIZE,
            Role.ORCHESTRATOR,
            "artifact.finalized",
            "its job completes, in the same transaction",
        ),
        arrow(
            "staged",
            "discarded",
            "discard",
            frozenset({Role.NLM_BACKEND, Role.ORCHESTRATOR, Role.CONTROL_PLANE}),
            "artifact.discarded",
            "a newer epoch took over, or an operator gives it up",
        ),
        arrow("staged", "discarded", Trigger.DUE, Role.ORCHESTRATOR, "artifact.discarded", "its job never named it"),
        arrow("finalized", "removed", "clean_up", Role.CONTROL_PLANE, "artifact.removed", "cleanup by an operator"),
    ),
)
