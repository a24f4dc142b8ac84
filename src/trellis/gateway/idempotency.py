"""Idempotency of requests: keys of requests that may be repeated."""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from trellis.app.wiring import new_id
from trellis.auth.principals import Principal
from trellis.auth.tokens import Identity
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.jobs import JobId, Mismatch, RequestId, RequestKey
from trellis.engine.ledger import Ledger
from trellis.engine.records import IdempotencyKey
from trellis.gateway.callers import KeyHeader, authenticate
from trellis.http.shapes import REPLAYED
from trellis.http_server.bodies import in_thread_if_large

# Identity of a request that may be repeated (D27, DJ-5).
#
# A key belongs to one caller at one route. The ledger stores it for at least 24 hours, in the transaction of the job that
# the request creates or of the change that it makes (`engine.request_keys`). The answer follows from what the request
# created or changed and not from its present state, so a repeated request gets the first answer. Two routes answer with
# the present state instead, because a caller that repeats them wants to know it: POST /inbox/submit, whose entry may
# have been pending, and POST /proposals/{id}/apply.

HEADER = REPLAYED
FINGERPRINT_CHARS = 16
REQUEST = "http"


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotentRequest:
    """A request with its idempotency key. Without a key (None) a repeated request takes effect again."""

    key: IdempotencyKey | None
    given: str | None
    """The key as the caller sent it, for messages."""
    fingerprint: bytes
    """Digest of the path, the caller's name and the body."""
    request_id: RequestId
    """The id under which the ledger records the request when it changes a job."""

    async def earlier(self, ledger: Ledger) -> JobId | None:
        """The job that an earlier request with this key created; raises IdempotencyMismatch."""
        if self.key is None:
            return None
        found = await ledger.find_by_idempotency_key(self.key.scope, self.key.key, self.key.fingerprint)
        if isinstance(found, Mismatch):
            raise self.mismatch(found.job_id)
        return None if found is None else found.job_id

    def change(self, about: str, *, keeps_refusals: bool = False) -> RequestKey | None:
        """The key for the ledger's verbs that change jobs. `about` is the job, or a word for many jobs."""
        if self.key is None or self.given is None:
            return None
        return RequestKey(
            scope=self.key.scope,
            key=self.key.key,
            fingerprint=self.fingerprint,
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
        found = None if key is None else await ledger.find_request(key)
        return found is not None and found.answer is not None

    async def take(self, ledger: Ledger, about: str) -> bytes | None:
        """Store the key before an effect that is more than one call of the ledger; raises IdempotencyMismatch.

        Returns the stored answer, if there is one. Without it the request goes on where an earlier one stopped.
        """
        key = self.change(about)
        found = None if key is None else await ledger.take_request_key(key)
        return None if found is None else found.answer

    async def moved(self, ledger: Ledger, job_id: JobId) -> bool:
        """Whether this request has already changed that job."""
        records = await ledger.recorded(await ledger.events(job_id))
        return any(record.request == self.request_id for record in records)

    def mismatch(self, job_id: str) -> IdempotencyMismatch:
        """The error for a key that was used for another request; `job_id` is what that one was about."""
        return IdempotencyMismatch(key=self.given, job_id=job_id)


async def idempotent_request(
    request: Request, who: Annotated[tuple[Principal, Identity], Depends(authenticate)], given: KeyHeader
) -> IdempotentRequest:
    """The key, fingerprint and request id of this request."""
    body = await request.body()
    value = await request.json() if body else None
    # The fingerprint includes the path, because one key for two agents or two jobs is a mistake.
    fingerprint = await in_thread_if_large(len(body), _fingerprint, [request.url.path, who[0].name, value])
    if given is None:
        return IdempotentRequest(key=None, given=None, fingerprint=fingerprint, request_id=RequestId(new_id()))
    scope = f"{request.method} {request.scope['route'].path}"
    key = IdempotencyKey(scope=scope, key=_digest(who[0].name, given), fingerprint=fingerprint)
    request_id = RequestId(f"{REQUEST}:{_digest(key.scope, key.key)}:{fingerprint.hex()[:FINGERPRINT_CHARS]}")
    return IdempotentRequest(key=key, given=given, fingerprint=fingerprint, request_id=request_id)


IdempotentRequestOf = Annotated[IdempotentRequest, Depends(idempotent_request)]


def mark_replayed(response: Response, *, replayed: bool) -> None:
    """Set the header that says an earlier request had the effect."""
    if replayed:
        response.headers[HEADER] = "true"


def _fingerprint(asked: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).digest()


def _digest(*parts: str) -> str:
    """A digest of fixed length, distinct for distinct lists of parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


RESPONSES: dict[str, Any] = {
    HEADER: {
        "description": "`true` when an earlier request with this key had the effect.",
        "schema": {"type": "string"},
    }
}
