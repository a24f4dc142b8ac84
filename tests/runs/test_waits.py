"""Upstream that is away delays runs: they wait, visibly, and neither fail nor lose their time."""

import asyncio
import json
from datetime import timedelta

import pytest

from tests.runs.conftest import ORCHESTRATOR, Stand
from tests.stopped_tasks import stopped
from trellis.documents import run_documents
from trellis.documents.ids import STEPS
from trellis.engine.jobs import CancelMode, JobId, RequestId
from trellis.engine.step_runner import DriveOutcome
from trellis.runs.orchestrator import Orchestrator, OrchestratorOptions, StepContext, StepResult
from trellis.runs.waits import WAITS_MAX, UpstreamWaits, read_waits
from trellis.storage.objects.store import StoreUnavailable

ONCE_EACH = dict.fromkeys(STEPS, 1)
TEN_MINUTES_S = 600.0


async def begun(stand: Stand, **options: float) -> "asyncio.Future[DriveOutcome]":
    claimed = await stand.claim()
    assert claimed is not None
    return asyncio.ensure_future(stand.driver(**options).drive(claimed))


async def pass_time(stand: Stand, seconds: float, *, step_s: float = 5.0) -> None:
    """Time goes by while the driver does what it does in it."""
    ends_at = stand.clock() + seconds

    def is_over() -> bool:
        return stand.clock() >= ends_at

    await stand.until(is_over, step_s=step_s)


def away_until(stand: Stand, moment: float, *, step: str) -> None:
    """The object store answers nothing that this step asks before the moment."""
    usual = stand.steps.acts[step]

    async def act(context: StepContext, /) -> StepResult:
        await stand.ledger.job(JobId("nobody"))
        if stand.clock() < moment:
            raise StoreUnavailable(verb="get", key="a", reason="503")
        return await usual(context)

    stand.steps.acts[step] = act


@pytest.mark.requirement("D14", "PIPE-12")
async def test_a_projector_that_is_away_for_two_hours_delays_the_run(stand: Stand):
    run_id = await stand.run_of()
    stand.shows = False
    drive = await begun(stand)
    await stand.until(lambda: bool(stand.shown))
    await pass_time(stand, 7_200.0, step_s=30.0)
    assert not drive.done()
    stand.shows = True
    await stand.until(drive.done, step_s=5.0)
    assert drive.result().state == "completed"
    assert stand.steps.done == ONCE_EACH
    (wait,) = read_waits(await stand.ledger.read_journal(run_id))
    assert wait.reason == "steps/01-load-context.json is not published yet"
    assert wait.until is not None
    assert wait.lasted_s(wait.until) >= 7_100.0


@pytest.mark.requirement("D14", "PIPE-12")
@pytest.mark.parametrize("step", ["load-context", "persist-results"])
async def test_an_object_store_that_is_away_for_ten_minutes_delays_the_run(stand: Stand, step: str):
    run_id = await stand.run_of()
    away_until(stand, stand.clock() + TEN_MINUTES_S, step=step)
    drive = await begun(stand)
    await stand.until(drive.done, step_s=1.0)
    assert drive.result().state == "completed"
    assert 10 < stand.steps.done[step] < 40, "it is asked again, ever more slowly"
    (wait,) = read_waits(await stand.ledger.read_journal(run_id))
    assert wait.reason.startswith("The object store did not answer get 'a': 503")


@pytest.mark.requirement("D14", "D18")
async def test_waiting_time_of_a_run_does_not_count_against_its_deadline(stand: Stand):
    await stand.run_of()
    left: dict[str, float] = {}
    away_until(stand, stand.clock() + 2 * TEN_MINUTES_S, step="execute-agent")
    usual = stand.steps.acts["persist-results"]

    async def noted(context: StepContext, /) -> StepResult:
        left[context.name] = context.left_s()
        return await usual(context)

    stand.steps.acts["persist-results"] = noted
    drive = await begun(stand, step_timeout_s=10_000.0)
    await stand.until(drive.done, step_s=1.0)
    assert drive.result().state == "completed"
    assert left["persist-results"] > TEN_MINUTES_S - 20.0


@pytest.mark.requirement("D14", "D16")
async def test_orchestrator_that_takes_over_a_waiting_run_continues_and_counts_the_whole_wait(stand: Stand):
    run_id = await stand.run_of()
    stand.shows = False
    drive = await begun(stand)
    await stand.until(lambda: bool(stand.shown))
    await pass_time(stand, 1_000.0, step_s=10.0)
    drive.cancel()
    await stopped(drive)
    await stand.lose_leases()
    again = await begun(stand)
    await pass_time(stand, 1_000.0, step_s=10.0)
    assert not again.done()
    stand.shows = True
    await stand.until(again.done, step_s=5.0)
    assert again.result().state == "completed"
    assert stand.steps.done == ONCE_EACH
    (wait,) = read_waits(await stand.ledger.read_journal(run_id))
    assert wait.until is not None
    assert wait.lasted_s(wait.until) >= 2_000.0


@pytest.mark.requirement("D14", "D18")
async def test_a_run_that_has_waited_for_as_long_as_it_may_fails_and_says_what_for(stand: Stand):
    run_id = await stand.run_of()
    stand.shows = False
    drive = await begun(stand, upstream_wait_s=3_600.0)
    await stand.until(drive.done, step_s=30.0)
    assert drive.result().state == "failed"
    assert json.loads(run_documents.status(await stand.facts(run_id)))["error"] == (
        "UPSTREAM_UNAVAILABLE: steps/01-load-context.json is not published yet"
        " (the run waited 3600s, which is its limit)"
    )
    assert stand.clock() >= (await stand.events(run_id))[2].ts.timestamp() + 3_600.0


@pytest.mark.requirement("D14", "D19")
@pytest.mark.parametrize("mode", [CancelMode.SOFT, CancelMode.HARD])
async def test_a_run_that_waits_can_be_cancelled(stand: Stand, mode: CancelMode):
    run_id = await stand.run_of()
    stand.shows = False
    orchestrator = Orchestrator(
        ledger=stand.ledger,
        actor=ORCHESTRATOR,
        clock=stand.clock,
        driver=stand.driver(),
        new_id=lambda: "claim",
        options=OrchestratorOptions(lease_s=1e6, heartbeat_s=1e5),
    )
    await orchestrator.run_once()
    await stand.until(lambda: bool(stand.shown))
    await pass_time(stand, 1_000.0, step_s=10.0)
    await stand.ledger.cancel(ORCHESTRATOR, run_id, mode, RequestId("c"), grace_s=30.0, cause="enough")
    await orchestrator.renew()

    async def has_ended() -> bool:
        return await stand.state(run_id) == "failed"

    await stand.until(has_ended)
    error = json.loads(run_documents.status(await stand.facts(run_id)))["error"]
    assert error.startswith("CANCELLED:")
    await orchestrator.drain()


@pytest.mark.requirement("RUN-6", "D7")
async def test_waiting_for_the_store_spends_none_of_the_retries_of_other_errors(stand: Stand):
    await stand.run_of()
    tries: list[str] = []

    async def act(context: StepContext, /) -> StepResult:
        await stand.ledger.job(JobId("nobody"))
        tries.append(context.name)
        if len(tries) <= 10:
            raise StoreUnavailable(verb="get", key="a", reason="503")
        raise RuntimeError("odd")

    stand.steps.acts["execute-agent"] = act
    drive = await begun(stand)
    await stand.until(drive.done, step_s=1.0)
    assert (drive.result().state, len(tries)) == ("failed", 14)


async def test_first_recorded_start_of_a_wait_is_kept(stand: Stand):
    journal: dict[str, bytes] = {}

    async def keep(entry: str, body: bytes) -> bytes:
        return journal.setdefault(entry, body)

    now = await stand.ledger.now()
    first, second = UpstreamWaits(journal, keep), UpstreamWaits(journal, keep)
    await first.begin("one", now)
    await second.begin("other", now + timedelta(seconds=5))
    assert [wait.reason for wait in read_waits(journal)] == ["one"]
    assert await first.end(now + timedelta(seconds=10)) == 10.0
    assert await second.end(now + timedelta(seconds=20)) == 10.0
    for waits in (first, UpstreamWaits(journal, keep)):
        assert (waits.is_open, waits.lasted_s(now + timedelta(hours=1))) == (False, 10.0)


async def test_waits_of_steps_that_began_before_them_neither_end_early_nor_overlap(stand: Stand):
    journal: dict[str, bytes] = {}

    async def keep(entry: str, body: bytes) -> bytes:
        return journal.setdefault(entry, body)

    waits, now = UpstreamWaits(journal, keep), await stand.ledger.now()
    await waits.begin("the server is away", now + timedelta(seconds=5))
    assert await waits.end(now) == 0.0
    await waits.begin("the store is away", now)
    await waits.end(now + timedelta(seconds=7))
    assert [(wait.since - now, wait.until) for wait in read_waits(journal)] == [
        (timedelta(seconds=5), now + timedelta(seconds=5)),
        (timedelta(seconds=5), now + timedelta(seconds=7)),
    ]


async def test_no_more_waits_are_kept_than_a_journal_can_hold(stand: Stand):
    journal: dict[str, bytes] = {}

    async def keep(entry: str, body: bytes) -> bytes:
        return journal.setdefault(entry, body)

    waits, now = UpstreamWaits(journal, keep), await stand.ledger.now()
    for number in range(WAITS_MAX + 10):
        await waits.begin(f"wait {number}", now + timedelta(seconds=number))
        await waits.end(now + timedelta(seconds=number + 1))
    assert len(journal) == 2 * WAITS_MAX
    assert waits.lasted_s(now) == WAITS_MAX
