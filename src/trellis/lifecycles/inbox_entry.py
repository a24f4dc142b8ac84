"""inbox-entry: an incoming message and its path through the gate (decision D51)."""

from functools import partial

from trellis.lifecycles.lifecycle import Lifecycle, Role, Trigger, arrow, ended, waiting

_by_gateway = partial(arrow, actors=Role.GATEWAY)

INBOX_ENTRY = Lifecycle(
    name="inbox-entry",
    code=7,
    title="What somebody sends in, and what the gate makes of it",
    swept_by=Role.GATEWAY,
    states=(
        waiting("pending", 0, timer_s=72 * 3600.0),
        ended("processed", 1, success=True),
        ended("rejected", 1),
        ended("expired", 1),
    ),
    transitions=(
        _by_gateway(None, "pending", Trigger.SUBMIT, event="inbox.received", when="POST /inbox/submit"),
        _by_gateway("pending", "processed", "process", event="inbox.processed", when="what it asks for was made"),
        _by_gateway("pending", "rejected", "reject", event="inbox.rejected", when="the gate refused it"),
        _by_gateway("pending", "expired", Trigger.DUE, event="inbox.expired", when="its time to live passed"),
    ),
)
