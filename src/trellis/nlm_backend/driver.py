"""Drives one execution through its stages (NLM-2, NLM-3): context, prompt, question, artifact, callback.

Invariants:
- The output of each stage is stored in the ledger before the next one starts, and the first stored output stays. After
  a crash, the next holder continues from there.
- The provider is asked at most once. The intention is stored before the call. A holder that finds it without an answer
  ends the job instead of paying twice.
- A failed execution reports before it ends. The fault is stored, the callback is repeated until it is accepted or the
  job's deadline passes, and only then the job goes to ERROR. An ended job owes no further report.
- Work stops a little before the deadline, to leave time for the report.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from trellis.artifacts.content import ArtifactDraft
from trellis.artifacts.drafts import draft
from trellis.artifacts.drafts.task import StoredAnswer, StructuringPrompt, StructuringTask, ask_provider, build_prompt
from trellis.artifacts.payloads import Snapshot, SnapshotInvalid
from trellis.engine import tracing
from trellis.engine.clock import within
from trellis.engine.errors import InputError
from trellis.engine.jobs import Claimed
from trellis.engine.logs import log_of
from trellis.engine.step_runner import JobDrive, StepRunner
from trellis.engine.text import storable
from trellis.lifecycles import Trigger
from trellis.lifecycles.nlm_job import HELD
from trellis.nlm.provider import NlmError, NlmTimeout
from trellis.nlm_backend.delivery import (
    DETAIL_CHARS_MAX,
    Delivered,
    DeliveryGivenUp,
    JobDelivery,
    StagedAnswer,
    as_bytes,
    complete_notice,
    failed_notice,
)
from trellis.nlm_backend.errors import Fault, FaultCode, Superseded, fault_of
from trellis.nlm_backend.limits import LimitedProvider
from trellis.nlm_backend.metrics import Metrics
from trellis.nlm_backend.orders import StoredOrder

SNAPSHOT, PROMPT, ASKED, ANSWER, DRAFT, STAGED, FAULT = (
    *("snapshot", "prompt", "asked", "answer", "draft", "staged", "fault"),
)
"""The journal entries of an execution."""
NEXT_STAGE = "next_stage"
FETCHING_CONTEXT, BUILDING_PROMPT, NLM_QUERY, STRUCTURING, CALLBACK = HELD
CAUSE_CHARS_MAX = 200
GIVEN_UP = "CALLBACK_GIVEN_UP"
SUPERSEDED = "SUPERSEDED"

_AFTER = dict(pairwise(HELD))
_log = log_of("trellis.nlm_backend")


@dataclass(frozen=True, kw_only=True, slots=True)
class NlmDriverOptions:
    """Time limits of the parts of an execution."""

    context_s: float = 30.0
    """For fetching the snapshot, including retries."""
    ask_s: float = 120.0
    """For the provider's answer."""
    reserve_s: float = 5.0
    """Reserved for the callback of a job that runs out of time."""
    reserve_share: float = 0.2
    """Upper bound of the reserve, as a share of the available time."""


@dataclass(kw_only=True)
class NlmDriver(StepRunner):
    """Drives claimed executions."""

    provider: LimitedProvider
    delivery: JobDelivery
    metrics: Metrics
    options: NlmDriverOptions = field(default_factory=NlmDriverOptions)
    span = "nlm.drive"

    def begin(self, claimed: Claimed) -> "_NlmExecution":
        return _NlmExecution(self, claimed)


class _NlmExecution(JobDrive[StagedAnswer, Exception]):
    """One execution held by one driver. Whatever a stage raises ends it, and its callback says so."""

    failures = Exception
    left = "execution_left"

    def __init__(self, driver: NlmDriver, claimed: Claimed) -> None:
        super().__init__(driver, claimed, _log.bind(execution=claimed.lease.job_id, epoch=claimed.lease.epoch))
        self._driver = driver
        self._order = StoredOrder.read(claimed.payload)
        self._correlation_id = claimed.correlation_id
        self._began = self._stage_began = driver.clock.monotonic()
        left_s = max(0.0, claimed.deadline_s or 0.0)
        self._ends_at = self._began + left_s
        options = driver.options
        self._works_until = self._ends_at - min(options.reserve_s, options.reserve_share * left_s)

    async def work(self) -> StagedAnswer:
        """Returns the staged artifact. Raises the fault that an earlier holder stored, if there is one."""
        self._journal = await self._driver.ledger.read_journal(self._job_id)
        stored = fault_in_journal(self._journal)
        if stored is not None:
            raise stored
        return await self._stages()

    async def stop(self) -> str:
        """Reports that the execution was cancelled, and ends it."""
        return await self.fail(Fault(fault=FaultCode.CANCELLED, detail="It was stopped on request."))

    async def fail(self, error: Exception) -> str:
        """Reports the fault and ends the execution. A superseded execution ends without a report."""
        if isinstance(error, Superseded):
            return await self._end(SUPERSEDED, str(error))
        fault = await self._kept_fault(self._fault(error))
        match await self._deliver(failed_notice(self._order, fault)):
            case Delivered():
                return await self._end(fault.fault.value, str(fault), callback="delivered")
            case DeliveryGivenUp(reason):
                return await self._end(fault.fault.value, str(fault), callback=f"given up: {reason}")

    def _fault(self, error: Exception) -> Fault:
        match error:
            case Fault():
                return error
            case NlmError() | InputError():
                return fault_of(error)
            case _:
                self.log.error("stage_failed", stage=self._state, exc_info=error)
                return Fault(fault=FaultCode.INTERNAL_ERROR, detail=f"{self._state} failed: {type(error).__name__}")

    async def _kept_fault(self, fault: Fault) -> Fault:
        """Stores why the execution failed, before it is reported. The first stored fault counts."""
        if FAULT not in self._journal:
            self.log.warning("execution_failed", stage=self._state, code=fault.fault.value, error=str(fault))
            stored = {"code": fault.fault.value, "message": storable(str(fault)[:DETAIL_CHARS_MAX])}
            self._journal[FAULT] = await self.keep(FAULT, json.dumps(stored).encode())
        return fault_in_journal(self._journal) or fault

    # --- the stages ----------------------------------------------------------------------------------------------

    async def _stages(self) -> StagedAnswer:
        # Texts are read and made in threads: large ones would block the event loop.
        task = await self._task(await self.once(SNAPSHOT, self._fetch))
        await self._leave(FETCHING_CONTEXT)
        prompt = StructuringPrompt.read(
            await self.once(PROMPT, lambda: asyncio.to_thread(lambda: build_prompt(task).to_bytes()))
        )
        await self._leave(BUILDING_PROMPT)
        answered = StoredAnswer.read(await self.once(ANSWER, lambda: self._ask(prompt)))
        await self._leave(NLM_QUERY)
        artifact_draft = ArtifactDraft.model_validate_json(
            await self.once(
                DRAFT, lambda: asyncio.to_thread(lambda: draft(task, prompt, answered).model_dump_json().encode())
            )
        )
        staged = StagedAnswer.model_validate_json(await self.once(STAGED, lambda: self._stage(artifact_draft)))
        await self._leave(STRUCTURING, {"artifact_id": staged.artifact_id})
        return staged

    async def _fetch(self) -> bytes:
        patience_s = min(self._driver.options.context_s, self._left_s())
        until = self._driver.clock.monotonic() + patience_s
        return await self._driver.delivery.snapshot(self._order, self._correlation_id, until=until)

    async def _task(self, body: bytes) -> StructuringTask:
        order = self._order
        try:
            snapshot = await asyncio.to_thread(Snapshot.read, body)
        except SnapshotInvalid as error:
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=str(error)) from None
        if (snapshot.job_id, snapshot.epoch, snapshot.agent_slug) != (order.job_id, order.epoch, order.agent_slug):
            detail = f"The context snapshot is of job {snapshot.job_id}, epoch {snapshot.epoch}, {snapshot.agent_slug}."
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=detail)
        return StructuringTask(job_type=order.job_type, payload=order.payload, snapshot=snapshot)

    async def _ask(self, prompt: StructuringPrompt) -> bytes:
        """Returns the provider's answer. Asks at most once."""
        if ASKED in self._journal:
            raise _interrupted()
        provider = self._driver.provider.noting(self._note_asked)
        left_s = self._left_s()
        patience_s = min(self._driver.options.ask_s, left_s)
        asking = ask_provider(provider, prompt, deadline_s=patience_s)
        try:
            return (await within(self._driver.clock, patience_s, asking)).to_bytes()
        except (TimeoutError, NlmTimeout) as error:
            if patience_s >= left_s:
                raise _too_late() from None
            detail = str(error) or f"The provider did not answer within {patience_s:g} s."
            raise Fault(fault=FaultCode.NLM_UNAVAILABLE, detail=detail) from None

    async def _note_asked(self) -> None:
        """Stores that the provider is about to be asked. Raises Fault if that was stored before."""
        if ASKED in self._journal:
            raise _interrupted()
        own = str(self._lease.epoch).encode()
        self._journal[ASKED] = await self.keep(ASKED, own)
        if self._journal[ASKED] != own:
            raise _interrupted()

    async def _stage(self, draft: ArtifactDraft) -> bytes:
        self._left_s()
        staged = await self._driver.delivery.stage(self._order, draft, self._correlation_id, until=self._works_until)
        return staged.model_dump_json().encode()

    def _left_s(self) -> float:
        left_s = self._works_until - self._driver.clock.monotonic()
        if left_s <= 0:
            raise _too_late()
        return left_s

    # --- the end -------------------------------------------------------------------------------------------------

    async def complete(self, staged: StagedAnswer) -> str:
        """Reports the artifact and ends the execution."""
        notice = complete_notice(self._order, staged)
        match await self._deliver(notice):
            case Delivered():
                await self.advance(Trigger.COMPLETE, notice)
                self._count("DONE")
                return "DONE"
            case DeliveryGivenUp(reason):
                return await self._end(GIVEN_UP, reason)

    async def _deliver(self, notice: Mapping[str, Any]) -> Delivered | DeliveryGivenUp:
        body, until = as_bytes(notice), self._ends_at
        with tracing.span("nlm.callback", {"trellis.status": notice["status"]}, kind=tracing.CLIENT) as span:
            outcome = await self._driver.delivery.call_back(self._order, body, self._correlation_id, until=until)
            if isinstance(outcome, DeliveryGivenUp):
                span.fail(outcome.reason)
            return outcome

    async def _end(self, code: str, message: str, **more: str) -> str:
        data = {"code": code, "message": (storable(message) or "")[:DETAIL_CHARS_MAX], **more}
        await self.advance(Trigger.FAIL, data, cause=storable(f"{code}: {message}"[:CAUSE_CHARS_MAX]))
        self.log.warning("execution_ended", state="ERROR", **data)
        self._count(code)
        return "ERROR"

    def _count(self, outcome: str) -> None:
        self._driver.metrics.job_ended(outcome, self._driver.clock.monotonic() - self._began)

    # --- the ledger ----------------------------------------------------------------------------------------------

    async def _leave(self, stage: str, data: Mapping[str, Any] | None = None) -> None:
        """Moves to the next stage, unless that was done before."""
        if self._state != stage:
            return
        await self.advance(NEXT_STAGE, data)
        now = self._driver.clock.monotonic()
        self._driver.metrics.stage_took(stage, now - self._stage_began)
        self._state, self._stage_began = _AFTER[stage], now

    async def once(self, entry: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """The output of a stage; made and stored now if there is none."""
        if entry in self._journal:
            return self._journal[entry]
        with tracing.span(f"nlm.{entry}"):
            return await super().once(entry, make)


def fault_in_journal(journal: Mapping[str, bytes]) -> Fault | None:
    """Returns the stored fault of the execution; None if it has none."""
    if FAULT not in journal:
        return None
    stored = json.loads(journal[FAULT])
    return Fault(fault=FaultCode(stored["code"]), detail=stored["message"])


def artifact_in_journal(journal: Mapping[str, bytes]) -> StagedAnswer | None:
    """Returns the stored answer about the staged artifact; None if nothing is staged."""
    return StagedAnswer.model_validate_json(journal[STAGED]) if STAGED in journal else None


def _interrupted() -> Fault:
    detail = "The backend was stopped while the provider was being asked; it is not asked twice."
    return Fault(fault=FaultCode.INTERRUPTED, detail=detail)


def _too_late() -> Fault:
    return Fault(fault=FaultCode.DEADLINE, detail="The job's deadline came before it was done.")
