"""nlm-job: jobs inside the NLM backend (source document 000 §2)."""

from functools import partial
from itertools import pairwise

from trellis.lifecycles.lifecycle import LeaseLoss, Lifecycle, Role, Trigger, arrow, ended, held, waiting

STAGES = (
    ("FETCHING_CONTEXT", "nlm_context_fetching", "context_snapshot_url is loaded"),
    ("BUILDING_PROMPT", "nlm_prompt_building", "context loaded"),
    ("NLM_QUERY", "nlm_queried", "prompt built"),
    ("STRUCTURING", "nlm_structuring", "the model answered"),
    ("CALLBACK", "nlm_callback_sending", "answer structured"),
)
HELD = tuple(name for name, _, _ in STAGES)
OPEN = ("ACCEPTED", *HELD)

_by_backend = partial(arrow, actors=Role.NLM_BACKEND)
_error = partial(_by_backend, target="ERROR", event="nlm_error")

NLM_JOB = Lifecycle(
    name="nlm-job",
    code=3,
    title="One grounded answer or artifact made by the NLM backend",
    swept_by=Role.NLM_BACKEND,
    states=(
        waiting("ACCEPTED", 0, claimable=True),
        *(
            held(name, rank, lease_loss=LeaseLoss.STAY, on_error=Trigger.FAIL)
            for rank, name in enumerate(HELD, start=1)
        ),
        ended("DONE", 6, success=True),
        ended("ERROR", 6),
    ),
    transitions=(
        arrow(None, "ACCEPTED", Trigger.SUBMIT, Role.NLM_BACKEND, "nlm_accepted", "POST /jobs/process answered 202"),
        _by_backend("ACCEPTED", "FETCHING_CONTEXT", Trigger.CLAIM, event="nlm_context_fetching", when="async worker"),
        *(
            _by_backend(source, target, "next_stage", event=event, when=when, fenced=True)
            for (source, _, _), (target, event, when) in pairwise(STAGES)
        ),
        _by_backend("CALLBACK", "DONE", Trigger.COMPLETE, event="nlm_done", when="callback delivered", fenced=True),
        *(_error(source, trigger=Trigger.FAIL, when="any step may fail", fenced=True) for source in HELD),
        *(_error(source, trigger=Trigger.DEADLINE, when="deadline passed") for source in OPEN),
        *(_error(source, trigger=Trigger.CANCEL, when="cancelled, or a newer epoch took over") for source in OPEN),
    ),
)
