"""What is kept behind pointers goes when no job names it any more, and never before."""

import json
import os
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import pytest
import pytest_asyncio

from tests.bus.rig import TOPIC, Rig
from trellis.bus.collector import (
    LOOK_BYTES,
    BusCollectionReport,
    BusCollector,
    CollectionPhase,
    CollectOptions,
    _CollectionRound,
)
from trellis.bus.errors import PointerGone
from trellis.bus.pointers import (
    BYTES_MAX,
    DIGEST_CHARS,
    PointerPart,
    Pointers,
    aside_key_of,
    make_pointers,
    object_key_of,
)
from trellis.bus.requests import JobRequest
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, Advance, CancelMode, JobId, Move, Moved, RequestId, Turn
from trellis.engine.records import RetentionOptions
from trellis.lifecycles import Role, Trigger
from trellis.storage.objects.keys import file_path
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore

DAY_S = 24 * 3600.0
CLIENT = Actor(role=Role.SUBMITTER, name="client")
SCHEDULER = Actor(role=Role.SCHEDULER, name="scheduler@test")
WORKER = Actor(role=Role.WORKER, name="w-1")
SMALL = CollectOptions(objects=2, events=3, removals=2)
"""Pages so short that a round is many passes."""


@dataclass
class Store:
    """An object store in a folder, in which things are as old as a test says."""

    rig: Rig
    folder: Path
    objects: ObjectStore
    pointers: Pointers
    passes: list[BusCollectionReport] = field(default_factory=list[BusCollectionReport])

    async def put(self, body: bytes, part: PointerPart = PointerPart.CONTEXT, *, days: float = 100.0) -> str:
        pointer = await self.pointers.put(body, part=part)
        await self.is_old(f"bus/{pointer.partition('://')[2]}", days)
        return pointer

    async def write_again(self, body: bytes) -> None:
        """The same bytes, now: by the ledger's clock, which is the test's, where the file system has its own."""
        key = f"bus/{self.pointers.pointer_to(body, part=PointerPart.CONTEXT).partition('://')[2]}"
        before = self.file(key).stat().st_mtime_ns
        await self.pointers.put(body, part=PointerPart.CONTEXT)
        if self.file(key).stat().st_mtime_ns != before:
            await self.is_old(key, 0.0)

    async def is_old(self, key: str, days: float) -> None:
        """As if it had been written so long ago."""
        at = (await self.rig.ledger.now()).timestamp() - days * DAY_S
        os.utime(self.file(key), (at, at))

    def file(self, key: str) -> Path:
        return self.folder.joinpath(*(part.decode() for part in file_path(key)))

    async def set_aside_now(self) -> None:
        """By the ledger's clock, too."""
        at = (await self.rig.ledger.now()).timestamp()
        for place in self.folder.rglob("bus-aside/*/*"):
            os.utime(place, (at, at))

    def collector(self, name: str = "one", options: CollectOptions = SMALL) -> BusCollector:
        actor = Actor(role=Role.CONTROL_PLANE, name=name)
        return BusCollector(ledger=self.rig.ledger, actor=actor, objects=self.objects, options=options)

    async def round(self, collector: BusCollector) -> tuple[int, int, int]:
        """A whole round: how many were set aside, brought back, removed."""
        done = [await collector.run_once()]
        while done[-1].phase is not None:
            done.append(await collector.run_once())
            assert len(done) < 1_000
        self.passes = done
        set_aside = sum(one.set_aside for one in done)
        if set_aside:
            await self.set_aside_now()
        return set_aside, sum(one.brought_back for one in done), sum(one.removed for one in done)

    async def has(self, pointer: str) -> bool:
        try:
            await self.pointers.read(pointer)
        except PointerGone:
            return False
        return True

    async def keys(self) -> list[str]:
        return [one.key for one in (await self.objects.list("bus")).items]


@pytest_asyncio.fixture(loop_scope="session")
async def store(rig: Rig, tmp_path: Path) -> AsyncGenerator[Store]:
    folder = tmp_path / "objects"
    objects = await open_objects(f"file://{folder}")
    yield Store(rig, folder, objects, make_pointers(objects, None))
    await objects.close()


async def forgotten(rig: Rig, job_id: str) -> None:
    """The job ends, and retention removes it."""
    await rig.ledger.cancel(CLIENT, JobId(job_id), CancelMode.HARD, RequestId(f"c-{job_id}"), grace_s=0, cause=None)
    await rig.advance(2 * DAY_S)
    while (await rig.ledger.retain(RetentionOptions(ended_s=DAY_S))).more:
        pass
    assert await rig.ledger.job(JobId(job_id)) is None


@pytest.mark.on_both
@pytest.mark.requirement("D61")
async def test_object_named_by_a_job_stays_until_retention_removes_the_last_such_job(rig: Rig, store: Store):
    collector, pointer = store.collector(), await store.put(b'{"n":1}')
    for job_id in ("a", "b"):
        await rig.submit(job_id=job_id, context_ptr=pointer)
    assert await store.round(collector) == (0, 0, 0)
    await forgotten(rig, "a")
    assert await store.round(collector) == (0, 0, 0), "another job has the same payload"
    await forgotten(rig, "b")
    assert await store.round(collector) == (1, 0, 0)
    assert await store.pointers.read(pointer) == b'{"n":1}', "what lies aside is still found"
    await rig.advance(SMALL.aside_s - DAY_S)
    assert await store.round(collector) == (0, 0, 0)
    await rig.advance(DAY_S)
    assert await store.round(collector) == (0, 0, 1)
    assert (await store.has(pointer), await store.keys()) == (False, [])


async def held_and_succeeded(rig: Rig, job_id: str, **report: Any) -> None:
    async def move(target: str, **how: Any) -> Moved:
        move = Move(job_id=JobId(job_id), target=target, request_id=RequestId(f"{job_id}-{target}"), **how)
        answer = await rig.ledger.move(SCHEDULER, move)
        assert isinstance(answer, Moved)
        return answer

    await move("SCHEDULED", delay_s=0)
    lease = (await move("DISPATCHED")).lease
    assert lease is not None
    data = str(report).replace("'", '"').encode()
    advances = (
        Advance(lease, "DISPATCHED", Trigger.START, data=b"{}"),
        Advance(lease, "RUNNING", Trigger.COMPLETE, data=data, result=data),
    )
    await rig.ledger.turn(Turn(actor=WORKER, advances=advances))


@pytest.mark.on_both
@pytest.mark.requirement("D61")
async def test_object_named_anywhere_in_a_request_or_report_stays(rig: Rig, store: Store):
    contexts = [await store.put(b"%d" % n) for n in range(4)]
    results = [await store.put(b"r%d" % n, PointerPart.RESULT) for n in range(5)]
    undo = {"topic": "job.undo", "context_ptr": contexts[1]}
    await rig.submit(job_id="first", context_ptr=contexts[0], compensation=undo, env={"FROM": contexts[2]})
    await held_and_succeeded(rig, "first", result_ptr=results[0], artifact_ptrs=[results[1], results[2]])
    await rig.submit(job_id="next", context_ptr=results[3], parent_job_id="gone", workflow_id="flow")
    assert await store.round(store.collector()) == (2, 0, 0), "one context and one result are nobody's"
    assert await store.keys() == sorted(
        [f"bus/{kept.partition('://')[2]}" for kept in [*contexts[:3], *results[:4]]]
        + [f"bus-aside/{gone.partition('://')[2]}" for gone in (contexts[3], results[4])]
    )
    assert len(store.passes) > 5, "a round is many short passes"


@pytest.mark.requirement("D61")
async def test_a_retry_keeps_what_its_first_job_named(rig: Rig, store: Store):
    pointer = await store.put(b"context")
    await rig.submit(job_id="first", context_ptr=pointer)
    again = JobRequest.model_validate(
        {"job_id": "first.r1", "topic": TOPIC, "context_ptr": pointer, "labels": {"retry_of": "first"}}
    )
    await rig.put(again)
    await forgotten(rig, "first")
    assert await store.round(store.collector()) == (0, 0, 0)


async def test_young_object_stays_and_a_repeated_write_renews_its_age(rig: Rig, store: Store):
    young, old = await store.put(b"young", days=29.0), await store.put(b"old", days=31.0)
    collector = store.collector()
    assert await collector.run_once() == BusCollectionReport(phase=CollectionPhase.LISTING)
    while (await collector.run_once()).phase is not CollectionPhase.REMOVING:
        pass
    await store.write_again(b"old")  # by somebody who is about to submit its job
    assert await store.round(collector) == (0, 0, 0)
    assert (await store.has(young), await store.has(old)) == (True, True)
    await store.is_old(f"bus/{old.partition('://')[2]}", 31.0)
    assert await store.round(collector) == (1, 0, 0)
    await store.pointers.put(b"old", part=PointerPart.CONTEXT)
    await rig.submit(job_id="again", context_ptr=old)
    assert await store.round(collector) == (0, 1, 0), "one of the two is enough"
    assert await store.has(old)


@pytest.mark.on_both
async def test_object_set_aside_by_mistake_is_found_and_restored(rig: Rig, store: Store):
    collector, pointer = store.collector(), await store.put(b"late")
    assert await store.round(collector) == (1, 0, 0)
    await rig.submit(job_id="late", context_ptr=pointer)
    assert await store.pointers.read(pointer, part=PointerPart.CONTEXT) == b"late"
    await rig.advance(SMALL.aside_s)
    assert await store.round(collector) == (0, 1, 0)
    assert await store.keys() == [f"bus/{pointer.partition('://')[2]}"]
    await store.is_old(f"bus/{pointer.partition('://')[2]}", 100.0)
    assert await store.round(collector) == (0, 0, 0)


async def test_a_pointer_is_seen_however_it_is_escaped(rig: Rig, store: Store):
    one, two, three = [await store.put(b"%d" % n) for n in range(3)]
    inner = json.dumps({"from": one}).replace("/", r"\/")  # as JSON may be written
    env = {"INNER": inner, "URL": quote(two, safe=""), "LOWER": quote(three, safe="").lower()}
    await rig.submit(job_id="a", env=env)
    assert await store.round(store.collector()) == (0, 0, 0)


class Meanwhile:
    """An object store in which something happens once, just before something is deleted."""

    def __init__(self, objects: ObjectStore, happens: Callable[[], Awaitable[object]]) -> None:
        self._objects, self._happens = objects, [happens]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    async def delete(self, key: str) -> bool:
        while self._happens:
            await self._happens.pop()()
        return await self._objects.delete(key)


@pytest.mark.parametrize("slow", ["sets aside", "brings back"])
async def test_concurrent_set_aside_and_restore_of_an_object_lose_nothing(rig: Rig, store: Store, slow: str):
    pointer, now = await store.put(b"context"), await rig.ledger.now()
    name = pointer.partition("://")[2]
    one, other = store.collector("one"), store.collector("other")
    if slow == "sets aside":
        one.objects = cast("ObjectStore", Meanwhile(store.objects, lambda: other._bring_back(name)))
        await one._set_aside(name, now)
    else:
        await store.objects.put(aside_key_of(name), b"context")
        one.objects = cast("ObjectStore", Meanwhile(store.objects, lambda: other._set_aside(name, now)))
        await one._bring_back(name)
    assert await store.pointers.read(pointer) == b"context"


async def test_a_pointer_with_the_longest_key_is_followed(store: Store):
    key = "/".join(["ctx", *["k" * 202] * 5])
    await store.objects.put(object_key_of(key), b"1")
    assert await store.pointers.read(f"objects://{key}") == b"1"


async def test_names_that_others_chose_and_what_is_too_large_are_left_alone(rig: Rig, store: Store):
    large = "ctx/" + "a" * 64
    for key, body in (
        (f"bus/{large}", b"x" * (BYTES_MAX + 1)),
        ("bus/ctx/mine", b"1"),
        ("bus/other/" + "b" * 64, b"1"),
    ):
        await store.objects.put(key, body)
        await store.is_old(key, 1_000.0)
    await store.objects.put("agents/a.md", b"1")
    assert await store.round(store.collector()) == (0, 0, 0)
    assert len(await store.keys()) == 3


async def test_a_round_that_has_enough_is_followed_by_one_that_goes_on_behind_it(rig: Rig, store: Store):
    for n in range(7):
        await store.put(b"%d" % n)
        await store.put(b"%d" % n, PointerPart.RESULT)
    kept = await store.put(b"kept", PointerPart.RESULT)
    await rig.submit(job_id="a", context_ptr=kept)
    collector, rounds = store.collector(options=replace(SMALL, names_max=2, aside_s=0.0)), 0
    while True:
        await store.round(collector)
        rounds += 1
        if collector.pause_s(BusCollectionReport()) == SMALL.interval_s and await store.keys() == [
            f"bus/{kept.partition('://')[2]}"
        ]:
            break
        assert rounds < 40
    assert rounds > 3


async def test_objects_set_aside_do_not_stop_the_collection_of_others(rig: Rig, store: Store):
    pointers = [await store.put(b"%d" % n, part) for n in range(5) for part in PointerPart]
    collector, rounds = store.collector(options=replace(SMALL, names_max=2)), 0
    while not rounds or collector.pause_s(BusCollectionReport()) < 1.0:
        await store.round(collector)
        rounds += 1
        assert rounds < 40
    assert [key for key in await store.keys() if key.startswith("bus/")] == []
    await rig.advance(8 * DAY_S)
    while any([await store.has(pointer) for pointer in pointers]):
        await store.round(collector)
        rounds += 1
        assert rounds < 80


async def test_rounds_that_follow_each_other_look_at_each_kind_once(rig: Rig, store: Store):
    """As many times as is needed for the larger of the two, though the smaller one is done before."""
    for n in range(4):
        await store.put(b"%d" % n)
    collector = store.collector(options=replace(SMALL, names_max=100))
    await store.round(collector)
    names = [await store.put(b"needed %d" % n) for n in range(10)]
    await rig.submit(job_id="a", env={f"n{n}": name for n, name in enumerate(names)})
    collector, rounds = store.collector(options=replace(SMALL, names_max=2)), 0
    while not rounds or collector.pause_s(BusCollectionReport()) < 1.0:
        assert await store.round(collector) == (0, 0, 0)
        rounds += 1
        assert rounds < 40
    assert rounds <= 6


async def test_a_round_goes_on_when_the_ledger_answers_again(rig: Rig, store: Store, monkeypatch: pytest.MonkeyPatch):
    pointer, needed = await store.put(b"1"), await store.put(b"2")
    await rig.submit(job_id="a", context_ptr=needed)
    collector, left = store.collector(), 3

    async def away() -> str:
        nonlocal left
        left -= 1
        raise LedgerUnavailable(reason="it is away")

    with monkeypatch.context() as patched:
        patched.setattr(rig.ledger, "feed_end", away)
        while left:
            with suppress(LedgerUnavailable):
                assert (await collector.run_once()).phase is not None
    assert await store.round(collector) == (1, 0, 0)
    assert await store.keys() == [f"bus-aside/{pointer.partition('://')[2]}", f"bus/{needed.partition('://')[2]}"]


async def test_a_long_text_is_looked_through_in_parts_and_no_name_is_missed(rig: Rig, store: Store):
    pointers = [await store.put(b"%d" % n) for n in range(6)]
    digests = "".join(pointer[-DIGEST_CHARS:] + "0" * (LOOK_BYTES - 10 * n) for n, pointer in enumerate(pointers))
    env = {f"n{n}": digests[2_000 * n : 2_000 * (n + 1)] for n in range(60)}
    await rig.submit(job_id="a", env=env)
    body = (await rig.job("a")).payload or b""
    seen = _CollectionRound(laid={f"ctx/{pointer[-DIGEST_CHARS:]}" for pointer in pointers})
    looking, turns = seen.find([body, None, b""]), 0
    with suppress(StopIteration):
        while True:
            looking.send(None)
            turns += 1
    assert turns == -(-len(body) // LOOK_BYTES)
    whole = {f"ctx/{pointer[-DIGEST_CHARS:]}" for pointer in pointers if pointer[-DIGEST_CHARS:].encode() in body}
    assert len(whole) >= 4
    assert seen.wanted == whole


@pytest.mark.on_both
async def test_one_collector_runs_at_a_time_and_another_takes_over(rig: Rig, store: Store):
    one, two = store.collector("one"), store.collector("two")
    pointer = await store.put(b"1")
    assert (await one.run_once()).phase is CollectionPhase.LISTING
    assert await store.round(two) == (0, 0, 0)
    await one.release()
    assert await store.round(two) == (1, 0, 0)
    assert await one.run_once() == BusCollectionReport()
    await rig.advance(2 * SMALL.interval_s)
    assert (await one.run_once()).phase is CollectionPhase.LISTING, "the other one is silent"
    assert (await two.run_once()).phase is None
    assert await store.has(pointer)


async def test_collector_that_lost_its_election_polls_no_more_often_than_others(rig: Rig, store: Store):
    one, two = (store.collector(name, replace(SMALL, names_max=2)) for name in ("one", "two"))
    for n in range(7):
        await store.put(b"%d" % n)
    await store.round(one)
    assert one.pause_s(BusCollectionReport()) < 1.0, "there is more"
    await rig.advance(2 * SMALL.interval_s)
    assert (await two.run_once()).phase is not None
    assert one.pause_s(await one.run_once()) == SMALL.interval_s
