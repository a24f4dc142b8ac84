"""The built-in orchestrator: claims runs and drives each through its steps."""

import json
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any, cast

from trellis.agents.run_io import JournalOnce
from trellis.documents import ids, run_documents
from trellis.documents.errors import (
    AgentStopped,
    AgentTimeout,
    RunTimeout,
    StepError,
    StoreAway,
    UpstreamUnavailable,
)
from trellis.documents.run_documents import RunRequest
from trellis.engine.batches import Batcher
from trellis.engine.call_times import CallKind, CallTimes, durations_ms
from trellis.engine.clock import within
from trellis.engine.jobs import Actor, Advance, Claimed, JobId, LeaseLost, Move, RequestId, StepApplied, Turn
from trellis.engine.lease_runner import LeaseRunner, LeaseRunnerOptions
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.records import Event, JobFilter
from trellis.engine.service import Service
from trellis.engine.step_runner import JobDrive, StepRunner
from trellis.lifecycles import Trigger
from trellis.runs.agent_status import run_key
from trellis.runs.waits import UpstreamWaits
from trellis.storage.objects.canonical_json import encode, sha256, timestamp
from trellis.storage.objects.store import StoreUnavailable

# The interface of a run's steps: what a step receives and what it returns. A step does work and never changes the run.
#
# A step may be executed again after a crash. An action that must not happen twice goes through `StepContext.once`. It
# keeps the first answer in the ledger under a name, and returns that answer from then on.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepContext:
    """Everything a step may use."""

    run_id: str
    number: int
    name: str
    request: RunRequest
    before: Mapping[str, Mapping[str, Any]]
    """Results of the earlier steps, by step name."""
    once: JournalOnce
    left_s: Callable[[], float]
    """Seconds until the run's deadline or the step's, whichever is sooner."""
    calls: CallTimes
    """The step's calls of others are timed with it, and its file lists them."""
    correlation_id: str | None = None
    """The run's correlation id. Everything the step creates carries it too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What a step returns: `result` goes into its file, `event_data` into the event that counts the step."""

    result: Mapping[str, Any]
    event_data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    output: bytes | None = None
    """The bytes of output/proposal.json, from the step `persist-results`."""


RunStep = Callable[[StepContext], Coroutine[Any, Any, StepResult]]
"""One of the four steps of a run: executes it, or raises a StepError."""


def result_of(step_file: bytes) -> dict[str, Any]:
    """The `result` field from the bytes of a step's file."""
    return json.loads(step_file)["result"]


# The run driver (PIPE-10, PIPE-11, RUN-6, RUN-7, D14, D16).
#
# For every step: execute it; store its file's bytes in the run's journal, where the first result stays; count it with a
# fenced transition; wait until the object store shows it; then begin the next step. If a driver dies, another driver
# continues after the last counted step, with everything in the journal.
#
# A projector or object store that is away delays a run and never fails it by itself. Such a wait is noted in the
# journal and does not count against the run's time limit. `upstream_wait_s` bounds all waits of a run together.

ERROR_CHARS_MAX = 2_000
ADVANCES_MAX = 200
"""Most steps of different runs in one transaction."""
LOOKS_MAX = 1_000
"""Most drives served by one query for the ledger's time."""
HISTORIES_MAX = 100
"""Most runs whose events are read in one query."""
CLOCKS_ALIKE_S = 1.0
"""Shorter durations are measured with the local clock, not the ledger's: it drifts less than a millisecond."""
UPSTREAM_PAUSE_S_MAX = 30.0
"""Longest pause between two tries of a step whose object store does not answer.

Also the longest pause between two checks of a wait's limit.
"""
STEP = "step"
EPOCH = datetime.fromtimestamp(0, UTC)

_log = log_of("trellis.runs")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDriverOptions:
    """Time limits and retries of a run (document 002, 5.1)."""

    step_timeout_s: float = 120.0
    run_timeout_s: float = 600.0
    retry_delays_s: tuple[float, ...] = (1.0, 2.0, 4.0)
    upstream_wait_s: float = 86_400.0
    """How long a run may wait in total for a projector or object store that is away, before it fails."""
    wait_noted_s: float = 5.0
    """A counted step that is not published for this long becomes a wait.

    A wait is noted in the journal and does not count against the run's time.
    """


@dataclass(frozen=True, slots=True)
class LedgerTime:
    """The ledger's time, and the local clock's readings before and after the query."""

    now: datetime
    asked_at: float
    answered_at: float


async def _no_artifacts(run_id: str, agent_slug: str) -> list[str]:  # noqa: ARG001 - the form of `RunDriver.artifacts`
    """Default for `RunDriver.artifacts` where jobs make no artifacts."""
    return []


@dataclass(kw_only=True)
class RunDriver(StepRunner):
    """Drives claimed runs. `published` returns when the object store shows a run at the given version or later."""

    steps: Mapping[str, RunStep]
    published: Callable[[str, str, int], Coroutine[Any, Any, None]]
    options: RunDriverOptions
    artifacts: Callable[[str, str], Awaitable[list[str]]] = _no_artifacts
    """Returns the artifacts that jobs of a run have made so far, by run and agent."""
    span = "run.drive"
    _advances: Batcher[Advance, StepApplied | LeaseLost] = field(init=False)
    _looks: Batcher[None, LedgerTime] = field(init=False)
    _histories: Batcher[JobId, list[Event]] = field(init=False)

    def __post_init__(self) -> None:
        self._advances = Batcher(self._advance_all, lambda _: 1, ADVANCES_MAX)
        self._looks = Batcher(self._look_for_all, lambda _: 1, LOOKS_MAX)
        self._histories = Batcher(self._read_histories, lambda _: 1, HISTORIES_MAX)

    def begin(self, claimed: Claimed) -> "RunDrive":
        """The drive of a claimed run."""
        return RunDrive(self, claimed)

    async def ledger_time(self) -> LedgerTime:
        """The ledger's time, from one query shared with the drives that ask at the same moment.

        The value is never cached: the local clock may stand still while the machine sleeps, and the ledger's may be
        adjusted.
        """
        return await self._looks.put(None)

    async def _look_for_all(self, askers: Sequence[None]) -> list[LedgerTime]:
        asked_at = self.clock.monotonic()
        now = await self.ledger.now()
        return [LedgerTime(now, asked_at, self.clock.monotonic())] * len(askers)

    async def history(self, run_id: JobId) -> list[Event]:
        """The events of a run, oldest first, from one query shared with the runs that begin at the same moment."""
        return await self._histories.put(run_id)

    async def _read_histories(self, run_ids: Sequence[JobId]) -> list[list[Event]]:
        events = await self.ledger.events_of(run_ids)
        return [events.get(run_id, []) for run_id in run_ids]

    async def advance(self, advance: Advance) -> StepApplied | LeaseLost:
        """One fenced step of one run, in one transaction with the concurrent steps of other runs."""
        return await self._advances.put(advance)

    async def _advance_all(self, advances: Sequence[Advance]) -> list[StepApplied | LeaseLost]:
        return list((await self.ledger.turn(Turn(actor=self.actor, advances=tuple(advances)))).outcomes)


class StepAgain(Exception):
    """A try of a step failed, and another try follows after `delay_s` seconds."""

    def __init__(self, delay_s: float, error: StepError) -> None:
        super().__init__(str(error))
        self.delay_s, self.code = delay_s, error.code


@dataclass(kw_only=True, slots=True)
class StepTries:
    """The tries of one step under one lease: the delays before the retries that are left, and the tries that waited."""

    delays_s: Iterator[float]
    upstream: int = 0


class RunDrive(JobDrive[str | None, StepError]):
    """One run while one driver holds its lease."""

    failures = StepError
    left = "run_left"

    def __init__(self, driver: RunDriver, claimed: Claimed) -> None:
        super().__init__(driver, claimed, _log.bind(run_id=claimed.lease.job_id, epoch=claimed.lease.epoch))
        self._driver, self._run_id = driver, self._job_id
        self._request = run_documents.RunRequest.read(claimed.payload)
        self._waits = UpstreamWaits(self._journal, self.keep)
        self._version = 0
        self._done = 0
        self._started = EPOCH
        self._ends_at = 0.0

    async def work(self) -> str | None:
        """Execute and count every step that was not counted yet. Returns the agent's summary."""
        await self._load()
        if self._done:
            await self._until_published(self._done)
        for number in range(self._done + 1, len(ids.STEPS) + 1):
            body = self._journal.get(step_entry(number)) or await self._make(number)
            await self._count(number, body)
            await self._until_published(number)
        return self._summary()

    def _summary(self) -> str | None:
        """The agent's summary, from the file of its step."""
        return result_of(self._journal[step_entry(2)]).get("summary")

    async def _load(self) -> None:
        """Load the run's events and journal."""
        ledger = self._driver.ledger
        events = await self._driver.history(self._run_id)
        started = next(event for event in events if event.type == run_documents.STARTED)
        self._started, self._version = started.ts, events[-1].version
        self._done = sum(event.type == run_documents.STEP_DONE for event in events)
        if self._done or started.epoch != self._lease.epoch:  # else this is the first lease, and the journal is empty
            self._journal = await ledger.read_journal(self._run_id)
            self._waits = UpstreamWaits(self._journal, self.keep)
            await self._look()  # a journaled step is counted and awaited without being executed

    async def _make(self, number: int) -> bytes:
        """Execute a step, with its retries, and journal its file.

        If another driver journaled the step first, its bytes are used.
        """
        return await self._keep_step(number, *await self._with_retries(number))

    async def _keep_step(
        self, number: int, result: StepResult, calls: CallTimes, began: datetime, ended: datetime
    ) -> bytes:
        """Journal a step's file. Returns the bytes that the journal holds."""
        if result.output is not None:
            self._journal[run_documents.OUTPUT_ENTRY] = await self.keep(run_documents.OUTPUT_ENTRY, result.output)
        body = encode(
            {
                "step": number,
                "name": ids.STEPS[number - 1],
                "run_id": self._run_id,
                "agent_slug": self._request.agent_slug,
                "started_at": timestamp(began),
                "finished_at": timestamp(ended),
                **calls.to_dict(),
                "result": dict(result.result),
                "told": dict(result.event_data),
            }
        )
        kept = await self.keep(step_entry(number), body)
        self._journal[step_entry(number)] = kept
        return kept

    async def _with_retries(self, number: int) -> tuple[StepResult, CallTimes, datetime, datetime]:
        """The result of the try that succeeded, its calls, and when it began and ended."""
        tries = self.new_tries()
        while True:
            try:
                return await self._try(number, tries)
            except StepAgain as again:
                await self._driver.clock.sleep(again.delay_s)

    def new_tries(self) -> "StepTries":
        """The tries of a step that has not begun."""
        return StepTries(delays_s=iter(self._driver.options.retry_delays_s))

    async def _try(self, number: int, tries: "StepTries") -> tuple[StepResult, CallTimes, datetime, datetime]:
        """One try of a step. Raises StepAgain if another try follows, else the StepError that ends the run."""
        began, calls = await self._look(), CallTimes(clock=self._driver.clock)
        try:
            result = await self._once_over(number, calls)
        except StepError as error:
            if error.waits:
                tries.upstream += 1
                delay_s = await self._upstream_pause_s(str(error), began.now, tries.upstream)
            else:
                await self._go_on(began.now)
                delay_s = next(tries.delays_s, None)
                if delay_s is None or not error.retries or delay_s >= self._left_s():
                    raise
            about = {"run_id": self._run_id, "step": ids.STEPS[number - 1], "code": error.code}
            _log.warning("step_failed", error=str(error), again_in_s=delay_s, **about)
            raise StepAgain(delay_s, error) from error
        await self._go_on(began.now)
        return result, calls, began.now, await self._end_of(began)

    async def _upstream_pause_s(self, problem: str, since: datetime | None, tries: int) -> float:
        """The pause after a try that failed upstream: the retry delays in turn, then doubled each time."""
        await self._wait(problem, since)
        delays = self._driver.options.retry_delays_s or (1.0,)
        beyond = max(0, tries - len(delays))
        return min(UPSTREAM_PAUSE_S_MAX, delays[min(tries, len(delays)) - 1] * 2.0 ** min(beyond, 16))

    async def _wait(self, reason: str, since: datetime | None = None) -> None:
        """Note that the run waits for upstream.

        Raises UpstreamUnavailable when the total wait reaches `upstream_wait_s`.
        """
        now, limit_s = (await self._driver.ledger_time()).now, self._driver.options.upstream_wait_s
        if not self._waits.is_open:
            _log.warning("run_waits", run_id=self._run_id, reason=reason)
        await self._waits.begin(reason, since or now)
        if self._waits.bounded_s(now) >= limit_s:
            raise UpstreamUnavailable(detail=f"{reason} (the run waited {limit_s:g}s, which is its limit)")

    async def _go_on(self, now: datetime) -> None:
        """End the open wait: the run's own time counts again from `now`."""
        if self._waits.is_open:
            waited_s = await self._waits.end(now)
            _log.info("run_goes_on", run_id=self._run_id, waited_s=round(waited_s, 3))

    async def _once_over(self, number: int, calls: CallTimes) -> StepResult:
        """One try of a step, limited by the step's timeout and the run's."""
        options, clock = self._driver.options, self._driver.clock
        ends_at = min(clock.monotonic() + options.step_timeout_s, self._ends_at)
        if ends_at <= clock.monotonic():
            raise RunTimeout(detail=f"execution exceeded {options.run_timeout_s:g}s limit")
        name = ids.STEPS[number - 1]
        context = StepContext(
            run_id=self._run_id,
            number=number,
            name=name,
            request=self._request,
            before={ids.STEPS[n - 1]: result_of(self._journal[step_entry(n)]) for n in range(1, number)},
            once=self.once,
            left_s=lambda: ends_at - clock.monotonic(),
            calls=calls,
            correlation_id=self._claimed.correlation_id,
        )
        return await self.in_time(
            f"run.step {name}",
            ends_at - clock.monotonic(),
            self._driver.steps[name](context),
            late=lambda: self._too_late(name, ends_at),
            unexpected=lambda error: self._unexpected(name, error),
        )

    def _unexpected(self, name: str, error: Exception) -> StepError:
        if isinstance(error, StoreUnavailable):
            return StoreAway(detail=str(error))
        _log.exception("step_raised", run_id=self._run_id, step=name)
        return StepError(detail=f"{name}: {type(error).__name__}: {error}"[:ERROR_CHARS_MAX])

    def _too_late(self, name: str, ends_at: float) -> StepError:
        options = self._driver.options
        if ends_at >= self._ends_at:
            return RunTimeout(detail=f"execution exceeded {options.run_timeout_s:g}s limit")
        return AgentTimeout(detail=f"step {name} exceeded {options.step_timeout_s:g}s limit")

    async def _count(self, number: int, body: bytes) -> None:
        """Count a step with a fenced transition."""
        file = json.loads(body)
        data = {
            "step": number,
            "name": file["name"],
            "file": ids.step_file(number),
            "sha256": sha256(body),
            "started_at": file["started_at"],
            "finished_at": file["finished_at"],
            **file["told"],
        }
        if nlm_ms := durations_ms(file, CallKind.NLM):
            data[run_documents.NLM_MS] = nlm_ms
        self._version = await self.advance(STEP, data, version=self._version)
        self._done = number

    async def _until_published(self, number: int) -> None:
        """Return when readers can see the step.

        Raises UpstreamUnavailable when the run has waited too long in total.
        """
        patience_s = self._driver.options.wait_noted_s
        while not await self._is_published_within(patience_s):
            await self._wait(f"{ids.step_file(number)} is not published yet")
            patience_s = min(UPSTREAM_PAUSE_S_MAX, self._driver.options.upstream_wait_s)
        if self._waits.is_open:
            await self._go_on((await self._driver.ledger_time()).now)

    async def _is_published_within(self, patience_s: float) -> bool:
        driver = self._driver
        publication = driver.published(self._request.agent_slug, self._run_id, self._version)
        try:
            await within(driver.clock, patience_s, publication)
        except TimeoutError:
            return False
        return True

    async def complete(self, summary: str | None) -> str:
        """End the run as completed."""
        await self.advance(Trigger.COMPLETE, {"summary": summary})
        return "completed"

    async def stop(self) -> str:
        """End the run as failed, because a cancel was requested. Its error is the reason that the request gave."""
        job = await self._driver.ledger.job(self._run_id)
        reason = None if job is None else job.cancel_cause
        return await self._end_failed(f"{run_documents.CANCELLED}: {reason or 'stopped on request'}")

    async def fail(self, error: StepError) -> str | None:
        """End the run as failed with this error, or put it aside until its agent is active again."""
        if isinstance(error, AgentStopped):
            await self._put_aside(str(error))
            self.log.warning("run_waits", reason=str(error))
            return None
        self.log.warning("run_failed", code=error.code, error=str(error))
        refused = cast("Sequence[Mapping[str, Any]]", error.data.get("refused", ()))
        return await self._end_failed(f"{error.code}: {error}", run_documents.refused_fields(refused))

    async def _put_aside(self, reason: str) -> None:
        """Set the limit of the agent's concurrency key to 0. `AgentGate` restores it.

        Without a holder the run takes no slot that runs of other agents need.
        """
        await self._waits.begin(reason, (await self._driver.ledger_time()).now, is_bounded=False)
        key = run_key(self._request.agent_slug)
        await self._driver.ledger.limit_key(self._driver.actor, key, 0, cause=reason)

    async def _end_failed(self, text: str, beside: Mapping[str, Any] = MappingProxyType({})) -> str:
        text = text[:ERROR_CHARS_MAX]
        artifacts = await self._driver.artifacts(self._run_id, self._request.agent_slug)
        data = {"error_text": text, **beside} | ({"artifacts": artifacts} if artifacts else {})
        await self.advance(Trigger.FAIL, data, cause=text[:200])
        return "failed"

    async def _look(self) -> LedgerTime:
        """Read the ledger's time and recompute when this run times out.

        The timeout is `run_timeout_s` after the start, not counting waits for upstream, and at most `run_timeout_s`
        from now.
        """
        seen, limit_s = await self._driver.ledger_time(), self._driver.options.run_timeout_s
        gone_s = (seen.now - self._started).total_seconds() - self._waits.lasted_s(seen.now)
        self._ends_at = seen.asked_at + limit_s - max(0.0, gone_s)
        return seen

    async def _end_of(self, began: LedgerTime) -> datetime:
        """The ledger's time now, for a step that began at `began`."""
        took_s = self._driver.clock.monotonic() - began.answered_at
        if took_s < CLOCKS_ALIKE_S:
            return began.now + timedelta(seconds=took_s)
        return max(began.now, (await self._driver.ledger_time()).now)

    def _left_s(self) -> float:
        return self._ends_at - self._driver.clock.monotonic()


def step_entry(number: int) -> str:
    """The name of the journal entry that holds the file of a step."""
    return run_documents.STEP_ENTRY.format(number=number)


# The orchestrator service; any number of processes may run it (PIPE-2, PIPE-3, D16).
#
# The ledger ensures one run per agent (the concurrency key `run:<slug>`) and one driver per run (its lease).

TYPE = "agent-run"
ACCEPT_BATCH_MAX = 100

OrchestratorOptions = LeaseRunnerOptions


@dataclass(kw_only=True)
class Orchestrator(LeaseRunner[RunDriver]):
    """Claims runs and drives them. Each pass accepts requested runs, then claims as many runs as there is room for."""

    type: str = TYPE
    lifecycle: str = "run"
    name: str = "orchestrator"

    def helpers(self) -> list[Service[Any]]:
        """Further services that this orchestrator needs in its process."""
        return []

    async def accept(self) -> int:
        """Queue runs that are only requested, oldest first. With `only`, that run alone.

        The process that triggers a run does this too, but may die before.
        """
        if self.only is None:
            where = JobFilter(lifecycle="run", state="requested")
            runs = (await self.ledger.jobs(where, limit=ACCEPT_BATCH_MAX, oldest_first=True)).jobs
        else:
            run = await self.ledger.job(self.only)
            runs = [run] if run is not None and run.state == "requested" else []
        for run in runs:
            await accept(self.ledger, self.actor, run.job_id)
        return len(runs)


async def accept(ledger: Ledger, actor: Actor, run_id: JobId) -> None:
    """Move a run from `requested` to `queued`. Idempotent."""
    await ledger.move(actor, Move(job_id=run_id, target="queued", request_id=RequestId(f"accept:{run_id}")))
