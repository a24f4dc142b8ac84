"""Requests that may come twice: what names one, and what it asked (D27, DJ-5).

A key is one caller's at one route. The ledger keeps it in the transaction of whatever the request made, for 24 hours and more; the key
of a request that moves what is there already is reserved before (`reserving`). What a route answers follows from what was made and not from how that stands now, so the second answer is the first.
Two routes tell how it stands instead, because who asks them again wants to know: POST /inbox/submit, whose entry may have waited, and
POST /proposals/{id}/apply.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from trellis.engine.authority import Principal
from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.jobs import JobId, Mismatch, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import IdempotencyKey
from trellis.gateway.callers import KeyHeader, authenticate
from trellis.http.shapes import REPLAYED
from trellis.identity import Identity
from trellis.web.bodies import in_thread_if_large
from trellis.wiring import new_id

HEADER = REPLAYED
FINGERPRINT_CHARS = 16
REQUEST = "http"


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotentRequest:
    """One request. `key` is None when its caller gave none: then asking twice is asking for two."""

    key: IdempotencyKey | None
    given: str | None
    """The caller's own word, for messages."""
    fingerprint: bytes
    """What was asked, and by whom: the path, the body and the caller's name."""
    request_id: RequestId
    """What the ledger calls it where it moves a job."""

    async def earlier(self, ledger: Ledger) -> JobId | None:
        """What this request made when it came before; raises IdempotencyMismatch."""
        if self.key is None:
            return None
        found = await ledger.find_by_idempotency_key(self.key.scope, self.key.key, self.key.fingerprint)
        if isinstance(found, Mismatch):
            raise self.mismatch(found.job_id)
        return None if found is None else found.job_id

    async def moved(self, ledger: Ledger, job_id: JobId) -> bool:
        """Whether this request has moved that job."""
        records = await ledger.recorded(await ledger.events(job_id))
        return any(record.request == self.request_id for record in records)

    def mismatch(self, job_id: str) -> IdempotencyMismatch:
        """The refusal of a key that means something else already; `job_id` is what that was about."""
        return IdempotencyMismatch(key=self.given, job_id=job_id)


async def idempotent_request(
    request: Request, who: Annotated[tuple[Principal, Identity], Depends(authenticate)], given: KeyHeader
) -> IdempotentRequest:
    """What names this request."""
    body = await request.body()
    value = await request.json() if body else None
    # The path is part of what was asked: one key for two agents, or two jobs, is a mistake.
    fingerprint = await in_thread_if_large(len(body), _fingerprint, [request.url.path, who[0].name, value])
    if given is None:
        return IdempotentRequest(key=None, given=None, fingerprint=fingerprint, request_id=RequestId(new_id()))
    scope = f"{request.method} {request.scope['route'].path}"
    key = IdempotencyKey(scope=scope, key=_digest(who[0].name, given), fingerprint=fingerprint)
    request_id = RequestId(f"{REQUEST}:{_digest(key.scope, key.key)}:{fingerprint.hex()[:FINGERPRINT_CHARS]}")
    return IdempotentRequest(key=key, given=given, fingerprint=fingerprint, request_id=request_id)


IdempotentRequestOf = Annotated[IdempotentRequest, Depends(idempotent_request)]


def mark_replayed(response: Response, *, replayed: bool) -> None:
    """Tell the caller that this was answered before."""
    if replayed:
        response.headers[HEADER] = "true"


def _fingerprint(asked: list[Any]) -> bytes:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, separators=(",", ":")).encode()).digest()


def _digest(*parts: str) -> str:
    """A name of fixed length; no two lists of parts share one."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


RESPONSES: dict[str, Any] = {
    HEADER: {
        "description": "`true` when an earlier request with this key had the effect.",
        "schema": {"type": "string"},
    }
}
