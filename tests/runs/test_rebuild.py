"""A wiped object store comes back from the ledger, byte for byte."""

import pytest

from tests.runs.conftest import ORCHESTRATOR
from tests.runs.test_projector import SLUG, Press, press
from trellis.runs import proposals
from trellis.runs.proposals import Draft
from trellis.runs.publishing import Publisher
from trellis.runs.rebuild import Rebuilt, rebuild_objects

__all__ = ["press"]


async def wiped(press: Press, *, every: int = 1) -> dict[str, bytes]:
    """What was published, after every nth object of it was deleted."""
    before = await press.folder()
    for number, key in enumerate(before):
        if number % every == 0:
            assert await press.objects._objects.delete(key)
    return before


@pytest.mark.requirement("D14", "PIPE-8")
@pytest.mark.parametrize("every", [1, 3], ids=["all", "some"])
async def test_what_was_deleted_comes_back_byte_for_byte(press: Press, every: int):
    for _ in range(2):
        await press.drive(press.projector())
    draft = Draft(action="propose-edit", target="sources/a.md", content={})
    proposal = proposals.make("run_2026-02-14_080000_000001", SLUG, 1, draft)
    await proposals.store(press.stand.ledger, ORCHESTRATOR, [proposal])
    await press.all(press.projector())
    before = await wiped(press, every=every)
    seen: list[Rebuilt] = []
    done = await rebuild_objects(press.stand.ledger, Publisher(press.objects), seen.append)  # type: ignore[arg-type]
    assert await press.folder() == before
    assert (done.jobs, done.events) == (3, 17)
    assert seen[-1] == done
    again = await rebuild_objects(press.stand.ledger, Publisher(press.objects))  # type: ignore[arg-type]
    assert again.written == 0
