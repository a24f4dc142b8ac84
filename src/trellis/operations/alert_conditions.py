"""The conditions of alerts that are read from the ledger and the object store. Every read is bounded and has an index."""

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, cast

from trellis.engine.alerts import REPORT_TYPE_PREFIX, AlertScope
from trellis.engine.event_data import data_of
from trellis.engine.ledger import Ledger
from trellis.engine.records import Event, JobFilter, RetentionOptions, SubscriberRecord
from trellis.engine.service import RETENTION_DEFAULT
from trellis.engine.subscription import PROJECTOR
from trellis.engine.text import counted, duration
from trellis.lifecycles.proposal import PROPOSAL
from trellis.operations.alerts import (
    AGENT_FAILING,
    ARTIFACT_WRITES,
    CONTEXT_TIMEOUTS,
    DEAD_JOBS,
    DEAD_LETTERS,
    JOBS_WAIT,
    PROJECTOR_LAG,
    PROPOSAL_WAITS,
    RETENTION_HELD,
    SUBJECTS_MAX,
    WORKER_LOST,
    AlertThresholds,
    Check,
    Checked,
    ConditionMet,
    decides,
)
from trellis.operations.explain import WorkerPresence, worker_presence
from trellis.operations.slo import measure_dead_rate

TYPES_MAX = 10 * SUBJECTS_MAX
"""Most job types that are looked at, so that those with an open alert are among them while others wait longer."""
IN_A_ROW = 3
"""How many failures in a row make an alert (document 000, 5.4)."""
STEPS_READ = 100
"""How many steps of each type are searched for a row of failures."""
CONTEXT, WRITE = "CONTEXT_ASSEMBLY", "ARTIFACT_WRITE"
ERROR_EVENT = "job_retry_scheduled"
"""The event of a stage that was left with an error, or given back. Every other step out of a stage is a success."""
CONTEXT_TIMEOUT = "CONTEXT_TIMEOUT"
STAGING_REFUSED = "STAGING_REFUSED"
LOST_S = 3_600.0
"""How long a silent worker counts as lost. After that its record only says that it was there."""
UP = "up@"
"""How the names of `trellis up` begin."""
DEAD_WINDOW_S = 3_600.0
DEAD_MIN = 3
DEAD, ENDS = "job_dead_lettered", ("job_succeeded", "job_failed", "job_cancelled", "job_timed_out", "job_denied")


@dataclass(frozen=True, kw_only=True)
class LedgerConditions:
    """Reads the conditions of a ledger. `failing_agents` and `unserved_agents` are None where there are no agents."""

    ledger: Ledger
    thresholds: AlertThresholds
    failing_agents: Callable[[], Awaitable[Sequence[str]]] | None = None
    """Returns the agents that were stopped because they kept failing."""
    unserved_agents: Callable[[], Awaitable[Mapping[str, str]]] | None = None
    """Returns the active agents whose runs fail because a server is away, each with its last error."""
    retention: RetentionOptions = RETENTION_DEFAULT
    steps_read: int = STEPS_READ

    def checks(self) -> tuple[Check, ...]:
        """The checks of every round, in the order in which they run."""
        of_agents = () if self.failing_agents is None else (self.agents,)
        return (self.waiting, self.stages, self.proposals, self.workers, self.followers, *of_agents)

    def counts(self) -> tuple[Check, ...]:
        """The checks that count what ended in a window. They cost more, and change slowly."""
        return (self.dead_jobs, self.dead_letters)

    @decides(JOBS_WAIT)
    async def waiting(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """Jobs that nobody claims. Reports of alerts are left out: an alert about them would only wait with them."""
        types = await self.ledger.waiting_types(limit=TYPES_MAX)
        met = [
            ConditionMet(
                subject=one.type,
                value=one.waited_s,
                text=f"A job of type {one.type} ({one.lifecycle}) has waited to be claimed for {duration(one.waited_s)}.",
            )
            for one in types
            if one.waited_s > self.thresholds.queued_s and not one.type.startswith(REPORT_TYPE_PREFIX)
        ]
        return Checked(met={JOBS_WAIT: met})

    @decides(ARTIFACT_WRITES, CONTEXT_TIMEOUTS)
    async def stages(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """Rows of failures of queue jobs, over all jobs."""
        steps = await self.ledger.stage_steps(each=self.steps_read)
        errors = [one.ts for one in steps if one.type == ERROR_EVENT]
        # Errors of other stages may fill what is read. What happened before the first of them is not known then.
        known_since = min(errors) if len(errors) >= self.steps_read else None
        writes = [one for one in steps if one.source == WRITE or _code(one) == STAGING_REFUSED]
        contexts = [one for one in steps if one.source == CONTEXT]
        rows = {
            ARTIFACT_WRITES: (_row(writes, known_since, counts=_failed), "tries to write an artifact failed in a row"),
            CONTEXT_TIMEOUTS: (
                _row(contexts, known_since, counts=lambda one: _code(one) == CONTEXT_TIMEOUT),
                "context assemblies in a row took too long",
            ),
        }
        return Checked(
            met={name: _in_a_row(row, what) for name, (row, what) in rows.items() if row is not None},
            unread=tuple(AlertScope(name=name) for name, (row, _) in rows.items() if row is None),
        )

    @decides(PROPOSAL_WAITS)
    async def proposals(self, now: datetime) -> Checked:
        """Proposals that nobody decides."""
        where = JobFilter(lifecycle=PROPOSAL.name, state="pending")
        page = await self.ledger.jobs(where, limit=SUBJECTS_MAX, oldest_first=True)
        before = now - timedelta(hours=self.thresholds.proposal_hours)
        met = [
            ConditionMet(
                subject=job.job_id,
                value=(now - job.created_at).total_seconds(),
                text=f"Proposal {job.job_id} has waited for a decision for {duration((now - job.created_at).total_seconds())}.",
            )
            for job in page.jobs
            if job.created_at < before
        ]
        return Checked(met={PROPOSAL_WAITS: met})

    @decides(WORKER_LOST)
    async def workers(self, now: datetime) -> Checked:
        """Workers that fell silent."""
        met: list[ConditionMet] = []
        for worker in await self.ledger.workers():
            silent_s = (now - worker.seen_at).total_seconds()
            if worker_presence(worker, now) is WorkerPresence.SILENT and silent_s <= LOST_S:
                held = f" It held {counted(worker.held, 'job')}." if worker.held else ""
                who = f"{worker.name} (a process of `trellis up`)" if worker.name.startswith(UP) else worker.name
                text = f"Worker {who} has been silent for {duration(silent_s)}.{held}"
                met.append(ConditionMet(subject=worker.name, value=silent_s, text=text))
        return Checked(met={WORKER_LOST: met})

    @decides(PROJECTOR_LAG, RETENTION_HELD)
    async def followers(self, now: datetime) -> Checked:
        """Followers of the feed that do not read: the projector soon, any other once it holds retention back."""
        waited_for = [one for one in await self.ledger.followers() if one.waits]
        kept = [age.keep_s for age in self.retention.ages().values() if age.keep_s is not None]
        lag_s, ended_s = self.thresholds.lag_s, min(kept, default=math.inf)
        behind = [_behind(one, now) for one in waited_for if one.name == PROJECTOR]
        held = [_behind(one, now) for one in waited_for]
        return Checked(
            met={
                PROJECTOR_LAG: [one for one in behind if one.value > lag_s],
                RETENTION_HELD: [one for one in held if one.value > ended_s],
            }
        )

    @decides(DEAD_JOBS)
    async def dead_jobs(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """The share of queue jobs that became DEAD in the window of the objective `dead_rate`."""
        measured = await measure_dead_rate(self.ledger)
        percent = 100.0 * (measured.value or 0.0)
        met: list[ConditionMet] = []
        if percent > self.thresholds.dead_percent:
            ended = counted(measured.samples, "queue job")
            text = f"{measured.bad} of {ended} that ended in the last seven days are DEAD ({percent:.1f} %)."
            met.append(ConditionMet(value=percent, text=text))
        return Checked(met={DEAD_JOBS: met})

    @decides(DEAD_LETTERS)
    async def dead_letters(self, now: datetime) -> Checked:
        """The share of jobs that became dead letters in the last hour."""
        counts = await self.ledger.count_events((DEAD, *ENDS), since=now - timedelta(seconds=DEAD_WINDOW_S))
        dead, ended = counts[DEAD], sum(counts.values())
        percent = 100.0 * dead / ended if ended else 0.0
        met: list[ConditionMet] = []
        if dead >= DEAD_MIN and percent > self.thresholds.dead_percent:
            text = (
                f"{dead} of {counted(ended, 'job')} that ended in the last hour became dead letters ({percent:.1f} %)."
            )
            met.append(ConditionMet(value=percent, text=text))
        return Checked(met={DEAD_LETTERS: met})

    @decides(AGENT_FAILING)
    async def agents(self, now: datetime) -> Checked:  # noqa: ARG002 - the shape of a check
        """Agents that were stopped because they kept failing, and active ones whose runs a server lets fail."""
        assert self.failing_agents is not None, "checks() leaves this check out"
        stopped = await self.failing_agents()
        unserved = dict[str, str]() if self.unserved_agents is None else await self.unserved_agents()
        texts = {
            slug: f"The last three runs of agent {slug} failed. It stays active: {unserved[slug]}" for slug in unserved
        }
        for slug in stopped:
            texts[slug] = f"Three runs of agent {slug} failed in a row. It has the status error, and its runs wait."
        met = [ConditionMet(subject=slug, value=IN_A_ROW, text=text) for slug, text in texts.items()]
        return Checked(met={AGENT_FAILING: met})


def _row(
    steps: Sequence[Event], known_since: datetime | None, *, counts: Callable[[Event], bool]
) -> list[Event] | None:
    """The failures that count since the last success, newest first. Other failures neither count nor end the row.

    None if they are fewer than a row and there may be more: `steps` has all failures after `known_since`.
    """
    failures: list[Event] = []
    is_known = known_since is None
    for step in sorted(steps, key=lambda one: one.ts, reverse=True):
        if step.type != ERROR_EVENT:
            is_known = known_since is None or step.ts > known_since
            break
        if counts(step):
            failures.append(step)
    return failures if is_known or len(failures) >= IN_A_ROW else None


def _in_a_row(row: Sequence[Event], what: str) -> list[ConditionMet]:
    if len(row) < IN_A_ROW:
        return []
    last = row[0]
    return [ConditionMet(value=len(row), text=f"{len(row)} {what}, the last of job {last.job_id}: {last.cause}.")]


def _failed(step: Event) -> bool:
    """Whether a step out of a stage has an error. A holder that drains puts its job back without one."""
    return _code(step) is not None


def _code(step: Event) -> str | None:
    """The code of a stage's error; None for a step without an error."""
    error = data_of(step).get("error")
    return str(cast("dict[str, Any]", error).get("code")) if isinstance(error, dict) else None


def _behind(follower: SubscriberRecord, now: datetime) -> ConditionMet:
    behind_s = 0.0 if follower.unread_since is None else max(0.0, (now - follower.unread_since).total_seconds())
    text = f"Follower {follower.name} ({follower.actor}) has not read events for {duration(behind_s)}."
    return ConditionMet(subject=follower.name, value=behind_s, text=text)
