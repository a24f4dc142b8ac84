"""Which ready job comes first: by priority, and every fourth time the one that waited longest, so that none starves (BUS-3).

Waiting counts like priority there: a batch job that has waited two minutes longer than a critical one is before it. Three of four go by
priority alone, so that a long queue of old batch jobs does not stand before a critical one that has just come.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime

from trellis.engine.jobs import Priority
from trellis.engine.records import Job

AGEING_S = 60.0
"""How much longer a job of the next lower class waits before it counts as much."""
BY_AGE_EVERY = 4
"""One of so many goes to the longest waiting."""


def age_s(job: Job, now: datetime) -> float:
    """How long it has been asked for."""
    return max(0.0, (now - job.created_at).total_seconds())


def age_bonus(job: Job, now: datetime) -> float:
    """How much it counts by its waiting."""
    return age_s(job, now) + AGEING_S * (Priority.BATCH - job.priority)


def dispatch_order(jobs: Sequence[Job], now: datetime, gone: int) -> list[Job]:
    """The order in which they go, after `gone` have gone before."""
    by_priority = sorted(jobs, key=lambda job: (job.priority, -age_s(job, now)))[::-1]
    by_age = sorted(jobs, key=lambda job: -age_bonus(job, now))[::-1]
    order: dict[str, Job] = {}
    while len(order) < len(jobs):
        source = by_age if (gone + len(order) + 1) % BY_AGE_EVERY == 0 else by_priority
        while source[-1].job_id in order:
            source.pop()
        job = source.pop()
        order[job.job_id] = job
    return list(order.values())


def urgent_first(newest: Sequence[Job], oldest: Sequence[Job], most: int) -> list[Job]:
    """The oldest, and before them so many of the newest that are more urgent than a batch: the most urgent first, each once."""
    urgent = sorted((job for job in newest if job.priority < Priority.BATCH), key=lambda job: job.priority)[:most]
    return list({job.job_id: job for job in (*urgent, *oldest)}.values())


# --- lanes: jobs that compete for the same workers ---------------------------------------------------------------------


def in_lanes(jobs: Sequence[Job], lane_of: Callable[[str], str], first: Collection[str]) -> dict[str, list[Job]]:
    """The jobs of each lane, by its name; these lanes first."""
    lanes: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: lane_of(job.type) not in first) if first else jobs:
        lanes.setdefault(lane_of(job.type), []).append(job)
    return lanes


def interleave(lanes: Sequence[Sequence[Job]]) -> list[Job]:
    """The first job of each lane, then the second of each, and so on."""
    longest = max(map(len, lanes), default=0)
    return [lane[number] for number in range(longest) for lane in lanes if number < len(lane)]


def unreached_lanes(jobs: Sequence[Job], waiting: Sequence[Job], lane_of: Callable[[str], str]) -> frozenset[str]:
    """Lanes of which all jobs are still waiting to be looked at."""
    left = {job.job_id for job in waiting}
    reached = {lane_of(job.type) for job in jobs if job.job_id not in left} if left else set[str]()
    return frozenset(lane_of(job.type) for job in waiting) - reached
