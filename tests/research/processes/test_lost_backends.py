"""An NLM backend that comes back too late, or without its ledger, changes nothing about what the job ends with (NLM-6, ART-3, D42).

A zombie stood still while its job was retried and completed elsewhere. Its artifact differs from the winner's on purpose, so that a
replaced one would show. Whatever it still sends is refused.
"""

import asyncio
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fleet import Line, Nursery, Running
from tests.research.processes.queue_process import NLM, PARTS, PLATFORM, ledger_files
from tests.research.processes.stories import Story, a_story, reserved
from trellis.artifacts.rows import FINALIZED
from trellis.lifecycles.nlm_job import OPEN

STOPS = ("send artifacts before", "send result before")
LOST_AT = (
    "nlm submit nlm-job after 1",
    "nlm keep answer after 1",
    "nlm keep staged after 1",
    "nlm send result before 1",
)
TAG = "zombie"
UNFENCED = {"lease_s": 600.0, "heartbeat_s": 200.0, "renews": False}
"""A zombie that does not know how long it stood still: it goes on, and only others can refuse it."""

pytestmark = [pytest.mark.quiet, pytest.mark.timeout(300)]


async def zombie_of(story: Story, stop_at: str) -> Running:
    """A backend that stands still at this point of its job."""
    story.start(PLATFORM)
    story.start(NLM, stop_at=f"nlm {stop_at}", tag=TAG, **UNFENCED)
    await story.begin()
    await story.until(lambda: any(line.op == "stopped" for line in story.fleet.lines()), "the backend stands still")
    return story.leave(NLM)


def answers(story: Story, zombie: Running) -> list[str]:
    """What the zombie was told since it was let go on."""
    lines: list[Line] = [line for line in story.fleet.lines() if line.pid == zombie.pid]
    stopped = next(number for number, line in enumerate(lines) if line.op == "stopped")
    return [line.what for line in lines[stopped:] if line.op == "answered"]


async def told_off(story: Story, zombie: Running, ledger: str) -> None:
    """Let the zombie go on until it is done with its job."""
    ours, story.fleet.orders["nlm_ledger"] = story.nlm_ledger, ledger
    zombie.send(signal.SIGCONT)

    async def done() -> bool:
        still_open = [job for job in await story.executions() if job.state in OPEN]
        return not still_open and bool(answers(story, zombie))

    await story.until(done, "the zombie is done")
    story.fleet.orders["nlm_ledger"] = ours


async def outlive(story: Story, stop_at: str, *, own_ledger: bool, folder: Path) -> list[str]:
    """The zombie's job is done by another backend; the answers that the zombie gets afterwards."""
    zombie = await zombie_of(story, stop_at)
    await story.kill(PLATFORM)
    zombies = story.nlm_ledger
    with reserved() as elsewhere:
        if own_ledger:
            story.fleet.orders["nlm_ledger"] = f"sqlite:///{folder / 'other.db'}"
        for part in PARTS:
            story.start(part, nlm=elsewhere)
        row = await story.finish()
        before = await story.instance.objects.get(row.key)
        assert before is not None
        assert TAG not in row.tags
        await told_off(story, zombie, zombies)
        await story.check()
        after = await story.instance.objects.get(row.key)
        assert after is not None
        assert (after.body, after.etag) == (before.body, before.etag)
        assert [one.artifact_id for one in await story.artifacts(FINALIZED)] == [row.artifact_id]
        assert sorted(await story.fleet.drain(), key=str) == [0, 0, 0], story.last_words()
        return answers(story, zombie)


@pytest.mark.requirement("NLM-5", "ART-3", "ART-4", "D15", "D42")
async def test_a_backend_that_stood_still_past_the_retry_cannot_replace_the_winners_artifact(
    template: Path, parts: Nursery, tmp_path: Path
):
    async def one(stop_at: str, *, own_ledger: bool) -> list[str]:
        folder = tmp_path / f"{stop_at.replace(' ', '-')}-{own_ledger}"
        async with a_story(template, folder, parts) as story:
            told = await outlive(story, stop_at, own_ledger=own_ledger, folder=folder)
        assert told
        assert all(answer.endswith(" 409") for answer in told), told
        return told

    await asyncio.gather(*(one(stop_at, own_ledger=own) for stop_at in STOPS for own in (False, True)))


@pytest.mark.requirement("NLM-6", "D42")
async def test_a_job_is_completed_when_its_backend_is_lost_with_its_ledger(
    template: Path, parts: Nursery, tmp_path: Path
):
    async def one(point: str) -> int:
        async with a_story(template, tmp_path / point.replace(" ", "-"), parts) as story:

            def without_ledger(_: str) -> Mapping[str, Any]:
                for path in ledger_files(story.nlm_ledger):
                    path.unlink(missing_ok=True)
                return {}

            story.next_life = without_ledger
            story.start(PLATFORM)
            story.start(NLM, die_at=point)
            await story.begin()
            await story.finish()
            await story.check()
            assert story.deaths == {NLM: 1}
            return story.attempts()

    attempts = await asyncio.gather(*map(one, LOST_AT))
    assert min(attempts) <= 2, "the attempt whose backend forgot it, and the next one"
