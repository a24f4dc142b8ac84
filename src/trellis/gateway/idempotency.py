"""Idempotency of requests: keys of requests that may come twice, and the answers kept under them."""

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

# Requests that may come twice: what names one, and what it asked (D27, DJ-5).
#
# A key is one caller's at one route. The ledger keeps it in the transaction of whatever the request made, for 24 hours and more; the key
# of a request that moves what is there already is reserved before (`reserving`). What a route answers follows from what was made and not from how that stands now, so the second answer is the first.
# Two routes tell how it stands instead, because who asks them again wants to know: POST /inbox/submit, whose entry may have waited, and
# POST /proposals/{id}/apply.

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


# Keys of requests that move what is there already: cancel, requeue, decide, apply (D27, DJ-5, DJ-11, DJ-12).
#
# What makes a job keeps its key in that job's transaction. What moves jobs makes no row that could hold a key, so the key is reserved
# first: an object, put create-only under the day and the digest of the key, that says what was asked. What holds:
# - nothing is done before the reservation is there, and whoever asks something else under the key is refused, also at the same moment;
# - the effect comes once, because the ledger keeps the request's id with it. A gateway that dies between the two leaves a reservation,
# and the same request goes on from there;
# - an answer that does not follow from the ledger (a wish that moved nothing yet, a list of many jobs) lies with the reservation;
# - a reservation is good for 24 hours and more, and for two days at most. A folder is emptied only when its day is over for good.

FOLDER = "requests"
DAY = timedelta(days=1)
REMOVED_AT_ONCE = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Reservation:
    """A key that means this request. Without a key there is nothing to reserve: then it has no `place`."""

    place: str | None = None
    etag: str = ""
    fresh: bool = True
    """This very request made it; else it came before, or comes at the same moment."""
    said: dict[str, Any] | None = None
    """What lies with it: the answer, and of a wish the generation it was about."""

    @property
    def answer(self) -> dict[str, Any] | None:
        """What was answered, if that is known."""
        return None if self.said is None else self.said["answer"]


async def reserve(
    instance: Instance, asked: IdempotentRequest, about: str, said: dict[str, Any] | None = None
) -> Reservation:
    """Let the key of this request mean it and nothing else; raises IdempotencyMismatch. `said` is kept if it means nothing yet."""
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
    if found is None:  # taken away after two days, between the two looks
        raise Problem("CONFLICT", "The Idempotency-Key ran out at this moment; ask again.")
    told = json.loads(found.body)
    if not _is_same_request(found, asked):
        raise asked.mismatch(told["about"])
    return Reservation(place=found.key, etag=found.etag, fresh=False, said=told["said"])


async def store_answer(
    instance: Instance, asked: IdempotentRequest, about: str, reservation: Reservation, said: dict[str, Any] | None
) -> None:
    """Keep with the reservation what was answered; None: nothing was. Whoever came first has said it."""
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
    """Cancel a job once under the key: the answer, and whether it is one that was given before.

    `act` cancels and gives the answer of what moved, or None when the job's holder was asked to stop; it raises InvalidTransition or a
    Problem when there is nothing to cancel. `waits` is the answer while its holder is asked, None for a wish that asks nobody. It is kept
    before the ledger is asked: who asks again after the end gets it, whichever gateway died in between.
    """
    said = (
        {"generation": job.generation, "answer": waits} if waits is not None and job.place is JobPlace.LEASED else None
    )
    mine = await reserve(instance, asked, job.job_id, said)
    before = None if mine.fresh else mine.said
    if before is not None and before["generation"] != job.generation:
        return before["answer"], True  # it ended, and was requeued since: that one nobody wished to end
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
    """The reservation of somebody who asked at the same moment on the other side of midnight.

    Both put first and look then, each at the other's day: at least one of them sees the other.
    """
    found = await _find_reservation(instance, asked, now - DAY)
    if found is None and _day(await instance.ledger.now()) != _day(now):
        found = await _find_reservation(instance, asked, now + DAY)
    return found


async def _find_reservation(instance: Instance, asked: IdempotentRequest, at: datetime) -> StoredObject | None:
    return await instance.objects.get(_reservation_key(asked, at))


async def _remove_expired(instance: Instance, now: datetime) -> None:
    """Take away a few that are too old, so that they do not gather."""
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
