"""Rate limits of concurrency keys in an SQLite ledger (see `engine/key_rates.py`).

A parked job becomes ready only with a token of its key that no other ready job of its type needs. So jobs without a token
never stand in the way of others, however many they are. A trigger of the database takes the token with the lease.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from trellis.engine.jobs import JobKey
from trellis.engine.key_rates import UNCLAIMED_WAIT_S, KeyRate
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import US, JobRow

RATE_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/key_rates.sql")


class KeyHead(NamedTuple):
    """The first parked job of a key and a type, and how many jobs of the type may become ready now."""

    prio: int
    pos: int
    id: JobKey
    type: int
    tokens: int | None
    """None without a limit."""
    due_at: int | None
    """When the key is looked at again, if it has no token for this type."""


def any_rate(tx: Transaction) -> bool:
    """Whether a type declares a rate for its keys."""
    return bool(tx.db.execute(RATE_QUERIES.any_rate).fetchall()[0][0])


def key_heads(tx: Transaction, key: int) -> list[KeyHead]:
    """The first parked job of each type of a key, in the order in which they become ready."""
    return sorted(_key_head(tx.now, row) for row in tx.db.execute(RATE_QUERIES.heads, {"key": key}).fetchall())


def _key_head(now: int, row: Sequence[Any]) -> KeyHead:
    prio, pos, id_, type_, token, burst, used_until, ready = row
    if token is None:
        return KeyHead(prio, pos, id_, type_, None, None)
    use = max(used_until, now) + ready * token
    tokens = max(0, (now + burst * token - use) // token)
    return KeyHead(prio, pos, id_, type_, tokens, None if tokens else use + token - burst * token)


def look_again(tx: Transaction, key: int, heads: Sequence[KeyHead], *, in_vain: bool) -> None:
    """Note when a key is looked at again. `in_vain` means that this look gave no token.

    A key that was due, and whose tokens are set aside for ready jobs that nobody claims, is looked at less often.
    """
    due_at = min((one.due_at for one in heads if one.due_at is not None), default=None)
    if due_at is not None and in_vain and tx.db.execute(RATE_QUERIES.was_due, (key, tx.now)).fetchall():
        due_at = max(due_at, tx.now + int(UNCLAIMED_WAIT_S * US))
    look_at(tx, key, due_at)


def look_at(tx: Transaction, key: int, due_at: int | None) -> None:
    """Note when a key is looked at again."""
    tx.db.execute(RATE_QUERIES.look_at, {"key": key, "due": due_at})


def due_keys(tx: Transaction, limit: int) -> list[int]:
    """Keys whose waiting jobs may have a token now."""
    return [key for (key,) in tx.db.execute(RATE_QUERIES.due_keys, (tx.now, limit))]


class KeyOfReadyJob(NamedTuple):
    id: JobKey
    ckey: int


class RatedJobs(NamedTuple):
    """The jobs of a claim that need tokens."""

    over: list[KeyOfReadyJob]
    """Those whose keys have no token for them. That happens when the clock was set back."""
    keys: set[int]
    """The keys of the others."""


def rated_jobs(tx: Transaction, ids: Sequence[int]) -> RatedJobs:
    """Those of these jobs that need a token of their key."""
    used: dict[tuple[int, int], int] = {}
    over: list[KeyOfReadyJob] = []
    wanted = f"[{','.join(map(str, ids))}]"
    for id_, key, type_, token, room, used_until in tx.db.execute(RATE_QUERIES.jobs_with_rate, (wanted,)).fetchall():
        after = used.get((key, type_), max(used_until, tx.now)) + token
        if after > tx.now + room:
            over.append(KeyOfReadyJob(id_, key))
        else:
            used[key, type_] = after
    return RatedJobs(over, {key for key, _ in used})


def has_token(tx: Transaction, row: JobRow) -> bool:
    """Whether this job may be held now, as far as the rate of its key goes."""
    return row.ckey is None or not any_rate(tx) or not rated_jobs(tx, [row.id]).over


def rate_changed(tx: Transaction, type_: int | None, before: KeyRate | None, after: KeyRate | None) -> None:
    """Let the ready jobs of a type whose rate has changed wait for their keys again, and look at all waiting keys."""
    factor = before.per_second / after.per_second if before is not None and after is not None else 0.0
    values = {"type": type_, "now": tx.now}
    tx.db.execute(RATE_QUERIES.scale_used, {**values, "factor": factor})
    tx.db.execute(RATE_QUERIES.look_again, values)
    tx.db.execute(RATE_QUERIES.park_ready, (type_,))
