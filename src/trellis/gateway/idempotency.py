"""Idempotency of requests: keys of requests that may be repeated."""

import hashlib
import json
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from trellis.api.requests import IdempotentRequest
from trellis.app.system import new_id
from trellis.auth.principals import Principal
from trellis.engine.jobs import RequestId
from trellis.engine.records import IdempotencyKey
from trellis.gateway.callers import Authenticated, KeyHeader
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
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


async def idempotent_request(
    request: Request, who: Authenticated, given: KeyHeader, response: Response
) -> IdempotentRequest:
    """The key and request id of this request. Without a key nobody compares it, so it has no fingerprint."""
    mark = partial(mark_replayed, response, replayed=True)
    if given is None:
        return IdempotentRequest(key=None, given=None, request_id=RequestId(new_id()), on_replay=mark)
    fingerprint = await fingerprint_of(request, who[0])
    scope = f"{request.method} {request.scope['route'].path}"
    key = IdempotencyKey(scope=scope, key=_digest(who[0].name, given), fingerprint=fingerprint)
    request_id = RequestId(f"{REQUEST}:{_digest(key.scope, key.key)}:{fingerprint.hex()[:FINGERPRINT_CHARS]}")
    return IdempotentRequest(key=key, given=given, request_id=request_id, on_replay=mark)


IdempotentRequestOf = Annotated[IdempotentRequest, Depends(idempotent_request)]


async def fingerprint_of(request: Request, principal: Principal) -> bytes:
    """The digest of the path, the caller's name and the body: the same for the same request.

    It includes the path, because one key for two agents or two jobs is a mistake.
    """
    body = await request.body()
    value = await request.json() if body else None
    return await in_thread_if_large(len(body), _fingerprint, [request.scope["path"], principal.name, value])


def mark_replayed(response: Response, *, replayed: bool) -> None:
    """Set the header that says an earlier request had the effect."""
    if replayed:
        response.headers[HEADER] = "true"


def _fingerprint(parts: list[Any]) -> bytes:
    return hashlib.sha256(_canonical(parts).encode()).digest()


def _digest(*parts: str) -> str:
    """A digest of fixed length, distinct for distinct lists of parts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
