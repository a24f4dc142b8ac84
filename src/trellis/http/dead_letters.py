"""Dead letters: jobs that need a person."""

from collections.abc import Sequence

from trellis.http.calls import GatewayCalls, path_of
from trellis.http.listing import LIMIT_DEFAULT, listed
from trellis.http.shapes import DeadLetterShape, Page, Requeued


class DeadLetters:
    """Dead letters: `client.dead_letters`."""

    def __init__(self, calls: GatewayCalls) -> None:
        self._calls = calls

    async def list(
        self,
        *,
        type_: str | None = None,
        reason: str | None = None,
        lifecycle: str | None = None,
        limit: int = LIMIT_DEFAULT,
        cursor: str | None = None,
    ) -> Page[DeadLetterShape]:
        """The dead letters, newest first; with `lifecycle` only those of leased-jobs or of queue-jobs."""
        chosen = {"type": type_, "reason_code": reason, "lifecycle": lifecycle}
        return await listed(self._calls, DeadLetterShape, "/dlq", limit, cursor, **chosen)

    async def get(self, job_id: str) -> DeadLetterShape:
        """The dead letter of one job."""
        return await self._calls.get(DeadLetterShape, path_of("dlq", job_id))

    async def requeue(
        self, job_ids: Sequence[str], *, reason: str | None = None, idempotency_key: str | None = None
    ) -> Requeued:
        """Run these jobs again; an operator's act. Each is answered for."""
        body = {"job_ids": list(job_ids), "reason": reason}
        return await self._calls.post(Requeued, "/dlq/requeue", body, key=idempotency_key)
