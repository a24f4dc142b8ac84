"""Decides automatic steps of a job: lease lost, timer due, deadline passed, or a soft cancel to carry out.

Both ledgers use these decisions. A decision is a pure function of the job's state, the occasion and a few facts. The
SQLite ledger calls `decision`. PostgreSQL's functions read the table `decision`, which holds every possible answer and
is written by each `trellis migrate` (`decision_rows`). Neither ledger has a text, a reason or a stage of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from functools import cache
from itertools import product

from trellis.engine.jobs import ReasonCode, Stage
from trellis.engine.retry_policy import releasable, stage_in
from trellis.lifecycles import BY_CODE, Illegal, LeaseLoss, Lifecycle, Phase, State, Trigger, next_state
from trellis.lifecycles.events import Cause


class Occasion(StrEnum):
    """What happened without a call. PostgreSQL's functions use these values."""

    LEASE_LOST = "lease_lost"
    TIMER_DUE = "timer_due"
    DEADLINE = "deadline"
    CANCEL_GRACE_OVER = "cancel_grace_over"
    """The holder had a cancel request and did not stop within the grace period."""
    CANCEL_LET_GO = "cancel_let_go"
    """The holder had a cancel request and releases the job, or has not started it."""


class Fact(IntFlag):
    """The facts that a decision depends on besides the state. PostgreSQL passes them by name to `_facts`."""

    CANCEL_REQUESTED = 1
    ATTEMPTS_LEFT = 2
    FIRST_DEATH = 4
    """No worker died while running this job before."""
    LAST_DEATH = 8
    """This worker death reaches the job's `max_deaths`."""
    SPARABLE = 16
    """Few enough attempts were lost that one lost before it began need not count."""
    DEADLINE_PASSED = 32


NO_FACTS = Fact(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The step that a job makes, and what is recorded with it."""

    trigger: str | None
    """None: the job keeps its state and waits there for the next holder."""
    cause: str | None = None
    """For the event and the dead letter. `%s` stands for the number of deaths."""
    reason_code: ReasonCode | None = None
    """For the dead letter; None where the target state has none."""
    stage: Stage | None = None
    counts_death: bool = False
    spares_attempt: bool = False

    def cause_after(self, deaths: int) -> str | None:
        """The cause to record after this many deaths."""
        return None if self.cause is None else self.cause.replace("%s", str(deaths))


@cache
def decision(lifecycle: int, state: int, occasion: Occasion, facts: Fact) -> Decision | None:
    """The decision for a job in a state, both by their stored numbers.

    None where the lifecycle declares nothing for the occasion.
    """
    declared = BY_CODE[lifecycle]
    return _RULES[occasion][0](declared, declared.state_of(state), facts)


def decision_rows() -> Iterator[tuple[int, int, str, int, str | None, str | None, str | None, str | None, bool, bool]]:
    """Every possible decision, in the column order of PostgreSQL's table `decision`."""
    for lifecycle, occasion in product(BY_CODE.values(), Occasion):
        read = _RULES[occasion][1]
        for state, facts in product(lifecycle.states, range(max(Fact) * 2)):
            if facts & ~read or state.phase is Phase.ENDED:
                continue
            code = lifecycle.code_of(state.name)
            decided = decision(lifecycle.code, code, occasion, Fact(facts))
            if decided is not None:
                recorded = decided.trigger, decided.cause, decided.reason_code, decided.stage
                yield lifecycle.code, code, occasion, facts, *recorded, decided.counts_death, decided.spares_attempt


def _on_lease_lost(lifecycle: Lifecycle, state: State, facts: Fact) -> Decision | None:
    """Carry out a requested cancel, or start the next attempt, or end the job. A death counts where user code ran."""
    if state.phase is not Phase.HELD:
        return None
    cancel = _cancel(lifecycle, state, Cause.CANCEL_HOLDER_GONE) if Fact.CANCEL_REQUESTED in facts else None
    if cancel is not None or state.lease_loss is LeaseLoss.STAY:
        return cancel or Decision(trigger=None, counts_death=state.runs_code)
    if Fact.SPARABLE in facts and releasable(lifecycle, state):
        return Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, spares_attempt=True)
    died = state.runs_code
    if _may(lifecycle, state, Trigger.EXHAUST):
        if died and Fact.LAST_DEATH in facts:
            cause = Cause.WORKER_DIED_ONCE if Fact.FIRST_DEATH in facts else Cause.WORKER_DIED
            return _end(lifecycle, state, Trigger.EXHAUST, cause, ReasonCode.INFRASTRUCTURE_FAILURE, died=died)
        if Fact.ATTEMPTS_LEFT not in facts:
            reason = ReasonCode.EXHAUSTED_RETRIES
            return _end(lifecycle, state, Trigger.EXHAUST, Cause.LEASE_EXPIRED, reason, died=died)
    return Decision(trigger=Trigger.EXPIRE, cause=Cause.LEASE_EXPIRED, counts_death=died)


def _on_timer_due(lifecycle: Lifecycle, state: State, facts: Fact) -> Decision | None:
    """Start the next attempt, or end the job when no attempt or no time is left."""
    if not _may(lifecycle, state, Trigger.DUE):
        return None
    if not _may(lifecycle, state, Trigger.EXHAUST):
        return Decision(trigger=Trigger.DUE)
    if Fact.DEADLINE_PASSED in facts:
        cause, reason = Cause.DEADLINE_PASSED, ReasonCode.TIMEOUT
    elif Fact.ATTEMPTS_LEFT in facts:
        return Decision(trigger=Trigger.DUE)
    else:
        cause, reason = Cause.ATTEMPTS_SPENT, ReasonCode.EXHAUSTED_RETRIES
    return _end(lifecycle, state, Trigger.EXHAUST, cause, reason, stage=Stage.EXEC)


def _on_deadline(lifecycle: Lifecycle, state: State, _: Fact) -> Decision | None:
    """End the job if the state has a deadline transition. Otherwise the deadline applies in a later state."""
    if not _may(lifecycle, state, Trigger.DEADLINE):
        return None
    return _end(lifecycle, state, Trigger.DEADLINE, Cause.DEADLINE_PASSED, ReasonCode.TIMEOUT)


def _on_cancel_grace_over(lifecycle: Lifecycle, state: State, _: Fact) -> Decision | None:
    return _cancel(lifecycle, state, Cause.CANCEL_GRACE_OVER)


def _on_cancel_let_go(lifecycle: Lifecycle, state: State, _: Fact) -> Decision | None:
    return _cancel(lifecycle, state, Cause.CANCEL_LET_GO)


def _cancel(lifecycle: Lifecycle, state: State, cause: Cause) -> Decision | None:
    held = state.phase is Phase.HELD and _may(lifecycle, state, Trigger.CANCEL)
    return Decision(trigger=Trigger.CANCEL, cause=cause) if held else None


def _end(
    lifecycle: Lifecycle,
    state: State,
    trigger: str,
    cause: Cause,
    reason: ReasonCode,
    *,
    stage: Stage | None = None,
    died: bool = False,
) -> Decision:
    """The step to the job's end, with a dead letter if the target state requires one."""
    target = next_state(lifecycle, state.name, trigger, lifecycle.swept_by)
    if isinstance(target, Illegal) or not target.dead_letter:
        return Decision(trigger=trigger, cause=cause, counts_death=died)
    at = stage or stage_in(state)
    return Decision(trigger=trigger, cause=cause, reason_code=reason, stage=at, counts_death=died)


def _may(lifecycle: Lifecycle, state: State, trigger: str) -> bool:
    """Whether the role that sweeps this lifecycle may fire the trigger in this state."""
    return not isinstance(next_state(lifecycle, state.name, trigger, lifecycle.swept_by), Illegal)


_RULES: Mapping[Occasion, tuple[Callable[[Lifecycle, State, Fact], Decision | None], Fact]] = {
    Occasion.LEASE_LOST: (_on_lease_lost, Fact(max(Fact) * 2 - 1) & ~Fact.DEADLINE_PASSED),
    Occasion.TIMER_DUE: (_on_timer_due, Fact.ATTEMPTS_LEFT | Fact.DEADLINE_PASSED),
    Occasion.DEADLINE: (_on_deadline, NO_FACTS),
    Occasion.CANCEL_GRACE_OVER: (_on_cancel_grace_over, NO_FACTS),
    Occasion.CANCEL_LET_GO: (_on_cancel_let_go, NO_FACTS),
}
"""The rule of each occasion, and the facts it reads."""
