"""First checks of an instance: what the environment and the ledger's own numbers say is wrong, with the way out."""

from collections.abc import Sequence
from datetime import datetime

from trellis.engine.records import Finding, QueueDepth, Severity, WorkerSeen
from trellis.operations.explain import WORKER_SILENT_S, counted, duration, is_alive, served_types

PYTHON_NEEDED = (3, 11)
READY_S_WARN = 60.0
"""A job that is ready for so long while workers serve its type says that there are too few of them."""


def python_finding(version: tuple[int, int, int]) -> Finding:
    """Whether this interpreter is new enough."""
    text = ".".join(map(str, version))
    if version[:2] >= PYTHON_NEEDED:
        return Finding(check="python", severity=Severity.OK, detail=f"Python {text}")
    needed = ".".join(map(str, PYTHON_NEEDED))
    return Finding(
        check="python",
        severity=Severity.ERROR,
        detail=f"Python {text} is older than {needed}",
        remedy=f"install Python {needed} or newer",
    )


def error_finding(check: str, detail: str, remedy: str) -> Finding:
    """Something that could not even be looked at."""
    return Finding(check=check, severity=Severity.ERROR, detail=detail, remedy=remedy)


def work_findings(queues: Sequence[QueueDepth], workers: Sequence[WorkerSeen], now: datetime) -> list[Finding]:
    """Whether somebody serves what waits."""
    alive = [worker for worker in workers if is_alive(worker, now)]
    served = {type_ for worker in alive for type_ in served_types(worker)}
    found = [_workers(alive)]
    found += [_unserved(queue) for queue in queues if queue.ready and not queue.paused and queue.type not in served]
    found += [_paused(queue) for queue in queues if queue.paused]
    found += [_slow(queue) for queue in queues if queue.type in served and (queue.oldest_ready_s or 0) > READY_S_WARN]
    return found


def letters_finding(count: int, limit: int) -> Finding:
    """Whether dead letters wait for a decision; `limit` is how far they were counted."""
    if not count:
        return Finding(check="dead letters", severity=Severity.OK, detail="none")
    many = f"{limit} or more" if count >= limit else str(count)
    return Finding(
        check="dead letters",
        severity=Severity.WARNING,
        detail=f"{many} {'waits' if count == 1 else 'wait'} for a decision",
        remedy="look with `trellis dlq`, then `trellis dlq requeue`",
    )


def aside_finding(jobs: Sequence[str], limit: int) -> Finding:
    """Whether the projector has set jobs aside; `limit` is how far they were counted."""
    if not jobs:
        return Finding(check="published", severity=Severity.OK, detail="no job is set aside")
    many = f"{limit} or more jobs" if len(jobs) >= limit else counted(len(jobs), "job")
    return Finding(
        check="published",
        severity=Severity.WARNING,
        detail=f"{many} not published, because the object store holds something else: {', '.join(jobs[:3])}",
        remedy="look at alerts/projector in the object store, then `trellis rebuild --from ledger`",
    )


def has_errors(findings: Sequence[Finding]) -> bool:
    """Whether anything is wrong rather than odd."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def _workers(alive: Sequence[WorkerSeen]) -> Finding:
    if not alive:
        return Finding(
            check="workers",
            severity=Severity.WARNING,
            detail=f"none seen in the last {WORKER_SILENT_S:.0f} s",
            remedy="start one: trellis worker MODULE:APP",
        )
    held = sum(worker.held for worker in alive)
    return Finding(check="workers", severity=Severity.OK, detail=f"{len(alive)} alive, {counted(held, 'job')} held")


def _unserved(queue: QueueDepth) -> Finding:
    return Finding(
        check=f"type {queue.type}",
        severity=Severity.WARNING,
        detail=f"{_ready(queue)} ready and no living worker serves the type",
        remedy="start a worker whose application has this type",
    )


def _ready(queue: QueueDepth) -> str:
    return f"{counted(queue.ready, 'job')} {'is' if queue.ready == 1 else 'are'}"


def _paused(queue: QueueDepth) -> Finding:
    return Finding(
        check=f"type {queue.type}",
        severity=Severity.WARNING,
        detail=f"paused, {counted(queue.ready, 'job')} ready",
        remedy=f"trellis queues resume {queue.type}",
    )


def _slow(queue: QueueDepth) -> Finding:
    return Finding(
        check=f"type {queue.type}",
        severity=Severity.WARNING,
        detail=f"the oldest ready job has waited {duration(queue.oldest_ready_s or 0)}",
        remedy="start more workers or raise their concurrency",
    )
