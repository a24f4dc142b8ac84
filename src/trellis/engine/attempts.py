"""How many attempts people are shown: the number of the present one, and of those that an ended job has made (D38)."""

from collections.abc import Sequence
from functools import cache

from trellis.engine.records import Event, Job
from trellis.lifecycles import LIFECYCLES, Phase, Progress


@cache
def has_attempts(lifecycle: str) -> bool:
    """Whether jobs of this lifecycle are tried more than once: a run, for example, goes on where it was."""
    return any(one.opens is Progress.ATTEMPT for one in LIFECYCLES[lifecycle].transitions)


EVENTS_OF_END = 3
"""The end of an ended job is among this many of its last events."""


def attempt_number(event: Event) -> int:
    """The number of the attempt that an event is about, from 1; 0 for the end of a job that nobody tried.

    An event that ends an attempt and opens the next one is about the attempt that ended: it has that one's error. The
    end of a job that waited for its next attempt is about the last one that was made.
    """
    lifecycle = LIFECYCLES[event.lifecycle]
    states = lifecycle.by_name
    ends = states[event.target].phase is Phase.ENDED
    if event.epoch == 0 and ends:
        return 0
    opened = [one for one in lifecycle.transitions if one.opens is Progress.ATTEMPT]
    if event.source is not None and states[event.source].phase is Phase.HELD:
        step = (event.source, event.target, event.type)
        return event.attempt + (0 if any((one.source, one.target, one.event) == step for one in opened) else 1)
    awaits_next = any(
        one.source is not None and states[one.source].phase is Phase.HELD and one.target == event.source
        for one in opened
    )
    return event.attempt if ends and awaits_next else event.attempt + 1


def needs_events(job: Job) -> bool:
    """Whether only its events tell how many attempts this job made: it may have ended while it waited for the next."""
    return job.epoch > 0 and (job.attempt > 0 or job.generation > 0) and job.state in _ends_of_waiting(job.lifecycle)


def attempts_made(job: Job, events: Sequence[Event]) -> int:
    """How many attempts of its generation the job has made, the present one included; 0 if it ended before the first.

    A job that waits is shown the attempt that it waits for. `events` are the job's, if `needs_events` says so.
    """
    states = LIFECYCLES[job.lifecycle].by_name
    if states[job.state].phase is not Phase.ENDED:
        return job.attempts_spent + 1
    if job.epoch == 0:
        return 0
    for event in reversed(events):
        was_over = event.source is not None and states[event.source].phase is Phase.ENDED
        if states[event.target].phase is Phase.ENDED and not was_over:
            return job.attempts_spent + attempt_number(event) - event.attempt
    return job.attempts_spent + 1


@cache
def _ends_of_waiting(lifecycle: str) -> frozenset[str]:
    """The states in which a job can end while nobody holds it."""
    states = LIFECYCLES[lifecycle].by_name
    return frozenset(
        one.target
        for one in LIFECYCLES[lifecycle].transitions
        if one.source is not None
        and states[one.source].phase is Phase.WAITING
        and states[one.target].phase is Phase.ENDED
    )
