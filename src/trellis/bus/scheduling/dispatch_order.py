"""The dispatch order that a worker gets, and the lookup of a person's approval."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trellis.bus.messages import ASK_FIRST, JOB_ID_IN_ENV, LEASE_IN_ENV, OWN_JOB_ID_IN_ENV, Dispatch, JobOrder
from trellis.bus.requests import REQUEUE_CAUSE, Budget, JobRequest, ResourceRef
from trellis.bus.safety.decisions import SafetyDecision
from trellis.engine import tracing
from trellis.engine.jobs import DELAY_S_MAX
from trellis.engine.records import Event

# The order: the request under its wire id, with the data of this dispatch (D29), limited by the policy.

CONSTRAINTS_IN_ENV = "TRELLIS_POLICY_CONSTRAINTS"
"""Key in a request's env: the policy's constraints, as JSON.

Only the policy sets it; a value from the request is removed.
"""
MAX_RUNTIME_FIELD = "max_runtime_ms"
DEADLINE_MS_MAX = int(DELAY_S_MAX * 1000)
"""Maximum deadline of a budget; a policy that allows more is cut to it."""


OVERWRITTEN_ENV = frozenset({OWN_JOB_ID_IN_ENV, ASK_FIRST, LEASE_IN_ENV, CONSTRAINTS_IN_ENV})
"""Keys in env that only the order sets; values from the request are removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchTerms:
    """The terms of one dispatch."""

    lease_s: float
    trace: str | None = None
    """The trace of the job's submitter."""
    constraints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    redacted: Mapping[str, Any] = field(default_factory=dict[str, Any])


def request_within_policy(
    request: JobRequest, constraints: Mapping[str, Any], redacted: Mapping[str, Any] | None = None
) -> JobRequest:
    """The request as its worker will receive it, within the policy's constraints, without the data of one dispatch.

    With a `redacted` context, no pointer or reference of the request or of its compensation is sent.

    Orders are built from this alone, and approvals show and bind it. So no field that a worker receives can be missing
    from the approval.
    """
    env = {name: value for name, value in request.env.items() if name not in OVERWRITTEN_ENV}
    labels = {name: value for name, value in request.labels.items() if name != REQUEUE_CAUSE}
    changed: dict[str, Any] = {"env": env, "labels": labels}
    if redacted:
        ref = redacted.get("context_ref")
        changed["context_ptr"] = str(redacted.get("context_ptr", ""))
        changed["context_ref"] = None if ref is None else ResourceRef.model_validate(ref)
        if request.compensation is not None:
            changed["compensation"] = request.compensation.model_copy(update={"context_ptr": "", "context_ref": None})
    if constraints:
        env[CONSTRAINTS_IN_ENV] = json.dumps(constraints, sort_keys=True, default=str)
        changed["budget"] = _shorter_budget(request.budget, constraints)
    return request.model_copy(update=changed)


def order_of(request: JobRequest, dispatch: Dispatch, wire_id: str, terms: DispatchTerms) -> JobOrder:
    """Build the order; the stored request is not changed.

    Raises BusRequestInvalid when the result is not a valid request.
    """
    work = request_within_policy(request, terms.constraints, terms.redacted)
    ours = {OWN_JOB_ID_IN_ENV: request.job_id, ASK_FIRST: "ask", LEASE_IN_ENV: f"{terms.lease_s:g}"}
    env = {JOB_ID_IN_ENV: request.job_id, **work.env, **ours}
    if terms.trace:
        env[tracing.IN_ENV] = terms.trace
    sent = work.model_copy(update={"job_id": wire_id, "env": env})
    return JobOrder(request=JobRequest.read(sent.body), dispatch=dispatch)


def _shorter_budget(budget: Budget | None, constraints: Mapping[str, Any]) -> Budget | None:
    """The budget with the shorter of the two times."""
    runtime = runtime_ms(constraints)
    if runtime is None:
        return budget
    asked = budget.deadline_ms if budget else 0
    shorter = min(asked or DEADLINE_MS_MAX, runtime)
    return (budget or Budget.model_validate({})).model_copy(update={"deadline_ms": shorter})


def runtime_ms(constraints: Mapping[str, Any]) -> int | None:
    """The runtime limit in milliseconds, from the constraints or from CAP's `budgets` in them; None without one."""
    budgets: Any = constraints.get("budgets")
    places: list[Mapping[str, Any]] = [constraints, budgets if isinstance(budgets, Mapping) else {}]
    found = (said.get(MAX_RUNTIME_FIELD) for said in places)
    return next((said for said in found if isinstance(said, int) and said > 0), None)


# Approvals. An approval counts only for the same request, the same order and the same policy (D45).

APPROVED = "job_approved"
HOLD_S = 72 * 3600.0
"""How long a job held for a person is delayed before the kernel is asked again, in seconds."""


def approval_bindings(request: JobRequest, decision: Mapping[str, Any]) -> dict[str, str]:
    """What an approval is bound to: the request, the policy, and everything the worker receives."""
    return {
        "job_hash": request.hash,
        "policy_hash": str(decision.get("policy_hash", "")),
        "order_hash": request_within_policy(request, decision.get("constraints") or {}, decision.get("redacted")).hash,
    }


def find_approval(events: Iterable[Event], request: JobRequest, decision: SafetyDecision) -> str | None:
    """The id of the approval event that is bound to exactly what would be sent now; None without one."""
    bound = approval_bindings(request, json.loads(json.dumps(decision.to_dict())))
    for event in events:
        if event.type != APPROVED:
            continue
        said: Any = json.loads(event.data or b"{}")
        if all(said.get(name) == value for name, value in bound.items()):
            return event.id
    return None
