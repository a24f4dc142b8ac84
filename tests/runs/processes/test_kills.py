"""kill -9 of the process that drives a run, at every point of it; another process goes on.

A run without a fault lists the points. What must hold after a death at any of them: the run completes, a counted step is not done
again and nothing that was kept is asked for again, the published documents are those of an undisturbed run but for times and
ids, every event has one audit record, and an applied memory update is one commit.
"""

import asyncio
import random
import re
import statistics
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import pytest

from tests.faults.conftest import SEED
from tests.faults.fleet import Nursery
from tests.runs.processes.run_process import AFTER
from tests.runs.processes.stories import PATIENCE_S, Story, a_story
from tests.servers.temporal import TemporalServer, running_temporal
from trellis.documents import ids

AT_ONCE = 6
"""Stories beside each other: most of the time of each is waiting for a dead process's lease to end."""
STORY_DEATHS_MAX = 100
LIFE_POINTS = (5, 90)
"""How many points a process lives; now and then enough for a whole page of the feed, whose place is kept at its end."""

pytestmark = pytest.mark.requirement("PIPE-10", "PIPE-11", "PIPE-12", "D14", "D16", "OBS-1")

_folders = count(1)


@dataclass(frozen=True)
class Golden:
    """What a run without a fault met and left."""

    points: list[str]
    form: dict[str, bytes]


async def undisturbed(template: Path, nursery: Nursery, folder: Path, **orders: str) -> Golden:
    async with a_story(template, folder / f"golden-{next(_folders)}", nursery, **orders) as story:
        await story.begin()
        story.fleet.start(1)
        await story.finish()
        form = await story.check(None)
        story.check_work()
        assert await story.fleet.drain() == [0]
        return Golden([line.what for line in story.fleet.lines() if line.op == "point"], form)


@dataclass(frozen=True)
class Killed:
    """What one disturbed run showed."""

    point: str
    deaths: int
    recovery_s: list[float]
    lost_while_alive: int
    problem: str = ""


async def killed_at(point: str, golden: Golden, story: Story) -> Killed:
    await story.begin()
    story.fleet.start(1, die_at=point)
    died = await story.until_dead()
    if died:
        story.fleet.start(1)
    await story.finish()
    await story.check(golden.form)
    story.check_work()
    drained = await story.fleet.drain()
    assert not died or drained == [0], story.last_words()
    return Killed(point, int(died), story.recovery_s(), story.lost_while_alive())


async def killed_at_with_its_server(point: str, golden: Golden, story: Story) -> Killed:
    """As `killed_at`. After each death of the server it takes up to ten seconds until a process asks it again."""
    story.patience_s = 3 * PATIENCE_S
    return await killed_at(point, golden, story)


async def killed_again_and_again(seed: int, golden: Golden, story: Story) -> Killed:
    rng, deaths = random.Random(seed), 0
    await story.begin()
    while deaths < STORY_DEATHS_MAX:
        story.fleet.start(1, die_after=rng.randint(*LIFE_POINTS))
        if not await story.until_dead():
            break
        deaths += 1
    await story.finish()
    await story.check(golden.form)
    story.check_work()
    await story.fleet.drain()
    return Killed(f"seed {seed}", deaths, story.recovery_s(), story.lost_while_alive())


async def all_of(
    told: Iterable, one, golden: Golden, template: Path, nursery: Nursery, folder: Path, **orders: str
) -> list[Killed]:
    """Many stories, some at once. One that goes wrong is told with its point, and the others are told too."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def tell(what) -> Killed:
        async with slots, asyncio.timeout(6 * PATIENCE_S):
            try:
                async with a_story(template, folder / f"story-{next(_folders)}", nursery, **orders) as story:
                    return await one(what, golden, story)
            except AssertionError as error:
                return Killed(str(what), 0, [], 0, problem=f"{what}: {error}")

    return await asyncio.gather(*map(tell, told))


def report(stories: list[Killed], figures) -> None:
    """How soon a run was claimed again is noted here and judged where nothing else goes on (`test_fleet`)."""
    problems = [story.problem for story in stories if story.problem]
    assert not problems, f"{len(problems)} of {len(stories)}:\n" + "\n".join(text[:4_000] for text in problems[:5])
    seconds = [one for story in stories for one in story.recovery_s]
    figures(
        stories=len(stories),
        deaths=sum(story.deaths for story in stories),
        lost_while_alive=sum(story.lost_while_alive for story in stories),
        claimed_again=len(seconds),
        claimed_again_p50_s=round(statistics.median(seconds), 2),
        claimed_again_max_s=round(max(seconds), 2),
    )


BOUNDARY = re.compile(r"(do |keep step/|count |show ).* after 1")
"""Of each step: when its work is done, when its result is kept, when it is counted, and when it is published."""
MANY = re.compile(r"put (audit|proposal|steps|status)|keep (model|tool)")
"""Points that are met again and again, with another name each time."""


def representatives(points: list[str], *, every: int) -> list[str]:
    """Every so many boundaries of steps, and one of each other kind; the moment before a thing is the one after the last."""
    kinds: dict[str, list[str]] = {}
    for point in points:
        what, side, _ = point.rsplit(" ", 2)
        many = MANY.match(what)
        if side == AFTER and not BOUNDARY.fullmatch(point):
            kinds.setdefault(many[0] if many else what, []).append(point)
    boundaries = [point for point in points if BOUNDARY.fullmatch(point)][::every]
    return sorted([*boundaries, *(kind[len(kind) // 2] for kind in kinds.values())], key=points.index)


@pytest.mark.long
@pytest.mark.parametrize(
    "rounds, every",
    [
        # A step has four boundaries: this comes by each of the four, and by every step.
        pytest.param(1, 5, marks=pytest.mark.timeout(300)),
        pytest.param(50, 1, marks=[pytest.mark.prove, pytest.mark.timeout(3600)]),
    ],
)
async def test_a_run_goes_on_after_a_death_at_any_kind_of_point(
    small_template: Path, orchestrators: Nursery, tmp_path: Path, figures, rounds: int, every: int
):
    golden = await undisturbed(small_template, orchestrators, tmp_path)
    named = " ".join(golden.points)
    assert all(f"do {name}" in named and f"count {name}" in named for name in ids.STEPS)
    for what in ("keep model/01 after", "keep tool/", "submit proposal", "commit after", "put manifest.json", "show 7"):
        assert what in named, f"the run has no point {what!r} any more"
    chosen = representatives(golden.points, every=every) * rounds
    boundaries = {found[1] for point in chosen if (found := BOUNDARY.fullmatch(point))}
    assert boundaries == {"do ", "keep step/", "count ", "show "}
    stories = await all_of(chosen, killed_at, golden, small_template, orchestrators, tmp_path)
    report(stories, figures)
    assert sum(story.deaths for story in stories) >= 0.9 * len(chosen), "points are not met twice in the same order"


@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_a_run_goes_on_after_a_death_at_every_point(
    template: Path, orchestrators: Nursery, tmp_path: Path, figures
):
    golden = await undisturbed(template, orchestrators, tmp_path)
    stories = await all_of(golden.points, killed_at, golden, template, orchestrators, tmp_path)
    report(stories, figures)
    assert sum(story.deaths for story in stories) >= len(golden.points) - 4, "the last points may come after the end"


@pytest.mark.prove
@pytest.mark.timeout(900)
async def test_fifty_runs_whose_every_process_dies_somewhere(
    template: Path, orchestrators: Nursery, tmp_path: Path, figures
):
    golden = await undisturbed(template, orchestrators, tmp_path)
    seeds = range(SEED, SEED + 50)
    stories = await all_of(seeds, killed_again_and_again, golden, template, orchestrators, tmp_path)
    report(stories, figures)
    assert sum(story.deaths for story in stories) > 3 * len(seeds)


@pytest.mark.prove
@pytest.mark.requirement("PIPE-2", "D16")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("server_alive_s", [None, 20.0], ids=["the server lives", "the server dies too"])
async def test_a_run_on_temporal_goes_on_after_a_death_and_leaves_what_a_builtin_run_leaves(
    template: Path,
    orchestrators: Nursery,
    tmp_path: Path,
    figures,
    own_server: TemporalServer,
    server_alive_s: float | None,
):
    expected = await undisturbed(template, orchestrators, tmp_path)
    where = f"temporal://{own_server.address}/default"
    golden = await undisturbed(template, orchestrators, tmp_path, orchestrator=where)
    assert golden.form == expected.form
    chosen = representatives(golden.points, every=1)
    one = killed_at if server_alive_s is None else killed_at_with_its_server
    async with dying(own_server, server_alive_s) as kills:
        stories = await all_of(chosen, one, golden, template, orchestrators, tmp_path, orchestrator=where)
    report(stories, partial(figures, server_deaths=len(kills)))
    assert sum(story.deaths for story in stories) >= 0.8 * len(chosen)
    assert (len(kills) > 5) == (server_alive_s is not None)


@pytest.fixture
def own_server() -> Iterator[TemporalServer]:
    """A Temporal server that may be killed, and keeps its data."""
    with running_temporal(keeps_data=True) as server:
        yield server


@asynccontextmanager
async def dying(server: TemporalServer, alive_s: float | None) -> AsyncGenerator[list[float]]:
    """Kill the server each time it has lived for so long, and start it again. The list grows with each kill."""
    kills, over = list[float](), asyncio.Event()

    async def again_and_again(alive_s: float) -> None:
        while not over.is_set():
            await asyncio.wait({asyncio.ensure_future(over.wait())}, timeout=alive_s)
            kills.append(time.monotonic())
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

    killing = None if alive_s is None else asyncio.create_task(again_and_again(alive_s))
    try:
        yield kills
    finally:
        over.set()
        if killing is not None:
            await killing
