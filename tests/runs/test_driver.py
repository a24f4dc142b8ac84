"""One run through its four steps: order, retries, time limits, crashes in between."""

import asyncio
import itertools
import json
from dataclasses import replace

import pytest

from tests.runs.conftest import Stand
from tests.stopped_tasks import stopped
from trellis.documents import run_documents
from trellis.documents.errors import NlmDown, StepError, UpstreamUnavailable
from trellis.documents.ids import STEPS
from trellis.engine.jobs import JobId
from trellis.runs.orchestrator import RunDriver, StepContext, StepResult
from trellis.storage.objects.canonical_json import encode, sha256, timestamp
from trellis.testing import FakeClock

ONCE_EACH = dict.fromkeys(STEPS, 1)


def told(body: bytes | None) -> dict[str, object]:
    assert body is not None
    return json.loads(body)


@pytest.mark.requirement("RUN-1", "PIPE-10", "D17", "D18")
async def test_a_run_goes_through_its_steps_in_order_and_completes(stand: Stand):
    run_id = await stand.run_of()
    assert (await stand.drive()).state == "completed"
    assert [(event.type, event.source, event.target) for event in await stand.events(run_id)] == [
        ("run.requested", None, "requested"),
        ("run.queued", "requested", "queued"),
        ("run.started", "queued", "running"),
        *[("run.step.completed", "running", "running")] * 4,
        ("run.completed", "running", "completed"),
    ]
    assert stand.steps.done == ONCE_EACH
    assert [version for _, _, version in stand.shown] == [4, 5, 6, 7]


@pytest.mark.requirement("PIPE-10")
async def test_the_next_step_begins_only_when_the_last_is_published(stand: Stand):
    run_id = await stand.run_of()
    stand.shows = False
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await stand.until(lambda: len(stand.shown) == 1)
    for _ in range(10):
        await stand.ledger.job(run_id)
    assert stand.steps.done == {**dict.fromkeys(STEPS, 0), "load-context": 1}
    stand.shows = True
    await stand.until(drive.done, step_s=1.0)
    assert drive.result().state == "completed"
    assert stand.steps.done == ONCE_EACH


@pytest.mark.requirement("RUN-6", "PIPE-12")
@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_failed_step_is_tried_again_after_one_two_and_four_seconds(stand: Stand, failures: int):
    run_id = await stand.run_of()
    tries: list[float] = []

    async def act(context: StepContext, /) -> StepResult:
        tries.append(stand.clock())
        await stand.ledger.job(JobId("nobody"))
        if len(tries) <= failures:
            raise StepError(detail="the runtime crashed")
        return StepResult(result={"summary": "done"})

    stand.steps.acts["execute-agent"] = act
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await stand.until(drive.done, step_s=0.25)
    assert drive.result().state == "completed"
    # Each look at the ledger moves the clock a little on, so a pause is seen a little longer than it is, never shorter.
    for seen, pause in zip([b - a for a, b in itertools.pairwise(tries)], (1, 2, 4), strict=False):
        assert pause <= seen < pause + 2
    assert await stand.state(run_id) == "completed"


@pytest.mark.requirement("RUN-6", "RUN-7", "D7")
@pytest.mark.parametrize(
    "error, tries, text",
    [
        (StepError(detail="the runtime crashed"), 4, "INTERNAL_ERROR: the runtime crashed"),
        (RuntimeError("odd"), 4, "INTERNAL_ERROR: execute-agent: RuntimeError: odd"),
        (UpstreamUnavailable(detail="no store"), 4, "UPSTREAM_UNAVAILABLE: no store"),
        (NlmDown(detail="the tool gave up"), 1, "NLM_UNAVAILABLE: the tool gave up"),
    ],
    ids=["crash", "exception", "upstream", "nlm"],
)
async def test_the_last_cause_picks_the_code(stand: Stand, error: Exception, tries: int, text: str):
    run_id = await stand.run_of()

    async def act(context: StepContext, /) -> StepResult:
        raise error

    stand.steps.acts["execute-agent"] = act
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await stand.until(drive.done, step_s=0.25)
    assert drive.result().state == "failed"
    assert stand.steps.done["execute-agent"] == tries
    status = told(run_documents.status(await stand.facts(run_id)))
    assert (status["status"], status["error"], status["current_step"]) == ("failed", text, "execute-agent")


@pytest.mark.requirement("RUN-6", "RUN-7")
async def test_a_step_that_hangs_is_cut_and_tried_again(stand: Stand):
    run_id = await stand.run_of()
    cut: list[str] = []

    async def act(context: StepContext, /) -> StepResult:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            cut.append(context.name)
            raise
        raise AssertionError

    stand.steps.acts["load-context"] = act
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver(run_timeout_s=1_000.0).drive(claimed))
    await stand.until(drive.done, step_s=5.0)
    assert cut == ["load-context"] * 4
    assert (await stand.events(run_id))[-1].cause == "AGENT_TIMEOUT: step load-context exceeded 120s limit"


@pytest.mark.requirement("RUN-6", "RUN-7", "D18")
async def test_the_run_has_one_absolute_deadline_from_its_start(stand: Stand):
    run_id = await stand.run_of()
    stand.clock.advance(3_000.0)  # waiting in the queue does not count

    async def act(context: StepContext, /) -> StepResult:
        assert context.left_s() <= 120.0
        return await asyncio.get_running_loop().create_future()

    stand.steps.acts["execute-agent"] = act
    claimed = await stand.claim()
    began = stand.clock()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver(run_timeout_s=300.0).drive(claimed))
    await stand.until(drive.done, step_s=1.0)
    assert stand.clock() - began <= 310.0
    assert (await stand.events(run_id))[-1].cause == "AGENT_TIMEOUT: execution exceeded 300s limit"


@pytest.mark.requirement("PIPE-11", "D16")
@pytest.mark.parametrize("step", STEPS)
async def test_a_run_whose_driver_died_in_a_step_goes_on_after_the_last_counted_one(stand: Stand, step: str):
    run_id = await stand.run_of()
    usual, hanging = stand.steps.acts[step], asyncio.Event()

    async def hang(context: StepContext, /) -> StepResult:
        hanging.set()
        return await asyncio.get_running_loop().create_future()

    stand.steps.acts[step] = hang
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await hanging.wait()
    drive.cancel()
    await stopped(drive)
    assert await stand.state(run_id) == "running"
    stand.steps.acts[step] = usual
    await stand.lose_leases()
    assert (await stand.drive()).state == "completed"
    assert stand.steps.done == {**ONCE_EACH, step: 2}
    assert [event.type for event in await stand.events(run_id)].count("run.step.completed") == 4


@pytest.mark.requirement("PIPE-11")
async def test_a_step_that_was_kept_but_not_counted_is_not_done_again(stand: Stand):
    run_id = await stand.run_of()
    claimed = await stand.claim()
    assert claimed is not None
    body = encode({"name": "load-context", "started_at": "s", "finished_at": "f", "result": {"kept": True}, "told": {}})
    assert await stand.ledger.journal(claimed.lease, "step/01", body) == body
    await stand.lose_leases()
    assert (await stand.drive()).state == "completed"
    assert stand.steps.done == {**ONCE_EACH, "load-context": 0}
    first = next(event for event in await stand.events(run_id) if event.type == "run.step.completed")
    assert told(first.data)["sha256"] == sha256(body)


@pytest.mark.requirement("PIPE-11")
async def test_journalled_result_of_a_step_is_not_computed_again_by_a_retry(stand: Stand):
    await stand.run_of()
    paid: list[str] = []

    async def pay() -> bytes:
        paid.append("paid")
        return b"receipt"

    async def act(context: StepContext, /) -> StepResult:
        assert await context.once("model/1", pay) == b"receipt"
        await stand.ledger.job(JobId("nobody"))
        if stand.steps.done["execute-agent"] < 3:
            raise StepError(detail="crashed after paying")
        return StepResult(result={"summary": "s"})

    stand.steps.acts["execute-agent"] = act
    claimed = await stand.claim()
    assert claimed is not None
    drive = asyncio.ensure_future(stand.driver().drive(claimed))
    await stand.until(drive.done, step_s=0.5)
    assert drive.result().state == "completed"
    assert paid == ["paid"]


@pytest.mark.requirement("D16")
async def test_a_driver_whose_lease_is_gone_changes_nothing(stand: Stand):
    run_id = await stand.run_of()
    late = await stand.claim()
    assert late is not None
    await stand.lose_leases()
    assert (await stand.drive()).state == "completed"
    before = await stand.events(run_id)
    assert (await stand.drive(late)).state is None
    assert await stand.events(run_id) == before


@pytest.mark.requirement("D19", "RUN-7")
async def test_a_run_that_is_asked_to_stop_fails_as_cancelled(stand: Stand):
    run_id = await stand.run_of()
    hanging = asyncio.Event()

    async def hang(context: StepContext, /) -> StepResult:
        hanging.set()
        return await asyncio.get_running_loop().create_future()

    stand.steps.acts["execute-agent"] = hang
    claimed = await stand.claim()
    assert claimed is not None
    driver = stand.driver()
    drive = asyncio.ensure_future(driver.drive(claimed))
    await hanging.wait()
    driver.cancel_requests.add(run_id)
    drive.cancel()
    assert (await drive).state == "failed"
    assert told(run_documents.status(await stand.facts(run_id)))["error"] == "CANCELLED: stopped on request"
    assert not driver.cancel_requests


class TwoClocks:
    """A driver whose process has a clock of its own beside the ledger's."""

    def __init__(self, stand: Stand) -> None:
        self._stand, self.process = stand, FakeClock(start_s=5.0)
        self.driver: RunDriver = stand.driver()
        self.driver.clock = self.process
        self.left_s: dict[str, float] = {}
        self._usual = dict(stand.steps.acts)
        for name in STEPS:
            stand.steps.acts[name] = self._noted

    async def _noted(self, context: StepContext, /) -> StepResult:
        self.left_s[context.name] = context.left_s()
        return await self._usual[context.name](context)

    def pass_time(self, seconds: float) -> None:
        self._stand.clock.advance(seconds)
        self.process.advance(seconds)

    def sleep_through(self, seconds: float) -> None:
        """The lid is closed: the ledger's clock goes on and this one stands still."""
        self._stand.clock.advance(seconds)

    async def run(self) -> JobId:
        run_id = await self._stand.run_of()
        claimed = await self._stand.claim()
        assert claimed is not None
        await self.driver.drive(claimed)
        return run_id

    async def check_times(self, run_id: JobId) -> None:
        """Every step lies between the event before it and the one that counts it."""
        events = await self._stand.events(run_id)
        counted = [(a, b) for a, b in itertools.pairwise(events) if b.type == "run.step.completed"]
        assert counted
        for before, event in counted:
            file = told(event.data)
            at = timestamp
            assert at(before.ts) <= str(file["started_at"]) <= str(file["finished_at"]) <= at(event.ts)


@pytest.mark.requirement("D18", "RUN-6")
async def test_a_machine_that_slept_between_two_runs_gives_the_second_no_more_time(stand: Stand):
    clocks = TwoClocks(stand)
    clocks.driver.options = replace(clocks.driver.options, step_timeout_s=10_000.0)
    await clocks.check_times(await clocks.run())
    clocks.sleep_through(8 * 3_600.0)
    second = await clocks.run()
    assert set(clocks.left_s.values()) == {600.0}
    await clocks.check_times(second)


@pytest.mark.requirement("D18", "RUN-6")
async def test_a_machine_that_slept_in_a_step_finds_the_run_over_at_the_next(stand: Stand):
    clocks = TwoClocks(stand)

    async def sleeps(context: StepContext, /) -> StepResult:
        clocks.sleep_through(601.0)
        return StepResult(result={"summary": "s"})

    stand.steps.acts["execute-agent"] = sleeps
    run_id = await clocks.run()
    assert (await stand.events(run_id))[-1].cause == "AGENT_TIMEOUT: execution exceeded 600s limit"
    assert set(clocks.left_s) == {"load-context"}
    await clocks.check_times(run_id)


@pytest.mark.requirement("D18", "RUN-6")
async def test_remaining_time_of_a_run_follows_the_clock_of_the_ledger(stand: Stand):
    clocks = TwoClocks(stand)

    async def takes(context: StepContext, /) -> StepResult:
        clocks.pass_time(100.0)
        clocks.sleep_through(450.0)
        return StepResult(result={"summary": "s"})

    stand.steps.acts["execute-agent"] = takes
    run_id = await clocks.run()
    assert clocks.left_s == {"load-context": 120.0, "persist-results": 50.0, "finalize": 50.0}
    await clocks.check_times(run_id)
    assert told((await stand.events(run_id))[4].data)["finished_at"] == "2026-01-01T00:09:10.000Z"


@pytest.mark.requirement("D18")
async def test_a_ledgers_clock_that_was_put_back_fails_no_run(stand: Stand):
    clocks = TwoClocks(stand)
    clocks.driver.options = replace(clocks.driver.options, step_timeout_s=10_000.0)
    await clocks.run()
    stand.clock.advance(-900.0)
    run_id = await clocks.run()
    assert await stand.state(run_id) == "completed"
    assert set(clocks.left_s.values()) == {600.0}
    await clocks.check_times(run_id)


@pytest.mark.requirement("D18")
async def test_a_ledgers_clock_that_was_put_back_under_a_run_gives_it_no_more_than_it_had(stand: Stand):
    clocks = TwoClocks(stand)
    clocks.driver.options = replace(clocks.driver.options, step_timeout_s=10_000.0)
    await stand.run_of()
    claimed = await stand.claim()
    assert claimed is not None
    stand.clock.advance(-1.0)
    assert (await clocks.driver.drive(claimed)).state == "completed"
    assert set(clocks.left_s.values()) == {600.0}


@pytest.mark.requirement("D18")
async def test_a_processs_clock_that_runs_ahead_takes_nothing_from_a_run(stand: Stand):
    clocks = TwoClocks(stand)

    async def jumps(context: StepContext, /) -> StepResult:
        clocks.process.advance(1_000.0)
        return StepResult(result={"summary": "s"})

    stand.steps.acts["execute-agent"] = jumps
    run_id = await clocks.run()
    assert await stand.state(run_id) == "completed"
    await clocks.check_times(run_id)
