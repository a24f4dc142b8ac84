"""Collection takes what nobody needs, and never what somebody may still read: whatever happens beside it, and in whatever order."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.artifacts.desk import BACKEND, CONTENTS, DAY_S, OPERATOR, Counted, Desk, complete, desk_in, draft
from tests.artifacts.turnstile import Turnstile
from trellis.artifacts.content import JobType
from trellis.artifacts.registry import ArtifactCollectionReport
from trellis.artifacts.rows import DISCARDED, FINALIZED, STAGED, ArtifactFinal
from trellis.engine.errors import InvalidTransition, LeaseConflictError
from trellis.engine.jobs import Lease
from trellis.lifecycles.artifact import STAGED_S
from trellis.storage.objects.canonical_json import sha256


@pytest.mark.requirement("D15")
async def test_a_blob_goes_when_its_row_has_ended_or_its_object_is_published_and_not_before(desk: Desk):
    final, lease = await desk.finalized(), await desk.waiting()
    discarded = await desk.stage(lease)
    assert await desk.artifacts.discard(BACKEND, discarded.artifact_id, cause="given up")
    staged = await desk.stage(await desk.waiting())
    desk.clock.advance(STAGED_S - 1)  # age alone is no reason
    assert (await desk.collector().run_once()).taken == 1
    assert set(await desk.keys()) == {final.row.staged_key, staged.row.staged_key}
    await desk.publish()
    assert (await desk.collector().run_once()).taken == 1
    assert set(await desk.keys()) == {final.row.key, staged.row.staged_key}
    desk.clock.advance(2.0)
    await desk.sweep()  # nobody named it for a week
    assert (await desk.collector().run_once()).taken == 1
    assert await desk.keys() == [final.row.key]
    assert await desk.collector().run_once() == ArtifactCollectionReport()


async def test_a_published_object_that_is_not_the_recorded_one_keeps_the_blob(desk: Desk):
    final = await desk.finalized()
    await desk.objects.put(final.row.key, b"{}")
    assert (await desk.collector().run_once()).taken == 0
    assert sha256(await desk.body(final.row.staged_key) or b"") == final.sha256


@pytest.mark.requirement("D15")
async def test_collector_leaves_objects_without_a_row_alone(desk: Desk):
    folder = f"projects/{desk.artifacts.cid}/staged"
    for name in ("art-00000000-0000-4000-8000-000000000000.json", "notes.txt", "art-x/y.json"):
        await desk.objects.put(f"{folder}/{name}", b"{}")
    other = await desk.stage(await desk.waiting())
    assert await desk.artifacts.discard(BACKEND, other.artifact_id, cause="given up")
    elsewhere = f"{folder}/copy/{other.artifact_id}.json"
    await desk.objects.put(elsewhere, b"{}")
    report = await desk.collector().run_once()
    assert (report.looked_at, report.taken, report.unknown) == (5, 1, 3)
    assert elsewhere in await desk.keys()


@pytest.mark.requirement("D15")
async def test_the_blob_of_a_final_artifact_stays_until_that_is_recorded(desk: Desk):
    final = await desk.finalized()
    await desk.publish()
    (record,) = [key for key in await desk.keys("audit/") if key.endswith(f"/{final.artifact_id}-2.json")]
    body = await desk.body(record) or b""
    await desk.objects.delete(record)  # as if the projector had died after it put the bytes
    assert (await desk.collector().run_once()).taken == 0
    assert await desk.keys() == [final.row.key, final.row.staged_key]
    await desk.objects.put(record, body)
    assert (await desk.collector().run_once()).taken == 1


@pytest.mark.requirement("ART-5")
async def test_the_bytes_of_a_removed_artifact_go_with_the_record_of_that_and_not_before(desk: Desk):
    final = await desk.finalized()
    await desk.publish()
    desk.clock.advance(91 * DAY_S)
    await desk.artifacts.cleanup(OPERATOR)
    assert (await desk.collector().run_once()).taken == 0
    both = await desk.keys()
    assert both == [final.row.key, final.row.staged_key]
    body = await desk.body(final.row.staged_key) or b""
    await desk.publish()
    assert await desk.keys() == []
    await desk.objects.put(final.row.staged_key, body)  # it was still under way
    assert (await desk.collector().run_once()).taken == 1


async def test_collector_never_looks_at_a_removed_artifact_again(desk: Desk):
    for _ in range(3):
        await desk.finalized()
    await desk.publish()
    desk.clock.advance(91 * DAY_S)
    await desk.artifacts.cleanup(OPERATOR)
    await desk.publish()
    ledger, objects = Counted(desk.ledger), Counted(desk.objects)
    collector = Desk(ledger=ledger, objects=objects, clock=desk.clock).collector(batch=2)  # type: ignore[arg-type]
    assert [await collector.run_once() for _ in range(3)] == [ArtifactCollectionReport()] * 3
    assert (objects.calls, ledger.calls) == ({"list": 4}, {}), "once for each page, and once for former requests"


async def test_a_round_goes_over_every_blob_page_by_page(desk: Desk):
    for _ in range(5):
        staged = await desk.stage(await desk.waiting())
        await desk.artifacts.discard(BACKEND, staged.artifact_id, cause="given up")
    collector, reports = desk.collector(batch=2), list[ArtifactCollectionReport]()
    while not reports or reports[-1].more:
        reports.append(await collector.run_once())
    assert [report.looked_at for report in reports] == [2, 2, 1]
    assert [collector.pause_s(report) < 1 for report in reports] == [True, True, False]
    assert await desk.keys() == []


# --- any interleaving ----------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One ledger and one store for all examples, on an event loop of its own."""

    loop: asyncio.AbstractEventLoop
    desk: Desk
    stack: AsyncExitStack

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    loop, stack = asyncio.new_event_loop(), AsyncExitStack()
    folder: Path = tmp_path_factory.mktemp("bench")
    made = Bench(loop, loop.run_until_complete(stack.enter_async_context(desk_in(folder))), stack)
    yield made
    made.run(stack.aclose())
    loop.close()


LOOKS_MAX = 20
ACTS = ("again", "again differently", "discard", "publish", "publish", "collect", "collect", "read")


async def act(desk: Desk, name: str, lease: Lease, seen: list[Any]) -> None:
    """One thing that somebody does, once the job has an artifact that it can be done to."""
    rows = await desk.artifacts.of_job(lease.job_id)
    for _ in range(LOOKS_MAX if name in {"discard", "read"} else 0):
        rows = rows or await desk.artifacts.of_job(lease.job_id)
    match name:
        case "again":
            await desk.stage(lease)
        case "again differently":
            await desk.stage(lease, draft(title="Another title"))
        case "discard":
            for row in rows:
                await desk.artifacts.discard(BACKEND, row.artifact_id, cause="given up")
        case "publish":
            projector = desk.projector()
            await projector.run_once()
            await projector.release()
        case "collect":
            await desk.collector().run_once()
        case _:
            seen += [(row.state, await desk.artifacts.read(row.artifact_id)) for row in rows]


async def make_and_complete(desk: Desk, lease: Lease) -> bool:
    """What the backend and the orchestration layer do together; whether the job is complete."""
    staged = await desk.stage(lease)
    completed = await complete(desk.ledger, desk.artifacts, lease, staged.artifact_id)
    (row,) = await desk.artifacts.of_job(lease.job_id)
    assert row.state == (FINALIZED if completed else DISCARDED)
    return completed


async def one_life(desk: Desk, acts: list[str], seed: int) -> str:
    """Everything at once, call by call in an order that the seed decides; then what must hold. How the artifact ended."""
    turnstile, rng = Turnstile(), random.Random(seed)
    gated = Desk(ledger=turnstile.wrap(desk.ledger), objects=turnstile.wrap(desk.objects), clock=desk.clock)
    lease, seen = await desk.waiting(), list[Any]()
    works = [make_and_complete(gated, lease), *(act(gated, name, lease, seen) for name in acts)]
    outcomes = await turnstile.run(works, rng.randrange)
    for outcome in outcomes:
        refused = isinstance(outcome, InvalidTransition | LeaseConflictError | ArtifactFinal)
        expected = refused or "cannot be staged" in str(outcome)
        assert not isinstance(outcome, BaseException) or expected, outcome
    content = CONTENTS[JobType.RESEARCH][1]
    for state, document in seen:
        assert document is None or document["content"] in (content, content | {"title": "Another title"})
        assert state != FINALIZED or document is not None
    return await what_is_left(desk, lease, is_complete=outcomes[0] is True)


async def what_is_left(desk: Desk, lease: Lease, *, is_complete: bool) -> str:
    (row,) = await desk.artifacts.of_job(lease.job_id)
    assert (row.state == FINALIZED) is is_complete
    for settle in (desk.collector().run_once, desk.publish, desk.collector().run_once, desk.collector().run_once):
        document = await desk.artifacts.read(row.artifact_id)
        assert (document is not None) is is_complete
        await settle()
        copies = [await desk.body(key) for key in (row.key, row.staged_key)]
        assert row.state == DISCARDED or any(copy is not None and row.is_of(copy) for copy in copies)
    there = {key for key in await desk.keys() if row.artifact_id in key}
    assert there == {FINALIZED: {row.key}, DISCARDED: set(), STAGED: {row.staged_key}}[row.state]
    for key in there:
        assert row.is_of(await desk.body(key) or b"")
    return row.state


def lives(count: int) -> Any:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


SEEDS = st.integers(0, 2**32)
WISHES = st.lists(st.sampled_from(ACTS), min_size=2, max_size=6)


@pytest.mark.requirement("D15", "ART-3", "ART-7", "JQ-5")
def test_collector_never_deletes_a_live_blob_in_any_order_of_events(bench: Bench):
    ended: set[str] = set()

    @lives(25)
    @given(acts=WISHES, seed=SEEDS)
    def live(acts: list[str], seed: int) -> None:
        ended.add(bench.run(one_life(bench.desk, acts, seed)))

    live()
    assert ended >= {FINALIZED, DISCARDED}  # the races were really run


@pytest.mark.prove
@pytest.mark.timeout(900)
@pytest.mark.requirement("D15", "ART-3", "ART-7", "JQ-5")
def test_a_live_blob_is_never_taken_in_very_many_orders(bench: Bench):
    @lives(400)
    @given(acts=WISHES, seed=SEEDS)
    def live(acts: list[str], seed: int) -> None:
        bench.run(one_life(bench.desk, acts, seed))

    live()
