"""Changes of many jobs that a filter names: cancel, discard, run now, prioritize (decision 0041).

Every entrance comes here: HTTP, commands and Python. What a caller may change is decided here, once. A caller that may
change all jobs does so in that role. Any other caller changes its own jobs, and the filter passes over all others.

A change goes in batches of one transaction each. A batch says where the next one begins. A change that was interrupted
is asked for again with the same filter: what it has changed is no longer selected.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from trellis.auth.ownership import PrincipalReach, changing_actor, permit_on_job, sees_all
from trellis.auth.principals import Principal, party_of
from trellis.engine.errors import InputError, JobNotFound, NotAllowed, OptionInvalid
from trellis.engine.job_changes import (
    CHANGEABLE,
    CHANGED_MAX,
    PARTICIPLES,
    RULES_OF_CHANGES,
    ChangedJobs,
    ChangeOrder,
    JobChange,
    JobSelection,
    JobToChange,
    LifecycleState,
    OwnedBy,
    SelectedJob,
    changeable_states,
    counts,
)
from trellis.engine.jobs import Actor, CancelMode, JobId, Priority, ReasonCode, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.request_keys import CHANGE_ANSWERS
from trellis.engine.text import nearest
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.leased_job import LEASED_JOB

COUNTED_MAX = 10_000
"""A preview counts no further."""
COUNTED_OWN_MAX = 1_000
"""The same for a caller with jobs of its own only: who owns a job is read from its events."""
EXAMPLES_MAX = 10
PAGES_MAX = 10
"""How many pages of the ledger one batch reads at most. A batch may be empty and have a next one."""
PREVIEW_PAGES_MAX = 25
"""How many batches a preview counts at most."""
ADD_TO_FILTER = "a type, a status, a lifecycle, a correlation id, a key, a parent, a reason, a priority or a time"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeFilter:
    """Names the jobs to change. None matches any value."""

    type: str | None = None
    """The job type."""
    lifecycle: str | None = None
    """`leased-job`, `queue-job` or `bus-job`."""
    state: str | None = None
    """The state in the words of the lifecycle."""
    correlation_id: str | None = None
    """What the job belongs to."""
    concurrency_key: str | None = None
    """The key that jobs share."""
    parent_id: str | None = None
    """The job that caused it."""
    reason_code: ReasonCode | None = None
    """Of the dead letter of a leased-job."""
    priority: Priority | None = None
    """The present priority."""
    submitted_before: datetime | None = None
    """A moment with a time zone."""
    submitted_after: datetime | None = None
    """A moment with a time zone."""
    everything: bool = False
    """All jobs are meant. Without it, a filter that names nothing is refused."""

    def to_text(self) -> str:
        """The filter for people and for the administrative act."""
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        named = [f"{name}={_word(value)}" for name, value in given.items() if name != "everything"]
        return ", ".join(named) or "all jobs"

    @property
    def is_empty(self) -> bool:
        """Whether it names nothing."""
        return self == ChangeFilter()


def check_filter(where: Any) -> None:
    """Check that a value is a ChangeFilter. Raises OptionInvalid."""
    if not isinstance(where, ChangeFilter):
        raise OptionInvalid(option="where", value=where, expected='it must be a filter: ChangeFilter(type="mail")')


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeWish:
    """What is to be done to the jobs."""

    change: JobChange
    mode: CancelMode = CancelMode.SOFT
    """Of a cancel."""
    grace_s: float = 0.0
    """Of a soft cancel."""
    priority: Priority | None = None
    """The new priority of a prioritize."""
    cause: str | None = None

    def __post_init__(self) -> None:
        if (self.priority is None) is (self.change is JobChange.PRIORITIZE):
            known = ", ".join(priority.name.lower() for priority in Priority)
            expected = f"one of {known}" if self.priority is None else "only a prioritize gives jobs another one"
            raise OptionInvalid(option="priority", value=self.priority, expected=expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangePreview:
    """How many jobs a change would concern, and some of them, oldest first."""

    matched: int
    more: bool
    """There are more than `matched`; they were not counted."""
    examples: tuple[SelectedJob, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangeTotals:
    """What became of all jobs of a change."""

    changed: int = 0
    """Jobs that made the step."""
    requested: int = 0
    """Jobs that are held, and whose holder was asked to stop."""
    skipped: int = 0
    """Jobs that had changed meanwhile, or whose state does not allow it."""
    next_cursor: str | None = None
    """Where to go on, if the limit ended the change."""

    @property
    def taken(self) -> int:
        """How many jobs the change came to."""
        return self.changed + self.requested + self.skipped

    def plus(self, batch: ChangedJobs) -> "ChangeTotals":
        """These, and the jobs of one more batch."""
        more = counts(batch.answers)
        return ChangeTotals(
            changed=self.changed + more["changed"],
            requested=self.requested + more["requested"],
            skipped=self.skipped + more["skipped"],
            next_cursor=batch.next_cursor,
        )


class JobChanges:
    """Changes of many jobs by one caller."""

    def __init__(self, ledger: Ledger, principal: Principal) -> None:
        self._ledger = ledger
        self._principal = principal
        self._reach = PrincipalReach(principal=principal, ledger=ledger)

    async def preview(self, wish: ChangeWish, where: ChangeFilter) -> ChangePreview:
        """How many jobs a change would concern. Changes nothing. Raises NotAllowed, InputError, OptionInvalid."""
        actor, rule = self._actor(wish), RULES_OF_CHANGES[wish.change]
        selection = replace(_selection(wish, where, actor), owned_by=self._owner(rule))
        most = COUNTED_MAX if self._has_all(rule) else COUNTED_OWN_MAX
        jobs, cursor = list[SelectedJob](), None
        for _ in range(PREVIEW_PAGES_MAX):
            page, cursor = await self._page(selection, rule, CHANGED_MAX, cursor)
            jobs += page
            if cursor is None or len(jobs) > most:
                break
        return ChangePreview(
            matched=min(len(jobs), most),
            more=len(jobs) > most or cursor is not None,
            examples=tuple(jobs[:EXAMPLES_MAX]),
        )

    async def change_batch(
        self,
        wish: ChangeWish,
        where: ChangeFilter,
        request_id: RequestId,
        *,
        limit: int = CHANGED_MAX,
        cursor: str | None = None,
        key: RequestKey | None = None,
    ) -> ChangedJobs:
        """Change the next jobs that a filter names, in one transaction. Raises NotAllowed, InputError, OptionInvalid.

        A repeated request with the same key gets the same answer; raises IdempotencyMismatch.
        """
        actor, rule = self._actor(wish), RULES_OF_CHANGES[wish.change]
        selection = replace(_selection(wish, where, actor), owned_by=self._owner(rule))
        before = None if key is None else await self._ledger.find_request(key)
        if before is not None and before.answer is not None:
            return CHANGE_ANSWERS.decode(before.answer)
        jobs, next_cursor = await self._page(selection, rule, min(limit, CHANGED_MAX), cursor)
        if not jobs:
            return ChangedJobs(answers=(), next_cursor=next_cursor)
        order = _order(wish, request_id, key)
        order = replace(order, selected_by=where.to_text(), next_cursor=next_cursor)
        return await self._ledger.change_jobs(actor, order, [JobToChange(job.job_id, job.version) for job in jobs])

    async def change_all(
        self,
        wish: ChangeWish,
        where: ChangeFilter,
        new_request_id: Callable[[], RequestId],
        *,
        limit: int,
        on_progress: Callable[[ChangeTotals], None] = lambda _: None,
    ) -> ChangeTotals:
        """Change the jobs that a filter names, oldest first, at most `limit`, a batch after the other."""
        totals = ChangeTotals()
        while totals.taken < limit:
            batch = await self.change_batch(
                wish, where, new_request_id(), limit=limit - totals.taken, cursor=totals.next_cursor
            )
            totals = totals.plus(batch)
            on_progress(totals)
            if totals.next_cursor is None:
                break
        return totals

    async def change_named(
        self, wish: ChangeWish, job_ids: Sequence[str], request_id: RequestId, *, key: RequestKey | None = None
    ) -> ChangedJobs:
        """Change these jobs, at most CHANGED_MAX, in one transaction. Raises NotAllowed, JobNotFound, OptionInvalid."""
        actor, rule = self._actor(wish), RULES_OF_CHANGES[wish.change]
        wanted = list(dict.fromkeys(JobId(job_id) for job_id in job_ids))
        if not 1 <= len(wanted) <= CHANGED_MAX:
            raise OptionInvalid(option="job_ids", value=len(wanted), expected=f"from 1 to {CHANGED_MAX} in one call")
        for job_id in wanted:
            job = await self._ledger.job(job_id)
            await permit_on_job(self._principal, rule, self._ledger, job)
            if job is None or job.lifecycle not in {one.name for one in CHANGEABLE}:
                raise JobNotFound(job_id=job_id)
        return await self._ledger.change_jobs(actor, _order(wish, request_id, key), list(map(JobToChange, wanted)))

    def _actor(self, wish: ChangeWish) -> Actor:
        return changing_actor(self._principal, RULES_OF_CHANGES[wish.change])

    def _owner(self, rule: str) -> OwnedBy | None:
        """Whose jobs the ledger selects; None for all, and for a token that is for one job."""
        principal = self._principal
        if self._has_all(rule) or principal.job_id is not None:
            return None
        return OwnedBy(principal.name, None if principal.tenant is None else party_of(principal.name))

    def _has_all(self, rule: str) -> bool:
        """Whether the caller may change every job. Without a token the store decides: it is the caller's."""
        return sees_all(self._principal, rule) or not (self._principal.by_token or self._principal.job_id)

    async def _page(
        self, selection: JobSelection, rule: str, limit: int, cursor: str | None
    ) -> tuple[list[SelectedJob], str | None]:
        """The next jobs that the caller may change, and where to go on. It may be none although there are more."""
        jobs: list[SelectedJob] = []
        for _ in range(PAGES_MAX):
            page = await self._ledger.select_jobs(selection, limit=limit - len(jobs), cursor=cursor)
            jobs += await self._reached(page.jobs, rule)
            cursor = page.cursor
            if len(jobs) == limit or cursor is None:
                break
        return jobs, cursor

    async def _reached(self, jobs: Sequence[SelectedJob], rule: str) -> list[SelectedJob]:
        if self._has_all(rule):
            return list(jobs)
        own: list[SelectedJob] = []
        for job in jobs:
            with suppress(NotAllowed):
                await self._reach.check(rule, job.job_id)
                own.append(job)
        return own


def _order(wish: ChangeWish, request_id: RequestId, key: RequestKey | None) -> ChangeOrder:
    return ChangeOrder(
        change=wish.change,
        request_id=request_id,
        cause=wish.cause,
        mode=wish.mode,
        grace_s=wish.grace_s,
        priority=wish.priority,
        key=key,
    )


def _selection(wish: ChangeWish, where: ChangeFilter, actor: Actor) -> JobSelection:
    """The jobs that a filter names and that the actor's role can change. Raises InputError, OptionInvalid."""
    if where.is_empty:
        raise InputError(
            detail=f"A filter that names nothing would {_words(wish.change)} every job: add {ADD_TO_FILTER}, or say that all are meant."
        )
    if where.submitted_before and where.submitted_after and where.submitted_before <= where.submitted_after:
        raise OptionInvalid(
            option="submitted_before", value=where.submitted_before.isoformat(), expected="later than submitted_after"
        )
    soft = wish.change is JobChange.CANCEL and wish.mode is CancelMode.SOFT
    return JobSelection(
        states=_states(wish.change, where, actor),
        type=where.type,
        correlation_id=where.correlation_id,
        concurrency_key=where.concurrency_key,
        parent_id=None if where.parent_id is None else JobId(where.parent_id),
        reason_code=where.reason_code,
        priority=where.priority,
        submitted_before=where.submitted_before,
        submitted_after=where.submitted_after,
        delayed=wish.change is JobChange.RUN_NOW,
        other_priority_than=wish.priority,
        not_asked_to_stop=soft,
    )


def _states(change: JobChange, where: ChangeFilter, actor: Actor) -> frozenset[LifecycleState]:
    if where.lifecycle is not None and where.lifecycle not in LIFECYCLES:
        raise OptionInvalid(option="lifecycle", value=where.lifecycle, expected=f"one of {', '.join(LIFECYCLES)}")
    lifecycle = where.lifecycle
    if where.reason_code is not None:
        if lifecycle not in {None, LEASED_JOB.name}:
            raise OptionInvalid(option="reason", value=where.reason_code, expected=f"with lifecycle {LEASED_JOB.name}")
        lifecycle = LEASED_JOB.name
    allowed = changeable_states(change, actor.role)
    states = frozenset(
        one for one in allowed if lifecycle in {None, one.lifecycle} and where.state in {None, one.state}
    )
    if not states:
        known = sorted({one.state for one in allowed if lifecycle in {None, one.lifecycle}})
        of = "" if lifecycle is None else f" {lifecycle}"
        value = lifecycle if where.state is None else where.state
        option = "lifecycle" if where.state is None else "status"
        expected = f"no{of}: {actor.role.value} cannot {_words(change)} one"
        if known and where.state is not None:
            expected = _other_states(change, where.state, lifecycle, known)
        raise OptionInvalid(option=option, value=value, expected=expected)
    return states


def _other_states(change: JobChange, state: str, lifecycle: str | None, known: Sequence[str]) -> str:
    """What to write for a state in which no job is changed so: why, or which state was probably meant."""
    choices = f"one of {', '.join(known)}"
    of = [one.by_name[state] for one in CHANGEABLE if lifecycle in {None, one.name} and state in one.by_name]
    if not of:
        near = nearest(state, known)
        return choices if near is None else f"{choices} (did you mean {near}?)"
    ended = change is not JobChange.DISCARD and all(one.phase is Phase.ENDED for one in of)
    which = "jobs that have ended" if ended else f"{state} jobs"
    return f"{which} cannot be {PARTICIPLES[change]}; choose {choices}"


def _words(change: JobChange) -> str:
    return change.value.replace("_", " ")


def _word(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    return value.name.lower() if isinstance(value, Priority) else str(value)
