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
    Lease,
    LeaseLost,
    Priority,
    TurnResult,
    lease_length_s,
)
from trellis.engine.text import storable
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
            advance.lease.lifecycle == name
            and advance.cause is None
            and advance.data is None
            and advance.death is None
            and advance.version is None
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
        "cause": storable(advance.cause),
        "data": advance.data.decode() if advance.data is not None else None,
        "result": base64.b64encode(advance.result).decode() if advance.result is not None else None,
        "ttl": advance.result_ttl_s,
        "reason": death.reason_code.value if death else None,
        "stage": death.stage.value if death else None,
        "error": storable(death.last_error) if death else None,
        "version": advance.version,
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


STARTED, DONE, OTHER = range(3)
"""Which part of a call an answer belongs to: one job may be started and completed in one call."""


def answers(
    advances: Sequence[Advance], steps: Steps, rows: Sequence[Row], names: dict[int, str], claim: Claim | None
) -> TurnResult:
    """What the rows of `turn` say about each step, and the jobs they hand out."""
    told: dict[tuple[int, int], tuple[int, int]] = {}
    claimed: list[Claimed] = []
    terms = {t.type: (lease_length_s(t.lease_s, t.heartbeat_s), t.heartbeat_s) for t in claim.types} if claim else {}
    for row in rows:
        if row[0] == CLAIMED:
            claimed.append(_claimed(row, names[row[4]], steps.lifecycle, terms))
        elif row["ids"] is not None:
            part = row["pos"]
            told.update(((part, key), (APPLIED, v)) for key, v in zip(row["ids"], row["versions"], strict=True))
        else:
            told[row["pos"], row["id"]] = (row[0], row["epoch"])
    if not advances:
        return TurnResult([], claimed)
    parts = {id(a): STARTED for a in steps.starts} | {id(a): DONE for a in steps.done}
    return TurnResult([_outcome(advance, parts.get(id(advance), OTHER), told) for advance in advances], claimed)


def _outcome(advance: Advance, part: int, told: dict[tuple[int, int], tuple[int, int]]) -> Applied | LeaseLost:
    kind, version = told.get((part, advance.lease.key), (LOST, 0))
    if kind == APPLIED:
        return Applied(version)
    return Applied(version, repeated=True) if kind == REPEATED else LeaseLost(advance.lease)


def _claimed(row: Row, type_: str, lifecycle: Lifecycle, terms: dict[str, tuple[float, float]]) -> Claimed:
    (
        _,
        key,
        epoch,
        state,
        _,
        attempt,
        generation,
        max_attempts,
        deaths,
        _,
        _,
        job_id,
        payload,
        correlation,
        created,
        extra,
        _,
        _,
    ) = row
    lease_s, heartbeat_s = terms[type_]
    more: dict[str, Any] = json.loads(extra) if extra else NOTHING_MORE
    checkpoint = more.get("checkpoint")
    return Claimed(
        Lease(key, epoch, job_id, lifecycle.name),
        type_,
        lifecycle.state_of(state).name,
        payload,
        attempt,
        generation,
        max_attempts,
        deaths,
        lease_s,
        heartbeat_s,
        correlation or job_id,
        more.get("trace"),
        more.get("parent_id"),
        more.get("compensates"),
        base64.b64decode(checkpoint) if checkpoint is not None else None,
        more.get("deadline_s"),
        created,
    )


NOTHING_MORE: dict[str, Any] = {}
