"""Retention: removes ended jobs, old results, signals and claim records, one small batch at a time."""

from dataclasses import dataclass

from trellis.engine.records import RetentionOptions, RetentionReport
from trellis.engine.request_keys import KEY_S_MIN
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.sqlite import request_keys
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ENDED_WELL, US
from trellis.ledgers.sqlite.steps import rows_changed

KEY_US_MIN = int(KEY_S_MIN * US)
"""An idempotency key is kept at least this long, whatever the retention of its job."""
CLAIM_S = 24 * 3600.0
WORKER_S = 7 * 24 * 3600.0
LOOK_AGAIN_US = 3600 * US
"""When to check again a skipped job that a subscriber has not read."""


_RETENTION_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/retain.sql")


@dataclass(slots=True)
class _PurgeReport:
    """What a pass removed, and whether more remains."""

    jobs: int = 0
    events: int = 0
    keys: int = 0
    more: bool = False
    unread: int = 0

    def purge(self, tx: Transaction, job: int, events: int, keys: int, *, unread: bool) -> None:
        tx.db.execute(_RETENTION_QUERIES.purge, (job,))
        self.unread += unread
        self.jobs, self.events, self.keys = self.jobs + 1, self.events + events, self.keys + keys


@dataclass(frozen=True, slots=True)
class _RetentionHorizon:
    """How far all subscribers that retention waits for have read, and when unread events are removed anyway."""

    read_up_to: int | None
    unread_before: int

    @classmethod
    def now(cls, tx: Transaction, options: RetentionOptions) -> "_RetentionHorizon":
        read_up_to: int | None = tx.db.execute(_RETENTION_QUERIES.read_up_to).fetchall()[0][0]
        return cls(read_up_to, tx.now - int((options.ended_s + options.unread_s) * US))

    def is_unread(self, seq: int) -> bool:
        return self.read_up_to is not None and seq > self.read_up_to

    def holds(self, seq: int, at: int) -> bool:
        return self.is_unread(seq) and at > self.unread_before


def retain(tx: Transaction, options: RetentionOptions) -> RetentionReport:
    """Remove at most one batch of each kind."""
    horizon = _RetentionHorizon.now(tx, options)
    purged = _purge_ended(tx, options, horizon)
    _purge_kept(tx, options, horizon, purged)
    tx.db.execute(_RETENTION_QUERIES.drop_results, (tx.now, options.batch))
    results = rows_changed(tx)
    before = tx.now - int(options.signals_s * US)
    tx.db.execute(_RETENTION_QUERIES.drop_signals, {"before": before, "limit": options.batch})
    signals = rows_changed(tx)
    tx.db.execute(_RETENTION_QUERIES.drop_claims, (tx.now - int(CLAIM_S * US), options.batch))
    claims = rows_changed(tx)
    ended_before = tx.now - int(options.ended_s * US)
    of_acts = {"before": ended_before, "unread_before": horizon.unread_before, "limit": options.batch}
    tx.db.execute(_RETENTION_QUERIES.drop_acts, of_acts)
    tx.db.execute(_RETENTION_QUERIES.drop_workers, (tx.now - int(WORKER_S * US),))
    changes = request_keys.drop_old(tx, options.batch)
    full = options.batch in {results, signals, claims, changes}
    more = _prune_keys(tx, options.batch) or purged.more or full
    return RetentionReport(
        jobs=purged.jobs,
        events=purged.events,
        results=results,
        signals=signals,
        keys=purged.keys + changes,
        more=more,
        unread=purged.unread,
    )


def _prune_keys(tx: Transaction, limit: int) -> bool:
    """Remove unused concurrency keys, some each time, in rotation. True when another pass would find more."""
    stored = tx.db.execute(_RETENTION_QUERIES.keys_pruned_up_to).fetchall()
    after: int = stored[0][0] if stored else 0
    seen = tx.db.execute(_RETENTION_QUERIES.next_keys, (after, limit)).fetchall()
    if not seen and not after:
        return False
    if seen:
        tx.db.execute(_RETENTION_QUERIES.drop_unused_keys, (after, seen[-1][0]))
    dropped = rows_changed(tx) if seen else 0
    last = seen[-1][0] if len(seen) == limit else 0
    if last != after:
        tx.db.execute(_RETENTION_QUERIES.write_keys_pruned, (last,))
    return dropped > 0 and len(seen) == limit


def _purge_ended(tx: Transaction, options: RetentionOptions, horizon: _RetentionHorizon) -> _PurgeReport:
    """Walk the history from where the last pass stopped. Stop at the first event that is too recent or still unread."""
    stored = tx.db.execute(_RETENTION_QUERIES.position).fetchall()
    position: int = stored[0][0] if stored else 0
    ended_before = tx.now - int(options.ended_s * US)
    done = _PurgeReport()
    rows = tx.db.execute(_RETENTION_QUERIES.next_events, (position, options.batch)).fetchall()
    for seq, at, job, version, key_count, key_at in rows:
        if at > ended_before or horizon.holds(seq, at):
            break
        if job is not None and _answers(tx, key_at):
            tx.db.execute(_RETENTION_QUERIES.keep, (job, key_at + KEY_US_MIN))
        elif job is not None:
            done.purge(tx, job, version, key_count, unread=horizon.is_unread(seq))
        position = seq
    else:
        done.more = len(rows) == options.batch
    tx.db.execute(_RETENTION_QUERIES.write_position, (position,))
    return done


def _purge_kept(tx: Transaction, options: RetentionOptions, horizon: _RetentionHorizon, done: _PurgeReport) -> None:
    """Remove the jobs that the walk skipped because of their idempotency keys.

    A requeued one is met by the walk again after it has ended.
    """
    rows = tx.db.execute(_RETENTION_QUERIES.kept, (tx.now, options.batch)).fetchall()
    for job, place, seq, at, version, key_count, key_at in rows:
        over = at + int(options.ended_s * US)
        if place < ENDED_WELL:
            tx.db.execute(_RETENTION_QUERIES.forget_kept, (job,))
        elif over > tx.now or _answers(tx, key_at):
            tx.db.execute(_RETENTION_QUERIES.keep, (job, max(over, (key_at or 0) + KEY_US_MIN)))
        elif horizon.holds(seq, at):
            tx.db.execute(_RETENTION_QUERIES.keep, (job, tx.now + LOOK_AGAIN_US))
        else:
            done.purge(tx, job, version, key_count, unread=horizon.is_unread(seq))
    done.more = done.more or len(rows) == options.batch


def _answers(tx: Transaction, key_at: int | None) -> bool:
    return key_at is not None and key_at > tx.now - KEY_US_MIN
