"""Changes of many jobs for one caller: what HTTP and commands ask `operations/job_changes.py`."""

from collections.abc import Sequence
from datetime import UTC
from typing import TYPE_CHECKING

from trellis.api.context import ApiPart
from trellis.api.requests import IdempotentRequest
from trellis.auth.ownership import cancelling_roles
from trellis.auth.principals import Principal
from trellis.engine.errors import InputError, OptionInvalid
from trellis.engine.job_changes import CHANGED_MAX, JobChange, answer_json, counts
from trellis.engine.jobs import CancelMode, Priority, ReasonCode
from trellis.engine.option_values import check_choice
from trellis.lifecycles import LIFECYCLES, Role
from trellis.operations.job_changes import ChangeFilter, ChangeWish, JobChanges
from trellis.worker.app import priority_of
from trellis.worker.requests import stored_concurrency_key

if TYPE_CHECKING:  # HTTP is loaded where there is an answer
    from trellis.http.jobs import JobChangeFilter
    from trellis.http.operation_shapes import JobsChanged, JobsPreview

MANY = "of many jobs"
"""The subject of a change of many jobs, for the message of a refused idempotency key."""


class LocalJobChanges(ApiPart):
    """The changes of many jobs of `LocalJobs`."""

    def wish(
        self, change: str, *, mode: str = "soft", to_priority: str | None = None, reason: str | None = None
    ) -> ChangeWish:
        """What is to be done; raises OptionInvalid."""
        return ChangeWish(
            change=check_choice(JobChange, "change", change),
            mode=check_choice(CancelMode, "mode", mode),
            grace_s=self._context.cancel_grace_s,
            priority=_priority(to_priority),
            cause=reason,
        )

    async def preview(self, wish: ChangeWish, where: "JobChangeFilter") -> "JobsPreview":
        """How many jobs the change would concern."""
        from trellis.http.operation_shapes import ChangeExample, JobsPreview

        principal = self._principal(wish, where)
        seen = await JobChanges(self._context.changes, principal).preview(wish, _filter(principal, where))
        examples = [
            ChangeExample(
                job_id=job.job_id,
                lifecycle=job.lifecycle,
                type=job.type,
                status=job.state,
                priority=job.priority.name.lower(),
                created_at=job.created_at.astimezone(UTC).isoformat(),
            )
            for job in seen.examples
        ]
        return JobsPreview(change=wish.change, matched=seen.matched, more=seen.more, examples=examples)

    async def change(
        self,
        wish: ChangeWish,
        request: IdempotentRequest,
        where: "JobChangeFilter",
        *,
        job_ids: Sequence[str] = (),
        limit: int = CHANGED_MAX,
        cursor: str | None = None,
    ) -> "JobsChanged":
        """One batch of a change: the named jobs, or the next ones of a filter."""
        from trellis.http.operation_shapes import ChangedJob, JobsChanged

        if not 1 <= limit <= CHANGED_MAX:
            raise OptionInvalid(option="limit", value=limit, expected=f"from 1 to {CHANGED_MAX} in one batch")
        principal = self._principal(wish, where)
        changes, chosen = JobChanges(self._context.changes, principal), _filter(principal, where)
        key = request.change(MANY, keeps_refusals=True)
        if job_ids:
            if not chosen.is_empty:
                raise InputError(detail="Name jobs or filter them, not both.")
            done = await changes.change_named(wish, job_ids, request.request_id, key=key)
        else:
            done = await changes.change_batch(wish, chosen, request.request_id, limit=limit, cursor=cursor, key=key)
        items = [ChangedJob.model_validate(answer_json(answer)) for answer in done.answers]
        request.note(replayed=done.repeated)
        return JobsChanged(change=wish.change, items=items, next_cursor=done.next_cursor, **counts(done.answers))

    def _principal(self, wish: ChangeWish, where: "JobChangeFilter") -> Principal:
        """The caller. On a ledger of one's own, only what a submitter may not do needs the operator's key."""
        lifecycle = where.get("lifecycle")
        by_submitter = wish.change is JobChange.CANCEL and (
            lifecycle not in LIFECYCLES or Role.SUBMITTER in cancelling_roles(str(lifecycle))
        )
        return self._context.acting(operator=not by_submitter)


def _priority(name: str | None) -> Priority | None:
    return None if name is None else priority_of(name)


def _filter(principal: Principal, where: "JobChangeFilter") -> ChangeFilter:
    reason = where.get("reason_code")
    return ChangeFilter(
        type=where.get("type_"),
        lifecycle=where.get("lifecycle"),
        state=where.get("status"),
        correlation_id=where.get("correlation_id"),
        concurrency_key=stored_concurrency_key(principal, where.get("concurrency_key")),
        parent_id=where.get("parent_id"),
        reason_code=None if reason is None else check_choice(ReasonCode, "reason_code", reason),
        priority=_priority(where.get("priority")),
        submitted_before=where.get("submitted_before"),
        submitted_after=where.get("submitted_after"),
        everything=where.get("everything", False),
    )
