"""The newest block of the audit chain, in an SQLite ledger."""

from collections.abc import Sequence
from dataclasses import replace

from trellis.engine.admin_acts import AdminAct
from trellis.engine.jobs import Actor
from trellis.engine.records import AuditHead
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_next_head
from trellis.ledgers.sqlite import rows
from trellis.ledgers.sqlite.lanes import Transaction

_CHAIN_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/audit_chain.sql")


def newest(tx: Transaction) -> AuditHead | None:
    """The newest block; None if nothing seals this ledger."""
    for number, sha256, place, feed, at in tx.db.execute(_CHAIN_QUERIES.head).fetchall():
        return AuditHead(number=number, sha256=sha256, position=place, feed=feed, at=rows.moment(at))
    return None


def extend(
    tx: Transaction,
    actor: Actor,  # noqa: ARG001 - not recorded
    head: AuditHead,
    *,
    after: AuditHead | None,
    acts: Sequence[AdminAct] = (),
) -> bool:
    """Replace the expected head and mark the acts of the block. True also if the new head is stored already."""
    check_next_head(head, after)
    stored = _undated(newest(tx))
    if stored == _undated(head):
        return True
    if stored != _undated(after):
        return False
    tx.db.execute(_CHAIN_QUERIES.write_head, (head.number, head.sha256, head.position, head.feed, tx.now))
    tx.db.executemany(_CHAIN_QUERIES.mark_sealed, [(act.no,) for act in acts])
    return True


def _undated(one: AuditHead | None) -> AuditHead | None:
    return None if one is None else replace(one, at=None)
