"""A turn on PostgreSQL: steps and claims become the arguments of one function call, and its rows become answers."""

import asyncio
import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeAlias

from trellis.engine.errors import InputError
from trellis.engine.jobs import (
    CLAIM_MAX,
    LEAST_URGENT_FIRST_EVERY,
    Advance,
    Claim,
    Claimed,
    Lease,
    LeaseLost,
    Priority,
    StepApplied,
    TurnResult,
    Wait,
    lease_length_s,
)
from trellis.engine.text import storable
from trellis.ledgers.postgres.connection import PostgresConnection, PostgresRow
from trellis.ledgers.postgres.lanes import PostgresLane
from trellis.ledgers.refusals import check_steps
from trellis.lifecycles import LIFECYCLES, Lifecycle, Role, Trigger

TURN = "select * from turn($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20)"
TURNS = "select * from turns($1, $2)"
CLAIMED, LOST, REPEATED, APPLIED, WIDE, RESUMED = range(6)
PRIORITIES = tuple(int(priority) for priority in Priority)


@dataclass(slots=True)
class SortedSteps:
    """The steps of one call, split into those the function takes as arrays and those it takes one by one."""

    lifecycle: Lifecycle
    done_source: str | None = None
    done: list[Advance] = field(default_factory=list[Advance])
    starts: list[Advance] = field(default_factory=list[Advance])
    others: list[Advance] = field(default_factory=list[Advance])

    @property
    def one_by_one(self) -> bool:
        return bool(self.others) and not (self.done or self.starts)


def sort_steps(advances: Sequence[Advance], claim: Claim | None, role: Role) -> SortedSteps:
    """Split steps: completions and starts of one lifecycle go set-wise, all others one by one.

    Each kind is sorted by job. Raises as `check_steps`.
    """
    check_steps(role, advances)
    ordered = sorted(advances, key=itemgetter(0))
    name = claim.lifecycle if claim else ordered[0].lease.lifecycle if ordered else "leased-job"
    steps = SortedSteps(lifecycle=LIFECYCLES[name])
    done, starts, others = steps.done, steps.starts, steps.others
    last_done = last_start = last_other = done_source = None
    complete = Trigger.COMPLETE
    for n, advance in enumerate(ordered, start=1):
        (key, _, _, lifecycle), source, trigger, _, _, cause, data, _, _, death, version, finalizes, guarded, _ = (
            advance
        )
        # A step after one that goes one by one also goes one by one, to stay behind it. So does a start that another
        # step of the same job follows: whether it was made before depends on how many steps follow.
        plain = cause is data is death is version is finalizes is None and not guarded
        if lifecycle != name or key == last_other or not plain:
            last_other = key
            others.append(advance)
        elif trigger == complete and (done_source is None or source == done_source) and key != last_done:
            done_source, last_done = source, key
            done.append(advance)
        elif trigger == Trigger.START and key != last_start and (n == len(ordered) or ordered[n].lease.key != key):
            last_start = key
            starts.append(advance)
        else:
            last_other = key
            others.append(advance)
    steps.done_source = done_source
    return steps


def _others(advances: Sequence[Advance]) -> list[dict[str, Any]]:
    """The steps in order, each with how many steps of the same lease follow it."""
    seen: Counter[Lease] = Counter()
    steps: list[dict[str, Any]] = []
    for n, advance in reversed(list(enumerate(advances))):
        steps.append(_other(advance) | {"n": n, "later": seen[advance.lease]})
        seen[advance.lease] += 1
    return steps[::-1]


def _other(advance: Advance) -> dict[str, Any]:
    lifecycle = LIFECYCLES[advance.lease.lifecycle]
    death = advance.death
    return {
        "id": advance.lease.key,
        "epoch": advance.lease.epoch,
        "lifecycle": lifecycle.code,
        "source": lifecycle.code_of(advance.source),
        "trigger": advance.trigger,
        "delay": advance.delay_s if advance.wait is None else advance.wait.timeout_s,
        "spare": advance.spare_attempt,
        "cause": storable(advance.cause),
        "data": _text(advance),
        "result": base64.b64encode(advance.result).decode() if advance.result is not None else None,
        "ttl": advance.result_ttl_s,
        "reason": death.reason_code.value if death else None,
        "stage": death.stage.value if death else None,
        "error": storable(death.last_error) if death else None,
        "version": advance.version,
        "finalizes": advance.finalizes,
        "guarded": advance.unless_cancelled,
        "wait": None if advance.wait is None else _wait(advance.wait),
    }


def _wait(wait: Wait) -> dict[str, Any]:
    return {
        "mode": int(wait.mode),
        "children": wait.children,
        "signal": wait.signal,
        "after": wait.after,
        "entry": None if wait.entry is None else wait.entry[0],
        "body": None if wait.entry is None else base64.b64encode(wait.entry[1]).decode(),
        "restart": None if wait.restart_with is None else base64.b64encode(wait.restart_with).decode(),
    }


def _text(advance: Advance) -> str | None:
    try:
        return advance.data.decode() if advance.data is not None else None
    except UnicodeDecodeError as error:
        raise InputError(
            detail=f"what a step of job {advance.lease.job_id} carries is no text in UTF-8: {error.reason}"
        ) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsCall:
    """A turn without a claim whose steps go one by one, as the function's arguments."""

    actor: int
    key: int
    """The first of its jobs."""
    steps: int
    told: str


def steps_call(actor: int, steps: SortedSteps) -> StepsCall:
    """The arguments for the actor of this number. Invalid values are refused here, before the turn joins a batch."""
    others = steps.others
    return StepsCall(actor=actor, key=others[0].lease.key, steps=len(others), told=json.dumps(_others(others)))


MarkedQueue: TypeAlias = tuple[str, int, int]
"""Lifecycle, type and priority: jobs that a claim reads in the order of their positions."""


class LowWaterMarks:
    """Low-water marks of a claimer: where it last found work, by lifecycle, type and priority.

    They are used while claims come back full, for at most half a second at a time. A job that commits late, or that
    keeps an older position because it waited for its key's slot, is before the mark. A claim that finds too little
    behind its marks searches again from the beginning in the same call. A claim that is full behind its marks leaves
    such a job to a later claim, at most half a second later.
    """

    FULL_SCAN_EVERY_S = 0.5

    def __init__(self) -> None:
        self._low: dict[MarkedQueue, int] = {}
        self._full = False
        self._scanned_at = float("-inf")
        self._claims = 0

    def order(self) -> tuple[int, ...]:
        """The order in which this claim searches the priorities."""
        self._claims += 1
        return PRIORITIES[::-1] if self._claims % LEAST_URGENT_FIRST_EVERY == 0 else PRIORITIES

    def lows(
        self, lifecycle: str, types: Sequence[int], priorities: Sequence[int], now: float
    ) -> dict[MarkedQueue, int]:
        """The marks of these types and priorities; 0 is the beginning."""
        if not self._full or now - self._scanned_at > self.FULL_SCAN_EVERY_S:
            self._scanned_at = now
            self._low.clear()
        queues = [(lifecycle, type_, priority) for priority in priorities for type_ in types]
        return {queue: self._low.get(queue, 0) for queue in queues}

    def note(self, lifecycle: str, claimed: PostgresRow | None, wanted: int, lows: Mapping[MarkedQueue, int]) -> None:
        """Store the positions of the jobs claimed last with these marks."""
        self._full = claimed is not None and len(claimed["ids"]) >= wanted
        if claimed is None:
            return
        # The rows are in claim order: the first and the last one of a type and priority have the lowest and the highest
        # position.
        queues = [(lifecycle, *queue) for queue in zip(claimed["types"], claimed["prios"], strict=True)]
        positions = claimed["places"]
        first = dict(zip(reversed(queues), reversed(positions), strict=True))
        if any(position is not None and position < lows[queue] for queue, position in first.items()):
            self._low.clear()  # this claim searched from the beginning
        for queue, position in dict(zip(queues, positions, strict=True)).items():
            if position is not None:
                self._low[queue] = max(self._low.get(queue, 0), position)


class TurnCaller:
    """Makes turns over a lane. The TurnCallers of one claimer share its marks."""

    def __init__(self, lane: PostgresLane, marks: LowWaterMarks) -> None:
        self.lane = lane
        self._marks = marks

    async def turn(
        self, actor: int, steps: SortedSteps, claim: Claim | None, types: Sequence[int]
    ) -> list[PostgresRow]:
        order = self._marks.order() if claim else ()
        lifecycle = claim.lifecycle if claim else ""
        lows = self._marks.lows(lifecycle, types, order, asyncio.get_running_loop().time())
        positions = [lows[lifecycle, type_, prio] for prio in order for type_ in types]
        arguments = turn_arguments(actor, steps, claim, types, positions, order)
        request = claim.claim_id if claim else "steps"
        rows = await self.lane.call("turn", request, lambda c, _: c.fetch(TURN, *arguments))
        if claim is not None and claim.only is None:
            self._marks.note(lifecycle, claimed_of(rows), claim.start + claim.prefetch, lows)
        return rows


async def run_turns(connection: PostgresConnection, turns: Sequence[StepsCall]) -> list[list[PostgresRow]]:
    """The result rows of each of these turns."""
    # Sorted by job, like every call, so that turns of one job each cannot deadlock.
    order = sorted(range(len(turns)), key=lambda n: turns[n].key)
    rows = await connection.fetch(TURNS, [turns[n].actor for n in order], [turns[n].told for n in order])
    by_turn: list[list[PostgresRow]] = [[] for _ in turns]
    for row in rows:
        by_turn[order[row["turn"] - 1]].append(row)
    return by_turn


def turn_arguments(
    actor: int, steps: SortedSteps, claim: Claim | None, types: Sequence[int], lows: Sequence[int], order: Sequence[int]
) -> list[Any]:
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
        json.dumps(_others(steps.others)) if steps.others else None,
    ]
    if claim is None:
        return [*head, *[None] * 8, False, None]
    start = min(claim.start, CLAIM_MAX)
    return [
        *head,
        claim.claim_id,
        list(types),
        [round(t.lease_s * 1000) for t in claim.types],
        [round(t.heartbeat_s * 1000) for t in claim.types],
        list(order),
        lows,
        start,
        min(claim.prefetch, CLAIM_MAX - start),
        claim.isolates,
        claim.only,
    ]


STARTED, DONE, OTHER = range(3)
"""The part of a call that an answer belongs to. One job may be started and completed in one call."""


def claimed_of(rows: Sequence[PostgresRow]) -> PostgresRow | None:
    return next((row for row in rows if row["kind"] == CLAIMED), None)


def turn_answers(
    advances: Sequence[Advance],
    steps: SortedSteps,
    rows: Sequence[PostgresRow],
    names: dict[int, str],
    claim: Claim | None,
) -> TurnResult:
    """The outcome of each step and the claimed jobs, from the rows of `turn`."""
    claimed = claimed_of(rows) if claim else None
    jobs = _claimed(claimed, rows, names, claim) if claim and claimed else []
    return TurnResult(_outcomes(advances, steps, rows) if advances else [], jobs)


def _outcomes(
    advances: Sequence[Advance], steps: SortedSteps, rows: Sequence[PostgresRow]
) -> list[StepApplied | LeaseLost]:
    applied: list[dict[int, StepApplied]] = [{}, {}]
    one_by_one: list[StepApplied | None] = []
    for row in rows:
        kind, part = row["kind"], row["part"]
        if kind not in {LOST, REPEATED, APPLIED}:
            continue
        if kind == APPLIED and part != OTHER and row["ids"] is not None:
            applied[part] |= zip(row["ids"], map(_applied, row["versions"]), strict=True)
            continue
        step = None if kind == LOST else StepApplied(row["version"], repeated=kind == REPEATED)
        if part == OTHER:
            one_by_one.append(step)
        elif step is not None:
            applied[part][row["id"]] = step
    if len(steps.done) == len(advances):
        done = applied[DONE]
        return [done.get(advance.lease.key) or LeaseLost(advance.lease) for advance in advances]
    answers = {id(a): applied[STARTED].get(a.lease.key) for a in steps.starts}
    answers |= {id(a): applied[DONE].get(a.lease.key) for a in steps.done}
    answers |= zip(map(id, steps.others), one_by_one, strict=True)
    return [answers[id(a)] or LeaseLost(a.lease) for a in advances]


@lru_cache(maxsize=256)
def _applied(version: int) -> StepApplied:
    return StepApplied(version)


# Built straight from a tuple of all fields: thousands are made per second, and named arguments double the cost.
_new: Callable[..., Any] = tuple.__new__  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
_lease: Callable[[tuple[Any, ...]], Lease] = partial(_new, Lease)
_job: Callable[[tuple[Any, ...]], Claimed] = partial(_new, Claimed)


def _claimed(row: PostgresRow, rows: Sequence[PostgresRow], names: dict[int, str], claim: Claim) -> list[Claimed]:
    lifecycle = LIFECYCLES[claim.lifecycle]
    terms = {t.type: (lease_length_s(t.lease_s, t.heartbeat_s), t.heartbeat_s) for t in claim.types}
    types = [names[number] for number in row["types"]]
    keys, job_ids = row["ids"], row["job_ids"]
    leases = map(_lease, zip(keys, row["epochs"], job_ids, repeat(lifecycle.name)))
    columns: list[Iterable[Any]] = [
        leases,
        types,
        [lifecycle.state_of(state).name for state in row["states"]],
        row["payloads"],
        row["attempts"],
        row["generations"],
        row["max_attempts"],
        row["deaths"],
        [terms[name][0] for name in types],
        [terms[name][1] for name in types],
        [correlation or job_id for correlation, job_id in zip(row["correlations"], job_ids, strict=True)],
        *[repeat(None)] * 5,
        repeat(False),
        repeat(0),
    ]
    jobs = list(map(_job, zip(*columns, strict=False)))
    wide = {row["id"]: row for row in rows if row["kind"] == WIDE}
    return (
        [_with_rare_fields(job, wide[job.lease.key]) if job.lease.key in wide else job for job in jobs]
        if wide
        else jobs
    )


def _with_rare_fields(job: Claimed, row: PostgresRow) -> Claimed:
    more: dict[str, Any] = json.loads(row["extra"])
    checkpoint = more["checkpoint"]
    return job._replace(
        payload=row["payload"],
        trace=more["trace"],
        parent_id=more["parent_id"],
        compensates=more["compensates"],
        checkpoint=base64.b64decode(checkpoint) if checkpoint is not None else None,
        deadline_s=more["deadline_s"],
        runs_alone=more["runs_alone"],
        spared=more["spared"] or 0,
    )
