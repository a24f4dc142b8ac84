"""A backend that dies anywhere is gone on with by the next one: one callback, and never a question asked twice (NLM-4, NLM-6)."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nlm_backend.conftest import Stand, provider_calls, until
from tests.nlm_backend.test_stages import WAY
from trellis.engine.jobs import Actor, CancelMode, JobId, RequestId
from trellis.lifecycles import Role
from trellis.lifecycles.nlm_job import HELD

WRITES = 11
"""What one execution writes: six journal entries and five steps."""


class DyingLedger:
    """The ledger, until the nth write: there it stops for good, before or after the write was made."""

    def __init__(self, ledger: Any, number: int, *, after: bool) -> None:
        self._ledger, self._left, self._after = ledger, number, after
        self.died = asyncio.Event()
        self.writes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ledger, name)

    async def journal(self, *given: Any) -> Any:
        return await self._write(self._ledger.journal, *given)

    async def turn(self, turn: Any) -> Any:
        if turn.claim is not None:
            return await self._ledger.turn(turn)
        return await self._write(self._ledger.turn, turn)

    async def _write(self, call: Any, *given: Any) -> Any:
        self.writes += 1
        dies = self.writes == self._left
        answer = await call(*given) if self._after or not dies else None
        if dies:
            self.died.set()
            await asyncio.Event().wait()
        return answer


def points() -> Iterator[tuple[int, bool]]:
    for number in range(1, WRITES + 1):
        for after in (False, True):
            yield number, after


async def died_and_taken_up(stand: Stand, job_id: str, number: int, *, after: bool) -> None:
    """One execution by a backend that dies at this write, and another backend."""
    dying = DyingLedger(stand.ledger, number, after=after)
    first, second = stand.backend(ledger=dying), stand.backend()  # type: ignore[arg-type]
    await first.post(stand.order(job_id))
    await first.begin()
    async with asyncio.timeout(60):
        await dying.died.wait()
    await first.die()
    await stand.lose_leases()
    await second.work()
    states = await stand.states(f"{job_id}@1")
    calls = provider_calls(first.backend) + provider_calls(second.backend)
    (callback,) = stand.gateway.of(job_id)
    assert calls <= 1
    if callback["status"] == "COMPLETE":
        assert states == WAY
        assert calls == 1
        assert (job_id, 1) in stand.gateway.staged
    else:  # it was, or might have been, asked, and nobody knows the answer
        assert callback["error"]["code"] == "INTERRUPTED"
        assert states == ["ACCEPTED", *HELD[:3], "ERROR"]
        assert (job_id, 1) not in stand.gateway.staged


@pytest.mark.requirement("NLM-4", "D42")
async def test_after_a_death_at_every_write_the_next_backend_ends_the_job_with_one_callback(stand: Stand):
    outcomes: list[str] = []
    for number, after in points():
        await died_and_taken_up(stand, f"job-{number}-{after}", number, after=after)
        outcomes.append(stand.gateway.of(f"job-{number}-{after}")[0]["status"])
    assert outcomes.count("FAILED") == 2  # after "asked" was kept, and before the answer was
    assert await stand.executions() == len(outcomes)


async def test_an_execution_makes_a_known_number_of_writes(stand: Stand):
    counting = DyingLedger(stand.ledger, 0, after=True)
    working = stand.backend(ledger=counting)  # type: ignore[arg-type]
    await working.post(stand.order("job-w"))
    await working.work()
    assert counting.writes == WRITES


@pytest.mark.requirement("NLM-3", "NLM-4")
async def test_a_stored_failure_is_reported_by_the_next_backend(stand: Stand):
    first, second = stand.backend({"status": 503}), stand.backend()
    hold = stand.gateway.hold("callback")
    await first.post(stand.order("job-a"))
    await first.begin()
    await hold.arrived.wait()
    await first.die()
    hold.go.set()
    await stand.lose_leases()
    await second.work()
    (callback,) = stand.gateway.of("job-a")
    assert callback["error"]["code"] == "NLM_UNAVAILABLE"
    assert provider_calls(second.backend) == 0
    assert (await stand.states("job-a@1"))[-1] == "ERROR"


@pytest.mark.requirement("NLM-4")
@pytest.mark.parametrize("kind", ["snapshot", "artifact", "callback"])
async def test_a_death_between_an_effect_at_the_gateway_and_its_answer_doubles_nothing(stand: Stand, kind: str):
    first, second = stand.backend(), stand.backend()
    hold = stand.gateway.hold(kind, after=True)
    await first.post(stand.order("job-a"))
    await first.begin()
    await hold.arrived.wait()
    await first.die()
    hold.go.set()
    await stand.lose_leases()
    await second.work()
    assert await stand.states("job-a@1") == WAY
    assert len(stand.gateway.of("job-a")) == 1
    assert len(stand.gateway.staged) == 1
    assert provider_calls(first.backend) + provider_calls(second.backend) == 1


async def test_a_crashing_stage_is_reported_and_the_other_jobs_go_on(stand: Stand, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    working = stand.backend()
    with monkeypatch.context() as patch:
        patch.setattr("trellis.nlm_backend.driver.draft", broken)
        await working.post(stand.order("job-bad"))
        await working.work()
    await working.post(stand.order("job-good"))
    await working.work()
    (callback,) = stand.gateway.of("job-bad")
    assert callback["error"] == {"code": "INTERNAL_ERROR", "message": "STRUCTURING failed: ZeroDivisionError"}
    assert await stand.states("job-good@1") == WAY


@pytest.mark.requirement("NLM-3")
async def test_cancelled_execution_reports_it_and_ends(stand: Stand):
    working = stand.backend({"after_s": 600, "answer": {"answer": "late"}})
    await working.post(stand.order("job-a"))
    await working.begin()
    await until(lambda: working.provider.asked)
    actor, request = Actor(role=Role.NLM_BACKEND, name="somebody"), RequestId("stop-1")
    id_ = JobId("job-a@1")
    await stand.ledger.cancel(actor, id_, CancelMode.SOFT, request, grace_s=60.0, cause="not wanted")
    await working.backend.holder.renew()
    await working.finish()
    (callback,) = stand.gateway.of("job-a")
    assert callback["error"]["code"] == "CANCELLED"
    assert (await stand.states("job-a@1"))[-2:] == ["NLM_QUERY", "ERROR"]
