"""Health checks of an instance: problems in the environment and in the ledger's figures, with remedies."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from trellis.engine.alerts import REPORT_TYPE_PREFIX, WEBHOOK
from trellis.engine.records import Finding, FindingSeverity, Job, JobPlace, QueueDepth, SubscriberRecord, WorkerRecord
from trellis.engine.service import RETENTION_DEFAULT
from trellis.engine.text import counted, duration
from trellis.lifecycles import LIFECYCLES, Role, Trigger
from trellis.lifecycles.queue_job import QUEUE_JOB
from trellis.lifecycles.run import RUN
from trellis.operations.explain import (
    SERVICE_SLOW_S,
    WORKER_SILENT_S,
    WorkerPresence,
    is_alive,
    types_taken,
    waits_for,
    worker_info,
    worker_presence,
)

PYTHON_NEEDED = (3, 11)
READY_S_WARN = 60.0
"""If a job is ready for longer than this although workers serve its type, there are too few workers."""
FOLLOWER_BEHIND_S = 600.0
"""A follower with unread events older than this is stuck, or no longer runs."""
CLOCK_SKEW_S_MAX = 5.0
GIB = 1024**3
DISK_BYTES_WARN, DISK_BYTES_ERROR = GIB, GIB // 10
QUEUE_STATES = ("PENDING", "QUEUED", "RETRY_BACKOFF", "FAILED", "DEAD")
"""States of queue jobs that wait or have failed."""
NAMES_SHOWN_MAX = 3
STORE_REMEDY = "let this user write there, or correct TRELLIS_OBJECTS and its credentials: until then runs wait"
STORE_AWAY_REMEDY = (
    "see that the store runs, and that TRELLIS_OBJECTS has its address: until then runs wait, and none is lost"
)
_IN_TROUBLE = ("FAILED", "DEAD")


def python_finding(version: tuple[int, int, int]) -> Finding:
    text = ".".join(map(str, version))
    if version[:2] >= PYTHON_NEEDED:
        return ok_finding("python", f"Python {text}")
    needed = ".".join(map(str, PYTHON_NEEDED))
    return error_finding("python", f"Python {text} is older than {needed}", f"install Python {needed} or newer")


def ok_finding(check: str, detail: str) -> Finding:
    return Finding(check=check, severity=FindingSeverity.OK, detail=detail)


def warning_finding(check: str, *, detail: str, remedy: str) -> Finding:
    return Finding(check=check, severity=FindingSeverity.WARNING, detail=detail, remedy=remedy)


def error_finding(check: str, detail: str, remedy: str) -> Finding:
    """A finding about something that could not be checked."""
    return Finding(check=check, severity=FindingSeverity.ERROR, detail=detail, remedy=remedy)


def work_findings(queues: Sequence[QueueDepth], workers: Sequence[WorkerRecord], now: datetime) -> list[Finding]:
    """Checks whether workers serve the waiting jobs."""
    alive = [worker for worker in workers if is_alive(worker, now)]
    wanted = any(
        queue.ready + queue.scheduled + queue.blocked + queue.held for queue in queues if _is_for_workers(queue)
    )
    findings = [_workers(alive, wanted=wanted)]
    lifecycles = {queue.lifecycle for queue in queues}
    taken = {name: {type_ for worker in alive for type_ in types_taken(worker, name)} for name in lifecycles}
    ready = [queue for queue in queues if queue.ready and not queue.paused and _is_for_workers(queue)]
    findings += [_unserved(queue) for queue in ready if queue.type not in taken[queue.lifecycle]]
    findings += [_paused(queue) for queue in queues if queue.paused]
    findings += [_unsent(queue) for queue in queues if queue.type.startswith(REPORT_TYPE_PREFIX) and _waits_long(queue)]
    served = [queue for queue in queues if queue.type in taken[queue.lifecycle]]
    findings += [_slow(queue) for queue in served if (queue.oldest_ready_s or 0) > READY_S_WARN]
    return findings


def version_findings(workers: Sequence[WorkerRecord], own: str, now: datetime) -> list[Finding]:
    """Compares the versions that living processes report with this program's.

    Programs that are older than the report of versions, and workers of other makes, are left out.
    """
    reported = {
        worker.name: str(worker_info(worker)["version"])
        for worker in workers
        if worker_presence(worker, now) is WorkerPresence.ALIVE and "version" in worker_info(worker)
    }
    others = sorted(f"{name} ({version})" for name, version in reported.items() if version != own)
    if not others:
        return [
            ok_finding("versions", f"this program is {own}, and so is every living process that reports its version")
        ]
    named = ", ".join(others[:NAMES_SHOWN_MAX]) + (" and others" if len(others) > NAMES_SHOWN_MAX else "")
    return [
        warning_finding(
            "versions",
            detail=f"this program is {own}, but {'one living process is' if len(others) == 1 else f'{len(others)} living processes are'} not: {named}",
            remedy="finish the upgrade: start this version there too, then stop the other processes with SIGTERM",
        )
    ]


def store_finding(url: str, problem: str | None, *, is_away: bool = False) -> Finding:
    """Reports whether the object store takes a small object, returns it, and removes it."""
    if problem is None:
        return ok_finding("object store", f"{url}: a small object was written, read and removed")
    return error_finding("object store", f"{url}: {problem}", STORE_AWAY_REMEDY if is_away else STORE_REMEDY)


def driving_findings(
    queues: Sequence[QueueDepth], followers: Sequence[SubscriberRecord], now: datetime
) -> list[Finding]:
    """Reports runs and queue jobs that are ready and that no orchestrator claims; empty if none waits so long."""
    late = [queue for queue in queues if _waits_for_service(queue)]
    is_up = any(seen.until > now for seen in followers)
    remedy = "look in the log of `trellis up`: its orchestrators fail, or drive as many as TRELLIS_RUNS allows"
    return [
        warning_finding(
            f"type {queue.type}",
            detail=f"{_ready(queue)} ready, the oldest for {duration(queue.oldest_ready_s or 0)}, and nobody drives them",
            remedy=remedy if is_up else "start `trellis up`, or its role orchestrator: no service of it runs",
        )
        for queue in late
    ]


def clock_finding(here: datetime, ledger: datetime) -> Finding:
    """Compares this machine's clock with the ledger's."""
    ahead_s = (here - ledger).total_seconds()
    if abs(ahead_s) <= CLOCK_SKEW_S_MAX:
        return ok_finding("clock", f"within {CLOCK_SKEW_S_MAX:g} s of the ledger's")
    return warning_finding(
        "clock",
        detail=f"this machine's clock is {duration(ahead_s)} {'ahead of' if ahead_s > 0 else 'behind'} the ledger's",
        remedy="let NTP set it: tokens that one machine issues and another checks are refused as too new or expired",
    )


def disk_finding(place: str, *, free: int, total: int) -> Finding:
    """Checks the free space of the file system that holds this file or folder."""
    detail = f"{place}: {free / GIB:.1f} of {total / GIB:.1f} GiB free"
    if free >= DISK_BYTES_WARN:
        return ok_finding("disk", detail)
    remedy = "free some space, or move it to a larger disk: when it is full, nothing can be submitted or settled"
    if free >= DISK_BYTES_ERROR:
        return warning_finding("disk", detail=detail, remedy=remedy)
    return error_finding("disk", detail, remedy)


def letters_finding(count: int, limit: int) -> Finding:
    """Checks for dead letters. `limit` is how far they were counted."""
    if not count:
        return ok_finding("dead letters", "none")
    many = f"{limit} or more" if count >= limit else str(count)
    return warning_finding(
        "dead letters",
        detail=f"{many} {'waits' if count == 1 else 'wait'} for a decision",
        remedy="look with `trellis dlq`, then `trellis dlq requeue`",
    )


def queue_findings(jobs_by_state: Mapping[str, Sequence[Job]], limit: int, now: datetime) -> list[Finding]:
    """Reports queue jobs by state; empty if there are none. `limit` is how far they were counted."""
    counts = {state: len(jobs) for state, all_ in jobs_by_state.items() if (jobs := without_cancelled(all_))}
    if not counts:
        return []
    detail = ", ".join(f"{count}{' or more' if count >= limit else ''} {state}" for state, count in counts.items())
    remedies = [
        f"`trellis jobs --lifecycle {QUEUE_JOB.name} --status {state}`, then `trellis job explain ID`"
        for state in _IN_TROUBLE
        if state in counts
    ]
    first = QUEUE_JOB.initial.name
    if any((now - job.updated_at).total_seconds() > SERVICE_SLOW_S for job in jobs_by_state.get(first, ())):
        remedies.insert(0, f"nobody takes up what is {first}: start `trellis up`")
    severity = FindingSeverity.WARNING if remedies else FindingSeverity.OK
    return [Finding(check="queue jobs", severity=severity, detail=detail, remedy="; ".join(remedies))]


def without_cancelled(jobs: Sequence[Job]) -> list[Job]:
    """Leaves out cancelled jobs: no timer moves them, and they wait for nothing."""
    return [job for job in jobs if job.place is not JobPlace.SCHEDULED or waits_for(job) or job.due_at is not None]


def aside_findings(names: Sequence[str], limit: int) -> list[Finding]:
    """Checks what the projector has set aside: jobs, and under no name a block of the audit chain.

    `limit` is how far they were counted.
    """
    chain = warning_finding(
        "audit chain",
        detail="nothing is sealed, because the object store has a block that the ledger does not have",
        remedy="`trellis audit verify` names it; docs/how-to/audit.md says what to do",
    )
    return [_aside([name for name in names if name], limit), *([] if "" not in names else [chain])]


def _aside(jobs: Sequence[str], limit: int) -> Finding:
    if not jobs:
        return ok_finding("published", "no job is set aside")
    many = f"{limit} or more jobs" if len(jobs) >= limit else counted(len(jobs), "job")
    return warning_finding(
        "published",
        detail=f"{many} not published, because the object store holds something else: {', '.join(jobs[:3])}",
        remedy="look at alerts/projector in the object store, then `trellis rebuild --from ledger`",
    )


def follower_findings(followers: Sequence[SubscriberRecord], now: datetime) -> list[Finding]:
    """Reports followers for which retention keeps ended jobs longer, since when, and the remedy.

    Empty if there are no followers.
    """
    slow = [seen for seen in followers if behind_s(seen, now) > FOLLOWER_BEHIND_S]
    findings = [_left_behind(seen) if not seen.waits else _behind(seen, now) for seen in slow]
    if not findings and followers:
        names = ", ".join(seen.name for seen in followers)
        findings.append(ok_finding("followers", f"nobody is behind: {names}"))
    return findings


def behind_s(seen: SubscriberRecord, now: datetime) -> float:
    """Returns the age of the first event that the follower has not read, in seconds."""
    return 0.0 if seen.unread_since is None else (now - seen.unread_since).total_seconds()


def has_errors(findings: Sequence[Finding]) -> bool:
    return any(finding.severity is FindingSeverity.ERROR for finding in findings)


def _behind(seen: SubscriberRecord, now: datetime) -> Finding:
    kept = duration(RETENTION_DEFAULT.unread_s)
    return warning_finding(
        f"follower {seen.name}",
        detail=f"it has not read what happened since {seen.unread_since:%Y-%m-%d %H:%M} UTC ({duration(behind_s(seen, now))} ago);"
        f" what ended since then is kept for it, {kept} beyond its time at most, and then removed unread;"
        f" {'followed now' if seen.until > now else 'last followed'} by {seen.actor}",
        remedy=f"start `trellis up` where it follows, and look in its log for what it waits for;"
        f" if nobody will follow any more: `trellis followers leave-behind {seen.name}`",
    )


def _left_behind(seen: SubscriberRecord) -> Finding:
    detail = "left behind: nothing is kept for it until somebody follows under this name again"
    return ok_finding(f"follower {seen.name}", detail)


OWN_TYPES = "trellis."
"""The beginning of job types that the platform itself submits and runs."""


def _workers(alive: Sequence[WorkerRecord], *, wanted: bool) -> Finding:
    """Checks for living workers. Having none is a problem only if jobs wait for one; agents need none.

    Workers on the bus do not count then: `wanted` is about jobs that workers claim from the ledger.
    """
    if not alive and not wanted:
        return ok_finding("workers", "none, and no job waits for one")
    on_bus = [worker for worker in alive if worker_info(worker).get("bus")]
    if wanted and len(on_bus) == len(alive):
        beside = f"; {len(on_bus)} on the bus, for jobs on topics only" if on_bus else ""
        return warning_finding(
            "workers",
            detail=f"none seen in the last {WORKER_SILENT_S:.0f} s{beside}",
            remedy="start one: `trellis worker MODULE:APP`",
        )
    held = sum(worker.held for worker in alive)
    return ok_finding("workers", f"{len(alive)} alive, {counted(held, 'job')} held")


def _is_for_workers(queue: QueueDepth) -> bool:
    """Whether workers claim such jobs. Other jobs are claimed by services of `trellis up`, as reports of alerts are."""
    if queue.type.startswith(OWN_TYPES):
        return False
    claims = [t for t in LIFECYCLES[queue.lifecycle].transitions if t.trigger == Trigger.CLAIM]
    return any(Role.WORKER in claim.actors for claim in claims)


def _waits_for_service(queue: QueueDepth) -> bool:
    """Whether a job that a service of `trellis up` claims has been ready for long."""
    return queue.lifecycle in {RUN.name, QUEUE_JOB.name} and _waits_long(queue)


def _waits_long(queue: QueueDepth) -> bool:
    return bool(queue.ready) and not queue.paused and (queue.oldest_ready_s or 0.0) > READY_S_WARN


def _unsent(queue: QueueDepth) -> Finding:
    """Reports of alerts that nobody sends."""
    setting = "TRELLIS_ALERT_WEBHOOK" if queue.type == WEBHOOK else "TRELLIS_ALERT_APPRISE"
    return warning_finding(
        f"type {queue.type}",
        detail=f"{counted(queue.ready, 'report')} of alerts not sent, the oldest for {duration(queue.oldest_ready_s or 0)}",
        remedy=f"start `trellis up`, or its role alerts, with {setting}",
    )


def _unserved(queue: QueueDepth) -> Finding:
    return warning_finding(
        f"type {queue.type}",
        detail=f"{_ready(queue)} ready and no living worker serves the type",
        remedy="start a worker whose application has this type",
    )


def _ready(queue: QueueDepth) -> str:
    return f"{counted(queue.ready, 'job')} {'is' if queue.ready == 1 else 'are'}"


def _paused(queue: QueueDepth) -> Finding:
    return warning_finding(
        f"type {queue.type}",
        detail=f"paused, {counted(queue.ready, 'job')} ready",
        remedy=f"`trellis queues resume {queue.type}`",
    )


def _slow(queue: QueueDepth) -> Finding:
    return warning_finding(
        f"type {queue.type}",
        detail=f"the oldest ready job has waited {duration(queue.oldest_ready_s or 0)}",
        remedy="start more workers or raise their concurrency",
    )
