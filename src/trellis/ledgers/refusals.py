"""What every ledger refuses: calls without a bound, invalid values, and steps that the lifecycle forbids."""

import json
import re
from collections.abc import Sequence
from functools import cache

from trellis.engine.alerts import ALERTS_MAX, SUBJECT_CHARS_MAX, TEXT_CHARS_MAX, AlertRound
from trellis.engine.errors import (
    InvalidTransition,
    LedgerUnavailable,
    NotAllowed,
    OptionInvalid,
    SignalRefused,
    UnknownLifecycle,
)
from trellis.engine.job_changes import CHANGED_MAX, JobChange
from trellis.engine.jobs import (
    ATTEMPTS_MAX,
    CLAIM_MAX,
    DECLARED_MAX,
    DELAY_S_MAX,
    JOB_SIGNALS_MAX,
    PAYLOAD_BYTES_MAX,
    REQUEST_KEY_CHARS_MAX,
    SIGNAL_NAME_CHARS_MAX,
    SUBMIT_MAX,
    TYPE_PATTERN,
    WAIT_CHILDREN_MAX,
    Advance,
    DeadLetterReason,
    JobId,
    Lease,
    NewJob,
    NotMoved,
    TypeOptions,
    Wait,
)
from trellis.engine.key_rates import check_key_rate
from trellis.engine.records import AuditHead, JobFilter, RetentionOptions
from trellis.engine.text import is_storable
from trellis.engine.uniqueness import check_declared_rule
from trellis.lifecycles import (
    LIFECYCLES,
    REMARK_TYPES,
    SIGNAL_TYPES,
    Lifecycle,
    Phase,
    Role,
    State,
    Transition,
    Trigger,
)
from trellis.lifecycles.bus_job import BUS_JOB
from trellis.lifecycles.events import EVENT_TYPES, event_code
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.lifecycle import IN_PLACE

# Checks of arguments, before the ledger is read. The same for every ledger.

SIGNALS_MAX = 1_000
CHILDREN_MAX = 1_000
SAMPLES_MAX = 50_000
"""Most events of one type in a sample."""
SAMPLED = tuple(name for name in LIFECYCLES if name not in {LEASED_JOB.name, BUS_JOB.name})
"""The lifecycles whose events can be sampled: those with few events, for which PostgreSQL has an index."""
RETENTION_BATCH_MAX = 10_000
"""The most jobs that one pass of retention removes, and so the most that its administrative act lists."""
_SHA256 = re.compile(r"[0-9a-f]{64}")
HOLDER_SIGNAL_TYPES = tuple(word for word in SIGNAL_TYPES if word not in REMARK_TYPES)


def ledger_closed() -> LedgerUnavailable:
    """The refusal of a call on a ledger after `close`."""
    return LedgerUnavailable(reason="this ledger was closed")


@cache
def check_may(role: Role, trigger: Trigger, lifecycle: str) -> None:
    """Check that this role may submit jobs of a lifecycle, or claim them. Raises UnknownLifecycle, NotAllowed."""
    steps = [t for t in lifecycle_named(lifecycle).transitions if t.trigger == trigger]
    if not any(role in step.actors for step in steps):
        raise NotAllowed(role=role.value, action=f"{trigger} a {lifecycle}", reason="the lifecycle names others")


def check_signals(signals: Sequence[tuple[str, bytes | None]]) -> None:
    """Check the signals of a holder. Raises OptionInvalid."""
    if len(signals) > SIGNALS_MAX:
        raise OptionInvalid(option="signals", value=len(signals), expected=f"at most {SIGNALS_MAX} in one call")
    for type_, _ in signals:
        if type_ not in HOLDER_SIGNAL_TYPES:
            raise OptionInvalid(option="signal type", value=type_, expected=f"one of {', '.join(HOLDER_SIGNAL_TYPES)}")


def check_annotation(type_: str, body: bytes) -> None:
    """Check a remark about a job. Raises OptionInvalid."""
    if type_ not in REMARK_TYPES:
        raise OptionInvalid(option="remark type", value=type_, expected=f"one of {', '.join(REMARK_TYPES)}")
    if len(body) > PAYLOAD_BYTES_MAX:
        raise OptionInvalid(option="remark", value=len(body), expected=f"at most {PAYLOAD_BYTES_MAX} bytes")


def check_wait(wait: Wait) -> None:
    """Check the bounds of what a job waits for. Raises OptionInvalid."""
    if len(wait.children) > WAIT_CHILDREN_MAX:
        raise OptionInvalid(
            option="children", value=len(wait.children), expected=f"at most {WAIT_CHILDREN_MAX} in one wait"
        )
    if wait.signal is not None:
        check_signal_name(wait.signal)
    if wait.timeout_s is not None and not 0 <= wait.timeout_s <= DELAY_S_MAX:
        raise OptionInvalid(option="timeout_s", value=wait.timeout_s, expected=f"from 0 to {DELAY_S_MAX:.0f}")


def check_signal_name(name: str) -> None:
    """Check the name of a signal. Raises OptionInvalid."""
    if not 1 <= len(name) <= SIGNAL_NAME_CHARS_MAX or not is_storable(name):
        expected = f"1 to {SIGNAL_NAME_CHARS_MAX} characters that can be stored"
        raise OptionInvalid(option="signal", value=name[:50], expected=expected)


def check_job_signal(name: str, body: bytes, key: str | None) -> None:
    """Check a signal to a job. Raises OptionInvalid."""
    check_signal_name(name)
    if len(body) > PAYLOAD_BYTES_MAX:
        raise OptionInvalid(option="signal", value=len(body), expected=f"at most {PAYLOAD_BYTES_MAX} bytes")
    if key is not None and not 1 <= len(key) <= REQUEST_KEY_CHARS_MAX["key"]:
        expected = f"1 to {REQUEST_KEY_CHARS_MAX['key']} characters"
        raise OptionInvalid(option="key", value=key[:50], expected=expected)
    try:
        json.loads(body.decode(), parse_constant=_no_constant, parse_int=str)  # no number is too long to be JSON
    except (ValueError, RecursionError) as error:
        raise OptionInvalid(option="signal", value=body[:50], expected="JSON in UTF-8") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def check_children_of(lease: Lease, jobs: Sequence[NewJob]) -> None:
    """Check that a holder spawns children of its own job, of the same lifecycle. Raises OptionInvalid."""
    if not 1 <= len(jobs) <= SUBMIT_MAX:
        raise OptionInvalid(option="jobs", value=len(jobs), expected=f"from 1 to {SUBMIT_MAX} in one call")
    for job in jobs:
        if job.parent_id != lease.job_id or job.lifecycle != lease.lifecycle or job.idempotency_key or job.id_is_given:
            expected = f"a plain child of {lease.job_id}, without an id or a key of its own"
            raise OptionInvalid(option="job to spawn", value=job.job_id, expected=expected)


def signal_refused(name: str, job_id: JobId, ended_as: str | None) -> SignalRefused:
    """The error for a signal that a job cannot get: it has ended, or has its most signals."""
    full = f"it has {JOB_SIGNALS_MAX} signals, which is the limit"
    return SignalRefused(name=name, job_id=job_id, reason=full if ended_as is None else f"it ended as {ended_as}")


def check_next_head(head: AuditHead, after: AuditHead | None) -> None:
    """Check that a block of the audit chain can follow another. Raises OptionInvalid."""
    numbers = {after.number, after.number + 1} if after is not None else {head.number}
    if head.number < 0 or head.number not in numbers or _SHA256.fullmatch(head.sha256) is None or head.feed < 1:
        expected = "the block after the newest one, with the SHA-256 of its bytes"
        raise OptionInvalid(option="head", value=head.number, expected=expected)


def check_retention(options: RetentionOptions) -> None:
    """Check the times, states and batch of retention. Raises OptionInvalid."""
    known = {
        (one.name, state.name) for one in LIFECYCLES.values() for state in one.states if state.phase is Phase.ENDED
    }
    for lifecycle, state in options.states_s:
        if (lifecycle, state) not in known:
            ends = ", ".join(sorted(name for one, name in known if one == lifecycle)) or "no lifecycle of that name"
            raise OptionInvalid(
                option="states_s", value=f"{lifecycle}.{state}", expected=f"a state in which a job ends: {ends}"
            )
    times = (options.ended_s, options.signals_s, options.unread_s, *options.states_s.values())
    if any(time is not None and not time >= 0 for time in times):
        raise OptionInvalid(option="retention", value="a time below 0", expected="0 s or more, or None for ever")
    if not 1 <= options.batch <= RETENTION_BATCH_MAX:
        raise OptionInvalid(option="batch", value=options.batch, expected=f"from 1 to {RETENTION_BATCH_MAX}")


def check_declared(types: Sequence[TypeOptions]) -> None:
    """Check the number and the values of declared types. Raises OptionInvalid."""
    if len(types) > DECLARED_MAX:
        raise OptionInvalid(option="types", value=len(types), expected=f"at most {DECLARED_MAX} in one call")
    for one in types:
        _check_type_options(one)


def _check_type_options(one: TypeOptions) -> None:
    """Check the options of a type against the bounds of a submit."""
    checks = {
        "max_attempts": (one.max_attempts, 1 <= one.max_attempts <= ATTEMPTS_MAX, f"from 1 to {ATTEMPTS_MAX}"),
        "max_deaths": (one.max_deaths, 0 <= one.max_deaths <= ATTEMPTS_MAX, f"from 0 to {ATTEMPTS_MAX}"),
        "deadline_s": (one.deadline_s, one.deadline_s is None or one.deadline_s > 0, "more than 0, or none"),
        "concurrency_limit": (one.concurrency_limit, one.concurrency_limit >= 1, "at least 1"),
        "compensation": (
            one.compensation,
            one.compensation is None or bool(re.match(TYPE_PATTERN, one.compensation)),
            "a job type",
        ),
    }
    for option, (value, is_right, expected) in checks.items():
        if not is_right:
            raise OptionInvalid(option=f"{option} of {one.type}", value=str(value)[:50], expected=expected)
    if one.unique is not None:
        check_declared_rule(one.unique, one.type)
    check_key_rate(one.key_rate)


def check_alerts(checked: AlertRound) -> None:
    """Check the number and the texts of observed alerts. Raises OptionInvalid."""
    if max(len(checked.observed), len(checked.scopes)) > ALERTS_MAX:
        raise OptionInvalid(option="alerts", value=len(checked.observed), expected=f"at most {ALERTS_MAX} in one round")
    for one in checked.observed:
        for option, text, most in (("subject", one.subject, SUBJECT_CHARS_MAX), ("text", one.text, TEXT_CHARS_MAX)):
            if len(text) > most or not is_storable(text):
                expected = f"at most {most} characters that can be stored"
                raise OptionInvalid(option=f"{option} of alert {one.name}", value=text[:50], expected=expected)


def check_sample(lifecycle: str, limit: int) -> None:
    """Check of which lifecycle and how many events a caller asks for. Raises OptionInvalid."""
    if lifecycle not in SAMPLED:
        raise OptionInvalid(option="lifecycle", value=lifecycle, expected=f"one of {', '.join(SAMPLED)}")
    if not 1 <= limit <= SAMPLES_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {SAMPLES_MAX}")


def known_event_code(type_: str) -> int:
    """The stored number of an event type that a caller named. Raises OptionInvalid."""
    if type_ not in EVENT_TYPES:
        raise OptionInvalid(option="type", value=type_, expected="an event type of a lifecycle")
    return event_code(type_)


def event_codes(types: frozenset[str] | None) -> list[int] | None:
    """The stored numbers of these event types; None stays None, for all. Raises OptionInvalid."""
    return None if types is None else sorted(map(known_event_code, types))


def check_peek_limit(each: int) -> None:
    """Check how many jobs per type and priority a caller asks for. Raises OptionInvalid."""
    if not 1 <= each <= CLAIM_MAX:
        raise OptionInvalid(option="each", value=each, expected=f"from 1 to {CLAIM_MAX}")


def check_children(limit: int) -> None:
    """Check how many children a caller asks for. Raises OptionInvalid."""
    if not 1 <= limit <= CHILDREN_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CHILDREN_MAX}")


def check_selected(limit: int) -> None:
    """Check how many jobs to change a caller asks for. Raises OptionInvalid."""
    if not 1 <= limit <= CHANGED_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CHANGED_MAX}")


def check_ids(job_ids: Sequence[JobId]) -> None:
    """Check how many ids a caller asks about. Raises OptionInvalid."""
    if len(job_ids) > CLAIM_MAX:
        raise OptionInvalid(option="job_ids", value=len(job_ids), expected=f"at most {CLAIM_MAX} in one call")


def check_expiring(within_s: float, limit: int) -> None:
    """Check the time range and the number of leases a caller asks for. Raises OptionInvalid."""
    if not 0 <= within_s <= DELAY_S_MAX:
        raise OptionInvalid(option="within_s", value=within_s, expected=f"from 0 to {DELAY_S_MAX:.0f}")
    if not 1 <= limit <= CLAIM_MAX:
        raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CLAIM_MAX}")


# Reasons for refusing a step, in the same words for every ledger. Pure: they depend on the lifecycle and the job's
# state alone.

ENGINE_TRIGGERS = {
    Trigger.COMPENSATED: "the engine itself records that a compensation succeeded",
    Trigger.FINALIZE: "only the completion of its job finalizes an artifact",
    Trigger.SUSPEND: "only the submit of a batch suspends its completion job",
}
"""Triggers that no caller may fire, and why: each is part of another job's step."""

KEY_IS_FULL = "its concurrency key is at its limit"
KEY_RATE_IS_USED = "the rate of its concurrency key allows no claim now"
NOT_DELAYED = "it does not wait for its time"
HAS_THIS_PRIORITY = "it has this priority"
REQUEST_IS_ANSWERED = "this request has an answer already"


def unique_key_is_taken(job_id: str) -> str:
    """Why a job whose unique key another job holds cannot be requeued."""
    return f"job {job_id} holds its unique key now; cancel that one first, or wait until it has ended"


def no_such_job(job_id: JobId, change: JobChange) -> NotMoved:
    """The answer for a job that was removed, or that the caller cannot reach."""
    return NotMoved(job_id=job_id, state="", target=change.value, reason="there is no such job")


def transition_or_refusal(lifecycle: Lifecycle, source: str, target: str, role: Role) -> Transition | str:
    """The transition that a `move` by this role makes from one state to another, or why there is none."""
    if target not in lifecycle.by_name:
        return f"{lifecycle.name} has no such state"
    steps = [t for t in lifecycle.transitions if t.trigger not in IN_PLACE]
    declared = [t for t in steps if (t.source, t.target) == (source, target)]
    if not declared:
        return "not declared"
    allowed = [t for t in declared if role in t.actors]
    if not allowed:
        return f"only {', '.join(sorted({one.value for t in declared for one in t.actors}))} may"
    free = [t for t in allowed if not t.fenced]
    if not free:
        return "only the lease holder may"
    return ENGINE_TRIGGERS.get(free[0].trigger, free[0])


def trigger_refusal(lifecycle: Lifecycle, state: str, trigger: str, role: Role) -> str:
    """Why this role's cancel or requeue has no effect on a job in this state."""
    if lifecycle.pull(state, trigger) is not None:
        return f"{role.value} may not {trigger} it"
    ended = trigger == Trigger.CANCEL and lifecycle.by_name[state].phase is Phase.ENDED
    return f"it ended as {state}" if ended else f"{state} declares no {trigger}"


def trigger_target(lifecycle: Lifecycle, state: str, trigger: str) -> str:
    """The state that a cancel or requeue leads to from this state, or from others where this state declares none."""
    declared = lifecycle.pull(state, trigger)
    steps = [declared] if declared is not None else [t for t in lifecycle.transitions if t.trigger == trigger]
    return steps[0].target if steps else trigger


def advance_refusal(transition: Transition | None, role: Role, advance: Advance) -> str | None:
    """Why this role cannot make this step as a lease holder; None when it can. Independent of who holds the job."""
    if transition is None:
        return "not declared"
    if role not in transition.actors:
        return "another role makes this step"
    if not transition.fenced:
        return "it is not the lease holder's step"
    if transition.finalizes and advance.finalizes is None:
        return "it names no artifact"
    if advance.finalizes is not None and not transition.finalizes:
        return "this step finalizes no artifact"
    suspends = transition.trigger == Trigger.SUSPEND
    return None if suspends is (advance.wait is not None) else "exactly a step that suspends a job names its wait"


def refused_step(advance: Advance, role: Role, target: str, reason: str) -> InvalidTransition:
    """The error for a step that a lease holder cannot make."""
    return InvalidTransition(
        job_id=advance.lease.job_id, source=advance.source, target=target, actor=role.value, reason=reason
    )


def check_steps(role: Role, advances: Sequence[Advance]) -> None:
    """Check the steps of one turn in their order. Raises UnknownLifecycle, InvalidTransition, OptionInvalid.

    A step without a dead letter, an artifact and a wait is checked once for all jobs of the turn that make it.
    """
    passed: set[tuple[str, str, str]] = set()
    for advance in advances:
        name = (advance.lease.lifecycle, advance.source, advance.trigger)
        is_plain = advance.death is advance.finalizes is advance.wait is None
        if is_plain and name in passed:
            continue
        _check_step(role, advance)
        if is_plain:
            passed.add(name)


def _check_step(role: Role, advance: Advance) -> None:
    lifecycle = lifecycle_named(advance.lease.lifecycle)
    transition = lifecycle.pull(advance.source, advance.trigger)
    reason = advance_refusal(transition, role, advance)
    if transition is None or reason is not None:
        target = advance.trigger if transition is None else transition.target
        raise refused_step(advance, role, target, reason or "not declared")
    check_death(lifecycle.by_name[transition.target], advance.death)
    if advance.wait is not None:
        check_wait(advance.wait)


def version_refusal(current: int, expected: int | None) -> str:
    return f"the job has version {current}, not {expected}"


def check_death(target: State, death: DeadLetterReason | None) -> None:
    """Check that a state which requires a dead letter gets one with an error text. Raises OptionInvalid."""
    if death is not None and not death.last_error:
        raise OptionInvalid(option="last_error", value="", expected="a dead letter says what went wrong")
    if death is None and target.dead_letter:
        raise OptionInvalid(option="death", value=None, expected=f"{target.name} needs a dead letter")


def lifecycle_named(name: str) -> Lifecycle:
    """The lifecycle of this name. Raises UnknownLifecycle, which lists the known names."""
    try:
        return LIFECYCLES[name]
    except KeyError:
        raise UnknownLifecycle(name=name, known=", ".join(LIFECYCLES)) from None


def state_pairs(where: JobFilter) -> list[tuple[Lifecycle, int]] | None:
    """The states that a filter's state name selects, one per lifecycle that has it; None for any state."""
    if where.state is None:
        return None
    among = [lifecycle_named(where.lifecycle)] if where.lifecycle else list(LIFECYCLES.values())
    pairs = [(lifecycle, lifecycle.code_of(where.state)) for lifecycle in among if where.state in lifecycle.by_name]
    if not pairs:
        known = sorted({name for lifecycle in among for name in lifecycle.by_name})
        raise OptionInvalid(option="state", value=where.state, expected=f"one of {', '.join(known)}")
    return pairs
