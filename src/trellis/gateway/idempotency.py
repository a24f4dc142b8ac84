"""Idempotency of requests: keys of requests that may be repeated, and the answers stored under them."""

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from trellis.app.instance import Instance
from trellis.app.wiring import new_id
from trellis.auth.principals import Principal
from trellis.auth.tokens import Identity
from trellis.engine.errors import IdempotencyMismatch, InvalidTransition
from trellis.engine.jobs import JobId, Mismatch, RequestId
from trellis.engine.ledger import Ledger
from trellis.engine.records import IdempotencyKey, Job, JobPlace
from trellis.gateway.callers import KeyHeader, authenticate
from trellis.http.shapes import REPLAYED
from trellis.http_server.bodies import in_thread_if_large
from trellis.http_server.problems import Problem
from trellis.storage.objects.store import CREATE, PutStored, StoredObject, if_match

# Identity of a request that may be repeated (D27, DJ-5).
#
# A key belongs to one caller at one route. The ledger stores it in the transaction of the job that the request creates,
# for at least 24 hours. For a request that changes existing jobs the key is reserved beforehand (`reserve`). The answer
# follows from what the request created and not from its present state, so a repeated request gets the first answer. Two
# routes answer with the present state instead, because a caller that repeats them wants to know it: POST /inbox/submit,
# whose entry may have been pending, and POST /proposals/{id}/apply.

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


# Reserved keys, for requests that change existing jobs: cancel, requeue, decide, apply (D27, DJ-5, DJ-11, DJ-12).
#
# A request that creates a job stores its key in that job's transaction. A request that changes jobs creates no row that
# could hold a key. So its key is reserved first, as an object that records the request: created once, under the day and
# the digest of the key. Invariants:
# - nothing is done before the reservation exists. A different request under the same key is refused, even a concurrent
#   one;
# - the effect happens once, because the ledger stores the request's id with it. If a gateway dies in between, the
#   reservation remains, and the repeated request continues from there;
# - an answer that cannot be derived from the ledger (a cancel request that changed nothing yet, a list of many jobs) is
#   stored with the reservation;
# - a reservation is valid for at least 24 hours and at most two days. A day's folder is emptied only after that.

FOLDER = "requests"
DAY = timedelta(days=1)
REMOVED_AT_ONCE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """The reservation of a key for one request. `place` is None when the request has no key."""

    place: str | None = None
    etag: str = ""
    fresh: bool = True
    """Whether this request made the reservation; False for an earlier or concurrent one."""
    said: dict[str, Any] | None = None
    """What is stored with it: the answer and, for a cancel request, the job's generation."""

    @property
    def answer(self) -> dict[str, Any] | None:
        """The stored answer, if there is one."""
        return None if self.said is None else self.said["answer"]


async def reserve(
    instance: Instance, asked: IdempotentRequest, about: str, said: dict[str, Any] | None = None
) -> Reservation:
    """Reserve the request's key; `said` is stored with a new reservation. Raises IdempotencyMismatch."""
    if asked.key is None:
        return Reservation(said=said)
    now = await instance.ledger.now()
    found = await _find_reservation(instance, asked, now - DAY)
    if found is None:
        made = await instance.objects.put(_reservation_key(asked, now), _body(asked, about, said), when=CREATE)
        if isinstance(made, PutStored):
            found = await _across_midnight(instance, asked, now)
            if found is None:
                await _remove_expired(instance, now)
                return Reservation(place=_reservation_key(asked, now), etag=made.etag, said=said)
            if not _is_same_request(found, asked):
                await instance.objects.delete(_reservation_key(asked, now))
        else:
            found = await _find_reservation(instance, asked, now)
    if found is None:  # removed after two days, between the two reads
        raise Problem("CONFLICT", "The Idempotency-Key ran out at this moment; ask again.")
    told = json.loads(found.body)
    if not _is_same_request(found, asked):
        raise asked.mismatch(told["about"])
    return Reservation(place=found.key, etag=found.etag, fresh=False, said=told["said"])


async def store_answer(
    instance: Instance, asked: IdempotentRequest, about: str, reservation: Reservation, said: dict[str, Any] | None
) -> None:
    """Store the answer with the reservation; None clears it. The first writer wins."""
    if reservation.place is not None:
        body = _body(asked, about, said)
        await instance.objects.put(reservation.place, body, when=if_match(reservation.etag))


async def cancel_once(
    instance: Instance,
    asked: IdempotentRequest,
    job: Job,
    *,
    waits: dict[str, Any] | None,
    act: Callable[[], Awaitable[dict[str, Any] | None]],
) -> tuple[dict[str, Any], bool]:
    """Cancel a job once per key. Returns the answer, and whether it was given before.

    `act` cancels the job and returns the answer. It returns None if the worker that holds the lease was asked to stop,
    and raises InvalidTransition or Problem if there is nothing to cancel. `waits` is the answer while the worker is
    being asked; None if the request never asks the worker. It is stored before the ledger is called, so a repeated
    request gets it even after the job has ended or a gateway has died in between.
    """
    said = (
        {"generation": job.generation, "answer": waits} if waits is not None and job.place is JobPlace.LEASED else None
    )
    mine = await reserve(instance, asked, job.job_id, said)
    before = None if mine.fresh else mine.said
    if before is not None and before["generation"] != job.generation:
        return before["answer"], True  # the job ended and was requeued since: the new generation must not be cancelled
    try:
        moved = await act()
    except (InvalidTransition, Problem):
        if before is not None:
            return before["answer"], True
        if mine.said is not None:
            await store_answer(instance, asked, job.job_id, mine, None)
        raise
    if moved is not None:
        return moved, False
    if before is not None:
        return before["answer"], True
    answer = waits or {}
    if mine.said is None:
        await store_answer(instance, asked, job.job_id, mine, {"generation": job.generation, "answer": answer})
    return answer, False


# --- inside ----------------------------------------------------------------------------------------------------------


async def _across_midnight(instance: Instance, asked: IdempotentRequest, now: datetime) -> StoredObject | None:
    """The reservation of a concurrent request on the other side of midnight.

    Both requests write first and then read the other's day, so at least one of them sees the other.
    """
    found = await _find_reservation(instance, asked, now - DAY)
    if found is None and _day(await instance.ledger.now()) != _day(now):
        found = await _find_reservation(instance, asked, now + DAY)
    return found


async def _find_reservation(instance: Instance, asked: IdempotentRequest, at: datetime) -> StoredObject | None:
    return await instance.objects.get(_reservation_key(asked, at))


async def _remove_expired(instance: Instance, now: datetime) -> None:
    """Remove a few expired reservations, so that they do not pile up."""
    oldest = await instance.objects.list(f"{FOLDER}/", limit=REMOVED_AT_ONCE)
    for info in oldest.items:
        if info.key < f"{FOLDER}/{_day(now - DAY)}/":
            await instance.objects.delete(info.key)


def _is_same_request(found: StoredObject, asked: IdempotentRequest) -> bool:
    return json.loads(found.body)["fingerprint"] == asked.fingerprint.hex()


def _body(asked: IdempotentRequest, about: str, said: dict[str, Any] | None) -> bytes:
    return json.dumps({"fingerprint": asked.fingerprint.hex(), "about": about, "said": said}).encode()


def _reservation_key(asked: IdempotentRequest, at: datetime) -> str:
    assert asked.key is not None
    return f"{FOLDER}/{_day(at)}/{hashlib.sha256(f'{asked.key.scope} {asked.key.key}'.encode()).hexdigest()}"


def _day(at: datetime) -> str:
    return at.astimezone(UTC).date().isoformat()
