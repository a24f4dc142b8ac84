"""Gauges that are read from the ledger: queues, workers, alerts, dead letters, the sweep, and followers (OBS-5)."""

from collections.abc import Iterable
from typing import TypeVar

from trellis.engine.ledger import Ledger
from trellis.engine.metrics import (
    AGE,
    ALERTS,
    BLOCKED,
    DLQ_COUNT,
    FEED_LAG,
    HELD,
    LABEL_SETS_MAX,
    LEDGER_CALLS,
    OTHER,
    PAUSED,
    READY,
    SCHEDULED,
    SWEEP_AGE,
    WORKERS,
    Sample,
    type_label,
)
from trellis.engine.records import DeadLetterCount, QueueDepth
from trellis.operations.alerts import open_counts
from trellis.operations.explain import is_alive

CountT = TypeVar("CountT", QueueDepth, DeadLetterCount)


async def ledger_gauges(ledger: Ledger) -> list[Sample]:
    """The gauges of everything that the ledger knows. Its cost does not depend on how many jobs have ended."""
    now = await ledger.now()
    samples: list[Sample] = [Sample(WORKERS, (), sum(is_alive(worker, now) for worker in await ledger.workers()))]
    for labels, queues in _by_labels(await ledger.queues()).items():
        samples += [
            Sample(READY, labels, sum(queue.ready for queue in queues)),
            Sample(SCHEDULED, labels, sum(queue.scheduled for queue in queues)),
            Sample(BLOCKED, labels, sum(queue.blocked for queue in queues)),
            Sample(HELD, labels, sum(queue.held for queue in queues)),
            Sample(AGE, labels, max(queue.oldest_ready_s or 0.0 for queue in queues)),
            Sample(PAUSED, labels, int(any(queue.paused for queue in queues))),
        ]
    figures = await ledger.figures()
    samples += [
        Sample(DLQ_COUNT, labels, sum(one.count for one in counts))
        for labels, counts in _by_labels(figures.dead_letters).items()
    ]
    if figures.swept_at is not None:
        samples.append(Sample(SWEEP_AGE, (), max(0.0, (now - figures.swept_at).total_seconds())))
    samples += [Sample(LEDGER_CALLS, (one.name,), one.calls) for one in ledger.connections()]
    for follower in await ledger.followers():
        if not follower.waits:
            continue  # an operator has released it: nobody waits for it to come back
        behind = 0.0 if follower.unread_since is None else (now - follower.unread_since).total_seconds()
        samples.append(Sample(FEED_LAG, (follower.name,), max(0.0, behind)))
    opened = open_counts(await ledger.alerts(only_open=True))
    return samples + [Sample(ALERTS, (name,), count) for name, count in opened.items()]


def _by_labels(counted: Iterable[CountT]) -> dict[tuple[str, ...], list[CountT]]:
    """What was counted by job type, under the labels `type` and `lifecycle`.

    Users choose job types, so there are at most LABEL_SETS_MAX labels. Further types of a lifecycle are `OTHER` together.
    """
    found: dict[tuple[str, ...], list[CountT]] = {}
    for one in counted:
        labels = (type_label(one.type, one.lifecycle), one.lifecycle)
        if labels not in found and len(found) >= LABEL_SETS_MAX:
            labels = (OTHER, one.lifecycle)
        found.setdefault(labels, []).append(one)
    return found
