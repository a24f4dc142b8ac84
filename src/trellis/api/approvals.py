"""Jobs that the safety kernel held: let them go or deny them (D45). Proposals decide about them with the same code."""

from typing import TYPE_CHECKING

from trellis.api.context import ApiContext
from trellis.app.wiring import new_id
from trellis.engine.jobs import JobId, RequestId, RequestKey
from trellis.engine.records import Job

if TYPE_CHECKING:  # `trellis jobs` loads neither HTTP nor the memory of agents
    from trellis.http.shapes import JobShape


class LocalApprovals:
    """Decisions about held jobs on a ledger, with the calls of `client.jobs`."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def approve(
        self,
        job_id: str,
        note: str | None = None,
        *,
        policy_hash: str | None = None,
        idempotency_key: str | None = None,
    ) -> "JobShape":
        """Let a held job go; with `policy_hash` only while it is held under that policy. Raises NotHeld."""
        return (await self.decide(job_id, note, policy_hash, idempotency_key, approve=True))[0]

    async def deny(
        self, job_id: str, note: str, *, policy_hash: str | None = None, idempotency_key: str | None = None
    ) -> "JobShape":
        """Refuse a held job, and say why; it is then DENIED. Raises NotHeld, NoteTooShort."""
        return (await self.decide(job_id, note, policy_hash, idempotency_key, approve=False))[0]

    async def held_job(self, job_id: str) -> Job:
        """The job of this id, or of this id in the inbox; raises JobNotFound."""
        from trellis.bus import approvals

        ledger, id_ = self._context.ledger, JobId(job_id)
        if await ledger.job(id_) is None:  # perhaps an inbox id; a job may have such an id itself
            id_ = approvals.job_id_of_inbox_id(job_id) or id_
        return await approvals.get_bus_job(ledger, id_)

    async def decide(
        self,
        job_id: str,
        note: str | None,
        policy_hash: str | None,
        key: str | None,
        *,
        approve: bool,
        request_key: RequestKey | None = None,
    ) -> "tuple[JobShape, bool]":
        """The job after the decision, and whether an earlier request with this key made it.

        `request_key` is stored in the transaction of the decision.
        """
        from trellis.bus import approvals
        from trellis.http.shapes import JobShape

        actor, request_id = self._context.permit("jobs.approve"), RequestId(key or new_id())
        job = await self.held_job(job_id)
        answer = await approvals.decide(
            self._context.ledger,
            actor,
            job.job_id,
            approve=approve,
            note=note,
            request_id=request_id,
            policy_hash=policy_hash,
            key=request_key,
        )
        shape = JobShape(
            job_id=job.job_id, lifecycle=job.lifecycle, status=answer.target, type=job.type, version=answer.version
        )
        return shape, answer.repeated
