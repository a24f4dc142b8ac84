"""The services behind schedules: what agents declare is registered, what is due is fired, whoever dies in between."""

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.agents.files import agent_file
from tests.runs.conftest import GATEWAY, ORCHESTRATOR, Stand
from tests.runs.test_projector import Traced
from trellis.agents import catalog
from trellis.agents.catalog import Catalog
from trellis.documents import ids
from trellis.documents.errors import ScheduleContended
from trellis.documents.publisher import DocumentPublisher
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role
from trellis.runs.orchestration import CRON_SCOPE, BuiltinLayer, TriggerKind
from trellis.runs.projector import Projector
from trellis.runs.schedules import PAUSE_S_MIN, ScheduleFirer, ScheduleRegistrar, ScheduleReport
from trellis.runs.timetable import HandledInstant, Timetable, schedule_key
from trellis.storage.objects.open import open_objects
from trellis.storage.objects.store import ObjectStore, PutCondition, PutRefused, StoreUnavailable

HOURLY = "{cron: 0 * * * *}"


class Clockwork:
    """Schedules on one ledger and store, with as many processes as a test wants."""

    def __init__(self, stand: Stand, objects: ObjectStore) -> None:
        self.stand, self.objects = stand, objects
        self._numbers = itertools.count(1)

    def layer(self) -> BuiltinLayer:
        return BuiltinLayer(
            ledger=self.stand.ledger,
            gateway=GATEWAY,
            orchestrator=ORCHESTRATOR,
            catalog=Catalog(self.objects),
            publisher=DocumentPublisher(self.objects),
            timetable=Timetable(objects=self.objects),
            random_text=lambda: f"{next(self._numbers):06x}",
        )

    def schedules(self) -> ScheduleFirer:
        layer = self.layer()
        return ScheduleFirer(ledger=self.stand.ledger, layer=layer, timetable=layer.timetable)

    def registrar(self) -> ScheduleRegistrar:
        return ScheduleRegistrar(layer=self.layer(), catalog=Catalog(self.objects))

    async def agent(self, slug: str, **fields: str) -> None:
        await self.objects.put(f"agents/{slug}/_agent.md", agent_file(slug=slug, **fields))

    async def registered(self) -> dict[str, str | None]:
        return {schedule.agent_slug: schedule.cron for schedule in await self.layer().schedules()}

    async def runs(self) -> list[str]:
        return [job.job_id for job in (await self.stand.ledger.jobs(JobFilter(lifecycle="run"), limit=100)).jobs]


@pytest.fixture
async def clockwork(stand: Stand, tmp_path: Path) -> AsyncGenerator[Clockwork]:
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    yield Clockwork(stand, objects)
    await objects.close()


def schedule_file(slug: str, cron: str | None) -> bytes:
    return json.dumps({"agent_slug": slug, "cron": cron, "registered_at": "2026-01-01T00:00:00Z"}).encode()


@pytest.mark.requirement("RUN-9", "D24")
async def test_schedules_of_active_agents_are_registered_and_removed_ones_withdrawn(clockwork: Clockwork):
    await clockwork.agent("hourly", triggers=HOURLY)
    await clockwork.agent("daily", triggers="{cron: 30 6 * * *}")
    await clockwork.agent("by-hand")
    await clockwork.agent("asleep", triggers=HOURLY, status="paused")
    await clockwork.agent("broken", triggers="{cron: 61 * * * *}")
    report = await clockwork.registrar().run_once()
    assert (set(report.registered), report.unregistered) == ({"hourly", "daily"}, ())
    assert await clockwork.registered() == {"hourly": "0 * * * *", "daily": "30 6 * * *"}
    assert await clockwork.registrar().run_once() == type(report)()
    await clockwork.agent("hourly", triggers="{cron: 15 * * * *}")
    await clockwork.agent("daily", triggers="{cron: 30 6 * * *}", status="paused")
    await clockwork.agent("asleep", triggers=HOURLY)
    report = await clockwork.registrar().run_once()
    assert (set(report.registered), report.unregistered) == ({"hourly", "asleep"}, ("daily",))
    await clockwork.objects.delete("agents/hourly/_agent.md")
    await clockwork.agent("asleep", triggers="{cron: often}")
    report = await clockwork.registrar().run_once()
    assert set(report.unregistered) == {"hourly", "asleep"}
    assert await clockwork.registered() == {}


async def test_agents_that_were_not_looked_at_keep_their_schedules(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
):
    for slug in ("one", "two", "three"):
        await clockwork.agent(slug, triggers=HOURLY)
    await clockwork.registrar().run_once()
    await clockwork.agent("one")
    monkeypatch.setattr(catalog, "FOLDERS_MAX", 2)
    assert (await clockwork.registrar().run_once()).unregistered == ("one",)
    assert set(await clockwork.registered()) == {"two", "three"}


@pytest.mark.requirement("RUN-9")
async def test_processes_that_fire_in_the_same_moment_begin_one_run(clockwork: Clockwork):
    for slug in ("one", "two"):
        await clockwork.agent(slug)
        await clockwork.layer().register_schedule(slug, "0 * * * *")
    processes = [clockwork.schedules() for _ in range(8)]
    for hour in range(1, 4):
        clockwork.stand.clock.advance(3_600.0)
        reports = await asyncio.gather(*(process.run_once() for process in processes))
        begun = {run for report in reports for run in report.runs}
        assert len(begun) == 2
        assert len(await clockwork.runs()) == 2 * hour


@pytest.mark.requirement("RUN-9")
async def test_a_process_that_died_after_the_trigger_leaves_nothing_to_be_fired_twice(clockwork: Clockwork):
    await clockwork.agent("one")
    layer = clockwork.layer()
    await layer.register_schedule("one", "0 * * * *")
    clockwork.stand.clock.advance(3_600.0)
    instant = "2026-01-01T01:00:00Z"
    run_id = (await layer.trigger("one", {"instant": instant}, kind=TriggerKind.CRON, key=f"cron:one:{instant}")).job_id
    assert (await clockwork.schedules().run_once()).runs == (run_id,)
    assert (await clockwork.schedules().run_once()).runs == ()
    assert await clockwork.runs() == [run_id]


async def test_outcome_of_an_instant_does_not_overwrite_a_changed_schedule(clockwork: Clockwork):
    layer, now = clockwork.layer(), await clockwork.stand.ledger.now()
    await layer.register_schedule("one", "0 * * * *")
    (seen,) = await layer.timetable.all()
    await layer.register_schedule("one", "30 * * * *")
    assert not await layer.timetable.handled(seen, HandledInstant(instant=now, run_id="run_1"))
    assert [(one.cron, one.last, one.version) for one in await layer.schedules()] == [("30 * * * *", None, 2)]


async def test_a_schedule_that_cannot_be_read_is_none_and_is_registered_anew(clockwork: Clockwork):
    layer = clockwork.layer()
    for body in (
        b"{",
        b"{}",
        *(schedule_file(*odd) for odd in (("two", None), ("../one", None), ("one", "61 * * * *"))),
    ):
        await clockwork.objects.put(schedule_key("one"), body)
        assert await layer.schedules() == []
    await layer.register_schedule("one", "0 * * * *")
    assert [schedule.cron for schedule in await layer.schedules()] == ["0 * * * *"]
    body = await clockwork.objects.get(schedule_key("one"))
    assert body is not None
    assert json.loads(body.body) == {
        "agent_slug": "one",
        "cron": "0 * * * *",
        "registered_at": "2026-01-01T00:00:00.000Z",
        "last": None,
        "version": 1,
    }


async def test_an_unreadable_schedule_is_logged_once_for_each_version(
    clockwork: Clockwork, caplog: pytest.LogCaptureFixture
):
    layer = clockwork.layer()
    for body in (b"{", b"[]"):
        await clockwork.objects.put(schedule_key("one"), body)
        caplog.clear()
        for _ in range(3):
            assert await layer.schedules() == []
        assert caplog.text.count("schedule_unreadable") == 1
    await clockwork.objects.put(schedule_key("one"), schedule_file("one", "0 * * * *"))
    assert len(await layer.schedules()) == 1


async def test_a_schedule_that_others_keep_changing_raises_schedule_contended(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
):
    async def too_late(key: str, body: bytes, *, when: object) -> PutRefused:
        return PutRefused(etag="another")

    monkeypatch.setattr(clockwork.objects, "put", too_late)
    with pytest.raises(ScheduleContended, match="schedule of agent one was changed by others 5 times"):
        await clockwork.layer().register_schedule("one", "0 * * * *")


@pytest.mark.requirement("RUN-9")
async def test_a_pass_says_how_long_it_is_until_the_next_instant(clockwork: Clockwork):
    service = clockwork.schedules()
    assert service.pause_s(await service.run_once()) == service.options.poll_s
    await clockwork.layer().register_schedule("one", "0 * * * *")
    clockwork.stand.clock.advance(3_598.0)
    report = await service.run_once()
    assert (report.next_s, service.pause_s(report)) == (2.0, 2.0)
    assert service.pause_s(ScheduleReport(next_s=1_000.0)) == service.options.poll_s
    assert service.pause_s(ScheduleReport(next_s=0.0)) == PAUSE_S_MIN


@pytest.mark.requirement("RUN-9")
async def test_a_schedule_that_means_nothing_stops_no_other(clockwork: Clockwork):
    for slug in ("a-one", "b-two"):
        await clockwork.agent(slug)
        await clockwork.layer().register_schedule(slug, "0 * * * *")
    await clockwork.objects.put(schedule_key("a-one"), schedule_file("a-one", "61 * * * *"))
    clockwork.stand.clock.advance(3_600.0)
    assert len((await clockwork.schedules().run_once()).runs) == 1
    assert await clockwork.registered() == {"b-two": "0 * * * *"}


@pytest.mark.requirement("RUN-9")
async def test_the_key_of_an_instant_cannot_be_taken_by_a_caller(clockwork: Clockwork):
    await clockwork.agent("one")
    layer, key = clockwork.layer(), "cron:one:2026-01-01T01:00:00Z"
    await layer.register_schedule("one", "0 * * * *")
    by_hand = (await layer.trigger("one", {}, kind=TriggerKind.MANUAL, key=key)).job_id
    clockwork.stand.clock.advance(3_600.0)
    (fired,) = (await clockwork.schedules().run_once()).runs
    assert fired != by_hand


@pytest.mark.requirement("RUN-9")
async def test_an_instant_whose_key_meant_something_else_is_passed_over_and_stops_no_other(clockwork: Clockwork):
    for slug in ("a-one", "b-two"):
        await clockwork.agent(slug)
        await clockwork.layer().register_schedule(slug, "0 * * * *")
    job = NewJob(
        job_id=JobId("j"), type="pay", idempotency_key="cron:a-one:2026-01-01T01:00:00Z", idempotency_scope=CRON_SCOPE
    )
    await clockwork.stand.ledger.submit(GATEWAY, [job])
    clockwork.stand.clock.advance(3_600.0)
    report = await clockwork.schedules().run_once()
    assert (len(report.runs), report.skipped) == (1, 1)
    first, second = await clockwork.layer().schedules()
    assert first.last is not None
    assert "cron:a-one" in (first.last.skipped or "")
    assert second.last is not None
    assert second.last.run_id == report.runs[0]


@pytest.mark.requirement("RUN-9")
async def test_an_agent_whose_file_cannot_be_read_now_stops_no_other_and_stays_due(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
):
    for slug in ("a-one", "b-two"):
        await clockwork.agent(slug)
        await clockwork.layer().register_schedule(slug, "0 * * * *")
    clockwork.stand.clock.advance(3_600.0)
    get = clockwork.objects.get

    async def one_is_away(key: str) -> object:
        if key == "agents/a-one/_agent.md":
            raise StoreUnavailable(verb="get", key=key, reason="503")
        return await get(key)

    with monkeypatch.context() as patched:
        patched.setattr(clockwork.objects, "get", one_is_away)
        assert len((await clockwork.schedules().run_once()).runs) == 1
    assert len((await clockwork.schedules().run_once()).runs) == 1
    assert len(await clockwork.runs()) == 2


async def test_a_schedule_that_others_keep_changing_keeps_no_other_from_being_registered(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
):
    for slug in ("a-one", "b-two"):
        await clockwork.agent(slug, triggers=HOURLY)
    put = clockwork.objects.put

    async def too_late(key: str, body: bytes, *, when: PutCondition) -> object:
        return PutRefused(etag="another") if key == schedule_key("a-one") else await put(key, body, when=when)

    monkeypatch.setattr(clockwork.objects, "put", too_late)
    assert (await clockwork.registrar().run_once()).registered == ("b-two",)


@pytest.mark.requirement("D13", "OBS-1")
async def test_a_run_is_recorded_before_it_is_shown_and_the_projector_finds_nothing_to_change(clockwork: Clockwork):
    await clockwork.agent("one")
    traced = Traced(clockwork.objects)
    layer = replace(clockwork.layer(), publisher=DocumentPublisher(traced))  # type: ignore[arg-type]
    run_id = (await layer.trigger("one", {}, kind=TriggerKind.MANUAL)).job_id
    first = (await clockwork.stand.ledger.events(run_id))[0]
    assert traced.writes == [ids.audit_key(first.ts, first.id), ids.status_key("one", run_id)]
    behind = Traced(clockwork.objects)
    projector = Projector(
        ledger=clockwork.stand.ledger,
        actor=Actor(role=Role.PROJECTOR, name="projector@test"),
        publisher=DocumentPublisher(behind),  # type: ignore[arg-type]
        clock=clockwork.stand.clock,
    )
    await projector.run_once()
    assert ids.audit_key(first.ts, first.id) not in behind.writes
    await projector.release()


@pytest.mark.requirement("D13")
async def test_a_run_that_is_in_the_ledger_is_begun_though_its_status_cannot_be_put(clockwork: Clockwork):
    await clockwork.agent("one")
    traced = Traced(clockwork.objects)
    traced.down = 1
    layer = replace(clockwork.layer(), publisher=DocumentPublisher(traced))  # type: ignore[arg-type]
    run_id = (await layer.trigger("one", {}, kind=TriggerKind.MANUAL)).job_id
    assert await clockwork.runs() == [run_id]
    assert (await layer.run_state(run_id)).status == "queued"
    assert await clockwork.objects.get(ids.status_key("one", run_id)) is None
    projector = Projector(
        ledger=clockwork.stand.ledger,
        actor=Actor(role=Role.PROJECTOR, name="projector@test"),
        publisher=DocumentPublisher(clockwork.objects),
        clock=clockwork.stand.clock,
    )
    await projector.run_once()
    assert await clockwork.objects.get(ids.status_key("one", run_id)) is not None


@pytest.mark.requirement("D13")
async def test_triggered_run_starts_although_the_ledger_fails_after_the_submit(
    clockwork: Clockwork, monkeypatch: pytest.MonkeyPatch
):
    await clockwork.agent("one")

    async def gone(*_: object) -> object:
        raise LedgerUnavailable(reason="gone")

    with monkeypatch.context() as patched:
        patched.setattr(clockwork.stand.ledger, "move", gone)
        run_id = (await clockwork.layer().trigger("one", {}, kind=TriggerKind.MANUAL)).job_id
    assert await clockwork.runs() == [run_id]
    assert (await clockwork.layer().run_state(run_id)).status == "requested"
