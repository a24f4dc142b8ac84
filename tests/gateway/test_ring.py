"""The ring of the last events: whoever asks for what comes after a position it holds gets all of it, and nothing else."""

import pytest

from trellis.engine.jobs import JobId
from trellis.gateway.events import StreamedEvent
from trellis.gateway.hub import EventRing


def _told(number: int) -> StreamedEvent:
    return StreamedEvent(
        position=f"{number:04d}",
        frame=b"",
        type="job_queued",
        lifecycle="leased-job",
        job_id=JobId(f"job-{number}"),
        runs=(),
        agent_slug=None,
    )


def _rest(ring: EventRing, position: str) -> list[str]:
    found: list[str] = []
    while True:
        some, position = ring.after(position)
        if not some:
            return found
        found += [one.position for one in some]


@pytest.mark.requirement("RUN-5")
@pytest.mark.parametrize("page", [1, 3, 7, 40])
def test_every_position_from_the_floor_on_gives_exactly_the_rest(page: int):
    size, total = 10, 120
    ring = EventRing("0000", size)
    for first in range(1, total, page):
        numbers = range(first, min(first + page, total))
        ring.add([_told(number) for number in numbers], f"{numbers[-1]:04d}")
        added = [f"{number:04d}" for number in range(1, numbers[-1] + 1)]
        for position in ("0000", *added):
            if position >= ring.floor:
                assert _rest(ring, position) == [one for one in added if one > position]
        kept = [one for one in added if one > ring.floor]
        assert len(kept) >= min(size, len(added)), "the floor is no higher than it must be"
        assert len(kept) <= 2 * size
