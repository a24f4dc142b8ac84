"""Administrative acts: recorded in the transaction of the change that they tell of, read by the projector, marked when published."""

from collections.abc import Sequence
from typing import LiteralString

from trellis.engine.admin_acts import AdminAct, NewAct, facts_text, read_facts, reason
from trellis.engine.jobs import Actor
from trellis.engine.nodes import node_of
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ROLE_CODES
from trellis.lifecycles.lifecycle import ROLES


class _ActQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/acts.sql"):
    add: LiteralString
    put_back: LiteralString
    read: LiteralString
    read_unpublished: LiteralString
    mark_published: LiteralString


def record(tx: Transaction, actor: Actor, act: NewAct) -> str:
    """Write the act down, unless one of its id is there; its id."""
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
    added = tx.db.execute(_ActQueries.add, values).fetchall()
    return added[0][0] if added else (act.id or "")


def put_back(tx: Transaction, lost: Sequence[AdminAct]) -> None:
    """Write acts down that this ledger lost, as they were; those that are there stay."""
    for act in lost:
        who = (ROLE_CODES[act.role], tx.names.actor_id(act.actor, act.node or ""))
        about = (act.event, act.subject, act.source, act.target, act.cause, act.correlation_id, act.job_id)
        tx.db.execute(_ActQueries.put_back, (act.id, rows.microseconds(act.at), *who, *about, facts_text(act.facts)))


def read(tx: Transaction, after: int, limit: int, *, unpublished: bool) -> list[AdminAct]:
    """The next acts after this number."""
    query = _ActQueries.read_unpublished if unpublished else _ActQueries.read
    return [_act(row) for row in tx.db.execute(query, (after, limit))]


def mark_published(tx: Transaction, numbers: Sequence[int]) -> None:
    tx.db.executemany(_ActQueries.mark_published, [(number,) for number in numbers])


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
