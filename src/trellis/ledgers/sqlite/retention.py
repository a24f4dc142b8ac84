"""Retention: removes ended jobs, old results, signals and claim records, one small batch at a time."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from trellis.engine.admin_acts import LEDGER_SUBJECT, RETAINED, NewAct
from trellis.engine.jobs import Actor
from trellis.engine.records import PlannedRemoval, RetentionOptions, RetentionReport, StateAge
from trellis.engine.request_keys import KEY_S_MIN
from trellis.engine.subscription import PROJECTOR
from trellis.ledgers.queries import NamedQueries
from trellis.ledgers.refusals import check_retention
from trellis.ledgers.retention_plan import PlannedGroup, planned_removals, stored_ages
from trellis.ledgers.sqlite import request_keys, rows
from trellis.ledgers.sqlite.control import audit_head, record
from trellis.ledgers.sqlite.lanes import Transaction
from trellis.ledgers.sqlite.plan import ENDED_WELL, US
from trellis.ledgers.sqlite.steps import rows_changed
from trellis.lifecycles import BY_CODE

KEY_US_MIN = int(KEY_S_MIN * US)
"""An idempotency key is kept at least this long, whatever the retention of its job."""
CLAIM_S = 24 * 3600.0
WORKER_S = 7 * 24 * 3600.0
LOOK_AGAIN_US = 3600 * US
"""When to check again a skipped job that a subscriber has not read."""
LOOK_AT_KEPT_US = 24 * 3600 * US
"""When to check again at the latest a job that is not over its time: the settings may have changed."""


_RETENTION_QUERIES = NamedQueries("trellis.ledgers.sqlite:queries/retain.sql")


@dataclass(frozen=True, slots=True)
class _EndedJob:
    """An ended job that the walk met: its last event, and what may hold it back."""

    job: int
    seq: int
    at: int
    version: int
    code: int
    job_id: str
    has_letter: bool
    keys: int
    key_at: int | None


@dataclass(slots=True)
class _PurgeReport:
    """What a pass removed, and whether more remains."""

    jobs: int = 0
    events: int = 0
    keys: int = 0
    more: bool = False
    unread: int = 0
    removed: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    """Ids of the removed jobs, by lifecycle and state."""

    def purge(self, tx: Transaction, one: _EndedJob, *, unread: bool) -> None:
        tx.db.execute(_RETENTION_QUERIES.purge, (one.job,))
        self.removed.setdefault(one.code, []).append(one.job_id)
        self.unread += unread
        self.jobs, self.events, self.keys = self.jobs + 1, self.events + one.version, self.keys + one.keys


@dataclass(frozen=True, slots=True)
class _RetentionHorizon:
    """What is over its time, how far subscribers have read, and how far the audit chain reaches."""

    read_up_to: int | None
    sealed_up_to: int | None
    """None if the audit chain does not seal this ledger."""
    now: int
    unread: int
    ages: Mapping[int, StateAge]

    @classmethod
    def at(cls, tx: Transaction, options: RetentionOptions) -> "_RetentionHorizon":
        read_up_to: int | None = tx.db.execute(_RETENTION_QUERIES.read_up_to).fetchall()[0][0]
        sealed_up_to: int | None = None
        if tx.db.execute(_RETENTION_QUERIES.is_sealed, (PROJECTOR,)).fetchall()[0][0]:
            head = audit_head(tx)
            sealed_up_to = int(head.position or 0) if head is not None else 0
        return cls(read_up_to, sealed_up_to, tx.now, int(options.unread_s * US), stored_ages(options))

    @property
    def ended_before(self) -> int | None:
        """No job that ended later is over its time. None if every job is kept."""
        kept = [age.keep_s for age in self.ages.values() if age.keep_s is not None]
        return self.now - int(min(kept) * US) if kept else None

    def over_at(self, one: _EndedJob) -> int | None:
        """When the time of a job is over; None if it is kept for ever."""
        age = self.ages[one.code]
        if age.keep_s is None or (one.has_letter and not age.is_set):
            return None
        return one.at + int(age.keep_s * US)

    def is_unread(self, seq: int) -> bool:
        return self.read_up_to is not None and seq > self.read_up_to

    def is_unsealed(self, seq: int) -> bool:
        return self.sealed_up_to is not None and seq > self.sealed_up_to

    def holds(self, one: _EndedJob, over_at: int) -> bool:
        return self.is_unsealed(one.seq) or (self.is_unread(one.seq) and self.now < over_at + self.unread)


def retain(tx: Transaction, options: RetentionOptions, by: Actor) -> RetentionReport:
    """Remove at most one batch of each kind."""
    if options.from_the_start:
        tx.db.execute(_RETENTION_QUERIES.forget_position)
        tx.db.execute(_RETENTION_QUERIES.check_kept_now)
    horizon = _RetentionHorizon.at(tx, options)
    purged = _purge_ended(tx, options, horizon)
    _purge_kept(tx, options, horizon, purged)
    tx.db.execute(_RETENTION_QUERIES.drop_results, (tx.now, options.batch))
    results = rows_changed(tx)
    before = tx.now - int(options.signals_s * US)
    tx.db.execute(_RETENTION_QUERIES.drop_signals, {"before": before, "limit": options.batch})
    signals = rows_changed(tx)
    tx.db.execute(_RETENTION_QUERIES.drop_claims, (tx.now - int(CLAIM_S * US), options.batch))
    claims = rows_changed(tx)
    acts = _drop_acts(tx, options, horizon, jobs_removed=purged.jobs > 0)
    tx.db.execute(_RETENTION_QUERIES.drop_workers, (tx.now - int(WORKER_S * US),))
    changes = request_keys.drop_old(tx, options.batch)
    full = options.batch in {results, signals, claims, changes}
    more = _prune_keys(tx, options.batch) or purged.more or full
    if purged.jobs or acts:
        _record(tx, options, by, purged, acts)
    return RetentionReport(
        jobs=purged.jobs,
        events=purged.events,
        results=results,
        signals=signals,
        keys=purged.keys + changes,
        more=more,
        unread=purged.unread,
        acts=acts,
    )


def _drop_acts(tx: Transaction, options: RetentionOptions, horizon: _RetentionHorizon, *, jobs_removed: bool) -> int:
    """Remove old acts. Returns how many.

    Every removal is recorded as an act. So one old act of retention stays until something else is removed: otherwise
    each record of a removal would lead to another one.
    """
    if options.ended_s is None:
        return 0
    before = tx.now - int(options.ended_s * US)
    values = {
        "before": before,
        "unread_before": before - int(options.unread_s * US),
        "is_sealed": horizon.sealed_up_to is not None,
        "limit": options.batch,
    }
    old = tx.db.execute(_RETENTION_QUERIES.old_acts, values).fetchall()
    if not jobs_removed and [event for _, event in old] == [RETAINED]:
        return 0
    tx.db.executemany(_RETENTION_QUERIES.drop_act, [(number,) for number, _ in old])
    return len(old)


def _record(tx: Transaction, options: RetentionOptions, by: Actor, purged: _PurgeReport, acts: int) -> None:
    """Record the act: how many jobs of each lifecycle and state were removed, which, and up to which time."""
    ages, removed, cutoffs = stored_ages(options), dict[str, dict[str, int]](), dict[str, dict[str, str]]()
    for code, jobs in sorted(purged.removed.items()):
        lifecycle = BY_CODE[code // 16]
        state, keep_s = lifecycle.state_of(code % 16).name, ages[code].keep_s
        removed.setdefault(lifecycle.name, {})[state] = len(jobs)
        cutoffs.setdefault(lifecycle.name, {})[state] = _time(tx.now - int((keep_s or 0) * US))
    acts_before = None if options.ended_s is None or not acts else _time(tx.now - int(options.ended_s * US))
    facts = {
        "removed": removed,
        "ended_before": cutoffs,
        "jobs": [job_id for jobs in purged.removed.values() for job_id in jobs],
        "events": purged.events,
        "acts": acts,
        "acts_before": acts_before,
    }
    record(tx, by, NewAct(event=RETAINED, subject=LEDGER_SUBJECT, cause=options.cause, facts=facts))


def _time(at: int) -> str:
    return rows.moment(at).isoformat(timespec="microseconds").replace("+00:00", "Z")


def plan(tx: Transaction, options: RetentionOptions) -> list[PlannedRemoval]:
    """What a pass would find, for every state that has ended jobs."""
    check_retention(options)
    horizon = _RetentionHorizon.at(tx, options)
    values = {
        "now": tx.now,
        "ages": json.dumps(
            [
                (code, None if age.keep_s is None else int(age.keep_s * US), int(age.is_set))
                for code, age in horizon.ages.items()
            ]
        ),
        "keys_from": tx.now - KEY_US_MIN,
        "sealed": horizon.sealed_up_to,
        "read": horizon.read_up_to,
        "unread": horizon.unread,
    }
    groups = [PlannedGroup(*row) for row in tx.db.execute(_RETENTION_QUERIES.plan, values).fetchall()]
    keep_s = {code: age.keep_s for code, age in horizon.ages.items()}
    return planned_removals(groups, keep_s, rows.moment)


def _prune_keys(tx: Transaction, limit: int) -> bool:
    """Remove unused concurrency keys, some each time, in rotation. True when another pass would find more."""
    stored = tx.db.execute(_RETENTION_QUERIES.keys_pruned_up_to).fetchall()
    after: int = stored[0][0] if stored else 0
    seen = tx.db.execute(_RETENTION_QUERIES.next_keys, (after, limit)).fetchall()
    if not seen and not after:
        return False
    if seen:
        tx.db.execute(_RETENTION_QUERIES.drop_unused_keys, (after, seen[-1][0], tx.now))
    dropped = rows_changed(tx) if seen else 0
    last = seen[-1][0] if len(seen) == limit else 0
    if last != after:
        tx.db.execute(_RETENTION_QUERIES.write_keys_pruned, (last,))
    return dropped > 0 and len(seen) == limit


def _purge_ended(tx: Transaction, options: RetentionOptions, horizon: _RetentionHorizon) -> _PurgeReport:
    """Walk the history from where the last pass stopped. Stop at the first event that is too recent or still unread.

    A job that is not over its time, or whose idempotency key must still answer, is skipped and checked again later.
    """
    stored = tx.db.execute(_RETENTION_QUERIES.position).fetchall()
    position: int = stored[0][0] if stored else 0
    done, ended_before = _PurgeReport(), horizon.ended_before
    if ended_before is None:
        return done
    rows_ = tx.db.execute(_RETENTION_QUERIES.next_events, (position, options.batch)).fetchall()
    for seq, at, job, version, code, job_id, has_letter, key_count, key_at in rows_:
        if at > ended_before or horizon.is_unsealed(seq):
            break
        if job is not None:
            one = _EndedJob(job, seq, at, version, code, job_id, bool(has_letter), key_count, key_at)
            over_at = horizon.over_at(one)
            if over_at is not None and over_at <= tx.now and horizon.holds(one, over_at):
                break
            _purge_or_keep(tx, one, horizon, done)
        elif horizon.is_unread(seq) and at > ended_before - horizon.unread:
            break
        position = seq
    else:
        done.more = len(rows_) == options.batch
    tx.db.execute(_RETENTION_QUERIES.write_position, (position,))
    return done


def _purge_or_keep(tx: Transaction, one: _EndedJob, horizon: _RetentionHorizon, done: _PurgeReport) -> None:
    over_at = horizon.over_at(one)
    if over_at is None or over_at > tx.now:
        # A setting may change meanwhile, so the job is checked again before its time is over.
        again = tx.now + LOOK_AT_KEPT_US
        tx.db.execute(_RETENTION_QUERIES.keep, (one.job, again if over_at is None else min(over_at, again)))
    elif one.key_at is not None and one.key_at > tx.now - KEY_US_MIN:
        tx.db.execute(_RETENTION_QUERIES.keep, (one.job, one.key_at + KEY_US_MIN))
    elif horizon.holds(one, over_at):
        tx.db.execute(_RETENTION_QUERIES.keep, (one.job, tx.now + LOOK_AGAIN_US))
    else:
        done.purge(tx, one, unread=horizon.is_unread(one.seq))


def _purge_kept(tx: Transaction, options: RetentionOptions, horizon: _RetentionHorizon, done: _PurgeReport) -> None:
    """Remove the jobs that the walk skipped and whose time is over now.

    A requeued one is met by the walk again after it has ended.
    """
    kept = tx.db.execute(_RETENTION_QUERIES.kept, (tx.now, options.batch)).fetchall()
    for job, place, seq, at, version, code, job_id, has_letter, key_count, key_at in kept:
        if place < ENDED_WELL:
            tx.db.execute(_RETENTION_QUERIES.forget_kept, (job,))
        else:
            one = _EndedJob(job, seq, at, version, code, job_id, bool(has_letter), key_count, key_at)
            _purge_or_keep(tx, one, horizon, done)
    done.more = done.more or len(kept) == options.batch
