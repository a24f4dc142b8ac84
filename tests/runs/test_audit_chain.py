"""The audit chain: what is published is sealed, any change afterwards is found, and nothing else is."""

import json
import random
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import apsw
import pytest

from tests.runs.conftest import Stand
from tests.runs.tampering import ObjectTampering, SqliteTampering, keys
from tests.runs.test_audit_segments import WORKER, work
from tests.runs.test_projector import Traced
from tests.runs.test_rebuild import ADMIN
from trellis.documents import audit_chain, audit_verification, ids
from trellis.documents.audit_chain import AuditSealer, ChainBlock, SealedRecord, SealOptions
from trellis.documents.audit_verification import AuditedLedger, AuditReport, verify_audit
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.admin_acts import RETAINED, NewAct
from trellis.engine.jobs import Actor, Advance, Claim, ClaimId, DeadLetterReason, ReasonCode, Stage, Turn, TypeClaim
from trellis.engine.ledger import Ledger
from trellis.engine.records import AuditHead, FeedPage, RetentionOptions
from trellis.engine.subscription import PROJECTOR
from trellis.engine.verify import verify
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.projector import NO_JOB, Projector, ProjectorOptions
from trellis.runs.rebuild import rebuild_ledger, rebuild_objects
from trellis.storage.objects.canonical_json import encode
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore
from trellis.testing import FakeClock

DAY_S = 86_400.0
TAMPERINGS = 40
DEATH = DeadLetterReason(reason_code=ReasonCode.POLICY_VIOLATION, stage=Stage.EXEC, last_error="it had to end")


def sealing_projector(
    ledger: Ledger, objects: ObjectStore, clock: FakeClock, *, name: str = "projector@test", block: int = 9
) -> Projector:
    """A projector with small segments and blocks."""
    actor = Actor(role=Role.PROJECTOR, name=name)
    options = SealOptions(seal_s=5.0, records_max=block)
    sealer = AuditSealer(ledger=ledger, actor=actor, objects=objects, clock=clock, options=options)
    return Projector(
        ledger=ledger,
        actor=actor,
        publisher=DocumentPublisher(objects),
        sealer=sealer,
        clock=clock,
        options=ProjectorOptions(batch=20),
    )


async def upgraded(world: "World") -> tuple[Stand, ObjectStore]:
    """An instance that published two jobs without sealing, and removed them, and begins its chain with a third one.

    As with a program from before the chain, the ledger has no act that says what retention removed.
    """
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 2)
    unsealing = sealing_projector(stand.ledger, objects, world.clock)
    unsealing.sealer = None
    await publish(unsealing)
    world.clock.advance(40 * DAY_S)
    await stand.ledger.release_retention(ADMIN, PROJECTOR)  # a program without the chain did not wait for it
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 2
    with closing(apsw.Connection(str(world.ledger_file))) as file:
        file.execute("DELETE FROM trellis_act WHERE event = ?", (RETAINED,))
    await work(stand, 1, type_="late")
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    return stand, objects


async def publish(projector: Projector) -> None:
    """Publish and seal everything, and end."""
    while (await projector.run_once()).events:
        pass
    await projector.release()


async def audited(ledger: Ledger, objects: ObjectStore, anchor: str | None = None) -> AuditReport:
    return await verify_audit([AuditedLedger(chain="", ledger=ledger)], objects, anchor=anchor)


async def forget_newest_block(
    world: "World", stand: Stand, objects: ObjectStore, *, jobs: int
) -> tuple[AuditHead, AuditHead]:
    """Seal a block of `jobs` more jobs that the ledger forgets, as if its sealer had died before the head was stored.

    Returns the head that the ledger knows and the one of the forgotten block.
    """
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    before = await stand.ledger.audit_head()
    await work(stand, jobs, type_="more")
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    forgotten = await stand.ledger.audit_head()
    assert before is not None
    assert forgotten is not None
    values = (before.number, before.sha256, before.position)
    SqliteTampering(world.ledger_file)._run(("UPDATE trellis_audit_head SET number = ?, sha256 = ?, place = ?", values))
    return before, forgotten


async def dead_letter(stand: Stand) -> None:
    await stand.ledger.submit(WORKER, [])
    claim = Claim(claim_id=ClaimId("to-reject"), types=(TypeClaim(type="dies"),))
    (held,) = (await stand.ledger.turn(Turn(actor=WORKER, claim=claim))).claimed
    await stand.ledger.turn(Turn(actor=WORKER, advances=(Advance(held.lease, "running", "reject", death=DEATH),)))


async def live(stand: Stand, projector: Projector) -> None:
    """A history with everything in it: segments, runs, acts, a restarted projector, removed jobs."""
    await work(stand, 4)
    await stand.run_of()
    await stand.drive()
    await stand.ledger.pause(ADMIN, "t", paused=True, cause="stocktaking")
    await publish(projector)
    stand.clock.advance(40 * DAY_S)
    await stand.ledger.pause(ADMIN, "t", paused=False, cause="done")
    await work(stand, 3, type_="late")
    await publish(projector)
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 5, "those of the first day, all of them sealed"
    await work(stand, 3, type_="later")
    await stand.ledger.record_act(ADMIN, NewAct(event="agent.status.changed", subject="boiler", cause="it leaks"))
    await publish(projector)


@dataclass
class World:
    """An instance on files, so that it can be copied, changed and thrown away."""

    folder: Path
    clock: FakeClock
    opened: list[Ledger | ObjectStore] = field(default_factory=list)

    @property
    def ledger_file(self) -> Path:
        return self.folder / "ledger.db"

    async def ledger(self) -> Ledger:
        found = await open_ledger(f"sqlite:///{self.ledger_file}", clock=self.clock)
        self.opened.append(found)
        return found

    async def objects(self) -> ObjectStore:
        found = await open_objects(f"file://{self.folder / 'objects'}")
        self.opened.append(found)
        return found

    async def close(self) -> None:
        while self.opened:
            await self.opened.pop().close()

    @asynccontextmanager
    async def copy(self, folder: Path) -> AsyncGenerator["World"]:
        shutil.copytree(self.folder, folder)
        world = World(folder, self.clock)
        try:
            yield world
        finally:
            await world.close()
            shutil.rmtree(folder)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncGenerator[World]:
    made = World(tmp_path / "world", FakeClock())
    made.folder.mkdir()
    yield made
    await made.close()


@pytest.fixture
async def lived(world: World) -> World:
    """A closed instance with a history."""
    stand = Stand(await world.ledger(), world.clock)
    await live(stand, sealing_projector(stand.ledger, await world.objects(), world.clock))
    await world.close()
    return world


# --- what is sealed --------------------------------------------------------------------------------------------------


@pytest.mark.requirement("OBS-1", "D57")
async def test_an_untouched_instance_is_clean_after_retention_and_restarts(lived: World):
    ledger, objects = await lived.ledger(), await lived.objects()
    report = await audited(ledger, objects)
    assert report.ok, report.violations
    assert (report.unsealed, report.unproven) == (0, 0)
    events = [one.event for one in await ledger.acts()]
    assert events.count(RETAINED) == 1
    assert report.blocks == (await ledger.audit_head() or AuditHead(number=0, sha256="", position=None)).number
    assert report.sealed > 50


@pytest.mark.requirement("OBS-1")
async def test_a_record_waits_for_its_block_and_is_not_wrong_meanwhile(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    await work(stand, 2)
    while (await projector.run_once()).events:
        pass
    head = await stand.ledger.audit_head()
    assert head == AuditHead(number=0, sha256="0" * 64, position=None, at=head.at if head else None)
    assert (await stand.ledger.retain(RetentionOptions(ended_s=0.0, testing=True))).jobs == 0, "nothing is sealed yet"
    assert (await audited(stand.ledger, objects)).unsealed == 8
    world.clock.advance(10.0)
    await projector.run_once()  # the segment is written
    world.clock.advance(5.0)
    await projector.run_once()
    head = await stand.ledger.audit_head()
    assert head is not None
    assert head.number == 1
    report = await audited(stand.ledger, objects)
    assert (report.ok, report.sealed, report.unsealed) == (True, 8, 0)
    await work(stand, 1, type_="more")
    assert (await audited(stand.ledger, objects)).unsealed == 4


@pytest.mark.requirement("OBS-1")
async def test_first_events_of_a_ledger_that_was_empty_when_sealing_began_are_sealed(world: World):
    """As the NLM backend's ledger is: no administrative act moves its first block on."""
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    for _ in range(3):
        await projector.run_once()
        world.clock.advance(10.0)
    await work(stand, 2)
    for _ in range(4):
        await projector.run_once()
        world.clock.advance(10.0)
    report = await audited(stand.ledger, objects)
    assert (report.ok, report.sealed, report.unsealed) == (True, 8, 0)


@pytest.mark.requirement("OBS-1")
async def test_what_is_not_sealed_is_not_removed_however_old_it_is(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    await projector.run_once()
    await work(stand, 2)
    await stand.ledger.release_retention(ADMIN, "projector", cause="nobody runs it")
    world.clock.advance(1_000 * DAY_S)
    (row,) = await stand.ledger.plan_retention(RetentionOptions())
    assert (row.state, row.ended, row.removable, row.unsealed) == ("succeeded", 2, 0, 2)
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 0
    await publish(projector)
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 2


@pytest.mark.requirement("OBS-1", "D14")
async def test_two_sealers_at_once_do_not_fork_the_chain(world: World):
    """Both hold a head; whoever comes second takes over the block that is there, or what the first one stored."""
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 6)
    publishing = sealing_projector(stand.ledger, objects, world.clock)
    publishing.sealer = None
    await publish(publishing)
    end = await stand.ledger.feed_end()
    one, two = (sealing_projector(stand.ledger, objects, world.clock, name=name).sealer for name in ("one", "two"))
    assert one is not None
    assert two is not None
    for sealer in (one, two):
        await sealer.begin()
    for _ in range(10):
        await one.seal(end, at_once=True)
        await two.seal(end, at_once=True)
    assert (one.head, (await audited(stand.ledger, objects)).violations) == (two.head, ())
    numbers = [int(key[-17:-5]) for key in await keys(objects, "audit/chain/")]
    assert numbers == [1, 2, 3, 4], "the first one says that records were published before"


@pytest.mark.requirement("OBS-1")
async def test_blocks_of_two_chains_are_counted_apart(world: World, tmp_path: Path):
    objects, ledgers = await world.objects(), [await world.ledger(), await open_ledger(f"sqlite:///{tmp_path}/nlm.db")]
    for ledger, chain, jobs in ((ledgers[0], "", 1), (ledgers[1], "nlm", 4)):
        await work(Stand(ledger, world.clock), jobs, type_=f"work{chain}")
        projector = sealing_projector(ledger, objects, world.clock)
        projector.sealer = replace(cast("AuditSealer", projector.sealer), chain=chain)
        await publish(projector)
    audited_ = [AuditedLedger(chain=chain, ledger=one) for chain, one in zip(("", "nlm"), ledgers, strict=True)]
    report = await verify_audit(audited_, objects)
    await ledgers[1].close()
    assert [(one.chain, one.blocks, one.sealed) for one in report.chains] == [("", 1, 4), ("nlm", 3, 16)]


@pytest.mark.requirement("OBS-1")
async def test_records_from_before_the_chain_are_counted_and_no_others(world: World):
    stand, objects = await upgraded(world)
    report = await audited(stand.ledger, objects)
    assert (report.violations, report.unproven, report.sealed) == ((), 8, 5), "four events and one act"
    tampering = ObjectTampering(objects)
    await tampering._put(next(key for key in await keys(objects) if "segments" in key and "late" in key), None)
    assert not (await audited(stand.ledger, objects)).ok


@dataclass
class ReadBetween:
    """A ledger on which something happens before one of its reads, once."""

    inner: Ledger
    read: str
    happens: Callable[[], Awaitable[object]]
    done: bool = False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)

        async def wrapped(*args: Any, **options: Any) -> Any:
            if not self.done:
                self.done = True
                await self.happens()
            return await call(*args, **options)

        return wrapped if name == self.read else call


@dataclass
class SlowSealing:
    """A ledger in which storing a block takes long."""

    ledger: Ledger
    clock: FakeClock
    takes_s: float

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)

    async def extend_audit_chain(self, *args: Any, **options: Any) -> bool:
        self.clock.advance(self.takes_s)
        return await self.ledger.extend_audit_chain(*args, **options)


async def test_retention_between_two_reads_of_a_verification_is_no_violation(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 3)
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    world.clock.advance(40 * DAY_S)
    racing = ReadBetween(stand.ledger, "recorded", lambda: stand.ledger.retain(RetentionOptions()))
    assert (await audited(cast("Ledger", racing), objects)).violations == ()
    assert (racing.done, (await stand.ledger.feed(None, limit=5)).events) == (True, ())


async def test_what_is_sealed_and_removed_during_a_verification_is_no_violation(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 1)
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    await work(stand, 3, type_="mid")
    publishing = sealing_projector(stand.ledger, objects, world.clock)
    sealer, publishing.sealer = publishing.sealer, None
    await publish(publishing)
    assert sealer is not None

    async def seal_and_remove() -> None:
        await sealer.seal_before_end(await stand.ledger.feed_end())
        assert (await stand.ledger.retain(RetentionOptions(ended_s=0.0, testing=True))).jobs == 4

    racing = ReadBetween(stand.ledger, "feed", seal_and_remove)
    assert (await audited(cast("Ledger", racing), objects)).violations == ()
    assert racing.done


async def test_blocks_that_a_sealer_adds_during_a_verification_are_no_violation(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 1)
    before, _ = await forget_newest_block(world, stand, objects, jobs=1)
    await work(stand, 3, type_="others")
    racing = ReadBetween(
        stand.ledger, "acts", lambda: publish(sealing_projector(stand.ledger, objects, world.clock))
    )  # the written block is being compared when a sealer takes it over and adds another one
    report = await audited(cast("Ledger", racing), objects)
    assert (report.violations, report.unsealed, report.blocks) == ((), 0, before.number + 2)


@pytest.mark.requirement("OBS-1", "D57")
async def test_records_older_than_the_chain_hide_no_forged_one(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audit_verification, "VIOLATIONS_MAX", 5)
    stand, objects = await upgraded(world)
    report = await audited(stand.ledger, objects)
    assert (report.violations, report.unproven) == ((), 8)
    segment = await objects.get(next(key for key in await keys(objects) if "segments" in key and "late" in key))
    assert segment is not None
    forged = {**json.loads(segment.body.splitlines()[0]), "event_id": "zforged-1", "ts": "2027-01-01T00:00:00.000000Z"}
    await objects.put("audit/20270101/zforged-1.json", encode(forged))
    report = await audited(stand.ledger, objects)
    assert ([one.event_id for one in report.violations], report.unproven) == (["zforged-1"], 8)


@pytest.mark.requirement("OBS-1", "D57")
@pytest.mark.parametrize("change", ["insert", "edit", "delete"])
async def test_a_change_of_records_older_than_the_chain_is_found_by_their_kept_hash(world: World, change: str):
    stand, objects = await upgraded(world)
    ledgers = [AuditedLedger(chain="", ledger=stand.ledger)]
    kept = (await audited(stand.ledger, objects)).unproven_sha256
    await work(stand, 1, type_="later")
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    assert (await verify_audit(ledgers, objects, unproven=kept)).ok, "what is sealed since does not change it"
    old = next(key for key in await keys(objects) if "segments" in key and "late" not in key)
    lines = (await objects.get(old)).body.splitlines(keepends=True)  # type: ignore[union-attr]
    if change == "insert":
        forged = {**json.loads(lines[0]), "event_id": "zforged-1", "ts": "2025-01-01T00:00:00.000000Z"}
        await objects.put("audit/20250101/zforged-1.json", encode(forged))
    else:  # the last line, whose record names no segment
        edited = [lines[-1].replace(b'"actor_name":"', b'"actor_name":"not-')] if change == "edit" else []
        await objects.put(old, b"".join([*lines[:-1], *edited]))
    report = await verify_audit(ledgers, objects, unproven=kept)
    (violation,) = report.violations
    assert (violation.place, str(kept) in violation.detail) == ("objects", True)
    assert (await verify_audit(ledgers, objects)).ok, "without the kept hash nobody can know it"


@pytest.mark.requirement("OBS-1", "D57")
async def test_a_record_of_the_first_format_that_was_sealed_late_is_no_violation(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await stand.run_of()
    await stand.drive()
    await stand.ledger.pause(ADMIN, "t", paused=True)
    publishing = sealing_projector(stand.ledger, objects, world.clock)
    publishing.sealer = None
    await publish(publishing)
    records = [key for key in await keys(objects) if key.startswith("audit/") and key.endswith(".json")]

    async def rewrite(key: str, **fields: Any) -> None:
        there = await objects.get(key)
        assert there is not None
        await objects.put(key, encode({**json.loads(there.body), **fields}))

    for key in records:
        await rewrite(key, format=1)
    world.clock.advance(1.0)
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    report = await audited(stand.ledger, objects)
    assert (len(records) > 5, report.violations, report.unproven) == (True, (), 0)
    await rewrite(records[3], actor_name="another")
    assert [one.key for one in (await audited(stand.ledger, objects)).violations] == [records[3]]


async def test_a_chain_that_begins_after_a_rebuild_of_the_ledger_does_not_judge_older_segments(lived: World):
    objects = await lived.objects()
    await lived.close()
    lived.ledger_file.unlink()
    stand, objects = Stand(await lived.ledger(), lived.clock), await lived.objects()
    await rebuild_ledger(stand.ledger, objects, ADMIN)
    for key in await keys(objects, "audit/chain/"):
        await objects.delete(key)
    SqliteTampering(lived.ledger_file)._run(("DELETE FROM trellis_audit_head", ()))
    lived.clock.advance(1.0)
    await work(stand, 2, type_="anew")
    await publish(sealing_projector(stand.ledger, objects, lived.clock))
    assert (await audited(stand.ledger, objects)).violations == ()


@pytest.mark.requirement("OBS-1")
async def test_a_sealer_that_dies_before_the_head_is_stored_loses_nothing(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 4)
    await stand.ledger.pause(ADMIN, "t", paused=True)
    _, after = await forget_newest_block(world, stand, objects, jobs=2)
    assert (await audited(stand.ledger, objects)).ok, "a block that is written and not stored yet is no forgery"
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    now = await stand.ledger.audit_head()
    assert (now and now.sha256, (await audited(stand.ledger, objects)).ok) == (after.sha256, True)


@pytest.mark.requirement("OBS-1")
async def test_a_forged_next_block_is_not_taken_over(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 2)
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    head = await stand.ledger.audit_head()
    assert head is not None
    forged = ChainBlock(
        number=head.number + 1,
        previous=head.sha256,
        feed=1,
        at="2026",
        start=head.position,
        end=head.position,
        records=(SealedRecord("forged-1", "20260101", "0" * 64, head.position),),
    )
    await objects.put(ids.block_key("", forged.number), forged.to_bytes())
    await work(stand, 1, type_="more")
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    assert (await stand.ledger.audit_head()) == head, "sealing stops, publishing does not"
    assert len([key for key in await keys(objects) if key.endswith(".jsonl")]) == 2
    report = await audited(stand.ledger, objects)
    detail = f"block {forged.number} differs from what the ledger has not sealed yet"
    assert [(one.key, one.detail) for one in report.violations] == [(ids.block_key("", forged.number), detail)]


@pytest.mark.requirement("OBS-1")
async def test_a_block_in_the_way_raises_an_alert_until_it_is_gone_and_is_looked_at_once_in_a_while(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    traced = Traced(objects)
    projector = sealing_projector(stand.ledger, traced, world.clock)  # type: ignore[arg-type]
    key = ids.block_key("", 2)
    await work(stand, 2)
    await publish(projector)
    await objects.put(key, b"left by a ledger that was set back")
    await work(stand, 1, type_="more")
    for _ in range(4):
        world.clock.advance(10.0)
        await projector.run_once()
    alert = ids.alert_key(NO_JOB)
    stored = await objects.get(alert)
    assert stored is not None
    assert json.loads(stored.body)["key"] == key
    traced.tried.clear()
    for _ in range(20):
        await projector.run_once()
    assert traced.tried.count(key) == 0, "nothing is asked of the store in every pass"
    await objects.delete(key)
    world.clock.advance(5.0)
    await projector.run_once()
    assert await objects.get(alert) is None
    assert (await audited(stand.ledger, objects)).ok


@pytest.mark.requirement("OBS-1", "D57")
async def test_a_next_block_that_leaves_out_an_event_and_a_block_beyond_it_are_found(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 2)
    before, _ = await forget_newest_block(world, stand, objects, jobs=2)
    key = ids.block_key("", before.number + 1)
    written = await objects.get(key)
    assert written is not None
    block = ChainBlock.read(key, written.body)
    assert (await audited(stand.ledger, objects)).ok, "a block that is written and not stored yet is no forgery"
    await objects.put(key, replace(block, records=block.records[:-1]).to_bytes())
    assert [one.key for one in (await audited(stand.ledger, objects)).violations] == [key]
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    assert (await stand.ledger.audit_head()) == before, "nor is it taken over"
    await objects.put(key, written.body)
    beyond = ids.block_key("", block.number + 1)
    await objects.put(beyond, replace(block, number=block.number + 1).to_bytes())
    assert [one.key for one in (await audited(stand.ledger, objects)).violations] == [beyond]
    await objects.put(beyond, b"junk")
    assert [one.key for one in (await audited(stand.ledger, objects)).violations] == [beyond]


@dataclass
class EmptyPlaces:
    """A ledger whose feed ends with positions without events, as sweeps of older versions left them. Counts reads."""

    ledger: Ledger
    end: str
    read: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)

    async def feed(self, after: str | None, **options: Any) -> FeedPage:
        self.read += 1
        page = await self.ledger.feed(after, **options)
        return page if page.events else replace(page, position=self.end)


async def test_positions_without_events_are_read_once_and_not_again_to_be_sealed(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 2)
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    head = await stand.ledger.audit_head()
    end = await stand.ledger.feed_end()
    ledger = EmptyPlaces(stand.ledger, end=f"{int(end) + 1_000:0{len(end)}}")
    idle = sealing_projector(cast("Ledger", ledger), objects, world.clock)
    await idle.run_once()
    world.clock.advance(60.0)
    await idle.run_once()
    await idle.release()
    assert (ledger.read, await stand.ledger.audit_head()) == (2, head), "one read for each pass"


@pytest.mark.requirement("OBS-1")
async def test_a_projector_that_ends_seals_for_a_bounded_time_and_the_next_one_seals_the_rest(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 12)
    ending = sealing_projector(stand.ledger, objects, world.clock)
    sealer, ending.sealer = ending.sealer, None
    while (await ending.run_once()).events:
        pass
    assert sealer is not None
    ending.sealer = sealer
    sealer.ledger = cast("Ledger", SlowSealing(stand.ledger, world.clock, takes_s=sealer.options.final_s / 2))
    await ending.release()
    head = await stand.ledger.audit_head()
    assert head is not None
    assert (head.number, (head.position or "") < await stand.ledger.feed_end()) == (2, True), (
        "one begins the chain, one has events"
    )
    await publish(sealing_projector(stand.ledger, objects, world.clock))
    report = await audited(stand.ledger, objects)
    assert (report.violations, report.unsealed) == ((), 0)


@pytest.mark.requirement("OBS-1", "D14")
async def test_a_lost_ledger_continues_the_chain_and_a_lost_store_begins_it_again(lived: World, tmp_path: Path):
    objects = await lived.objects()
    before = await (await lived.ledger()).audit_head()
    assert before is not None
    await lived.close()
    lived.ledger_file.unlink()
    stand, objects = Stand(await lived.ledger(), lived.clock), await lived.objects()
    await rebuild_ledger(stand.ledger, objects, ADMIN)
    report = await audited(stand.ledger, objects, before.sha256)
    assert report.ok, report.violations
    await work(stand, 2, type_="anew")
    await publish(sealing_projector(stand.ledger, objects, lived.clock))
    report = await audited(stand.ledger, objects, before.sha256)
    assert report.ok, report.violations
    head = await stand.ledger.audit_head()
    assert head is not None
    assert (head.feed, head.number > before.number) == (2, True)

    for key in await keys(objects):
        await objects.delete(key)
    await rebuild_objects(stand.ledger, objects, ADMIN)
    await publish(sealing_projector(stand.ledger, objects, lived.clock))
    report = await audited(stand.ledger, objects)
    assert report.ok, report.violations
    assert report.restarts == (head.number + 1,)
    anchored = await audited(stand.ledger, objects, before.sha256)
    assert not anchored.ok, "the lost blocks prove nothing any more"


@pytest.mark.requirement("D61", "D57")
async def test_an_instance_that_gives_up_its_object_store_releases_retention_with_an_empty_folder(
    world: World, tmp_path: Path
):
    """What docs/runbooks/retention-held.md says to do when there is a chain and its projector never returns."""
    stand, given_up = Stand(await world.ledger(), world.clock), await world.objects()
    await work(stand, 2)
    await stand.run_of()
    await publish(sealing_projector(stand.ledger, given_up, world.clock))
    await work(stand, 2, type_="late")
    await stand.drive()
    world.clock.advance(400 * DAY_S)
    await stand.ledger.release_retention(ADMIN, PROJECTOR)
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 2, "leaving it behind releases nothing unsealed"

    empty = await open_objects(f"file://{tmp_path / 'empty'}")
    world.opened.append(empty)
    await rebuild_objects(stand.ledger, empty, ADMIN)
    await publish(sealing_projector(stand.ledger, empty, world.clock))
    report = await audited(stand.ledger, empty)
    assert (report.ok, len(report.restarts)) == (True, 1), report.violations
    assert (await stand.ledger.retain(RetentionOptions())).jobs == 3, "the two late jobs and the run"
    report = await audited(stand.ledger, empty)
    assert report.ok, report.violations


@pytest.mark.requirement("OBS-1")
async def test_a_head_that_was_kept_elsewhere_is_found_in_the_chain(lived: World):
    ledger, objects = await lived.ledger(), await lived.objects()
    first = await objects.get(ids.block_key("", 1))
    assert first is not None
    kept = audit_chain.sha256(first.body)
    assert (await audited(ledger, objects, kept)).ok
    report = await audited(ledger, objects, "f" * 64)
    assert [one.detail for one in report.violations] == [
        f"no block has the hash {'f' * 64}: this chain does not extend the head that was kept"
    ]


# --- what was changed ------------------------------------------------------------------------------------------------


async def _tamper(world: World, folder: Path, number: int) -> tuple[str, bool, AuditReport]:
    """One random change of a copy: which, and whether it was found."""
    rng = random.Random(number)
    async with world.copy(folder) as copy:
        objects = await copy.objects()
        kinds = {**ObjectTampering(objects).kinds(), **SqliteTampering(copy.ledger_file).kinds()}
        kind = list(kinds)[number % len(kinds)]
        what = f"{number}: {kind}: {await kinds[kind](rng)}"
        ledger = await copy.ledger()
        report = await audited(ledger, objects)
        return what, not report.ok or not (await verify(ledger)).ok, report


@pytest.mark.requirement("OBS-1", "D57")
async def test_every_change_of_a_record_in_store_or_ledger_is_found(lived: World, tmp_path: Path):
    missed = []
    for number in range(TAMPERINGS):
        what, found, _ = await _tamper(lived, tmp_path / "copy", number)
        missed += [] if found else [what]
    assert missed == []


@pytest.mark.prove
@pytest.mark.requirement("OBS-1", "D57")
async def test_a_thousand_changes_of_records_are_found(lived: World, tmp_path: Path):
    missed = []
    for number in range(TAMPERINGS, 1_000 + TAMPERINGS):
        what, found, _ = await _tamper(lived, tmp_path / "copy", number)
        missed += [] if found else [what]
    assert missed == []


@pytest.mark.requirement("OBS-1")
async def test_the_first_bad_record_is_named_with_its_position_and_what_differs(lived: World):
    ledger, objects = await lived.ledger(), await lived.objects()
    segments = [key for key in await keys(objects) if key.endswith(".jsonl")]
    found = await objects.get(segments[-1])
    assert found is not None
    lines = found.body.splitlines()
    lines[3] = lines[3].replace(b'"actor_name":"', b'"actor_name":"not-')
    await objects.put(segments[-1], b"\n".join(lines) + b"\n")
    report = await audited(ledger, objects)
    assert report.found == 1
    first = report.violations[0]
    assert first.event_id is not None
    (event,) = [one for one in await ledger.events(first.event_id.rpartition("-")[0]) if one.id == first.event_id]  # type: ignore[arg-type]
    assert (first.place, first.key) == ("objects", segments[-1])
    assert first.detail == "the record is not the one that was sealed: it differs in actor_name"
    page = await ledger.feed(None, limit=500)
    assert dict(zip(page.positions, page.events, strict=True))[first.position or ""] == event


@pytest.mark.requirement("OBS-1", "D57")
async def test_a_deleted_act_of_retention_is_missed(lived: World):
    ledger, objects = await lived.ledger(), await lived.objects()
    (act,) = [one for one in await ledger.acts() if one.event == RETAINED]
    SqliteTampering(lived.ledger_file)._run(("DELETE FROM trellis_act WHERE event = ?", (RETAINED,)))
    report = await audited(ledger, objects)
    assert [(one.place, one.event_id) for one in report.violations] == [("ledger", act.id)]


async def test_acts_of_retention_that_retention_removed_are_not_missed(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    for _ in range(2):
        await work(stand, 1)
        await publish(projector)
        world.clock.advance(20 * DAY_S)
        await stand.ledger.retain(RetentionOptions(ended_s=DAY_S))
        await publish(projector)
    world.clock.advance(20 * DAY_S)
    assert (await stand.ledger.retain(RetentionOptions(ended_s=DAY_S))).acts == 0, "the last one waits for the next"
    (last,) = await stand.ledger.acts()
    assert (last.event, last.facts["acts"], last.facts["jobs"] != []) == (RETAINED, 1, True)
    assert (await audited(stand.ledger, objects)).violations == ()


@pytest.mark.requirement("OBS-1", "D57")
@pytest.mark.parametrize("deleted", [1, 2], ids=["the oldest", "all"])
async def test_the_oldest_acts_of_retention_are_missed_when_somebody_deletes_them(world: World, deleted: int):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    for _ in range(2):
        await work(stand, 1)
        await publish(projector)
        world.clock.advance(2 * DAY_S)
        await stand.ledger.retain(RetentionOptions(ended_s=DAY_S))
        await publish(projector)
        world.clock.advance(-1.5 * DAY_S)
    acts = await stand.ledger.acts()
    assert ([act.event for act in acts], (await audited(stand.ledger, objects)).ok) == ([RETAINED] * 2, True)
    SqliteTampering(world.ledger_file)._run(
        *(("DELETE FROM trellis_act WHERE no = ?", (act.no,)) for act in acts[:deleted])
    )
    report = await audited(stand.ledger, objects)
    assert [(one.place, one.event_id) for one in report.violations] == [("ledger", act.id) for act in acts[:deleted]]


@pytest.mark.requirement("OBS-1", "D57")
async def test_an_act_later_than_the_cut_of_retention_is_missed_on_the_same_day(world: World):
    stand, objects = Stand(await world.ledger(), world.clock), await world.objects()
    projector = sealing_projector(stand.ledger, objects, world.clock)
    await stand.ledger.pause(ADMIN, "t", paused=True, cause="early")
    await work(stand, 1)
    world.clock.advance(3 * 3600.0)
    await publish(projector)
    assert (await stand.ledger.retain(RetentionOptions(ended_s=3600.0, testing=True))).acts == 1
    await stand.ledger.pause(ADMIN, "u", paused=True, cause="kept")
    await publish(projector)
    assert (await audited(stand.ledger, objects)).ok
    SqliteTampering(world.ledger_file)._run(("DELETE FROM trellis_act WHERE cause = 'kept'", ()))
    (found,) = (await audited(stand.ledger, objects)).violations
    assert found.detail == "the administrative act is missing, and retention did not remove it"
