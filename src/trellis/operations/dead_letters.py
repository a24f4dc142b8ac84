"""Dead letters of every lifecycle that has them, as one list: jobs that ended without success and need a person (DJ-12).

A leased-job's letter is a row of the ledger. A DEAD queue-job's letter follows from its events, which say everything that a letter says but
when its last lease would have ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from trellis.engine.errors import OptionInvalid
from trellis.engine.jobs import Actor, JobId, Moved, NotMoved, ReasonCode, RequestId, Stage
from trellis.engine.ledger import Ledger
from trellis.engine.records import DeadLetter, Event, Job, JobFilter
from trellis.lifecycles import LIFECYCLES, Phase
from trellis.lifecycles.leased_job import LEASED_JOB
from trellis.lifecycles.queue_job import QUEUE_JOB

LETTERS_PAGE = 100
REQUEUE_PAGES_MAX = 20
LEASED_DEAD = next(state.name for state in LEASED_JOB.states if state.dead_letter)
QUEUE_DEAD = next(t.target for t in QUEUE_JOB.transitions if t.event == "job_dead_lettered")
CLAIMED = "job_claimed"
WITH_LETTERS = (LEASED_JOB.name, QUEUE_JOB.name)
"""Lifecycles whose jobs can be dead letters."""
_LIST_ENDED = "."
"""In a cursor: this lifecycle has no more."""
_CURSOR_SEPARATOR = "~"

_STAGES = MappingProxyType(
    {"CONTEXT_ASSEMBLY": Stage.FETCH, "NOTEBOOKLM_CALL": Stage.EXEC, "ARTIFACT_WRITE": Stage.COMMIT}
)
"""How far a queue-job was, by the state in which its last attempt failed."""
_REASONS = MappingProxyType(
    {
        "VALIDATION_ERROR": ReasonCode.VALIDATION_FAILED,
        "DEADLINE_PASSED": ReasonCode.TIMEOUT,
        "UPSTREAM_UNAVAILABLE": ReasonCode.DEPENDENCY_UNAVAILABLE,
        "NLM_UNAVAILABLE": ReasonCode.DEPENDENCY_UNAVAILABLE,
    }
)
"""Why a queue-job died, by the code of its error, where its attempts were not spent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LetterPage:
    """Dead letters, newest first; `cursor` asks for the next page, None at the end."""

    letters: tuple[DeadLetter, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class _LettersCursor:
    """Where the next page begins in each of the two lists: None at the beginning, _OVER behind the end."""

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
    """A page of the dead letters that nobody requeued, of one lifecycle or of all; raises OptionInvalid.

    A page may hold fewer than `limit` and still be followed by another.
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
    """The first of both lists, each in its own order, by which its next page is found: of the two heads always the newer one."""
    lists, merged = [list(leased[::-1]), list(queue[::-1])], list[DeadLetter]()
    while len(merged) < limit and any(lists):
        newer = max((one for one in lists if one), key=lambda one: one[-1].at)
        merged.append(newer.pop())
    return merged


async def _leased(ledger: Ledger, where: JobFilter, limit: int, begins: str | None) -> list[DeadLetter]:
    if begins == _LIST_ENDED or where.lifecycle not in {None, LEASED_JOB.name}:
        return []
    return await ledger.dead_letters(where, limit=limit, cursor=begins)


def _leased_cursor(found: Sequence[DeadLetter], taken: int, begins: str | None) -> str | None:
    if taken == len(found):
        return _LIST_ENDED
    return found[taken - 1].job_id if taken else begins


@dataclass(frozen=True, kw_only=True, slots=True)
class _QueueLetters:
    """DEAD queue-jobs that were looked at, and the letters of those that are meant, each with how many jobs were looked at before it."""

    where: JobFilter
    begins: str | None
    looked: int = 0
    more: bool = False
    found: tuple[tuple[int, DeadLetter], ...] = ()

    @property
    def letters(self) -> list[DeadLetter]:
        return [letter for _, letter in self.found]

    async def cursor_after(self, ledger: Ledger, taken: int) -> str | None:
        """Where the next page begins when so many letters were shown."""
        passed = self.looked if taken == len(self.found) else self.found[taken][0]
        if passed == self.looked and not self.more:
            return _LIST_ENDED
        if not passed:
            return self.begins
        return (await ledger.jobs(self.where, limit=passed, cursor=self.begins)).cursor or _LIST_ENDED


async def _queue(ledger: Ledger, where: JobFilter, limit: int, begins: str | None) -> _QueueLetters:
    dead = replace(where, lifecycle=QUEUE_JOB.name, state=QUEUE_DEAD, reason_code=None)
    if begins == _LIST_ENDED or where.lifecycle not in {None, QUEUE_JOB.name}:
        return _QueueLetters(where=dead, begins=_LIST_ENDED)
    page = await ledger.jobs(dead, limit=limit, cursor=begins)
    events = await ledger.events_of([job.job_id for job in page.jobs])
    letters = [(at, queue_letter(job, events[job.job_id])) for at, job in enumerate(page.jobs) if job.job_id in events]
    meant = [(at, one) for at, one in letters if where.reason_code in {None, one.reason_code}]
    more = len(page.jobs) == limit
    return _QueueLetters(where=dead, begins=begins, looked=len(page.jobs), more=more, found=tuple(meant))


def queue_letter(job: Job, events: Sequence[Event]) -> DeadLetter:
    """The letter of a DEAD queue-job, from its events."""
    from trellis.research.documents import error_of  # brings the agents with it, which most commands never need

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
    """The dead letter of an ended job, if it has one that nobody requeued."""
    if LIFECYCLES[job.lifecycle].by_name[job.state].phase is not Phase.ENDED:
        return None
    if job.lifecycle == QUEUE_JOB.name:
        return queue_letter(job, await ledger.events(job.job_id)) if job.state == QUEUE_DEAD else None
    return await ledger.dead_letter(job.job_id)


async def requeue_dead(
    ledger: Ledger, actor: Actor, where: JobFilter, request_id: RequestId, *, limit: int, cause: str | None
) -> list[Moved | NotMoved]:
    """Run the dead-lettered jobs again that a filter means, of each lifecycle the oldest first, at most `limit` in all.

    Asked again with the same request id it answers for the same jobs.
    """
    answers: list[Moved | NotMoved] = []
    if where.lifecycle in {None, LEASED_JOB.name}:
        leased = replace(where, lifecycle=LEASED_JOB.name, state=LEASED_DEAD)
        answers += await ledger.requeue(actor, leased, request_id, limit=limit, cause=cause)
    if where.lifecycle in {None, QUEUE_JOB.name} and len(answers) < limit:
        answers += await _requeue_queue(ledger, actor, where, request_id, limit=limit - len(answers), cause=cause)
    return answers


async def _requeue_queue(
    ledger: Ledger, actor: Actor, where: JobFilter, request_id: RequestId, *, limit: int, cause: str | None
) -> list[Moved | NotMoved]:
    """The part of `requeue_dead` that are queue-jobs. The ledger does not know their reasons: then each is requeued by its id."""
    again = RequestId(f"{request_id}:{QUEUE_JOB.name}")
    dead = replace(where, lifecycle=QUEUE_JOB.name, state=QUEUE_DEAD)
    if where.reason_code is None:
        return await ledger.requeue(actor, dead, again, limit=limit, cause=cause)
    # A request that took jobs before is answered for those: the filter is not looked at then, and it means nothing new.
    before = await ledger.requeue(actor, replace(dead, reason_code=None), again, limit=0, cause=cause)
    if before:
        return before
    meant = await _queue_jobs_of_filter(ledger, where, limit)
    return await ledger.requeue(actor, meant, again, limit=limit, cause=cause) if meant else []


async def _queue_jobs_of_filter(ledger: Ledger, where: JobFilter, limit: int) -> list[JobId]:
    """The oldest DEAD queue-jobs with the reason of a filter, at most `limit` of them."""
    only, cursor, found = replace(where, lifecycle=QUEUE_JOB.name), None, list[JobId]()
    for _ in range(REQUEUE_PAGES_MAX):
        page = await dead_letters(ledger, only, limit=LETTERS_PAGE, cursor=cursor)
        found += [letter.job_id for letter in page.letters]
        cursor = page.cursor
        if cursor is None:
            break
    return found[::-1][: min(limit, LETTERS_PAGE)]
