"""proposal: a change an agent proposes and a person decides (source document 001, decision D22)."""

from functools import partial

from trellis.lifecycles.lifecycle import Lifecycle, Progress, Role, Trigger, arrow, ended, held, waiting

_by_owner = partial(arrow, actors=Role.OWNER)
_by_apply = partial(arrow, actors=Role.APPLY_ENGINE)
_claim = partial(_by_apply, target="applying", trigger=Trigger.CLAIM, event="proposal.applying")

PROPOSAL = Lifecycle(
    name="proposal",
    code=6,
    title="A change an agent proposes and a person decides",
    swept_by=Role.APPLY_ENGINE,
    states=(
        waiting("pending", 0, timer_s=72 * 3600.0),
        waiting("approved", 1, claimable=True),
        waiting("auto_approved", 1, claimable=True),
        held("applying", 2, on_error=Trigger.FAIL),
        waiting("failed", 3),
        ended("applied", 4, success=True),
        ended("rejected", 4),
        ended("expired", 4),
    ),
    transitions=(
        arrow(
            None,
            "pending",
            Trigger.SUBMIT,
            frozenset({Role.ORCHESTRATOR, Role.GATEWAY}),
            "proposal.created",
            "persist-results stores it",
        ),
        _by_owner("pending", "approved", "approve", event="proposal.approved", when="a person approves"),
        _by_owner("pending", "rejected", "reject", event="proposal.rejected", when="a person rejects, with a note"),
        arrow(
            "pending",
            "auto_approved",
            "auto_approve",
            Role.GATEWAY,
            "proposal.auto_approved",
            "memory-update at priority normal",
        ),
        _by_apply("pending", "expired", Trigger.DUE, event="proposal.expired", when="72 h passed"),
        _claim("approved", when="the apply engine takes it"),
        _claim("auto_approved", when="the apply engine takes it"),
        _claim("failed", when="a person asks to apply again", opens=Progress.ATTEMPT),
        _by_apply("applying", "applied", Trigger.COMPLETE, event="proposal.applied", when="committed", fenced=True),
        _by_apply("applying", "failed", Trigger.FAIL, event="proposal.failed", when="conflict or error", fenced=True),
        _by_apply("applying", "failed", Trigger.EXPIRE, event="proposal.failed", when="the apply engine was lost"),
        _by_owner("failed", "rejected", "reject", event="proposal.rejected", when="a person rejects it after all"),
    ),
)
