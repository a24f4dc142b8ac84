"""Durable functions: the steps, waits and children of a handler.

Every durable call of a handler has a number, from 1. Its outcome is a journal entry of the job, under that number. A
job that waits is suspended: its handler ends, and begins again when what it waits for has happened. Then each call that
has an entry returns what the entry says, until the handler reaches the first call without one. So a handler must make
the same calls in the same order each time; `ctx.version` is for code that has changed meanwhile.
"""

import hashlib
import json
import uuid
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from inspect import isawaitable
from typing import Any, Generic, NamedTuple, NoReturn, Protocol, TypeVar

import pydantic_core

from trellis.engine.errors import LeaseConflictError, OptionInvalid, PermanentError
from trellis.engine.job_batches import BatchMembers
from trellis.engine.jobs import (
    BATCH_ENTRY,
    CLAIM_MAX,
    DELAY_S_MAX,
    ERROR_CHARS_MAX,
    RESTART_ENTRY,
    Actor,
    JobId,
    JobOutcome,
    Lease,
    LeaseLost,
    NewJob,
    Wait,
    WaitMode,
)
from trellis.engine.ledger import Ledger
from trellis.engine.option_values import SECONDS, check_within
from trellis.engine.text import error_message
from trellis.ledgers.refusals import check_wait
from trellis.worker.batches import (
    RESULTS_BYTES_MAX,
    RESULTS_READ,
    BatchOutcome,
    EndedBatch,
    batch_outcome,
    short_outcome,
)
from trellis.worker.outcomes import Snooze
from trellis.worker.payloads import step_result_bytes
from trellis.worker.requests import SubmitSettings

ResultT = TypeVar("ResultT")

JOURNAL_ENTRIES_MAX = 10_000
"""The most journal entries of one job. A handler that needs more begins anew (`ctx.continue_as_new`)."""
JOURNAL_BYTES_MAX = 16 * 1024 * 1024
SPAWN_MAX = 1_000
"""The most children that one journal entry names."""
OUTCOMES_BYTES = 512 * 1024
"""Results of children that are stored together in one journal entry."""
ERROR = "error"
"""The entry of a step whose error the handler caught."""
STEP, SLEEP, SPAWN, GATHER, FIRST, SIGNAL = "step", "sleep", "spawn", "gather", "first", "wait_signal"
BATCH = "batch"
WAITS = "waits"
"""The entry of a call that has begun to wait. It is stored with the wait, and shows that the handler was there."""
OWN_SETTINGS = frozenset({"job_id", "idempotency_key", "idempotency_scope", "parent_id", "compensates", "lifecycle"})
"""Settings of a submit that a spawned job cannot have: its parent gives it an id of its own."""


class Suspended(BaseException):
    """Ends a handler whose job waits. The handler begins again later; let this pass."""


class ReplayMismatch(PermanentError):
    """The handler makes other durable calls than when the job ran before. The journal is kept.

    Repair the code, or give the change a `ctx.version`, and requeue the job.
    """


class CallsOverlap(PermanentError):
    """The handler makes a durable call while another one has not returned."""


class DurableStepFailed(PermanentError):
    """A step raised an error, which is its `__cause__` when it happens and its text when the handler is repeated.

    An uncaught one fails the attempt as its cause does: a transient error is tried again. One that the handler catches is
    the outcome of the step, and is raised again by each repetition of the handler.
    """

    def __init__(self, step: str, type_: str, message: str) -> None:
        self.step, self.type, self.message = step, type_, message
        super().__init__(f"step {step!r}: {type_}: {message}")


class ChildFailed(PermanentError):
    """A child that the job waited for ended without success."""

    relation = "child"

    def __init__(self, job_id: JobId, type_: str, state: str, error: str | None) -> None:
        self.job_id, self.type, self.state, self.error = job_id, type_, state, error
        super().__init__(f"{self.relation} {job_id} ({type_}) ended as {state}: {error or 'no error was recorded'}")


class MemberFailed(ChildFailed):
    """A job of the batch that this job completes ended without success."""

    relation = "job"


class SignalTimeout(PermanentError, TimeoutError):
    """No signal arrived in time."""


@dataclass(frozen=True, slots=True, eq=False)
class ChildHandle(Generic[ResultT]):
    """A spawned child. `await` waits for its result; `ctx.gather` and `ctx.first` wait for several."""

    id: JobId
    type: str
    calls: "DurableCalls"
    """The attempt that spawned it."""
    is_new: bool
    """Whether this attempt spawned it, and no earlier one."""

    def __await__(self) -> Generator[Any, None, ResultT]:
        return self._result().__await__()

    async def _result(self) -> ResultT:
        return (await self.calls.gather((self,), return_exceptions=False))[0]


class FirstChild(NamedTuple):
    """The child that ended first, and its result."""

    handle: ChildHandle[Any]
    value: Any


class DurableServices(Protocol):
    """The parts of a worker that durable calls use."""

    ledger: Ledger
    actor: Actor

    def request(self, type_: str, payload: Any, settings: SubmitSettings) -> NewJob:
        """Builds and checks a job to submit."""
        ...

    def payload_bytes(self, type_: str, payload: Any) -> bytes:
        """Encodes and checks the payload of a job to submit."""
        ...

    def read_result(self, type_: str, body: bytes | None) -> Any:
        """Decodes the result of a job as its handler's return type, if this application has the handler."""
        ...


class JournalEntry(NamedTuple):
    """What the journal says about one durable call."""

    kind: str
    label: str
    body: bytes


class PendingChild(NamedTuple):
    """A child that was spawned and is not submitted yet."""

    number: int
    """The number of the call that spawned it."""
    job: NewJob
    mark: str
    """A digest of its payload."""
    abandon: bool
    """It goes on when its parent is cancelled."""


class JournalReplay:
    """The journal of a job, by the numbers of its durable calls."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        self.entries = len(entries)
        self.bytes = sum(map(len, entries.values()))
        self.last = 0
        """The highest number of a call that has an entry."""
        self.named: dict[str, bytes] = {}
        """Entries without a number: versions, and the input of a job that began anew."""
        self.times_restarted = 0
        """How often the job began anew."""
        self.signals_read: dict[str, int] = {}
        """The number of the last signal of each name that the job has read."""
        self._by_number: dict[int, list[JournalEntry]] = {}
        for name, body in entries.items():
            self.add(name, body, stored=True)

    def add(self, name: str, body: bytes, *, stored: bool = False) -> None:
        """Note an entry that is stored."""
        if not stored:
            self.entries += 1
            self.bytes += len(body)
        number, _, rest = name.removeprefix("@").partition(":")
        if not name.startswith("@") or not number.isdigit():
            self.named[name] = body
            if name == RESTART_ENTRY:
                restart = json.loads(body)
                self.times_restarted = restart["n"]
                self._note_signals(restart["signals"])
            return
        kind, _, label = rest.partition(":")
        if kind == SIGNAL:
            self._note_signals({label: json.loads(body)["number"] or 0})
        entries = (
            _spawn_entries(int(number), body) if kind == SPAWN else [(int(number), JournalEntry(kind, label, body))]
        )
        for at, entry in entries:
            self._by_number.setdefault(at, []).append(entry)
            self.last = max(self.last, at)

    def _note_signals(self, read: dict[str, int]) -> None:
        for name, number in read.items():
            self.signals_read[name] = max(self.signals_read.get(name, 0), number)

    def has(self, kind: str) -> bool:
        """Whether a call of this kind has an entry."""
        return any(entry.kind == kind for entries in self._by_number.values() for entry in entries)

    def at(self, number: int) -> list[JournalEntry]:
        """The entries of one call."""
        return self._by_number.get(number, [])


def _spawn_entries(first: int, body: bytes) -> list[tuple[int, JournalEntry]]:
    """One entry names several children, whose calls have consecutive numbers."""
    return [
        (first + n, JournalEntry(SPAWN, f"{type_}#{mark}", b"")) for n, (type_, mark) in enumerate(json.loads(body))
    ]


class DurableCalls:
    """The durable calls of one attempt."""

    def __init__(
        self,
        lease: Lease,
        worker: DurableServices,
        fenced: Callable[[Any | LeaseLost], Any],
        family: Callable[[], SubmitSettings],
        generation: int,
        *,
        was_suspended: bool,
    ) -> None:
        self._lease = lease
        self._was_suspended = was_suspended
        self._worker = worker
        self._fenced = fenced
        self._family = family
        """The settings that children inherit."""
        self._generation = generation
        self._replay: JournalReplay | None = None
        self._number = 0
        self._pending: list[PendingChild] = []
        self._failure: tuple[int, str, DurableStepFailed] | None = None
        """A step that raised, while nobody knows whether the handler catches it."""
        self._busy: str | None = None
        self._mismatch: ReplayMismatch | None = None
        self._batch: EndedBatch | None = None
        """What `ctx.batch` returned."""
        self._ended_before: EndedBatch | None = None
        """How the batch had ended before the handler began."""
        self.suspension: Wait | None = None
        """What the job waits for, once a call has suspended it."""

    # --- the journal ---------------------------------------------------------------------------------------------

    async def load(self) -> JournalReplay:
        """Read the journal, once."""
        if self._replay is None:
            # The first holder of a job that was never suspended knows that nobody has written a journal before.
            is_first = self._lease.epoch == 1 and not self._was_suspended
            self._replay = JournalReplay({} if is_first else await self._worker.ledger.read_journal(self._lease.job_id))
        return self._replay

    async def restarted_payload(self) -> bytes | None:
        """The payload with which the job began anew, if it did."""
        body = (await self.load()).named.get(RESTART_ENTRY)
        return None if body is None else json.dumps(json.loads(body)["payload"]).encode()

    async def finish(self) -> None:
        """The handler has returned: submit children that no call has submitted, and check that no call is missing."""
        if self._mismatch is not None:
            raise self._mismatch
        await self._flush()
        if self._replay is not None and self._replay.last > self._number:
            (entry, *_) = self._replay.at(self._replay.last)
            raise ReplayMismatch(
                f"the handler returned after {self._number} durable calls; when this job ran before, it made "
                f"{self._replay.last}, the last one {_call_text(entry.kind, entry.label)}"
            )

    def _begin(self, kind: str, label: str) -> int:
        """The number of the next call. Raises ReplayMismatch."""
        self._number += 1
        if self._replay is not None:
            self._check_fit(self._replay, self._number, kind, label)
        return self._number

    def _check_alone(self, kind: str) -> None:
        """Check that a call may begin. Raises Suspended, ReplayMismatch, CallsOverlap."""
        if self.suspension is not None:
            raise Suspended
        if self._mismatch is not None:  # also for a handler that caught it
            raise self._mismatch
        if self._busy is not None:
            raise CallsOverlap(
                f"ctx.{kind} was called while ctx.{self._busy} had not returned: a handler makes one durable call at a time. "
                "Use ctx.spawn and ctx.gather for what shall run in parallel"
            )

    @contextmanager
    def _alone(self, kind: str) -> Generator[None]:
        """Marks that a durable call is being made."""
        self._check_alone(kind)
        self._busy = kind
        try:
            yield
        finally:
            self._busy = None

    def _check_fit(self, replay: JournalReplay, number: int, kind: str, label: str) -> None:
        """Check that the journal has no other call under this number. Raises ReplayMismatch, from here on always."""
        for entry in replay.at(number):
            if not _fits(kind, label, entry):
                self._mismatch = ReplayMismatch(
                    f"durable call {number} of this handler is {_call_text(kind, label)}; when this job ran before, it was "
                    f"{_call_text(entry.kind, entry.label)}"
                )
                raise self._mismatch

    async def _stored(self, number: int, kind: str) -> bytes | None:
        return next((entry.body for entry in (await self.load()).at(number) if entry.kind == kind), None)

    async def _record(self, number: int, kind: str, label: str, body: bytes) -> bytes:
        name = _entry_name(number, kind, label)
        _refuse_full(await self.load(), len(body))
        stored: bytes = self._fenced(await self._worker.ledger.journal(self._lease, name, body))
        (await self.load()).add(name, stored)
        return stored

    def _suspended(self, wait: Wait) -> Suspended:
        """What to raise so that the job waits. Raises OptionInvalid and PermanentError for a wait that cannot be stored."""
        check_wait(wait)
        if wait.entry is not None and self._replay is not None:
            _refuse_full(self._replay, len(wait.entry[1]))
        self.suspension = wait
        return Suspended()

    # --- steps and times -----------------------------------------------------------------------------------------

    async def step(self, name: str, call: Callable[[], Awaitable[Any] | Any], arguments: Any) -> Any:
        """Run a call once; later attempts get its stored result."""
        with self._alone(STEP):
            await self.load()
            label = f"{name}#{_mark(arguments)}"
            number = self._begin(STEP, label)
            failed = await self._stored(number, ERROR)
            if failed is not None:
                raise DurableStepFailed(name, *json.loads(failed))
            body = await self._stored(number, STEP)
            if body is None:
                await self._flush()
                result = await self._result(number, name, label, call)
                body = await self._record(number, STEP, label, result)
            return json.loads(body)

    async def _result(self, number: int, name: str, label: str, call: Callable[[], Awaitable[Any] | Any]) -> bytes:
        """The result of a step as JSON. Its error is noted: if the handler catches it, the next call journals it."""
        try:
            value = call()
            return step_result_bytes(await value if isawaitable(value) else value, name)
        except (Snooze, LeaseConflictError):
            raise
        except Exception as error:
            failure = DurableStepFailed(name, type(error).__name__, error_message(error)[:ERROR_CHARS_MAX])
            self._failure = (number, label, failure)
            raise failure from error

    async def sleep(self, seconds: float | None, until: datetime | None) -> None:
        """Wait for a time, by the ledger's clock."""
        with self._alone(SLEEP):
            replay = await self.load()
            number = self._begin(SLEEP, "")
            stored = await self._stored(number, SLEEP)
            if stored is not None and number < replay.last:
                return  # the handler went on after it
            await self._flush()
            now = await self._worker.ledger.now()
            end = until or now + timedelta(seconds=_seconds("sleep", seconds or 0.0))
            if stored is not None:
                end = datetime.fromisoformat(json.loads(stored))
            left_s = (end - now).total_seconds()
            if left_s <= 0:
                return
            entry = (
                None if stored is not None else (_entry_name(number, SLEEP, ""), json.dumps(end.isoformat()).encode())
            )
            raise self._suspended(Wait(timeout_s=_seconds("sleep", left_s), entry=entry))

    async def version(self, change: str, latest: int) -> int:
        """The version of a change that this job began with."""
        with self._alone("version"):
            replay, name = await self.load(), f"@version:{change}"
            if name not in replay.named and replay.last > self._number:
                replay.named[name] = b"0"  # for this attempt: the next one comes to the same answer
            if name not in replay.named:
                await self._flush()
                body = json.dumps(latest).encode()
                _refuse_full(replay, len(body))
                replay.add(name, self._fenced(await self._worker.ledger.journal(self._lease, name, body)))
            return json.loads(replay.named[name])

    async def continue_as_new(self, body: bytes) -> NoReturn:
        """Empty the journal and begin the handler anew with this payload."""
        with self._alone("continue_as_new"):
            await self._flush()
            replay = await self.load()
            anew = {"n": replay.times_restarted + 1, "payload": json.loads(body), "signals": replay.signals_read}
            raise self._suspended(Wait(restart_with=json.dumps(anew).encode()))

    # --- children ------------------------------------------------------------------------------------------------

    def spawn(self, type_: str, payload: Any, settings: SubmitSettings, *, abandon: bool) -> ChildHandle[Any]:
        """A child of this job. It is submitted with the next call that waits or writes, or when the handler returns."""
        if wrong := settings.keys() & OWN_SETTINGS:
            expected = "a spawned job gets its id and parent from the job that spawns it; use ctx.submit for others"
            raise OptionInvalid(option=min(wrong), value="set", expected=expected)
        self._check_alone(SPAWN)
        job = None
        if self._replay is None or not self._replay.at(self._number + 1):
            job = self._worker.request(type_, payload, {**self._family(), **settings})
        mark = _digest(self._worker.payload_bytes(type_, payload) if job is None else job.payload)
        number = self._begin(SPAWN, f"{type_}#{mark}")
        restarts = 0 if self._replay is None else self._replay.times_restarted
        job_id = JobId(str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self._lease.job_id} {restarts} {number}")))
        if job is not None:
            self._pending.append(PendingChild(number, replace(job, job_id=job_id), mark, abandon))
        return ChildHandle(job_id, type_, self, job is not None)

    async def _flush(self) -> None:
        """Journal an error that the handler caught, and submit the children that were spawned since the last call."""
        replay = await self.load()
        if self._failure is not None:
            number, label, failure = self._failure
            self._failure = None
            await self._record(number, ERROR, label, json.dumps([failure.type, failure.message]).encode())
        while self._pending:
            part, self._pending = self._pending[:SPAWN_MAX], self._pending[SPAWN_MAX:]
            for child in part:  # the journal may not have been read when they were spawned
                self._check_fit(replay, child.number, SPAWN, f"{child.job.type}#{child.mark}")
            part = [child for child in part if not replay.at(child.number)]
            if not part:
                continue
            body = json.dumps([[child.job.type, child.mark] for child in part]).encode()
            _refuse_full(replay, len(body))
            jobs = [child.job for child in part]
            left = frozenset(child.job.job_id for child in part if child.abandon)
            name = _entry_name(part[0].number, SPAWN, str(len(part)))
            stored = self._fenced(
                await self._worker.ledger.spawn(self._worker.actor, self._lease, jobs, name, body, abandoned=left)
            )
            replay.add(name, stored)

    async def gather(self, handles: Sequence[ChildHandle[Any]], *, return_exceptions: bool) -> list[Any]:
        """The results of children, in their order."""
        if not handles:
            return []
        self._check_handles(handles)
        with self._alone(GATHER):
            await self.load()
            number = self._begin(GATHER, str(len(handles)))
            outcomes = await self._gathered(number, len(handles))
            if outcomes is None:
                mode = WaitMode.ALL if return_exceptions else WaitMode.ALL_OR_FAILURE
                by_id = await self._ended(number, GATHER, handles, mode)
                outcomes = [_stored_outcome(by_id.get(handle.id)) for handle in handles]
                await self._record_outcomes(number, GATHER, outcomes)
        values = [self._value(handle, outcome) for handle, outcome in zip(handles, outcomes, strict=True)]
        if not return_exceptions:
            for value in values:
                if isinstance(value, ChildFailed):
                    raise value
        return values

    async def first(self, handles: Sequence[ChildHandle[Any]]) -> FirstChild:
        if not handles:
            raise OptionInvalid(option="handles", value="none", expected="at least one child to wait for")
        self._check_handles(handles)
        with self._alone(FIRST):
            replay = await self.load()
            number = self._begin(FIRST, str(len(handles)))
            of_first = (entry for entry in replay.at(number) if entry.kind == FIRST)
            body = next((entry.body for entry in of_first if self._counts(number, entry)), None)
            if body is None:
                by_id = await self._ended(number, FIRST, handles, WaitMode.ANY)
                ended = [_stored_outcome(by_id.get(handle.id)) for handle in handles]
                place, outcome = next((n, outcome) for n, outcome in enumerate(ended) if outcome is not None)
                label = self._outcomes_label(len(handles), 0, failed="failed" in outcome)
                body = await self._record(number, FIRST, label, json.dumps([place, outcome]).encode())
        chosen: tuple[int, Any] = tuple(json.loads(body))
        place, outcome = chosen
        value = self._value(handles[place], outcome)
        if isinstance(value, ChildFailed):
            raise value
        return FirstChild(handles[place], value)

    def _check_handles(self, handles: Sequence[ChildHandle[Any]]) -> None:
        if any(handle.calls is not self for handle in handles):
            expected = "a child that this attempt of this handler has spawned"
            raise OptionInvalid(option="handle", value="of another handler", expected=expected)

    def _outcomes_label(self, count: int, part: int, *, failed: bool) -> str:
        """The label of an entry with outcomes of children. `_counts` and `_fits` read it."""
        return f"{count}.{part}.{self._generation}.{int(failed)}"

    def _counts(self, number: int, entry: JournalEntry) -> bool:
        """Whether the outcomes of an entry still count. After a requeue, failures that ended the handler are asked again."""
        _, _, generation, failed = entry.label.split(".")
        assert self._replay is not None
        return not int(failed) or int(generation) == self._generation or number < self._replay.last

    async def _ended(
        self, number: int, kind: str, handles: Sequence[ChildHandle[Any]], mode: WaitMode
    ) -> dict[JobId, JobOutcome]:
        """The outcomes of children once they suffice. Suspends the job until then."""
        is_new = any(handle.is_new for handle in handles)
        await self._flush()
        ids = tuple(dict.fromkeys(handle.id for handle in handles))
        if not is_new:
            by_id = {one.job_id: one for one in await self._outcomes(ids)}
            unfinished = [job_id for job_id in ids if job_id in by_id and not by_id[job_id].has_ended]
            failed = any(one.has_ended and not one.success for one in by_id.values())
            enough = {
                WaitMode.ALL: not unfinished,
                WaitMode.ALL_OR_FAILURE: not unfinished or failed,
                WaitMode.ANY: len(unfinished) < len(ids),
            }
            if enough[mode]:
                return by_id
            if mode is WaitMode.ALL:
                ids = tuple(unfinished)
        raise self._suspended(Wait(children=ids, mode=mode, entry=_begun(number, kind, str(len(handles)))))

    async def _outcomes(self, ids: Sequence[JobId], *, with_results: bool = True) -> list[JobOutcome]:
        outcomes: list[JobOutcome] = []
        for start in range(0, len(ids), CLAIM_MAX):
            outcomes += await self._worker.ledger.outcomes(ids[start : start + CLAIM_MAX], with_results=with_results)
        return outcomes

    async def _gathered(self, number: int, count: int) -> list[Any] | None:
        """The outcomes that were journaled. After a requeue, those with a failure are asked for again."""
        parts: dict[int, list[Any]] = {}
        for entry in (await self.load()).at(number):
            if entry.kind == WAITS:
                continue
            if self._counts(number, entry):
                parts[int(entry.label.split(".")[1])] = json.loads(entry.body)
        outcomes = [outcome for part in sorted(parts) for outcome in parts[part]]
        return outcomes if len(outcomes) == count else None

    async def _record_outcomes(self, number: int, kind: str, outcomes: Sequence[Any]) -> None:
        failed = any(outcome is None or "failed" in outcome for outcome in outcomes)
        part: list[str] = []
        size = parts = 0
        for n, outcome in enumerate(outcomes):
            text = json.dumps(outcome)
            part.append(text)
            size += len(text)
            if size >= OUTCOMES_BYTES or n == len(outcomes) - 1:
                label = self._outcomes_label(len(outcomes), parts, failed=failed)
                await self._record(number, kind, label, f"[{','.join(part)}]".encode())
                part, size, parts = [], 0, parts + 1

    def _value(self, handle: ChildHandle[Any], outcome: Any) -> Any:
        if outcome is None:
            return None
        if "failed" in outcome:
            return ChildFailed(handle.id, handle.type, outcome["failed"], outcome["error"])
        body = None if outcome["ok"] is None else json.dumps(outcome["ok"]).encode()
        return self._worker.read_result(handle.type, body)

    # --- the batch that this job completes ------------------------------------------------------------------------

    async def await_batch(self) -> None:
        """If this job completes a batch, suspend it unless all jobs of the batch have ended.

        A worker calls this before the handler begins. Only a job of a restored ledger, or of a batch with a requeued
        job, waits again.
        """
        replay = await self.load()
        if BATCH_ENTRY in replay.named and not replay.has(BATCH):
            self._ended_before = await self._ended_batch(replay)

    async def batch(self) -> BatchOutcome:
        """How the jobs of the batch have ended."""
        with self._alone(BATCH):
            replay = await self.load()
            if BATCH_ENTRY not in replay.named:
                raise PermanentError("ctx.batch: this job completes no batch; submit it with `submit_batch`")
            members = BatchMembers.read(replay.named[BATCH_ENTRY])
            number = self._begin(BATCH, str(len(members.ids)))
            outcomes = await self._gathered(number, len(members.ids))
            if outcomes is None:
                await self._flush()
                outcomes = (self._ended_before or await self._ended_batch(replay)).outcomes
                await self._record_outcomes(number, BATCH, outcomes)
            self._batch = EndedBatch(members, outcomes)
            return batch_outcome(self._batch)

    async def _ended_batch(self, replay: JournalReplay) -> EndedBatch:
        """The jobs of the batch, which have ended. Suspends the job until they have."""
        members = BatchMembers.read(replay.named[BATCH_ENTRY])
        ids = tuple(dict.fromkeys(members.ids))
        by_id = {one.job_id: one for one in await self._outcomes(ids, with_results=False)}
        if any(not one.has_ended for one in by_id.values()):
            raise self._suspended(Wait(mode=WaitMode.BATCH))
        return EndedBatch(members, [short_outcome(_stored_outcome(by_id.get(job_id))) for job_id in members.ids])

    async def batch_results(self, start: int, stop: int | None) -> list[Any]:
        """The results of jobs of the batch, in order; a MemberFailed for each that ended without success."""
        if self._batch is None:
            raise PermanentError("ctx.batch_results: call `await ctx.batch()` first")
        chosen = self._batch.part(start, stop)
        results, size = dict[JobId, bytes | None](), 0
        wanted = list(dict.fromkeys(one.job_id for one in chosen if one.success))
        for first in range(0, len(wanted), RESULTS_READ):
            for one in await self._worker.ledger.outcomes(wanted[first : first + RESULTS_READ]):
                results[one.job_id] = one.result
                size += len(one.result or b"")
            if size > RESULTS_BYTES_MAX:
                raise PermanentError(
                    f"the results of this batch have more than {RESULTS_BYTES_MAX} bytes: read them in parts, "
                    "as ctx.batch_results(0, 100)"
                )
        return [
            self._worker.read_result(one.type, results.get(one.job_id))
            if one.success
            else MemberFailed(one.job_id, one.type, one.state, one.error)
            for one in chosen
        ]

    # --- signals -------------------------------------------------------------------------------------------------

    async def wait_signal(self, name: str, timeout_s: float | None) -> Any:
        with self._alone(SIGNAL):
            replay = await self.load()
            number = self._begin(SIGNAL, name)
            stored = await self._stored(number, SIGNAL)
            if stored is None:
                stored = await self._next_signal(replay, number, name, timeout_s)
        answer = json.loads(stored)
        if answer["number"] is None:
            raise SignalTimeout(f"no signal {name!r} arrived in time")
        return answer["value"]

    async def _next_signal(self, replay: JournalReplay, number: int, name: str, timeout_s: float | None) -> bytes:
        await self._flush()
        after = replay.signals_read.get(name, 0)
        signals = await self._worker.ledger.job_signals(self._lease.job_id, name, after=after, limit=1)
        if signals:
            body = json.dumps({"number": signals[0].number, "value": json.loads(signals[0].body)}).encode()
            return await self._record(number, SIGNAL, name, body)
        begun = await self._stored(number, WAITS)
        until = None if begun is None else json.loads(begun)
        left_s: float | None = None
        if until is not None:
            left_s = (datetime.fromisoformat(until) - await self._worker.ledger.now()).total_seconds()
        elif begun is None and timeout_s is not None:
            left_s = _seconds("timeout_s", timeout_s)
            until = (await self._worker.ledger.now() + timedelta(seconds=left_s)).isoformat()
        if left_s is not None and left_s <= 0:
            return await self._record(number, SIGNAL, name, json.dumps({"number": None}).encode())
        entry = _begun(number, SIGNAL, name, until)
        raise self._suspended(Wait(signal=name, after=after, timeout_s=left_s, entry=entry))


def error_of_step(error: BaseException) -> BaseException:
    """The error with which an attempt fails: that of the step, if the handler did not catch the failure of a step."""
    return error.__cause__ if isinstance(error, DurableStepFailed) and error.__cause__ is not None else error


def _refuse_full(replay: JournalReplay, more: int) -> None:
    """Check that the journal may get another entry of this size. Raises PermanentError."""
    if replay.entries >= JOURNAL_ENTRIES_MAX or replay.bytes + more > JOURNAL_BYTES_MAX:
        raise PermanentError(
            f"the journal of this job has {replay.entries} entries of {replay.bytes} bytes, and may have "
            f"{JOURNAL_ENTRIES_MAX} of {JOURNAL_BYTES_MAX}: let the handler begin anew with ctx.continue_as_new"
        )


def _entry_name(number: int, kind: str, label: str) -> str:
    return f"@{number}:{kind}:{label}"


def _begun(number: int, kind: str, label: str, until: str | None = None) -> tuple[str, bytes]:
    """The entry that is stored when a call begins to wait: until when, if it has a time limit."""
    return _entry_name(number, WAITS, f"{kind}:{label}"), json.dumps(until).encode()


def _fits(kind: str, label: str, entry: JournalEntry) -> bool:
    """Whether a call can have written this entry."""
    if entry.kind == WAITS:
        return f"{kind}:{label}" == entry.label
    if kind != entry.kind and (kind, entry.kind) != (STEP, ERROR):
        return False
    if kind in {GATHER, FIRST, BATCH}:
        return label == entry.label.partition(".")[0]
    if kind in {STEP, SPAWN}:
        name, _, mark = label.rpartition("#")
        stored_name, _, stored_mark = entry.label.rpartition("#")
        return name == stored_name and (mark == stored_mark or not mark or not stored_mark)
    return label == entry.label


def _call_text(kind: str, label: str) -> str:
    """A call in the words of an error message."""
    if kind == WAITS:
        kind, _, label = label.partition(":")
    kind = STEP if kind == ERROR else kind
    name, _, mark = label.rpartition("#") if kind in {STEP, SPAWN} else (label, "", "")
    what = {
        GATHER: f"of {label.partition('.')[0]} children",
        FIRST: f"of {label.partition('.')[0]} children",
        BATCH: f"of {label.partition('.')[0]} jobs",
        SLEEP: "",
    }.get(kind, repr(name))
    return " ".join(filter(None, (f"ctx.{kind}", what, f"with arguments {mark}" if mark else "")))


def _stored_outcome(outcome: JobOutcome | None) -> Any:
    """The outcome of a child as the journal has it; None for one that has not ended."""
    if outcome is None:
        return {"failed": "removed", "error": "it ended, and is no longer in the ledger"}
    if not outcome.has_ended:
        return None
    if not outcome.success:
        return {"failed": outcome.state, "error": outcome.error}
    return {"ok": None if outcome.result is None else json.loads(outcome.result)}


def _mark(arguments: Any) -> str:
    """A short digest of a step's arguments; empty without arguments, or if they have no JSON form."""
    if not arguments:
        return ""
    try:
        return _digest(pydantic_core.to_json(arguments))
    except (pydantic_core.PydanticSerializationError, ValueError):
        return ""


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:12]


def _seconds(option: str, value: float) -> float:
    check_within(option, value, 0, DELAY_S_MAX, of=SECONDS)
    return value
