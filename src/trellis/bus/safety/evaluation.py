"""Evaluation of a policy: its decision on a request and why, and simulation of another policy."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trellis.bus.documents import decision_of
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.requests import JobRequest
from trellis.bus.safety.policy import (
    DELAY_S_DEFAULT,
    DecisionKernel,
    DecisionKind,
    PolicyRule,
    RuleMatch,
    SafetyDecision,
    SafetyPolicy,
)
from trellis.bus.topics import subject_matches
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter
from trellis.lifecycles.bus_job import BUS_JOB

# Decisions. Pure: the same policy and request give the same decision.

DEFAULT = "default"
AMBIGUOUS = "ambiguous"


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleCheck:
    rule: str
    decision: DecisionKind
    fits: bool
    why: str
    """The condition that did not match, or those that did."""

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.rule, "decision": self.decision.value, "fits": self.fits, "why": self.why}


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionExplanation:
    """A decision with every rule that was checked, in order. The last one made the decision, if it matches."""

    decision: SafetyDecision
    looked: tuple[RuleCheck, ...] = ()
    not_looked: tuple[str, ...] = ()
    """The ids of later rules, which were not checked."""

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.decision.to_dict(),
            "looked": [one.to_dict() for one in self.looked],
            "not_looked": list(self.not_looked),
        }


def decide(policy: SafetyPolicy, request: JobRequest) -> SafetyDecision:
    """The safety decision on a job request: that of the first rule that matches; denied when none does."""
    return explain(policy, request).decision


def explain(policy: SafetyPolicy, request: JobRequest) -> DecisionExplanation:
    facts = _facts(request)
    if isinstance(facts, str):
        return DecisionExplanation(decision=_denied(policy, request, AMBIGUOUS, facts))
    looked = list[RuleCheck]()
    for number, rule in enumerate(policy.rules):
        why = _mismatch(rule.match, facts)
        reason = why or f"{', '.join(sorted(rule.match.model_fields_set))} fit"
        looked.append(RuleCheck(rule=rule.id, decision=rule.decision, fits=why is None, why=reason))
        if why is None:
            later = tuple(one.id for one in policy.rules[number + 1 :])
            return DecisionExplanation(
                decision=_decision_by_rule(rule, policy, request), looked=tuple(looked), not_looked=later
            )
    return DecisionExplanation(
        decision=_denied(policy, request, DEFAULT, "it matches no rule, and a job that matches no rule is denied"),
        looked=tuple(looked),
    )


def _decision_by_rule(rule: PolicyRule, policy: SafetyPolicy, request: JobRequest) -> SafetyDecision:
    throttled = rule.decision is DecisionKind.THROTTLE
    return SafetyDecision(
        kind=rule.decision,
        rule=rule.id,
        reason=rule.reason or f"rule {rule.id}",
        policy_hash=policy.hash,
        job_hash=request.hash,
        delay_s=(rule.delay_s or DELAY_S_DEFAULT) if throttled else 0.0,
        constraints={} if rule.constraints is None else rule.constraints.to_dict(),
    )


def _denied(policy: SafetyPolicy, request: JobRequest, rule: str, reason: str) -> SafetyDecision:
    return SafetyDecision(
        kind=DecisionKind.DENY, rule=rule, reason=reason, policy_hash=policy.hash, job_hash=request.hash
    )


# --- matching ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _ConditionValues:
    """A request's values for one condition, prepared once for all rules: a request may have a thousand values."""

    given: Sequence[str]
    known: frozenset[str]
    joined: str
    """All values in one text. A string that is not in it is in none of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _RequestFacts:
    """A request's values for the conditions of a match. Of several values, one match is enough."""

    topic: str
    labels: Mapping[str, str]
    names: Mapping[str, _ConditionValues]


def _facts(request: JobRequest) -> _RequestFacts | str:
    """The values that rules check; or, as text, a contradiction in the request."""
    meta = request.meta
    if meta is not None and request.tenant_id and meta.tenant_id and request.tenant_id != meta.tenant_id:
        return f"tenant_id is {request.tenant_id!r} and meta.tenant_id is {meta.tenant_id!r}; send one of them"
    labels = dict(request.labels)
    for name, value in meta.labels.items() if meta else ():
        if labels.setdefault(name, value) != value:
            return f"the label {name!r} is {labels[name]!r}, and {value!r} in meta; send one of them"
    names: dict[str, Sequence[str]] = {
        "tenants": _as_tuple(request.tenant),
        "principals": _as_tuple(request.principal_id),
        "actor_types": _as_tuple(meta.actor_type if meta else ""),
        "capabilities": _as_tuple(meta.capability if meta else ""),
        "risk_tags": meta.risk_tags if meta else (),
        "requires": meta.requires if meta else (),
        "priorities": (request.priority or "batch",),
        "adapters": _as_tuple(request.adapter_id),
        "packs": _as_tuple(meta.pack_id if meta else ""),
    }
    values = {
        name: _values(values_of_condition, any_case=name in _ANY_CASE) for name, values_of_condition in names.items()
    }
    return _RequestFacts(topic=request.topic, labels=labels, names=values)


_NO_VALUES = _ConditionValues(given=(), known=frozenset(), joined="")


def _values(given: Sequence[str], *, any_case: bool) -> _ConditionValues:
    if not given:
        return _NO_VALUES
    compared = [one.casefold() for one in given] if any_case else given
    return _ConditionValues(given=given, known=frozenset(compared), joined="\n".join(compared))


def _as_tuple(value: str) -> tuple[str, ...]:
    return (value,) if value else ()


_ANY_CASE = frozenset({"capabilities", "risk_tags", "requires"})


def _mismatch(match: RuleMatch, facts: _RequestFacts) -> str | None:
    """The first condition that does not match, in words; None when all match."""
    if match.topics is not None and not any(subject_matches(pattern, facts.topic) for pattern in match.topics):
        return f"topics: {facts.topic} matches none of {_short_list(match.topics)}"
    for condition, values in facts.names.items():
        patterns: Sequence[str] | None = getattr(match, condition)
        if patterns is not None and not _any_matches(patterns, values, any_case=condition in _ANY_CASE):
            given = (
                f"{_short_list(values.given)} matches none of"
                if values.given
                else "the job has none; the rule wants one of"
            )
            return f"{condition}: {given} {_short_list(patterns)}"
    for name, pattern in (match.labels or {}).items():
        value = facts.labels.get(name)
        if value is None or not matches_pattern(pattern, value):
            actual = "is not there" if value is None else f"is {_short(value)!r}"
            return f"labels: {name} {actual} and should be like {pattern!r}"
    return None


def _any_matches(patterns: Iterable[str], values: _ConditionValues, *, any_case: bool) -> bool:
    compared = (one.casefold() for one in patterns) if any_case else patterns
    return any(
        pattern in values.known or ("*" in pattern and _any_value_matches(pattern, values)) for pattern in compared
    )


def _any_value_matches(pattern: str, values: _ConditionValues) -> bool:
    longest = max(pattern.split("*"), key=len)
    return longest in values.joined and any(matches_pattern(pattern, value) for value in values.known)


def matches_pattern(pattern: str, value: str) -> bool:
    """Whether a value matches a pattern in which `*` is any text, also none.

    Never backtracks, so no pattern is slow.
    """
    first, *others = pattern.split("*")
    if not others:
        return pattern == value
    *middle, last = others
    if not value.startswith(first) or len(value) < len(first) + len(last) or not value.endswith(last):
        return False
    at, end = len(first), len(value) - len(last)
    for part in middle:
        place = value.find(part, at, end)
        if place < 0:
            return False
        at = place + len(part)
    return True


def _short_list(names: Sequence[str]) -> str:
    shown = ", ".join(_short(name) for name in names[:5])
    return f"{shown} and {len(names) - 5} more" if len(names) > 5 else shown


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:59]}…"


# Simulation of another policy, on given requests or on the last jobs of a ledger. Evaluates in a thread, because the
# policy may be slow.

JOBS_MAX = 1_000
REQUESTS_MAX = 1_000
PAGE = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedDecision:
    """One request under the simulated policy. `before` is the earlier or current decision; None when unknown."""

    job_id: str
    topic: str
    before: str | None
    before_rule: str | None
    after: SafetyDecision

    @property
    def changes(self) -> bool:
        return self.before is not None and self.before != self.after.kind.value

    def to_dict(self) -> dict[str, Any]:
        return {
            "job_id": self.job_id,
            "topic": self.topic,
            "before": self.before,
            "before_rule": self.before_rule,
            "after": self.after.kind.value,
            "after_rule": self.after.rule,
            "reason": self.after.reason,
            "changes": self.changes,
        }


async def simulate_requests(
    policy: SafetyPolicy, requests: Sequence[JobRequest], kernel: DecisionKernel | None
) -> list[SimulatedDecision]:
    """Compare with the current kernel's decision on each request; raises KernelUnavailable."""
    decisions = list[SimulatedDecision]()
    for request in requests[:REQUESTS_MAX]:
        before = None if kernel is None else await kernel.check(request)
        decisions.append(
            SimulatedDecision(
                job_id=request.job_id,
                topic=request.topic,
                before=None if before is None else before.kind.value,
                before_rule=None if before is None else before.rule,
                after=await asyncio.to_thread(decide, policy, request),
            )
        )
    return decisions


async def simulate_jobs(policy: SafetyPolicy, ledger: Ledger, *, last: int) -> list[SimulatedDecision]:
    """Compare with the recorded decision on each of the last jobs, newest first.

    Jobs with unreadable requests are left out.
    """
    decisions, seen, cursor = list[SimulatedDecision](), 0, None
    while seen < min(last, JOBS_MAX):
        page = await ledger.jobs(
            JobFilter(lifecycle=BUS_JOB.name), limit=min(PAGE, min(last, JOBS_MAX) - seen), cursor=cursor
        )
        for listed in page.jobs:
            job = await ledger.job(listed.job_id)
            simulated = None if job is None else await _simulate_one(policy, ledger, job.payload or b"", job.job_id)
            decisions += [] if simulated is None else [simulated]
        seen, cursor = seen + len(page.jobs), page.cursor
        if cursor is None:
            break
    return decisions


async def _simulate_one(policy: SafetyPolicy, ledger: Ledger, payload: bytes, job_id: Any) -> SimulatedDecision | None:
    try:
        request = JobRequest.read(payload)
    except BusRequestInvalid:
        return None
    before = decision_of(await ledger.events(job_id)) or {}
    return SimulatedDecision(
        job_id=job_id,
        topic=request.topic,
        before=before.get("decision"),
        before_rule=before.get("rule"),
        after=await asyncio.to_thread(decide, policy, request),
    )
