"""Dead letters of all lifecycles that have them, in one list: jobs that failed and need an operator (DJ-12).

The letter of a leased job is a row in the ledger. The letter of a DEAD queue job is derived from its events, which
contain everything but when its last lease would have expired.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from trellis.engine.errors import OptionInvalid, Refused
from trellis.engine.jobs import Actor, JobId, Moved, NotMoved, ReasonCode, RequestId, RequestKey, Stage
from trellis.engine.ledger import Ledger
from trellis.engine.records import DeadLetter, Event, Job, JobFilter
from trellis.engine.request_keys import REQUEUE_ANSWERS
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB

LETTERS_PAGE = 100
REQUEUE_PAGES_MAX = 20
LEASED_DEAD = next(state.name for state in LEASED_JOB.states if state.dead_letter)
QUEUE_DEAD = next(t.target for t in QUEUE_JOB.transitions if t.event == "job_dead_lettered")
CLAIMED = "job_claimed"
WITH_LETTERS = (LEASED_JOB.name, QUEUE_JOB.name)
"""Lifecycles whose jobs can have dead letters."""
_LIST_ENDED = "."
"""In a cursor: this lifecycle has no more letters."""
_CURSOR_SEPARATOR = "~"

_STAGES = MappingProxyType(
    {"CONTEXT_ASSEMBLY": Stage.FETCH, "NOTEBOOKLM_CALL": Stage.EXEC, "ARTIFACT_WRITE": Stage.COMMIT}
)
"""The stage of a queue job's letter, by the state in which its last attempt failed."""
_REASONS = MappingProxyType(
    {
        "VALIDATION_ERROR": ReasonCode.VALIDATION_FAILED,
        "DEADLINE_PASSED": ReasonCode.TIMEOUT,
        "UPSTREAM_UNAVAILABLE": ReasonCode.DEPENDENCY_UNAVAILABLE,
        "NLM_UNAVAILABLE": ReasonCode.DEPENDENCY_UNAVAILABLE,
    }
)
"""The reason of a queue job's letter, by its error code, if it did not use up its attempts."""


class DeadLetterNotFound(Refused):
    """Job {job_id} is {state} and has no dead letter; `trellis job explain {job_id}` says more."""

    code = "NOT_FOUND"


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterPage:
    """Dead letters, newest first. `cursor` is for the next page; None at the end."""

    letters: tuple[DeadLetter, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class _LettersCursor:
    """Where the next page starts in each of the two lists: None at the beginning, `_LIST_ENDED` after the end."""

    queue: str | None = None
    leased: str | None = None

    @classmethod
    def read(cls, text: str | None) -> "_LettersCursor":
        if text is None:
            return cls()
        queue, between, leased = text.partition(_CURSOR_SEPARATOR)
        if not between:
            raise OptionInvalid(option="cursor", value=text, expected="the cursor of an earlier page of dead letters")
        return cls(queue or None, leased or None)

    def to_text(self) -> str | None:
        if self.queue == self.leased == _LIST_ENDED:
            return None
        return f"{self.queue or ''}{_CURSOR_SEPARATOR}{self.leased or ''}"


async def dead_letters(ledger: Ledger, where: JobFilter, *, limit: int, cursor: str | None = None) -> LetterPage:
    """Returns a page of dead letters that were not requeued, of one lifecycle or of all. Raises OptionInvalid.

    A page may have fewer than `limit` letters although another page follows.
    """
    begins = _LettersCursor.read(cursor)
    leased = await _leased(ledger, where, limit + 1, begins.leased)
    queue = await _queue(ledger, where, limit + 1, begins.queue)
    newest = _merged(leased, queue.letters, limit)
    from_queue = sum(letter.lifecycle == QUEUE_JOB.name for letter in newest)
    from_leased = len(newest) - from_queue
    ends = _LettersCursor(
        queue=await queue.cursor_after(ledger, from_queue),
        leased=_leased_cursor(leased, from_leased, begins.leased),
    )
    return LetterPage(letters=tuple(newest), cursor=ends.to_text())


def _merged(leased: Sequence[DeadLetter], queue: Sequence[DeadLetter], limit: int) -> list[DeadLetter]:
    """Merges the two lists, always taking the newer head. Each list keeps its order, which its cursor depends on."""
    lists, merged = [list(leased[::-1]), list(queue[::-1])], list[DeadLetter]()
    while len(merged) < limit and any(lists):
        newer = max((one for one in lists if one), key=lambda one: one[-1].at)
        merged.append(newer.pop())
    return merged


async def _leased(ledger: Ledger, where: JobFilter, limit: int, begins: str | None) -> list[DeadLetter]:
    if begins == _LIST_ENDED or where.lifecycle not in {None, LEASED_JOB.name}:
        return []
    return await ledger.dead_letters(where, limit=limit, cursor=begins)


def _leased_cursor(letters: Sequence[DeadLetter], taken: int, begins: str | None) -> str | None:
    if taken == len(letters):
        return _LIST_ENDED
    return letters[taken - 1].job_id if taken else begins


@dataclass(frozen=True, kw_only=True, slots=True)
class _QueueLetters:
    """A page of DEAD queue jobs, and the letters that match the filter, each with the number of jobs before it."""

    where: JobFilter
    begins: str | None
    ends: str = _LIST_ENDED
    found: tuple[tuple[int, DeadLetter], ...] = ()

    @property
    def letters(self) -> list[DeadLetter]:
        return [letter for _, letter in self.found]

    async def cursor_after(self, ledger: Ledger, taken: int) -> str | None:
        """Returns where the next page starts when `taken` letters were shown."""
        if taken == len(self.found):
            return self.ends
        passed, cursor = self.found[taken][0], self.begins
        while passed and cursor != _LIST_ENDED:  # a ledger limited to own jobs may answer with short pages
            page = await ledger.jobs(self.where, limit=passed, cursor=cursor)
            passed, cursor = passed - len(page.jobs), page.cursor or _LIST_ENDED
        return cursor


async def _queue(ledger: Ledger, where: JobFilter, limit: int, begins: str | None) -> _QueueLetters:
    dead = replace(where, lifecycle=QUEUE_JOB.name, state=QUEUE_DEAD, reason_code=None)
    if begins == _LIST_ENDED or where.lifecycle not in {None, QUEUE_JOB.name}:
        return _QueueLetters(where=dead, begins=_LIST_ENDED)
    page = await ledger.jobs(dead, limit=limit, cursor=begins)
    events = await ledger.events_of([job.job_id for job in page.jobs])
    letters = [(at, queue_letter(job, events[job.job_id])) for at, job in enumerate(page.jobs) if job.job_id in events]
    meant = [(at, one) for at, one in letters if where.reason_code in {None, one.reason_code}]
    return _QueueLetters(where=dead, begins=begins, ends=page.cursor or _LIST_ENDED, found=tuple(meant))


def queue_letter(job: Job, events: Sequence[Event]) -> DeadLetter:
    """Builds the letter of a DEAD queue job from its events."""
    from trellis.research.queue_job import error_of  # imports the agents, which most commands never need

    present = [event for event in events if event.generation == job.generation]
    held = [event for event in present if event.source in _STAGES]
    owners = [event.actor for event in present if event.target in _STAGES]
    error = error_of(job, events) or "INTERNAL_ERROR: nothing was recorded"
    code, spent = error.partition(":")[0], job.attempts_spent >= job.attempts_allowed - 1
    return DeadLetter(
        job_id=job.job_id,
        type=job.type,
        lifecycle=job.lifecycle,
        state=job.state,
        reason_code=ReasonCode.EXHAUSTED_RETRIES if spent else _REASONS.get(code, ReasonCode.INFRASTRUCTURE_FAILURE),
        stage=_STAGES[held[-1].source or ""] if held else Stage.INPUT,
        last_error=error,
        attempts=sum(event.type == CLAIMED for event in present),
        last_owner=owners[-1] if owners else None,
        last_lease_expires_at=None,
        correlation_id=job.correlation_id,
        at=events[-1].ts,
        version=job.version,
    )


async def letter_of(ledger: Ledger, job: Job) -> DeadLetter | None:
    """Returns the dead letter of an ended job, if it has one that was not requeued."""
    if LIFECYCLES[job.lifecycle].by_name[job.state].phase is not Phase.ENDED:
        return None
    if job.lifecycle == QUEUE_JOB.name:
        return queue_letter(job, await ledger.events(job.job_id)) if job.state == QUEUE_DEAD else None
    return await ledger.dead_letter(job.job_id)


def requeue_answer(answer: Moved | NotMoved) -> dict[str, Any]:
    """What became of one job that should be requeued, as HTTP and commands report it."""
    if isinstance(answer, NotMoved):
        return {"job_id": answer.job_id, "requeued": False, "status": answer.state, "reason": answer.reason}
    return {"job_id": answer.job_id, "requeued": True, "status": answer.target, "version": answer.version}


async def requeue_dead(
    ledger: Ledger,
    actor: Actor,
    where: JobFilter,
    request_id: RequestId,
    *,
    limit: int,
    cause: str | None,
    key: RequestKey | None = None,
) -> list[Moved | NotMoved]:
    """Requeues the dead-lettered jobs that match a filter, oldest first per lifecycle, at most `limit` in total.

    A repeated request id gives the answer for the same jobs. Raises IdempotencyMismatch.
    """
    answers: list[Moved | NotMoved] = []
    if where.lifecycle in {None, LEASED_JOB.name}:
        leased = replace(where, lifecycle=LEASED_JOB.name, state=LEASED_DEAD)
        answers += await ledger.requeue(actor, leased, request_id, limit=limit, cause=cause, key=key)
        key = None if key is None else key.part(QUEUE_JOB.name)
    if where.lifecycle in {None, QUEUE_JOB.name} and len(answers) < limit:
        rest = limit - len(answers)
        answers += await _requeue_queue(ledger, actor, where, request_id, limit=rest, cause=cause, key=key)
    return answers


async def _requeue_queue(
    ledger: Ledger,
    actor: Actor,
    where: JobFilter,
    request_id: RequestId,
    *,
    limit: int,
    cause: str | None,
    key: RequestKey | None,
) -> list[Moved | NotMoved]:
    """Requeues queue jobs for `requeue_dead`. A filter by reason, unknown to the ledger, uses job ids."""
    again = RequestId(f"{request_id}:{QUEUE_JOB.name}")
    dead = replace(where, lifecycle=QUEUE_JOB.name, state=QUEUE_DEAD)
    if where.reason_code is None:
        return await ledger.requeue(actor, dead, again, limit=limit, cause=cause, key=key)
    stored = None if key is None else await ledger.find_request(key)
    if stored is not None and stored.answer is not None:
        return REQUEUE_ANSWERS.decode(stored.answer)
    # A repeated request without a stored answer is answered for the jobs it took before. The filter is then ignored.
    before = await ledger.requeue(actor, replace(dead, reason_code=None), again, limit=0, cause=cause)
    if before:
        return before
    meant = await _queue_jobs_of_filter(ledger, where, limit)
    return await ledger.requeue(actor, meant, again, limit=limit, cause=cause, key=key)


async def _queue_jobs_of_filter(ledger: Ledger, where: JobFilter, limit: int) -> list[JobId]:
    """Returns at most `limit` of the oldest DEAD queue jobs with the filter's reason."""
    only, cursor, job_ids = replace(where, lifecycle=QUEUE_JOB.name), None, list[JobId]()
    for _ in range(REQUEUE_PAGES_MAX):
        page = await dead_letters(ledger, only, limit=LETTERS_PAGE, cursor=cursor)
        job_ids += [letter.job_id for letter in page.letters]
        cursor = page.cursor
        if cursor is None:
            break
    return job_ids[::-1][: min(limit, LETTERS_PAGE)]
