"""What the death of a worker means for the jobs it held. Pure; `engine/decide.py` uses it.

PostgreSQL asks `_runs_alone` and `_sparable`, which migrating writes with the bounds of this module.

A death counts for every job that the worker was running, because nobody can tell which of them killed it. So no job is condemned
for a death in company: the death that reaches `max_deaths` (from 2 on) always finds the job alone in its worker.

- After its first death a job runs beside others again: most workers die of something else, and all their jobs go on at once.
- It runs alone once it has died twice, or when one more death would be its last for want of deaths or attempts.
- One job at a time runs alone in the whole fleet, so that one worker at most does nothing else, and the others go on.
- A job that was claimed and never started loses nothing: neither a death is counted nor an attempt.
"""

from trellis.engine.jobs import Stage
from trellis.lifecycles import Lifecycle, State, Trigger

SHARED_DEATHS_MAX = 2
"""After so many deaths a job runs alone, however many more it may have."""
UNBEGUN_LOSSES_MAX = 100
"""So many lost attempts are spared that never began; then they count, so that nothing goes round for ever."""


def stage_in(state: State) -> Stage:
    """How far a job is while it is in this state, for a dead letter that nobody who ran it writes: user code runs, or not yet."""
    return Stage.EXEC if state.runs_code else Stage.FETCH


def releasable(lifecycle: Lifecycle, state: State) -> bool:
    """Whether nothing ran in this state and its holder could have given the job back: a lease lost there may cost no attempt."""
    released = any(t.source == state.name and t.trigger == Trigger.RELEASE for t in lifecycle.transitions)
    return released and not state.runs_code


def sparable(attempt: int) -> bool:
    """Whether so few attempts were lost that one more which never began costs none."""
    return attempt < UNBEGUN_LOSSES_MAX


def runs_alone(*, deaths: int, max_deaths: int, attempt: int, max_attempts: int) -> bool:
    """Whether a job must have its worker to itself: it may be what kills workers, or must not be lost to one that is."""
    if not deaths:
        return False
    last_death = 0 < max_deaths <= deaths + 1
    last_attempt = attempt + 1 >= max_attempts
    return deaths >= SHARED_DEATHS_MAX or last_death or last_attempt
