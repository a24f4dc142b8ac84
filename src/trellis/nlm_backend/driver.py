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
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from trellis.artifacts.content import ArtifactDraft
from trellis.artifacts.drafts import StoredAnswer, StructuringPrompt, StructuringTask, ask_provider, build_prompt, draft
from trellis.artifacts.snapshot import Snapshot, SnapshotInvalid
from trellis.engine import tracing
from trellis.engine.clock import Clock, within
from trellis.engine.errors import InputError, LedgerError
from trellis.engine.jobs import Actor, Advance, Claimed, LeaseLost, StepApplied, Turn
from trellis.engine.lease_runner import DriveStopped, consume_cancel, journal_once, shield_final_step
from trellis.engine.ledger import Ledger
from trellis.engine.logs import log_of
from trellis.engine.text import storable
from trellis.lifecycles import Trigger
from trellis.lifecycles.nlm_job import HELD
from trellis.nlm.errors import NlmError, NlmTimeout
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
STAGE_LEFT = "left"
"""The state noted on the span of a drive that ended because the lease was lost."""
CAUSE_CHARS_MAX = 200
GIVEN_UP = "CALLBACK_GIVEN_UP"
SUPERSEDED = "SUPERSEDED"

MadeT = TypeVar("MadeT")

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
class NlmDriver:
    """Drives claimed executions."""

    ledger: Ledger
    actor: Actor
    clock: Clock
    provider: LimitedProvider
    delivery: JobDelivery
    metrics: Metrics
    options: NlmDriverOptions = field(default_factory=NlmDriverOptions)
    cancel_requests: set[str] = field(default_factory=set[str])
    """Executions with a cancel request. An id is added before its drive is cancelled."""

    async def drive(self, claimed: Claimed) -> str | None:
        """Drives the execution to its end. Returns its final state; None if the lease was lost."""
        with tracing.attempt_span(claimed, "nlm.drive") as span:
            state = await self._drive(claimed)
            span.note({"trellis.state": state or STAGE_LEFT})
            return state

    async def _drive(self, claimed: Claimed) -> str | None:
        execution, id_ = _NlmExecution(self, claimed), claimed.lease.job_id
        try:
            worked = await execution.worked()
            return await shield_final_step(self.cancel_requests, id_, execution.ended(worked))
        except DriveStopped:
            _log.info("execution_left", execution=id_, reason="the lease is another's")
            return None
        finally:
            self.cancel_requests.discard(id_)


class _NlmExecution:
    """One execution held by one driver."""

    def __init__(self, driver: NlmDriver, claimed: Claimed) -> None:
        self._driver, self._lease, self._state = driver, claimed.lease, claimed.state
        self._order = StoredOrder.read(claimed.payload)
        self._correlation_id = claimed.correlation_id
        self._journal: dict[str, bytes] = {}
        self._began = self._stage_began = driver.clock.monotonic()
        left_s = max(0.0, claimed.deadline_s or 0.0)
        self._ends_at = self._began + left_s
        options = driver.options
        self._works_until = self._ends_at - min(options.reserve_s, options.reserve_share * left_s)
        self._log = _log.bind(execution=claimed.lease.job_id, epoch=claimed.lease.epoch)

    async def worked(self) -> StagedAnswer | Fault | Superseded:
        """Returns the staged artifact, or why there is none. Raises DriveStopped, LedgerError."""
        try:
            self._journal = await self._driver.ledger.read_journal(self._lease.job_id)
            return fault_in_journal(self._journal) or await self._stages()
        except asyncio.CancelledError:
            if not consume_cancel(self._driver.cancel_requests, self._lease.job_id):
                raise
            fault = Fault(fault=FaultCode.CANCELLED, detail="It was stopped on request.")
        except (DriveStopped, LedgerError):
            raise
        except Superseded as error:
            return error
        except Fault as error:
            fault = error
        except (NlmError, InputError) as error:
            fault = fault_of(error)
        except Exception as error:  # noqa: BLE001 - whatever a stage raises ends this execution, and its callback says so
            self._log.exception("stage_failed", stage=self._state)
            fault = Fault(fault=FaultCode.INTERNAL_ERROR, detail=f"{self._state} failed: {type(error).__name__}")
        return await self._kept_fault(fault)

    async def ended(self, worked: StagedAnswer | Fault | Superseded) -> str:
        """Reports the outcome and ends the execution. Returns its final state."""
        match worked:
            case StagedAnswer():
                return await self._call_back(worked)
            case Fault():
                return await self._report(worked)
            case Superseded():
                return await self._end(SUPERSEDED, str(worked))

    async def _kept_fault(self, fault: Fault) -> Fault:
        """Stores why the execution failed, before it is reported. The first stored fault counts."""
        self._log.warning("execution_failed", stage=self._state, code=fault.fault.value, error=str(fault))
        told = {"code": fault.fault.value, "message": storable(str(fault)[:DETAIL_CHARS_MAX])}
        self._journal[FAULT] = await self._keep(FAULT, json.dumps(told).encode())
        return fault_in_journal(self._journal) or fault

    # --- the stages ----------------------------------------------------------------------------------------------

    async def _stages(self) -> StagedAnswer:
        task = await self._task(await self._once(SNAPSHOT, self._fetch))
        await self._leave(FETCHING_CONTEXT)
        prompt = StructuringPrompt.read(
            await self._once(PROMPT, lambda: _in_thread(lambda: build_prompt(task).to_bytes()))
        )
        await self._leave(BUILDING_PROMPT)
        answered = StoredAnswer.read(await self._once(ANSWER, lambda: self._ask(prompt)))
        await self._leave(NLM_QUERY)
        made = ArtifactDraft.model_validate_json(
            await self._once(
                DRAFT, lambda: _in_thread(lambda: draft(task, prompt, answered).model_dump_json().encode())
            )
        )
        staged = StagedAnswer.model_validate_json(await self._once(STAGED, lambda: self._stage(made)))
        await self._leave(STRUCTURING, {"artifact_id": staged.artifact_id})
        return staged

    async def _fetch(self) -> bytes:
        patience_s = min(self._driver.options.context_s, self._left_s())
        until = self._driver.clock.monotonic() + patience_s
        return await self._driver.delivery.snapshot(self._order, self._correlation_id, until=until)

    async def _task(self, body: bytes) -> StructuringTask:
        order = self._order
        try:
            snapshot = await _in_thread(lambda: Snapshot.read(body))
        except SnapshotInvalid as error:
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=str(error)) from None
        if (snapshot.job_id, snapshot.epoch, snapshot.agent_slug) != (order.job_id, order.epoch, order.agent_slug):
            detail = f"The context snapshot is of job {snapshot.job_id}, epoch {snapshot.epoch}, {snapshot.agent_slug}."
            raise Fault(fault=FaultCode.CONTEXT_INVALID, detail=detail)
        return StructuringTask(
            job_type=order.job_type, agent_slug=order.agent_slug, payload=order.payload, snapshot=snapshot
        )

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
        mine = str(self._lease.epoch).encode()
        self._journal[ASKED] = await self._keep(ASKED, mine)
        if self._journal[ASKED] != mine:
            raise _interrupted()

    async def _stage(self, made: ArtifactDraft) -> bytes:
        self._left_s()
        staged = await self._driver.delivery.stage(self._order, made, self._correlation_id, until=self._works_until)
        return staged.model_dump_json().encode()

    def _left_s(self) -> float:
        left_s = self._works_until - self._driver.clock.monotonic()
        if left_s <= 0:
            raise _too_late()
        return left_s

    # --- the end -------------------------------------------------------------------------------------------------

    async def _call_back(self, staged: StagedAnswer) -> str:
        notice = complete_notice(self._order, staged)
        match await self._deliver(notice):
            case Delivered():
                await self._advance(Trigger.COMPLETE, notice)
                self._count("DONE")
                return "DONE"
            case DeliveryGivenUp(reason):
                return await self._end(GIVEN_UP, reason)

    async def _report(self, fault: Fault) -> str:
        match await self._deliver(failed_notice(self._order, fault)):
            case Delivered():
                return await self._end(fault.fault.value, str(fault), callback="delivered")
            case DeliveryGivenUp(reason):
                return await self._end(fault.fault.value, str(fault), callback=f"given up: {reason}")

    async def _deliver(self, notice: Mapping[str, Any]) -> Delivered | DeliveryGivenUp:
        body, until = as_bytes(notice), self._ends_at
        with tracing.span("nlm.callback", {"trellis.status": notice["status"]}, kind=tracing.CLIENT) as span:
            told = await self._driver.delivery.call_back(self._order, body, self._correlation_id, until=until)
            if isinstance(told, DeliveryGivenUp):
                span.fail(told.reason)
            return told

    async def _end(self, code: str, message: str, **more: str) -> str:
        data = {"code": code, "message": (storable(message) or "")[:DETAIL_CHARS_MAX], **more}
        await self._advance(Trigger.FAIL, data, cause=f"{code}: {message}"[:CAUSE_CHARS_MAX])
        self._log.warning("execution_ended", state="ERROR", **data)
        self._count(code)
        return "ERROR"

    def _count(self, outcome: str) -> None:
        self._driver.metrics.job_ended(outcome, self._driver.clock.monotonic() - self._began)

    # --- the ledger ----------------------------------------------------------------------------------------------

    async def _leave(self, stage: str, data: Mapping[str, Any] | None = None) -> None:
        """Moves to the next stage, unless that was done before."""
        if self._state != stage:
            return
        await self._advance(NEXT_STAGE, data)
        now = self._driver.clock.monotonic()
        self._driver.metrics.stage_took(stage, now - self._stage_began)
        self._state, self._stage_began = _AFTER[stage], now

    async def _advance(self, trigger: str, data: Mapping[str, Any] | None, *, cause: str | None = None) -> None:
        body = None if data is None else json.dumps(data, ensure_ascii=False).encode()
        advance = Advance(self._lease, self._state, trigger, data=body, cause=storable(cause))
        (outcome,) = (await self._driver.ledger.turn(Turn(actor=self._driver.actor, advances=(advance,)))).outcomes
        match outcome:
            case StepApplied():
                return
            case LeaseLost():
                raise DriveStopped

    async def _once(self, name: str, make: Callable[[], Awaitable[bytes]]) -> bytes:
        """Returns the journal entry with this name; creates and stores it if there is none."""
        if name not in self._journal:
            with tracing.span(f"nlm.{name}"):
                self._journal[name] = await self._keep(name, await make())
        return self._journal[name]

    async def _keep(self, name: str, body: bytes) -> bytes:
        return await journal_once(self._driver.ledger, self._lease, name, body)


def fault_in_journal(journal: Mapping[str, bytes]) -> Fault | None:
    """Returns the stored fault of the execution; None if it has none."""
    if FAULT not in journal:
        return None
    told = json.loads(journal[FAULT])
    return Fault(fault=FaultCode(told["code"]), detail=told["message"])


def artifact_in_journal(journal: Mapping[str, bytes]) -> StagedAnswer | None:
    """Returns the stored answer about the staged artifact; None if nothing is staged."""
    return StagedAnswer.model_validate_json(journal[STAGED]) if STAGED in journal else None


def _in_thread(make: Callable[[], MadeT]) -> Coroutine[Any, Any, MadeT]:
    """Runs `make` in a thread, because large texts would block the event loop."""
    return asyncio.to_thread(make)


def _interrupted() -> Fault:
    detail = "The backend was stopped while the provider was being asked; it is not asked twice."
    return Fault(fault=FaultCode.INTERRUPTED, detail=detail)


def _too_late() -> Fault:
    return Fault(fault=FaultCode.DEADLINE, detail="The job's deadline came before it was done.")
