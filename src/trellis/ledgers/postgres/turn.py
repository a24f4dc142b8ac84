"""A turn on PostgreSQL: how steps and claims become the arguments of one function call, and its rows become answers."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trellis.engine.errors import InvalidTransition
from trellis.engine.jobs import (
    CLAIM_MAX,
    Advance,
    Applied,
    Claim,
    Claimed,
    Epoch,
    JobId,
    JobKey,
    Lease,
    LeaseLost,
    Priority,
    TurnResult,
)
from trellis.ledgers.postgres.connection import Row
from trellis.lifecycles import LIFECYCLES, Lifecycle, Role, Transition, Trigger

TURN = "select * from turn($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18)"
CLAIMED, LOST, REPEATED, APPLIED = range(4)
PRIORITIES = tuple(int(priority) for priority in Priority)
REVERSED_EVERY = 8
"""Every so many claims the lowest class is looked at first, so that none starves."""


@dataclass(slots=True)
class Steps:
    """The steps of one call, sorted into what the function takes as arrays and what it takes one by one."""

    lifecycle: Lifecycle
    done_source: str | None = None
    done: list[Advance] = field(default_factory=list[Advance])
    starts: list[Advance] = field(default_factory=list[Advance])
    others: list[Advance] = field(default_factory=list[Advance])


def declared(advance: Advance, role: Role) -> Transition:
    """The transition a holder's step pulls, or InvalidTransition."""
    transition = LIFECYCLES[advance.lease.lifecycle].pull(advance.source, advance.trigger)
    if transition is not None and transition.fenced and role in transition.actors:
        return transition
    if transition is None:
        reason = "not declared"
    else:
        reason = "no step of a holder" if not transition.fenced else "this role may not"
    raise InvalidTransition(
        job_id=advance.lease.job_id,
        source=advance.source,
        target=transition.target if transition else advance.trigger,
        actor=role,
        reason=reason,
    )


def sort_steps(advances: Iterable[Advance], claim: Claim | None, role: Role) -> Steps:
    """Completions and starts of one lifecycle go set-wise, everything else one by one."""
    ordered = sorted(advances, key=lambda a: a.lease.key)
    name = claim.lifecycle if claim else ordered[0].lease.lifecycle if ordered else "leased-job"
    steps = Steps(lifecycle=LIFECYCLES[name])
    for advance in ordered:
        transition = declared(advance, role)
        plain = (
            advance.lease.lifecycle == name and advance.cause is None and advance.data is None and advance.death is None
        )
        if plain and transition.trigger == Trigger.COMPLETE and steps.done_source in {None, advance.source}:
            steps.done_source = advance.source
            steps.done.append(advance)
        elif plain and transition.trigger == Trigger.START:
            steps.starts.append(advance)
        else:
            steps.others.append(advance)
    return steps


def _other(advance: Advance) -> dict[str, Any]:
    lifecycle = LIFECYCLES[advance.lease.lifecycle]
    death = advance.death
    return {
        "id": advance.lease.key,
        "epoch": advance.lease.epoch,
        "lifecycle": lifecycle.code,
        "source": lifecycle.code_of(advance.source),
        "trigger": advance.trigger,
        "delay": advance.delay_s,
        "spare": advance.spare_attempt,
        "cause": advance.cause,
        "data": advance.data.decode() if advance.data is not None else None,
        "result": base64.b64encode(advance.result).decode() if advance.result is not None else None,
        "ttl": advance.result_ttl_s,
        "reason": death.reason_code.value if death else None,
        "stage": death.stage.value if death else None,
        "error": death.last_error if death else None,
    }


class Marks:
    """Low-water marks of a claimer: where it last found work, by type and priority.

    They are used while claims come back full and for at most a second on end, because a job that commits late, or with
    a lower position, stands before the mark.
    """

    FULL_SCAN_EVERY_S = 0.5

    def __init__(self) -> None:
        self._low: dict[tuple[int, int], int] = {}
        self._full = False
        self._scanned_at = float("-inf")
        self._claims = 0

    def order(self) -> tuple[int, ...]:
        """Priorities in the order in which this claim looks at them."""
        self._claims += 1
        return PRIORITIES[::-1] if self._claims % REVERSED_EVERY == 0 else PRIORITIES

    def lows(self, types: Sequence[int], priorities: Sequence[int], now: float) -> tuple[list[int], bool]:
        """A mark for each priority and type, and whether any is above the beginning."""
        if not self._full or now - self._scanned_at > self.FULL_SCAN_EVERY_S:
            self._scanned_at = now
            self._low.clear()
        lows = [self._low.get((type_, priority), 0) for priority in priorities for type_ in types]
        return lows, any(lows)

    def note(self, rows: Sequence[Row], wanted: int) -> None:
        """Remember where the last claimed rows stood."""
        self._full = len(rows) >= wanted
        for row in rows:
            if row["pos"] is not None:
                place = (row["type"], row["prio"])
                self._low[place] = max(self._low.get(place, 0), row["pos"])


def arguments(
    actor: int, steps: Steps, claim: Claim | None, types: Sequence[int], lows: Sequence[int], order: Sequence[int]
) -> list[Any]:
    """The arguments of `turn`."""
    done, starts = steps.done, steps.starts
    results = [a.result for a in done] if any(a.result is not None for a in done) else None
    ttls = [a.result_ttl_s for a in done] if results else None
    head: list[Any] = [
        actor,
        steps.lifecycle.code,
        [a.lease.key for a in done] or None,
        [a.lease.epoch for a in done] or None,
        steps.lifecycle.code_of(steps.done_source) if steps.done_source else None,
        results,
        ttls,
        [a.lease.key for a in starts] or None,
        [a.lease.epoch for a in starts] or None,
        json.dumps([_other(a) for a in steps.others]) if steps.others else None,
    ]
    if claim is None:
        return [*head, *[None] * 8]
    start = min(claim.start, CLAIM_MAX)
    return [
        *head,
        claim.claim_id,
        list(types),
        [round(t.lease_s * 1000) for t in claim.types],
        [round(t.heartbeat_s * 1000) for t in claim.types],
        list(order),
        list(lows),
        start,
        min(claim.prefetch, CLAIM_MAX - start),
    ]


def answers(
    advances: Sequence[Advance], rows: Sequence[Row], names: dict[int, str], lifecycle: Lifecycle
) -> TurnResult:
    """What the rows of `turn` say about each step, and the jobs they hand out."""
    told: dict[int, tuple[int, int]] = {}
    claimed: list[Claimed] = []
    for row in rows:
        kind = row[0]
        if kind == CLAIMED:
            claimed.append(_claimed(row, names, lifecycle))
        elif row["ids"] is not None:
            told.update((key, (APPLIED, version)) for key, version in zip(row["ids"], row["versions"], strict=True))
        else:
            told[row["id"]] = (kind, row["version"])
    return TurnResult([_outcome(advance, told) for advance in advances], claimed)


def _outcome(advance: Advance, told: dict[int, tuple[int, int]]) -> Applied | LeaseLost:
    kind, version = told.get(advance.lease.key, (LOST, 0))
    if kind == APPLIED:
        return Applied(version)
    return Applied(version, repeated=True) if kind == REPEATED else LeaseLost(advance.lease)


def _claimed(row: Row, names: dict[int, str], lifecycle: Lifecycle) -> Claimed:
    job_id = JobId(row[14])
    lease_s, beat_s = row[11] / 1000, row[12] / 1000
    return Claimed(
        Lease(JobKey(row[1]), Epoch(row[2]), job_id, lifecycle.name),
        names[row[5]],
        lifecycle.state_of(row[4]).name,
        row[15],
        row[6],
        row[7],
        row[8],
        row[9],
        min(lease_s, 2 * beat_s + 1),
        beat_s,
        row[16] or job_id,
        row[17],
        row[18],
        row[19],
        row[20],
        row[21],
        row[22],
    )
