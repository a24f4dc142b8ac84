"""kill -9 of the platform, of a gateway apart and of the NLM backend at every point of a queue job; another process goes on.

A job without a fault lists the points. What must hold at every moment: no job is COMPLETE without a readable artifact of the recorded
hash, no artifact is finalized without its job, no job has two. What must hold after a death at any point: one artifact and one
COMPLETE, every other staged one discarded, one audit record for each event, and no execution that asked the provider twice.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.faults.conftest import SEED
from tests.faults.fleet import Nursery
from tests.pace import Pace
from tests.research.processes.queue_process import APART, GATEWAY, NLM, ORCHESTRATOR, PARTS, PLATFORM
from tests.research.processes.stories import PATIENCE_S, Story, a_story

AT_ONCE = 6
"""Stories beside each other: most of the time of each is waiting for a dead process's lease to end."""
LIFE_POINTS = {PLATFORM: (5, 70), GATEWAY: (2, 18), ORCHESTRATOR: (5, 55), NLM: (3, 45)}
"""How many points a process lives in a story of random deaths; a whole job has about 55, 15, 40 and 40 of them."""
TRIES = 3
"""How often a point is tried whose first story a busy machine spoiled."""
LIVES_MAX = 5
"""Deaths of one part by orders in such a story; then it is let live."""

NAMED = {
    # staging: sent, its row made, its blob put, answered, kept
    "nlm send artifacts before 1": 1,
    "gateway submit artifact after 1": 1,
    "gateway put staged after 1": 1,
    "nlm send artifacts after 1": 1,
    "nlm keep staged after 1": 1,
    # the callback: kept by the gateway, answered, and the backend is done
    "gateway put callback after 1": 1,
    "nlm send result after 1": 1,
    "nlm complete nlm-job after 1": 1,
    # verification: announced, read, kept
    "platform response_received queue-job after 1": 2,
    "platform keep artifact after 1": 2,
    # the commit, and what acknowledges it
    "platform complete queue-job before 1": 2,
    "platform complete queue-job after 1": 1,
    "platform put artifact after 1": 1,
    "platform put audit job_succeeded after 1": 1,
}
"""The points, and how many attempts a job needs that meets a death there: another one only when its holder died."""
ALSO_NAMED = (
    "nlm ask sources before 1",
    "nlm ask sources after 1",
    "nlm keep answer after 1",
    "nlm keep draft after 1",
    "nlm send result before 1",
    "gateway put staged before 1",
    "gateway answer artifacts after 1",
    "gateway put callback before 1",
    "gateway answer result after 1",
    "platform submit artifact after 1",
    "platform put staged after 1",
    "platform put callback after 1",
    "platform read callback after 1",
    "platform read staged after 1",
)
"""Further points in the same places; the long proof has them with all others."""
MET = (
    *NAMED,
    *ALSO_NAMED,
    "platform put snapshot after 1",
    "platform snapshot_ready queue-job after 1",
    "platform send process before 1",
    "platform send process after 1",
    "nlm submit nlm-job after 1",
    "platform delete staged after 1",
)
"""What a job without a fault must have met: a point that is not there any more would prove nothing."""

pytestmark = pytest.mark.requirement("JQ-5", "JQ-9", "NLM-4", "NLM-5", "ART-3", "ART-4", "D15", "D26")

_folders = count(1)


@dataclass(frozen=True)
class Told:
    """What one story showed."""

    what: str
    deaths: Mapping[str, int] = field(default_factory=dict[str, int])
    attempts: int = 0
    requeued: int = 0
    asked: int = 0
    looks: int = 0
    retried_while_alive: int = 0
    took_s: float = 0.0
    problem: str = ""


def parts_of(point: str) -> tuple[str, ...]:
    """The processes of a story in which this point is met."""
    return PARTS if point.startswith(PARTS) else APART


async def undisturbed(story: Story, parts: tuple[str, ...]) -> list[str]:
    """Every point that a job without a fault meets."""
    for part in parts:
        story.start(part)
    await story.begin()
    await story.finish()
    await story.check()
    assert await story.fleet.drain() == [0] * len(parts), story.last_words()
    points = story.points()
    missing = {point for point in MET if parts_of(point) == parts} - set(points)
    assert not missing, f"a job does not meet {sorted(missing)} any more"
    return points


async def killed_at(point: str, story: Story) -> None:
    dying = point.partition(" ")[0]
    for part in parts_of(point):
        story.start(part, die_at=point if part == dying else "")
    await story.begin()
    await story.finish()


async def killed_again_and_again(seed: int, story: Story) -> None:
    rng = random.Random(seed)

    def life(part: str) -> Mapping[str, Any]:
        return {"die_after": rng.randint(*LIFE_POINTS[part])} if story.deaths[part] < LIVES_MAX else {}

    story.next_life = life
    for part in APART if seed % 2 else PARTS:
        story.start(part, **life(part))
    await story.begin()
    await story.finish()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Where stories take place."""

    template: Path
    nursery: Nursery
    folder: Path
    new_url: Callable[[], str] | None = None
    """Gives each story a ledger of its own; None is a file."""

    async def tell(self, what: Any, one: Callable[[Any, Story], Awaitable[None]]) -> Told:
        """One story with all its checks. One that goes wrong is told, so that the others are told too."""
        began, url = time.monotonic(), None if self.new_url is None else self.new_url()
        folder = self.folder / f"story-{next(_folders)}"
        try:
            async with asyncio.timeout(4 * PATIENCE_S), a_story(self.template, folder, self.nursery, url=url) as story:
                await one(what, story)
                await story.check()
                await story.fleet.drain()
                return Told(
                    str(what),
                    dict(story.deaths),
                    story.attempts(),
                    story.requeued,
                    story.asked(),
                    story.looks,
                    story.retried_while_alive(),
                    time.monotonic() - began,
                )
        except AssertionError as error:
            return Told(str(what), problem=f"{what}: {error}")

    async def all_of(self, told: Iterable[Any], one: Callable[[Any, Story], Awaitable[None]]) -> list[Told]:
        slots = asyncio.Semaphore(AT_ONCE)

        async def tell(what: Any) -> Told:
            async with slots:
                return await self.tell(what, one)

        return await asyncio.gather(*map(tell, told))

    async def named_once(self) -> list[Told]:
        """Each named point once, and again where the machine was too slow to show what a death there costs."""
        stories: list[Told] = []
        for _ in range(TRIES):
            shown = {story.what for story in stories if story.problem or costs_what_it_must(story)}
            stories += await self.all_of([point for point in NAMED if point not in shown], killed_at)
        return stories

    async def golden(self) -> list[str]:
        """The points of a job without a fault, with the gateway inside and apart."""

        async def points(parts: tuple[str, ...]) -> list[str]:
            folder = self.folder / f"golden-{next(_folders)}"
            url = None if self.new_url is None else self.new_url()
            async with a_story(self.template, folder, self.nursery, url=url) as story:
                return [point for point in await undisturbed(story, parts) if parts_of(point) == parts]

        inside, apart = await asyncio.gather(points(PARTS), points(APART))
        return [*inside, *apart]


def report(stories: list[Told], figures: Callable[..., None]) -> Counter[str]:
    """Note the figures; how many died, by part."""
    problems = [story.problem for story in stories if story.problem]
    assert not problems, f"{len(problems)} of {len(stories)}:\n" + "\n".join(text[:6_000] for text in problems[:5])
    deaths: Counter[str] = sum((Counter(story.deaths) for story in stories), Counter[str]())
    figures(
        stories=len(stories),
        **{f"deaths_{part}": deaths[part] for part in (PLATFORM, *APART)},
        attempts=sum(story.attempts for story in stories),
        attempts_max=max(story.attempts for story in stories),
        asked=sum(story.asked for story in stories),
        looks=sum(story.looks for story in stories),
        requeued=sum(story.requeued for story in stories),
        retried_while_alive=sum(story.retried_while_alive for story in stories),
        story_max_s=round(max(story.took_s for story in stories), 1),
    )
    return deaths


def costs_what_it_must(story: Told) -> bool:
    """It died where it should and cost no more attempts than it has to.

    On a busy machine a living holder now and then loses its lease: then a story costs more, or goes past its point.
    """
    return bool(story.deaths) and story.attempts == NAMED[story.what]


def check_named(stories: list[Told], pace: Pace) -> None:
    """Each point was met, and a death there costs no more attempts than it has to; it never costs less.

    Where the machine stood still leases were lost by nobody's fault.
    """
    missed = NAMED.keys() - {story.what for story in stories if story.deaths}
    assert not missed, f"nobody died at {sorted(missed)}"
    best = {point: min(story.attempts for story in stories if story.what == point and story.deaths) for point in NAMED}
    assert all(attempts >= NAMED[point] for point, attempts in best.items()), best
    if pace.stood_still_s > 1.0:
        return
    assert best == NAMED
    assert sum(story.requeued for story in stories) <= max(1, len(stories) / 10)


@pytest.fixture
def stage(template: Path, parts: Nursery, tmp_path: Path) -> Stage:
    return Stage(template=template, nursery=parts, folder=tmp_path)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_death_between_staging_and_acknowledgement_leaves_one_artifact_and_one_complete(
    stage: Stage, figures: Callable[..., None], pace: Pace
):
    await stage.golden()
    stories = await stage.named_once()
    report(stories, figures)
    check_named(stories, pace)


@pytest.mark.prove
@pytest.mark.timeout(3_600)
async def test_fifty_deaths_at_each_point_between_staging_and_acknowledgement_leave_one_artifact_and_one_complete(
    stage: Stage, figures: Callable[..., None], pace: Pace
):
    await stage.golden()
    stories = await stage.all_of([*NAMED] * 50, killed_at)
    deaths = report(stories, figures)
    assert deaths.total() >= 0.95 * len(stories), "each of these points is met by every job"
    check_named(stories, pace)


async def test_artifact_staged_by_an_older_attempt_is_discarded_after_a_death_of_the_gateway(
    stage: Stage, figures: Callable[..., None]
):
    async def twice(_: str, story: Story) -> None:
        story.start(GATEWAY, die_at="gateway submit artifact after 2")
        story.start(ORCHESTRATOR, die_at="orchestrator response_received queue-job after 1")
        story.start(NLM)
        await story.begin()
        await story.finish()

    deaths = report(await stage.all_of(["two deaths"], twice), figures)
    assert deaths == {GATEWAY: 1, ORCHESTRATOR: 1}


@pytest.mark.prove
@pytest.mark.timeout(3_600)
async def test_a_death_at_every_point_leaves_one_artifact_and_one_complete(stage: Stage, figures: Callable[..., None]):
    points = [point for point in await stage.golden() for _ in range(3)]
    stories = await stage.all_of(points, killed_at)
    deaths = report(stories, figures)
    assert deaths.total() >= 0.95 * len(points), (
        "some points are not met again: what is read twice, and what comes after the end"
    )


@pytest.mark.prove
@pytest.mark.timeout(3_600)
async def test_a_hundred_jobs_whose_processes_die_anywhere(stage: Stage, figures: Callable[..., None]):
    stories = await stage.all_of(range(SEED, SEED + 100), killed_again_and_again)
    deaths = report(stories, figures)
    assert min(deaths[part] for part in (PLATFORM, GATEWAY, ORCHESTRATOR)) > len(stories) / 4, "all of them die"
    assert deaths[NLM] > len(stories) / 2


@pytest.mark.prove
@pytest.mark.timeout(1_800)
async def test_deaths_leave_one_artifact_and_one_complete_on_postgresql(
    stage: Stage,
    figures: Callable[..., None],
    new_postgres_database: Callable[..., str],
    postgres_template: str,
    pace: Pace,
):
    on_postgres = Stage(
        template=stage.template,
        nursery=stage.nursery,
        folder=stage.folder,
        new_url=lambda: new_postgres_database(template=postgres_template),
    )
    await on_postgres.golden()
    stories = await on_postgres.all_of([*NAMED] * 3, killed_at)
    deaths = report(stories, figures)
    assert deaths.total() >= 0.95 * len(stories), "each of these points is met by every job"
    check_named(stories, pace)
