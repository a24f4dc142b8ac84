"""Compares all that two ledgers have recorded of the same story."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any

from tests.ledgers.conformance.rig import Rig
from trellis.engine.event_data import CANCEL_REQUESTED
from trellis.engine.jobs import JobId
from trellis.engine.records import Event, Job, JobFilter, JobHistory
from trellis.lifecycles.events import Cause

OF_ONE_JOB: dict[str, Any] = {
    "payload": None,
    "progress": None,
    "spared": 0,
    "cancel_asked_by": None,
    "cancel_asked_at": None,
    "cancel_cause": None,
}
"""What `job` tells and a history need not; the stories compare it job by job."""
FEED_READS_MAX = 1_000


async def compare_histories(first: Rig, second: Rig) -> Counter[str]:
    """All that two ledgers have recorded: jobs, events, dead letters and the order of the feed; how often each thing happened."""
    kept: list[dict[JobId, JobHistory]] = [
        {history.job.job_id: history async for history in rig.ledger.histories()} for rig in (first, second)
    ]
    assert kept[0].keys() == kept[1].keys()
    for job_id, one in kept[0].items():
        other = kept[1][job_id]
        for mine, theirs in zip((*one.events, *one.dead_letters), (*other.events, *other.dead_letters), strict=True):
            assert mine == theirs, f"{job_id}\n  {mine}\n  {theirs}"
        rows = [replace(history.job, **OF_ONE_JOB) for history in (one, other)]
        assert rows[0] == rows[1], f"{job_id}\n  {rows[0]}\n  {rows[1]}"
    letters = [
        {(one.job_id, one.version): one for one in await rig.ledger.dead_letters(JobFilter(), limit=1_000)}
        for rig in (first, second)
    ]
    assert letters[0] == letters[1]
    everything = [event for history in kept[0].values() for event in history.events]
    await _compare_feeds(first, second, len(everything))
    return Counter(what for event in everything for what in _happenings(event, kept[0][event.job_id].job))


async def _compare_feeds(first: Rig, second: Rig, events: int) -> None:
    """Both feeds have every event once, in the same order; the events of one transaction are in whichever order of their own."""
    (mine, _), (theirs, places) = [await _whole_feed(rig, events) for rig in (first, second)]
    start = 0
    for _, group in groupby(places, key=lambda place: place.split(".")[0]):
        end = start + len(list(group))
        assert sorted(mine[start:end]) == sorted(theirs[start:end]), (mine[start:end], theirs[start:end])
        start = end
    for feed in (mine, theirs):
        assert len(feed) == len(set(feed)) == events


async def _whole_feed(rig: Rig, events: int) -> tuple[list[tuple[JobId, int]], list[str]]:
    """Another transaction on the server may hold back the newest for a while."""
    found: list[tuple[JobId, int]] = []
    places: list[str] = []
    position = None
    for _ in range(FEED_READS_MAX):
        page = await rig.ledger.feed(position, limit=1_000)
        found += [(event.job_id, event.version) for event in page.events]
        places += page.positions
        position = page.position
        if len(found) >= events:
            break
    return found, places


def _happenings(event: Event, job: Job) -> Iterator[str]:
    data = json.loads(event.data or b"null")
    yield event.type
    if event.cause is not None:
        yield event.cause
    if job.concurrency_key is not None and event.type == "job_claimed":
        yield "with a key"
    if event.type == "job_cancelled":
        yield "a soft cancel is carried out" if isinstance(data, dict) and "asked_by" in data else "a hard cancel"
    if event.cause == Cause.DEADLINE_PASSED:
        yield "a deadline passes"
    if isinstance(data, dict) and CANCEL_REQUESTED in data and event.type == "job_succeeded":
        yield "succeeded though asked to stop"
