"""`python -m bench --day JOBS`: a simulated day on one PostgreSQL ledger, from the measured costs of `--cost`.

Second by second: jobs arrive by a curve with its peak at noon, and a hundredth of the day's jobs at once at two in the
night. Half of them are submitted one at a time, the others and those of the night 500 a call. Workers take what waits, at most 500 at a time
and at most 200 times a second each. PostgreSQL works them off with the processor time it has. What does not fit waits.
The simulation knows no disk and no network: they are counted as bytes.
"""

import math
import random
from dataclasses import dataclass

from bench.table import markdown

SECONDS = 86_400
SUBMIT_CALL_US, SUBMIT_JOB_US = 540.0, 20.0
TURN_US, JOB_US = 975.0, 36.0
RETENTION_US = 57.0
SUBMIT_WAL_BYTES, WORK_WAL_BYTES, RETENTION_WAL_BYTES = 1_000, 1_300, 500
KEPT_BYTES = 1_240
BATCH = 500
TURNS_MAX = 200
"""Turns a second of one worker process: each is a round trip with a commit."""
IMPORT_SHARE, IMPORT_AT = 0.01, 2 * 3600
USABLE = 0.7
"""Share of the cores that the ledger may take. The rest is for vacuum, checkpoints, reads and other databases."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Day:
    """How a day went."""

    jobs: int
    cores: int
    workers: int
    busy_mean: float
    """Processor cores that PostgreSQL used on average."""
    busy_peak: float
    waiting_max: int
    """The most jobs that waited at the end of a second."""
    behind_s: int
    """Seconds with jobs that waited longer than that second."""
    per_turn: float
    """Jobs in a turn, at the busiest second."""
    wal_mb_s_peak: float

    @property
    def kept_gb(self) -> float:
        """What a day leaves in the database, in GB."""
        return self.jobs * KEPT_BYTES / 1e9


def simulate(jobs: int, *, cores: int, workers: int, seed: int = 20261117) -> Day:
    """One day with so many jobs."""
    rng = random.Random(seed)
    usual = jobs * (1 - IMPORT_SHARE)
    capacity_us = cores * USABLE * 1e6
    waiting = done = behind = waiting_max = 0
    left_us = total_us = peak_us = wal_peak = per_turn = 0.0
    for second in range(SECONDS):
        mean = usual / SECONDS * (1 + 0.8 * math.sin(2 * math.pi * (second / SECONDS - 0.25)))
        arrived = max(0, round(rng.gauss(mean, math.sqrt(mean)))) if mean > 20 else _few(rng, mean)
        imported = round(jobs * IMPORT_SHARE) if second == IMPORT_AT else 0
        calls = arrived / 2 + (arrived / 2 + imported) / BATCH
        arrived += imported
        work_us = left_us + calls * SUBMIT_CALL_US + arrived * SUBMIT_JOB_US + done * RETENTION_US
        waiting += arrived
        turns = min(workers * TURNS_MAX, waiting)
        fits = max(0.0, capacity_us - work_us)
        turns = min(turns, int(fits / (TURN_US + JOB_US)))
        taken = min(waiting, turns * BATCH, int(max(0.0, fits - turns * TURN_US) / JOB_US))
        work_us += turns * TURN_US + taken * JOB_US
        left_us = max(0.0, work_us - capacity_us)
        used_us = min(work_us, capacity_us)
        logged = (
            (arrived * SUBMIT_WAL_BYTES + taken * WORK_WAL_BYTES + done * RETENTION_WAL_BYTES)
            * used_us
            / max(1.0, work_us)
        )
        waiting, done = waiting - taken, taken
        behind += waiting > 0
        waiting_max = max(waiting_max, waiting)
        wal_peak = max(wal_peak, logged)
        if used_us > peak_us:
            peak_us, per_turn = used_us, taken / max(1, turns)
        total_us += used_us
    return Day(
        jobs=jobs,
        cores=cores,
        workers=workers,
        busy_mean=total_us / SECONDS / 1e6,
        busy_peak=peak_us / 1e6,
        waiting_max=waiting_max,
        behind_s=behind,
        per_turn=per_turn,
        wal_mb_s_peak=wal_peak / 1e6,
    )


def _few(rng: random.Random, mean: float) -> int:
    """A Poisson number for a small mean."""
    limit, product, n = math.exp(-mean), rng.random(), 0
    while product > limit:
        product *= rng.random()
        n += 1
    return n


def run_days(jobs: list[int]) -> int:
    """Simulate and print; 0 when it is done."""
    rows: list[tuple[str, ...]] = []
    for n in jobs:
        for cores, workers in ((2, 2), (8, 8), (32, 32)):
            day = simulate(n, cores=cores, workers=workers)
            rows.append(
                (
                    f"{n:,}",
                    f"{cores}",
                    f"{workers}",
                    f"{day.busy_mean:.2f}",
                    f"{day.busy_peak:.2f}",
                    f"{day.waiting_max:,}",
                    f"{day.behind_s:,}",
                    f"{day.wal_mb_s_peak:.1f}",
                    f"{day.kept_gb:,.1f}",
                )
            )
    head = (
        "jobs a day",
        "cores",
        "workers",
        "cores busy, mean",
        "peak",
        "waiting, most",
        "seconds behind",
        "WAL MB/s, peak",
        "GB kept a day",
    )
    print(markdown(head, rows))
    return 0
