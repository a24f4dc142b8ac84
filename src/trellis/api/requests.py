"""Requests that change something, and their idempotency keys.

A route has one, which the application gets with the caller (`ApiContext`). Commands and Python have none: each of their
calls is a request of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass

from trellis.app.system import new_id
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.jobs import JobId, Mismatch, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.records import IdempotencyKey


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotentRequest:
    """A request with its idempotency key. Without a key (None) a repeated request takes effect again."""

    key: IdempotencyKey | None
    given: str | None
    """The key as the caller sent it, for messages."""
    request_id: RequestId
    """The id under which the ledger records the request when it changes a job."""
    on_replay: Callable[[], None] | None = None
    """Called if an earlier request with the same key had the effect."""

    def note(self, *, replayed: bool) -> None:
        """Tell who asks that an earlier request had the effect, if it had."""
        if replayed and self.on_replay is not None:
            self.on_replay()

    async def earlier(self, ledger: Ledger) -> JobId | None:
        """The job that an earlier request with this key created; raises IdempotencyMismatch."""
        if self.key is None:
            return None
        earlier_job = await ledger.find_by_idempotency_key(self.key.scope, self.key.key, self.key.fingerprint)
        if isinstance(earlier_job, Mismatch):
            raise self.mismatch(earlier_job.job_id)
        return None if earlier_job is None else earlier_job.job_id

    def change(self, about: str, *, keeps_refusals: bool = False) -> RequestKey | None:
        """The key for the ledger's verbs that change jobs. `about` is the job, or a word for many jobs."""
        if self.key is None or self.given is None:
            return None
        return RequestKey(
            scope=self.key.scope,
            key=self.key.key,
            fingerprint=self.key.fingerprint,
            about=about,
            given=self.given,
            keeps_refusals=keeps_refusals,
        )

    async def changed_before(self, ledger: Ledger) -> bool:
        """Whether an earlier request with this key has a stored answer; raises IdempotencyMismatch.

        A route that checks more before it calls the ledger asks this first, so that another request under the key is
        refused for the key. The transaction of the change decides between concurrent requests.
        """
        key = self.change("")
        request = None if key is None else await ledger.find_request(key)
        return request is not None and request.answer is not None

    async def moved(self, ledger: Ledger, job_id: JobId) -> bool:
        """Whether this request has already changed that job."""
        records = await ledger.recorded(await ledger.events(job_id))
        return any(record.request == self.request_id for record in records)

    def mismatch(self, job_id: str) -> IdempotencyMismatch:
        """The error for a key that was used for another request; `job_id` is what that one was about."""
        return IdempotencyMismatch(key=self.given, job_id=job_id)


def single_request(request_id: str | None = None) -> IdempotentRequest:
    """A request without a stored key. Given the same id again, the ledger answers what it answered first."""
    return IdempotentRequest(key=None, given=None, request_id=RequestId(request_id or new_id()))
