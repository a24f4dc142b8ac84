"""What a lease holder writes besides steps: heartbeats, checkpoints, journal entries, signals, all fenced. And others' remarks."""

from collections.abc import Sequence
from typing import LiteralString

from trellis.engine.jobs import REMARKS_MAX, JobId, Lease, LeaseLost, Renewed, StepApplied
from trellis.ledgers.bounds import check_signals
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction


class _HolderQueries(NamedQueries, file="trellis.ledgers.sqlite:queries/holder.sql"):
    renew: LiteralString
    note_renewal: LiteralString
    version_held: LiteralString
    put_checkpoint: LiteralString
    journal_entry: LiteralString
    put_journal: LiteralString
    put_signal: LiteralString
    put_remark: LiteralString


def renew(tx: Transaction, leases: Sequence[Lease]) -> list[Renewed | LeaseLost]:
    """Each lease for its own length from now; one that nobody has revoked is renewed even when its time is over."""
    answers: list[Renewed | LeaseLost] = []
    for lease in leases:
        values = {"now": tx.now, "job": lease.key, "epoch": lease.epoch}
        rows = tx.db.execute(_HolderQueries.renew, values).fetchall()
        answers.append(Renewed(cancel=bool(rows[0][0])) if rows else LeaseLost(lease))
    kept = {lease.key for lease, answer in zip(leases, answers, strict=True) if isinstance(answer, Renewed)}
    tx.db.executemany(_HolderQueries.note_renewal, [{"job": key, "now": tx.now} for key in kept])
    return answers


def save_checkpoint(tx: Transaction, lease: Lease, body: bytes) -> StepApplied | LeaseLost:
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.execute(_HolderQueries.put_checkpoint, (lease.key, lease.epoch, tx.now, body))
    return StepApplied(version)


def journal(tx: Transaction, lease: Lease, entry: str, body: bytes) -> bytes | LeaseLost:
    """The first body under a name stays and is the answer."""
    if _version_held(tx, lease) is None:
        return LeaseLost(lease)
    rows = tx.db.execute(_HolderQueries.journal_entry, (lease.key, entry)).fetchall()
    if rows:
        return rows[0][0]
    tx.db.execute(_HolderQueries.put_journal, (lease.key, entry, lease.epoch, tx.now, body))
    return body


def signal(tx: Transaction, lease: Lease, signals: Sequence[tuple[str, bytes | None]]) -> StepApplied | LeaseLost:
    check_signals(signals)
    version = _version_held(tx, lease)
    if version is None:
        return LeaseLost(lease)
    tx.db.executemany(_HolderQueries.put_signal, [(lease.key, type_, tx.now, data) for type_, data in signals])
    return StepApplied(version)


def annotate(tx: Transaction, job_id: JobId, type_: str, body: bytes) -> bool:
    values = {"type": type_, "now": tx.now, "data": body, "job_id": job_id, "most": REMARKS_MAX}
    return bool(tx.db.execute(_HolderQueries.put_remark, values).fetchall())


def _version_held(tx: Transaction, lease: Lease) -> int | None:
    rows = tx.db.execute(_HolderQueries.version_held, (lease.key, lease.epoch)).fetchall()
    return rows[0][0] if rows else None
