"""An embedded instance with one of everything, for tests of `trellis move`."""

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER, Rig, actor
from trellis.app.instance import open_instance
from trellis.app.settings import Settings
from trellis.documents.audit_chain import AuditSealer
from trellis.engine.alerts import AlertObservation, AlertRound, AlertScope
from trellis.engine.jobs import (
    CancelMode,
    Claim,
    ClaimId,
    DeadLetterReason,
    JobId,
    ReasonCode,
    RequestKey,
    Stage,
    Turn,
    TypeClaim,
    TypeOptions,
    Wait,
)
from trellis.engine.key_rates import key_rate
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, JobHistory
from trellis.engine.schedules import ScheduleRecord, ScheduleSpec
from trellis.engine.uniqueness import UniqueRule, WhileHeld
from trellis.ledgers import open_ledger
from trellis.lifecycles import LIFECYCLES, Role

DEATH = DeadLetterReason(reason_code=ReasonCode.VALIDATION_FAILED, stage=Stage.INPUT, last_error="no such customer")
LISTED = dict.fromkeys(("payload", "progress", "cancel_asked_by", "cancel_asked_at", "cancel_cause"))


PLAIN = ("leased-job", "bus-job")
"""Lifecycles whose jobs may have any payload: the documents of others are made from it."""


class RealTime:
    """The clock of a test, which may be moved on."""

    def __init__(self, ahead_s: float = 0.0) -> None:
        self.ahead_s = ahead_s

    def __call__(self) -> float:
        return time.time() + self.ahead_s

    async def advance(self, seconds: float) -> None:
        self.ahead_s += seconds


async def fill(url: str, nlm_path: Path | None = None, *, lifecycles: Iterable[str] = PLAIN) -> None:
    """Put something into every table of the ledger. Its history begins an hour ago."""
    clock = RealTime(-3600.0)

    async def reopen() -> Ledger:
        return await open_ledger(url, clock=clock)

    rig = Rig(kind="sqlite", ledger=await reopen(), advance=clock.advance, reopen=reopen)
    try:
        await _fill(rig, lifecycles)
    finally:
        await rig.close()
    if nlm_path is not None:
        other = await open_ledger(f"sqlite:///{nlm_path}", clock=clock)
        rig = Rig(kind="sqlite", ledger=other, advance=clock.advance, reopen=reopen)
        await rig.submit(3, lifecycle="nlm-job", by=actor(Role.NLM_BACKEND))
        await other.close()


async def _wait_for_a_child(rig: Rig) -> None:
    """A suspended job with a child and a signal."""
    waits = await rig.running(type="waits")
    child = rig.new_job(type="child", parent_id=waits.lease.job_id)
    await rig.ledger.spawn(WORKER, waits.lease, [child], "children", b"[]", abandoned=frozenset())
    await rig.ledger.send_signal(SUBMITTER, waits.lease.job_id, "hint", b'"early"', signal_key="once")
    wait = Wait(children=(child.job_id,), signal="go", timeout_s=9e5)
    await rig.pull(waits, "suspend", wait=wait, spare_attempt=True)


async def _use_tokens(rig: Rig) -> None:
    """A type with a rate per key, of which one token is used, one set aside and two jobs wait."""
    await rig.ledger.declare_types(ADMIN, [TypeOptions(type="paced", key_rate=key_rate(1e-5, 2))])
    await rig.submit(4, type="paced", concurrency_key="customer", concurrency_limit=9)
    assert len(await rig.claim(1, types=("paced",))) == 1


async def paced_jobs_claimed(url: str) -> int:
    """How many jobs with a rate per key can be claimed now."""
    ledger = await open_ledger(url)
    try:
        claim = Claim(claim_id=ClaimId("after the move"), types=(TypeClaim(type="paced"),), start=9)
        return len((await ledger.turn(Turn(actor=WORKER, claim=claim))).claimed)
    finally:
        await ledger.close()


async def _fill(rig: Rig, lifecycles: Iterable[str]) -> None:
    ledger = rig.ledger
    await _use_tokens(rig)
    await ledger.declare_types(ADMIN, [TypeOptions(type="work", deadline_s=1.5e6, compensation="undo", keyed=True)])
    await ledger.declare_types(
        ADMIN, [TypeOptions(type="one", unique=UniqueRule(key="args", while_=WhileHeld.WAITING))]
    )
    await ledger.limit_rate(ADMIN, "slow", 0.5, 3, cause="spare them")
    await ledger.pause(ADMIN, "halted", paused=True)
    await ledger.limit_held(ADMIN, "work", 40)
    await ledger.limit_key(ADMIN, "stopped", 0)
    await ledger.limit_key(ADMIN, "wide", 3)
    await ledger.set_home_issuer(ADMIN, "trellis")
    await rig.submit(2, type="lost")
    await rig.claim(2, types=("lost",))
    await rig.lose_lease()
    # Every place and every lifecycle, in states on the way and at the end.
    for lifecycle in lifecycles:
        for state in LIFECYCLES[lifecycle].states:
            await rig.drive(await rig.submit_one(lifecycle=lifecycle, type=f"of-{lifecycle}"), state.name)
    await rig.submit(4, concurrency_key="narrow", type="work", deadline_s=9e5)
    await rig.submit(
        2, concurrency_key="wide", concurrency_limit=3, type="work", parent_id=JobId("job-1"), trace="00-ab-cd-01"
    )
    await rig.submit(1, concurrency_key="stopped", type="work")
    await rig.submit(1, delay_s=7200.0, type="work", payload='{"ключ":"скрипка\\u0000"}'.encode())
    await rig.submit(
        1, type="keyed", idempotency_key="once", idempotency_scope="shop", fingerprint=b"\x00\xff", id_is_given=True
    )
    for n in range(2):
        await rig.offer(rig.new_job(type="one", chosen=0, payload=b'{"n": %d}' % n))
    await rig.submit(1, type="one", unique=UniqueRule(key="k", window_s=1e6), unique_scope="acme")
    await rig.submit_with_key(RequestKey(scope="s", key="k", fingerprint=b"\x01", about="jobs", given="k"))
    held = await rig.running(type="held")
    await ledger.save_checkpoint(held.lease, b"\x00half")
    await ledger.journal(held.lease, "step", b'{"n":1}')
    await ledger.signal(held.lease, [("job_heartbeat", b'{"done":0.5}'), ("job_log", b'{"line":"\xd1\x85"}')])
    await ledger.renew(WORKER, [held.lease])
    await rig.cancel(held.lease.job_id, CancelMode.SOFT, cause="too late")
    await _wait_for_a_child(rig)
    done = await rig.running(type="done")
    await rig.pull(done, "complete", result=b"42", result_ttl_s=1e6, data=b'{"took":3}')
    dead = await rig.running(type="dies")
    await rig.pull(dead, "reject", death=DEATH)
    twice = await rig.running(type="dies")
    await rig.pull(twice, "reject", death=DEATH)
    await ledger.requeue(ADMIN, [twice.lease.job_id], rig.request(), limit=1, cause="once more")
    await ledger.heartbeat_worker(WORKER, b'{"version":"1"}')
    await ledger.annotate(ADMIN, held.lease.job_id, "job_result_refused", b'{"why":"late"}')
    await _subscribe(ledger)
    since = datetime(2026, 1, 1, tzinfo=UTC)
    spec = ScheduleSpec(name="nightly", cron="0 3 * * *", type="work", payload={"n": 1})
    record = ScheduleRecord(spec=spec, owner="anna", since=since, next_at=since, last_at=since, last_job="job-1")
    assert await ledger.save_schedule(ADMIN, record)
    seen = AlertObservation(id="al-1", name="dead-letters", subject="dies", value=1.5, text="one died")
    mark = (await ledger.alert_mark()).mark
    scopes = (AlertScope(name="dead-letters"),)
    await ledger.observe_alerts(ADMIN, AlertRound(mark=mark, scopes=scopes, observed=(seen,), report_types=("mail",)))


async def _subscribe(ledger: Ledger) -> None:
    for name, leave in (("reads", False), ("left-behind", True)):
        following = await ledger.subscribe(ADMIN, name, lease_s=5.0)
        assert following is not None
        page = await ledger.feed(None, limit=5)
        assert await ledger.ack(following, page.position, lease_s=5.0)
        if leave:
            assert await ledger.release_retention(ADMIN, name)


async def seal(url: str, settings: Settings | None = None) -> None:
    """Let the projector of the instance publish and seal everything."""
    async with open_instance(settings or Settings.model_validate({}), url) as instance:
        for service in instance.services(alerts=False, runs=False):
            if service.name == "projector":
                sealer: AuditSealer = service.sealer  # type: ignore[attr-defined]
                for _ in range(60):
                    await service.run_once()
                    head = await instance.ledger.audit_head()
                    if (
                        head is not None
                        and head.position is not None
                        and head.position >= await instance.ledger.feed_end()
                    ):
                        break
                    sealer._due_at = 0.0  # type: ignore[attr-defined]
                await service.release()  # type: ignore[attr-defined]


async def records(url: str) -> dict[str, Any]:
    """All that readers can see of a ledger, in values that do not depend on its kind."""
    ledger = await open_ledger(url)
    try:
        histories = [history async for history in ledger.histories()]
        ids = [history.job.job_id for history in histories]
        events = [event for history in histories for event in history.events]
        recorded = [one for at in range(0, len(events), 500) for one in await ledger.recorded(events[at : at + 500])]
        feed = await ledger.feed(None, limit=10_000)
        return {
            "histories": [_listed(history) for history in histories],
            "jobs": [await ledger.job(job_id) for job_id in ids],
            "recorded": recorded,
            "order of the feed": [event.id for event in feed.events],
            "results": [await ledger.result(job_id) for job_id in ids],
            "journals": [await ledger.read_journal(job_id) for job_id in ids],
            "signals": [await ledger.signals(job_id, limit=100) for job_id in ids],
            "dead letters": await ledger.dead_letters(JobFilter(), limit=500),
            "acts": [replace(act, no=0) for act in await ledger.acts() if act.event != "instance.moved"],
            "types": await ledger.declared_types(),
            "schedules": await ledger.schedules(),
            "alerts": await ledger.alerts(),
            "alert mark": await ledger.alert_mark(),
            "issuer": await ledger.home_issuer(),
            "limits": [await ledger.key_limit(key) for key in ("stopped", "wide", "narrow")],
            "followers": [(one.name, one.waits, one.until) for one in await ledger.followers()],
            "key": await ledger.find_by_idempotency_key("shop", "once", b"\x00\xff"),
            "request": await ledger.find_request(
                RequestKey(scope="s", key="k", fingerprint=b"\x01", about="jobs", given="k")
            ),
            "waiting": sorted(
                (one.type, one.paused, one.rate_limit, one.rate_per_key) for one in await ledger.queues() if one.ready
            ),
        }
    finally:
        await ledger.close()


def _listed(history: JobHistory) -> JobHistory:
    return replace(history, job=replace(history.job, **LISTED))
