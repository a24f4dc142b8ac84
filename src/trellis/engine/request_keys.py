"""Idempotency keys of requests that change the ledger. Every ledger stores them and follows these rules.

The request that creates a job for its caller stores its key with that job (`NewJob.idempotency_key`). A request that
cancels, requeues or moves jobs, or that submits a job which has a key of its own, has a row of its own, a request key.
Invariants:

- Only `submit`, `move`, `cancel`, `requeue`, `change_jobs` and `send_signal` write a row, in the transaction of their
  change. Without the change there is no row, and without the row no change. A change that was refused leaves the row with its request.
- One key belongs to one request. Another one with the same key is refused, also at the same moment.
- A request with the same fingerprint is repeated: it is carried out again under its request id, which has its effect
  once. If the row has an answer, that answer is returned instead. The ledger stores the answers that no event of a job
  shows: a cancel that was only requested, the ids of submitted jobs, and the answer for several jobs.
- A request of several transactions stores its whole answer with the first one (`RequestKey.answer`). A repeated request
  does what that answer says and is not yet done.
- A row is kept for at least KEY_S_MIN and removed by retention.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

from trellis.engine.errors import IdempotencyMismatch
from trellis.engine.job_changes import ChangeAnswer, ChangedJobs
from trellis.engine.jobs import CancelRequested, JobId, Mismatch, Moved, NotMoved, RequestKey, SignalSent, Submitted

KEY_S_MIN = 24 * 3600.0
"""How long an idempotency key is kept at least, of a submit as of a change (D27)."""

AnswerT = TypeVar("AnswerT")
AnyAnswerT = TypeVar("AnyAnswerT", bound=Moved | NotMoved | CancelRequested)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRequest:
    """The request that a key belongs to."""

    fingerprint: bytes
    about: str
    answer: bytes | None = None
    """The stored answer; None when the answer follows from the ledger, or the change was refused."""


def check_same_request(key: RequestKey, stored: StoredRequest) -> StoredRequest:
    """The stored request, if it is this one. Raises IdempotencyMismatch when the key belongs to another request."""
    if stored.fingerprint != key.fingerprint:
        raise IdempotencyMismatch(key=key.given, job_id=stored.about)
    return stored


# Answers that a ledger stores with the key.


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredAnswers(Generic[AnswerT]):
    """How the answers of one verb are stored."""

    encode: Callable[[RequestKey, AnswerT], bytes | None]
    """The answer to store; None when a repeated request is to be carried out again."""
    decode: Callable[[bytes], AnswerT]


def _encode_cancel(_: RequestKey, answer: Moved | NotMoved | CancelRequested) -> bytes | None:
    return json.dumps(asdict(answer)).encode() if isinstance(answer, CancelRequested) else None


def _decode_cancel(stored: bytes) -> Moved | NotMoved | CancelRequested:
    return replace(CancelRequested(**json.loads(stored)), repeated=True)


def _encode_requeue(key: RequestKey, answers: list[Moved | NotMoved]) -> bytes | None:
    if not key.keeps_refusals and not any(isinstance(answer, Moved) for answer in answers):
        return None
    return json.dumps([asdict(answer) for answer in answers]).encode()


def _decode_requeue(stored: bytes) -> list[Moved | NotMoved]:
    return [_repeated(NotMoved(**one) if "reason" in one else Moved(**one)) for one in json.loads(stored)]


def _repeated(answer: AnyAnswerT) -> AnyAnswerT:
    return answer if isinstance(answer, NotMoved) else replace(answer, repeated=True)


def _encode_change(_: RequestKey, changed: ChangedJobs) -> bytes | None:
    stored = [asdict(answer) for answer in changed.answers]
    return json.dumps({"answers": stored, "next_cursor": changed.next_cursor}).encode()


def _decode_change(stored: bytes) -> ChangedJobs:
    body = json.loads(stored)
    answers = tuple(_repeated(_change_answer(one)) for one in body["answers"])
    return ChangedJobs(answers=answers, next_cursor=body["next_cursor"], repeated=True)


def _change_answer(one: dict[str, Any]) -> ChangeAnswer:
    if "reason" in one:
        return NotMoved(**one)
    return Moved(**one) if "source" in one else CancelRequested(**one)


def _encode_submit(_: RequestKey, answers: list[Submitted | Mismatch]) -> bytes | None:
    if any(isinstance(answer, Mismatch) for answer in answers):
        return None
    return json.dumps([answer.job_id for answer in answers]).encode()


def _decode_submit(stored: bytes) -> list[Submitted | Mismatch]:
    return [Submitted(job_id=JobId(job_id), created=False) for job_id in json.loads(stored)]


SIGNAL_ANSWERS: StoredAnswers[SignalSent] = StoredAnswers(
    encode=lambda _, answer: json.dumps(asdict(answer)).encode(),
    decode=lambda stored: replace(SignalSent(**json.loads(stored)), repeated=True),
)
SUBMIT_ANSWERS = StoredAnswers(encode=_encode_submit, decode=_decode_submit)
CANCEL_ANSWERS = StoredAnswers(encode=_encode_cancel, decode=_decode_cancel)
CHANGE_ANSWERS = StoredAnswers(encode=_encode_change, decode=_decode_change)
REQUEUE_ANSWERS = StoredAnswers(encode=_encode_requeue, decode=_decode_requeue)
