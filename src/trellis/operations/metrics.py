"""Gauges that are read from the ledger: queues, workers, alerts, dead letters, the sweep, and followers (OBS-5)."""

from trellis.engine.ledger import Ledger
from trellis.engine.metrics import (
    AGE,
    ALERTS,
    BLOCKED,
    DLQ_COUNT,
    FEED_LAG,
    HELD,
    LEDGER_CALLS,
    PAUSED,
    READY,
    SCHEDULED,
    SWEEP_AGE,
    WORKERS,
    Sample,
    type_label,
)
from trellis.engine.records import QueueDepth
from trellis.operations.alerts import open_counts
from trellis.operations.explain import is_alive


async def ledger_gauges(ledger: Ledger) -> list[Sample]:
    """The gauges of everything that the ledger knows. Its cost does not depend on how many jobs have ended."""
    now = await ledger.now()
    samples: list[Sample] = [Sample(WORKERS, (), sum(is_alive(worker, now) for worker in await ledger.workers()))]
    by_labels: dict[tuple[str, ...], list[QueueDepth]] = {}
    for queue in await ledger.queues():
        by_labels.setdefault((type_label(queue.type, queue.lifecycle), queue.lifecycle), []).append(queue)
    for labels, queues in by_labels.items():
        samples += [
            Sample(READY, labels, sum(queue.ready for queue in queues)),
            Sample(SCHEDULED, labels, sum(queue.scheduled for queue in queues)),
            Sample(BLOCKED, labels, sum(queue.blocked for queue in queues)),
            Sample(HELD, labels, sum(queue.held for queue in queues)),
            Sample(AGE, labels, max(queue.oldest_ready_s or 0.0 for queue in queues)),
            Sample(PAUSED, labels, int(any(queue.paused for queue in queues))),
        ]
    figures = await ledger.figures()
    samples += [Sample(DLQ_COUNT, (one.type, one.lifecycle), one.count) for one in figures.dead_letters]
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
