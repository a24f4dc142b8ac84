"""What a lease holder writes besides steps: heartbeats, checkpoints, journal entries, signals. All fenced."""

from collections.abc import Sequence
from typing import LiteralString

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Applied, Lease, LeaseLost, Renewed
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.lifecycles import SIGNAL_TYPES

SIGNALS_MAX = 1_000


class _Sql(NamedQueries, file="trellis.ledgers.sqlite:queries/holder.sql"):
    renew: LiteralString
    note_renewal: LiteralString
    version_held: LiteralString
    put_checkpoint: LiteralString
    journal_entry: LiteralString
    put_journal: LiteralString
    put_signal: LiteralString


def renew(tx: Transaction, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
    """Each lease for its own length from now; one that nobody has revoked is renewed even when its time is over."""
    answers: list[Renewed | LeaseLost] = []
    for lease in leases:
        values = {"now": tx.now, "job": lease.key, "epoch": lease.epoch}
        rows = tx.db.execute(_Sql.renew, values).fetchall()
        answers.append(Renewed(cancel=bool(rows[0][0])) if rows else LeaseLost(lease))
    kept = {lease.key for lease, answer in zip(leases, answers, strict=True) if isinstance(answer, Renewed)}
    tx.db.executemany(_Sql.note_renewal, [{"job": key, "now": tx.now} for key in kept])
    return answers


def save_checkpoint(tx: Transaction, lease: Lease, body: bytes) -> Applied | LeaseLost:
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.execute(_Sql.put_checkpoint, (lease.key, lease.epoch, tx.now, body))
    return Applied(version)


def journal(tx: Transaction, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
    """The first body under a name stays and is the answer."""
    if _version_held(tx, lease) is None:
        return LeaseLost(lease)
    rows = tx.db.execute(_Sql.journal_entry, (lease.key, entry)).fetchall()
    if rows:
        return rows[0][0]
    tx.db.execute(_Sql.put_journal, (lease.key, entry, lease.epoch, tx.now, body))
    return body


def signal(tx: Transaction, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> Applied | LeaseLost:
    if len(signals) > SIGNALS_MAX:
        raise OptionInvalid(option="signals", value=len(signals), expected=f"at most {SIGNALS_MAX} in one call")
    for type_, _ in signals:
        if type_ not in SIGNAL_TYPES:
            raise OptionInvalid(option="signal type", value=type_, expected=f"one of {', '.join(SIGNAL_TYPES)}")
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.executemany(_Sql.put_signal, [(lease.key, type_, tx.now, data) for type_, data in signals])
    return Applied(version)


def _version_held(tx: Transaction, lease: Lease) -> int | None:
    rows = tx.db.execute(_Sql.version_held, (lease.key, lease.epoch)).fetchall()
    return rows[0][0] if rows else None
