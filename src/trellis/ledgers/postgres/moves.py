"""Moves on PostgreSQL: how those that meet become the arguments of one function call, and its rows become answers."""

from collections.abc import Sequence
from math import isfinite

from trellis.engine.errors import JobNotFound, OptionInvalid
from trellis.engine.jobs import Epoch, JobId, JobKey, Lease, Move, Moved, NotMoved
from trellis.engine.text import storable
from trellis.ledgers.postgres.connection import Connection, Row
from trellis.lifecycles import BY_CODE, Phase

MOVES = "select * from moves($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)"
REFUSALS = {
    "undeclared": "not declared",
    "actor": "this role may not",
    "fenced": "only its holder may, with its epoch",
    "version": "the job has another version",
    "key": "its concurrency key is at its limit",
    "reason": "a dead letter needs reason, stage and error",
    "same": "it is there already",
    "engine": "the engine itself makes this step, as a part of another",
}


def arguments(actor: int, move: Move) -> tuple[object, ...]:
    """What the function is told of a move by the actor of this number. Whatever cannot be told is refused here, before it meets others."""
    death = move.death
    return (
        actor,
        move.job_id,
        move.target,
        move.request_id,
        move.version,
        move.delay_s,
        _ms("lease_s", move.lease_s),
        _ms("heartbeat_s", move.heartbeat_s),
        storable(move.cause),
        move.data,
        death.reason_code.value if death else None,
        death.stage.value if death else None,
        storable(death.last_error) if death else None,
    )


async def make(connection: Connection, asked: Sequence[tuple[object, ...]]) -> list[Row]:
    """The rows that answer these moves, in their order; each comes with its arguments."""
    rows = await connection.fetch(MOVES, *map(list, zip(*asked, strict=True)))
    return sorted(rows, key=lambda row: row["n"])


def _ms(option: str, seconds: float) -> int:
    if not isfinite(seconds):
        raise OptionInvalid(option=option, value=seconds, expected="a number of seconds")
    return round(seconds * 1000)


def answer(move: Move, row: Row) -> Moved | NotMoved:
    """What a row says about a move; raises JobNotFound."""
    match row["outcome"]:
        case "missing":
            raise JobNotFound(job_id=move.job_id)
        case "unknown":
            lifecycle = BY_CODE[row["lifecycle"]]
            reason, state = f"{lifecycle.name} has no such state", state_name(row["lifecycle"], row["source"])
            return NotMoved(job_id=move.job_id, state=state, target=move.target, reason=reason)
        case _:
            return moved(move.job_id, row, move.target)


def state_name(lifecycle: int, code: int) -> str:
    """What a state is called."""
    return BY_CODE[lifecycle].state_of(code).name


def moved(job_id: str, row: Row, wanted: str) -> Moved | NotMoved:
    """The answer of a function that moves one job."""
    lifecycle, outcome = BY_CODE[row["lifecycle"]], row["outcome"]
    source = lifecycle.state_of(row["source"]).name
    if outcome == "same":
        return Moved(job_id=JobId(job_id), source=source, target=source, version=row["version"], repeated=True)
    if outcome not in {"moved", "repeated"}:
        target = lifecycle.state_of(row["target"]).name if row["target"] else wanted
        return NotMoved(job_id=JobId(job_id), state=source, target=target, reason=REFUSALS[outcome])
    target = lifecycle.state_of(row["target"])
    lease = None
    if target.phase is Phase.HELD:
        lease = Lease(JobKey(row["id"]), Epoch(row["epoch"]), JobId(job_id), lifecycle.name)
    return Moved(
        job_id=JobId(job_id),
        source=source,
        target=target.name,
        version=row["version"],
        lease=lease,
        repeated=outcome == "repeated",
    )
