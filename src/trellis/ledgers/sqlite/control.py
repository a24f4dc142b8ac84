"""Operators' settings of an SQLite ledger, and the administrative acts that record their changes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trellis.auth.principals import check_held_limit, require_home_issuer
from trellis.engine.admin_acts import (
    ACTIVITY,
    ACTS_MAX,
    HELD_LIMIT,
    HOME_ISSUER,
    KEY_LIMIT,
    LEFT_BEHIND,
    PAUSED,
    RATE,
    RESUMED,
    AdminAct,
    NewAct,
    facts_text,
    node_of,
    rate_text,
    read_facts,
    reason,
)
from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor, Epoch, Subscription
from trellis.engine.records import AuditHead
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_next_head
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ROLE_CODES, US
from trellis.ledgers.sqlite.steps import STEP_QUERIES, promote
from trellis.lifecycles.lifecycle import ROLES

# Administrative acts: recorded in the transaction of their change, read by the projector, marked when published, and
# sealed by the audit chain.


_ACT_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/acts.sql")


def record(tx: Transaction, actor: Actor, act: NewAct) -> str:
    """Record an act unless its id exists. Returns its id."""
    values = {
        "at": tx.now,
        "role": ROLE_CODES[actor.role],
        "actor": tx.names.actor_id(actor.name),
        "event": act.event,
        "subject": act.subject,
        "source": act.source,
        "target": act.target,
        "cause": reason(act.cause),
        "correlation": act.correlation_id,
        "job": act.job_id,
        "facts": facts_text(act.facts),
        "id": act.id,
    }
    tx.appended = True
    added = tx.db.execute(_ACT_QUERIES.add, values).fetchall()
    return added[0][0] if added else (act.id or "")


def put_back(tx: Transaction, actor: Actor, lost: Sequence[AdminAct]) -> None:  # noqa: ARG001 - the acts name their own
    """Restore acts that this ledger lost. Existing acts stay unchanged."""
    for act in lost:
        who = (ROLE_CODES[act.role], tx.names.actor_id(act.actor, act.node or ""))
        about = (act.event, act.subject, act.source, act.target, act.cause, act.correlation_id, act.job_id)
        tx.db.execute(_ACT_QUERIES.put_back, (act.id, rows.microseconds(act.at), *who, *about, facts_text(act.facts)))


def read(
    tx: Transaction, *, after: int = 0, limit: int = ACTS_MAX, unpublished: bool = False, unsealed: bool = False
) -> list[AdminAct]:
    query = _ACT_QUERIES.read_unpublished if unpublished else _ACT_QUERIES.read
    query = _ACT_QUERIES.read_unsealed if unsealed else query
    return [_act(row) for row in tx.db.execute(query, (after, min(limit, ACTS_MAX)))]


def mark_published(tx: Transaction, actor: Actor, published: Sequence[AdminAct]) -> None:  # noqa: ARG001 - not recorded
    tx.db.executemany(_ACT_QUERIES.mark_published, [(act.no,) for act in published])


def _act(row: rows.SqliteRow) -> AdminAct:
    no, id_, at, role, actor, node, event, subject, source, target, cause, correlation, job, facts = row
    return AdminAct(
        no=no,
        id=id_,
        at=rows.moment(at),
        role=ROLES[int(role)],
        actor=actor,
        node=node_of(actor, node),
        event=event,
        subject=subject,
        source=source,
        target=target,
        cause=cause,
        correlation_id=correlation,
        job_id=job,
        facts=read_facts(facts),
    )


def audit_head(tx: Transaction) -> AuditHead | None:
    """The newest block; None if nothing seals this ledger."""
    for number, sha256, place, feed, at in tx.db.execute(_ACT_QUERIES.head).fetchall():
        return AuditHead(number=number, sha256=sha256, position=place, feed=feed, at=rows.moment(at))
    return None


def extend_audit_chain(
    tx: Transaction,
    actor: Actor,  # noqa: ARG001 - not recorded
    head: AuditHead,
    *,
    after: AuditHead | None,
    acts: Sequence[AdminAct] = (),
) -> bool:
    """Replace the expected head and mark the acts of the block. True also if the new head is stored already."""
    check_next_head(head, after)
    stored = _undated(audit_head(tx))
    if stored == _undated(head):
        return True
    if stored != _undated(after):
        return False
    tx.db.execute(_ACT_QUERIES.write_head, (head.number, head.sha256, head.position, head.feed, tx.now))
    tx.db.executemany(_ACT_QUERIES.mark_sealed, [(act.no,) for act in acts])
    return True


def _undated(one: AuditHead | None) -> AuditHead | None:
    return None if one is None else replace(one, at=None)


# Pauses, rate limits, key limits and worker heartbeats. Each change of a setting is one administrative act. Setting a
# value to what it already is records none.


_CONTROL_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/control.sql")


@dataclass(frozen=True, slots=True)
class _TypeControl:
    paused: int = 0
    rate: float | None = None
    burst: int = 1
    held_max: int | None = None


def _control(tx: Transaction, type_: str) -> _TypeControl:
    stored = tx.db.execute(_CONTROL_QUERIES.control_of, (type_,)).fetchall()
    return _TypeControl(*stored[0]) if stored else _TypeControl()


def _note(
    tx: Transaction, actor: Actor, event: str, subject: str, change: tuple[object, object], cause: str | None
) -> None:
    """Record an act if the value changed. `change` is the value before and after."""
    if change[0] != change[1]:
        before, after = (None if one is None else str(one) for one in change)
        record(tx, actor, NewAct(event=event, subject=subject, source=before, target=after, cause=cause))


def pause(tx: Transaction, actor: Actor, type_: str, *, paused: bool, cause: str | None = None) -> None:
    before, after = (ACTIVITY[bool(one)] for one in (_control(tx, type_).paused, paused))
    _note(tx, actor, PAUSED if paused else RESUMED, type_, (before, after), cause)
    tx.db.execute(_CONTROL_QUERIES.pause, (type_, int(paused), tx.names.actor_id(actor.name)))
    tx.woke |= not paused


def limit_rate(
    tx: Transaction, actor: Actor, type_: str, per_second: float | None, burst: int = 1, *, cause: str | None = None
) -> None:
    """Set a token bucket: it starts full with `burst` tokens and refills at `per_second`."""
    if per_second is not None and per_second <= 0:
        raise OptionInvalid(option="per_second", value=per_second, expected="more than 0; pause the type to stop it")
    if burst < 1:
        raise OptionInvalid(option="burst", value=burst, expected="1 or more")
    before = _control(tx, type_)
    change = (rate_text(before.rate, before.burst), rate_text(per_second, burst))
    _note(tx, actor, RATE, type_, change, cause)
    values = {"name": type_, "rate": per_second, "burst": burst, "now": tx.now, "by": tx.names.actor_id(actor.name)}
    tx.db.execute(_CONTROL_QUERIES.limit_rate, values)
    tx.woke = True


def limit_held(tx: Transaction, actor: Actor, type_: str, limit: int | None, *, cause: str | None = None) -> None:
    check_held_limit(limit)
    _note(tx, actor, HELD_LIMIT, type_, (_control(tx, type_).held_max, limit), cause)
    tx.db.execute(_CONTROL_QUERIES.limit_held, (type_, limit, tx.names.actor_id(actor.name)))
    tx.woke = True


def subscribe(
    tx: Transaction, actor: Actor, name: str, *, lease_s: float, reads: bool = True, first: str | None = None
) -> Subscription | None:
    until, by = tx.now + int(lease_s * US), tx.names.actor_id(actor.name)
    values = {"name": name, "actor": by, "now": tx.now, "until": until, "reads": int(reads), "first": first}
    rows = tx.db.execute(_CONTROL_QUERIES.follow, values).fetchall()
    return Subscription(name=name, epoch=Epoch(rows[0][0]), position=rows[0][1]) if rows else None


def ack(tx: Transaction, following: Subscription, position: str | None, *, lease_s: float) -> bool:
    until = tx.now + int(lease_s * US)
    values = {"name": following.name, "epoch": following.epoch, "place": position, "until": until}
    return bool(tx.db.execute(_CONTROL_QUERIES.followed, values).fetchall())


def release_retention(tx: Transaction, actor: Actor, name: str, *, cause: str | None = None) -> bool:
    stored = tx.db.execute(_CONTROL_QUERIES.is_waited_for, (name,)).fetchall()
    if stored and stored[0][0]:
        tx.db.execute(_CONTROL_QUERIES.leave_behind, (name,))
        _note(tx, actor, LEFT_BEHIND, name, ("waited for", "left behind"), cause)
    return bool(stored)


def home_issuer(tx: Transaction) -> str | None:
    stored = tx.db.execute(_CONTROL_QUERIES.home_issuer).fetchall()
    return None if not stored else str(stored[0][0])


def set_home_issuer(
    tx: Transaction, actor: Actor, issuer: str, *, replaces: str | None = None, cause: str | None = None
) -> str:
    require_home_issuer(actor, issuer, replaces)
    before = home_issuer(tx)
    if before not in {None, replaces}:
        return str(before)
    tx.db.execute(_CONTROL_QUERIES.set_home_issuer, (issuer,))
    if before is not None:
        _note(tx, actor, HOME_ISSUER, "issuer", (before, issuer), cause)
    return issuer


def limit_key(tx: Transaction, actor: Actor, key: str, limit: int, *, cause: str | None = None) -> None:
    """Set the limit of a concurrency key.

    A lower limit takes slots back from jobs that are not held; held jobs finish.
    """
    if limit < 0:
        raise OptionInvalid(option="limit", value=limit, expected="0 or more; 0 hands out nothing")
    _note(tx, actor, KEY_LIMIT, key, (tx.names.key_limit(key), limit), cause)
    number = tx.names.set_key_limit(key, limit, actor.name)
    over: int = tx.db.execute(_CONTROL_QUERIES.over_limit, (number,)).fetchall()[0][0]
    for (job,) in tx.db.execute(_CONTROL_QUERIES.ready_of_key, (number, over)).fetchall():
        tx.db.execute(STEP_QUERIES.take_slot_back, (job,))
    promote(tx, [number])


def heartbeat_worker(tx: Transaction, actor: Actor, info: bytes | None) -> None:
    tx.db.execute(_CONTROL_QUERIES.beat, (actor.name, tx.names.actor_id(actor.name), tx.now, info))
