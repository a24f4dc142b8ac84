"""Retention: one small batch of ended work, old results, signals and claim records at a time."""

from typing import LiteralString

from trellis.engine.records import RetentionOptions, RetentionReport
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import US
from trellis.ledgers.sqlite.steps import changed

KEY_S_MIN = 24 * 3600.0
"""An idempotency key answers at least this long, whatever the retention of its job."""
CLAIM_S = 24 * 3600.0
WORKER_S = 7 * 24 * 3600.0


class _Sql(NamedQueries, file="trellis.ledgers.sqlite:queries/retain.sql"):
    position: LiteralString
    write_position: LiteralString
    next_events: LiteralString
    purge: LiteralString
    drop_results: LiteralString
    drop_signals: LiteralString
    keys_pruned_up_to: LiteralString
    write_keys_pruned: LiteralString
    next_keys: LiteralString
    drop_unused_keys: LiteralString
    drop_claims: LiteralString
    drop_workers: LiteralString


def retain(tx: Transaction, options: RetentionOptions) -> RetentionReport:
    """Remove at most a batch of each kind."""
    jobs, events, keys, more = _purge_ended(tx, options)
    tx.db.execute(_Sql.drop_results, (tx.now, options.batch))
    results = changed(tx)
    before = tx.now - int(options.signals_s * US)
    tx.db.execute(_Sql.drop_signals, {"before": before, "limit": options.batch})
    signals = changed(tx)
    tx.db.execute(_Sql.drop_claims, (tx.now - int(CLAIM_S * US), options.batch))
    claims = changed(tx)
    tx.db.execute(_Sql.drop_workers, (tx.now - int(WORKER_S * US),))
    full = options.batch in {results, signals, claims}
    more = _prune_keys(tx, options.batch) or more or full
    return RetentionReport(jobs=jobs, events=events, results=results, signals=signals, keys=keys, more=more)


def _prune_keys(tx: Transaction, limit: int) -> bool:
    """Remove concurrency keys that no job refers to any more: some each time, going round. True when it pays to go on."""
    stored = tx.db.execute(_Sql.keys_pruned_up_to).fetchall()
    after: int = stored[0][0] if stored else 0
    seen = tx.db.execute(_Sql.next_keys, (after, limit)).fetchall()
    if not seen and not after:
        return False
    if seen:
        tx.db.execute(_Sql.drop_unused_keys, (after, seen[-1][0]))
    dropped = changed(tx) if seen else 0
    last = seen[-1][0] if len(seen) == limit else 0
    if last != after:
        tx.db.execute(_Sql.write_keys_pruned, (last,))
    return dropped > 0 and len(seen) == limit


def _purge_ended(tx: Transaction, options: RetentionOptions) -> tuple[int, int, int, bool]:
    """Walk the history from where the last pass stopped; stop where the first event is too young."""
    stored = tx.db.execute(_Sql.position).fetchall()
    position: int = stored[0][0] if stored else 0
    ended_before = tx.now - int(options.ended_s * US)
    key_before = tx.now - int(KEY_S_MIN * US)
    jobs = events = keys = 0
    rows = tx.db.execute(_Sql.next_events, (position, options.batch)).fetchall()
    for seq, at, job, version, key_count, key_at in rows:
        kept_by_key = job is not None and key_at is not None and key_at > key_before
        if at > ended_before or kept_by_key:
            more = False
            break
        if job is not None:
            tx.db.execute(_Sql.purge, (job,))
            jobs, events, keys = jobs + 1, events + version, keys + key_count
        position = seq
    else:
        more = len(rows) == options.batch
    tx.db.execute(_Sql.write_position, (position,))
    return jobs, events, keys, more
