"""Alerts on every ledger: raised once and resolved once, whoever evaluates; and the conditions that the ledger stores."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import count

import pytest

from tests.ledgers.conformance.rig import ADMIN, DEATH, Rig, actor
from tests.ledgers.conformance.test_idle import read_statements
from trellis.engine import jobs as engine_jobs
from trellis.engine.alerts import ALERTS_MAX, HOLD_S, Alert, AlertChangeKind, AlertObservation, AlertRound, AlertScope
from trellis.engine.errors import LedgerUnavailable, OptionInvalid
from trellis.engine.jobs import SUBMIT_MAX, CancelMode, JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import JobFilter, RetentionOptions
from trellis.ledgers.sqlite import submit as sqlite_submit
from trellis.lifecycles import Role, Trigger
from trellis.operations.alert_conditions import LedgerConditions
from trellis.operations.alerts import SUBJECTS_MAX, AlertEvaluator, AlertOptions, AlertThresholds
from trellis.operations.doctor import work_findings
from trellis.operations.runbooks import runbook
from trellis.testing import FakeClock

WEBHOOK = "trellis.alert.webhook"
ORCHESTRATOR = actor(Role.ORCHESTRATOR)
RAISED, RESOLVED = AlertChangeKind.RAISED, AlertChangeKind.RESOLVED
HOUR_S = 3600.0
_ids = count(1)


def met(name: str = "jobs-wait", subject: str = "work", value: float = 301.0) -> AlertObservation:
    return AlertObservation(id=f"alert-{next(_ids)}", name=name, subject=subject, value=value, text=f"it is {value:g}")


async def observe(
    rig: Rig, *observed: AlertObservation, ledger: Ledger | None = None, mark: int | None = None, **options
) -> list[tuple[str, str]]:
    """One round that has checked `jobs-wait`; what it raised and resolved."""
    options.setdefault("scopes", (AlertScope(name="jobs-wait"),))
    began = (await rig.ledger.alert_mark()).mark if mark is None else mark
    checked = AlertRound(mark=began, observed=observed, **options)
    changes = await (ledger or rig.ledger).observe_alerts(ADMIN, checked)
    return [(change.kind.value, change.alert.subject) for change in changes]


def evaluator(
    rig: Rig, ledger: Ledger | None = None, *, name: str = ADMIN.name, steps_read: int = 100, **thresholds: float
) -> AlertEvaluator:
    """A process that evaluates alerts. Another one has nothing of it but the ledger."""
    conditions = LedgerConditions(
        ledger=ledger or rig.ledger, thresholds=AlertThresholds(**thresholds), steps_read=steps_read
    )
    return AlertEvaluator(
        ledger=ledger or rig.ledger,
        actor=replace(ADMIN, name=name),
        clock=FakeClock(),
        checks=conditions.checks(),
        counts=conditions.counts(),
        new_id=lambda: str(next(_ids)),
    )


async def changes(evaluating: AlertEvaluator) -> list[tuple[str, str, str]]:
    report = await evaluating.run_once()
    return [(change.kind.value, change.alert.name, change.alert.subject) for change in report.changes]


async def opened(rig: Rig) -> list[Alert]:
    return await rig.ledger.alerts(only_open=True)


# --- one raise, one resolve ------------------------------------------------------------------------------------------


@pytest.mark.requirement("OBS-4")
async def test_alert_is_raised_once_kept_while_true_and_resolved_once(rig: Rig):
    assert await observe(rig, met(value=301.0)) == [("raised", "work")]
    (first,) = await opened(rig)
    await rig.advance(15.0)
    assert await observe(rig, met(value=316.0)) == []
    (seen,) = await opened(rig)
    assert (seen.id, seen.raised_at, seen.value, seen.text) == (first.id, first.raised_at, 316.0, "it is 316")
    assert (seen.last_seen_at - first.last_seen_at).total_seconds() == pytest.approx(15.0)
    await rig.advance(15.0)
    assert await observe(rig) == [("resolved", "work")]
    assert await observe(rig) == []
    (ended,) = await rig.ledger.alerts()
    assert ended.id == first.id
    assert ended.resolved_at == await rig.ledger.now()
    assert await rig.ledger.alert(first.id) == ended
    assert await opened(rig) == []
    await rig.advance(1.0)
    assert await observe(rig, met()) == [("raised", "work")], "the cause is back: another alert"
    assert [one.id == first.id for one in await rig.ledger.alerts()] == [False, True]


@pytest.mark.requirement("OBS-4")
async def test_several_evaluators_raise_and_resolve_an_alert_once(rig: Rig):
    ledgers = [rig.ledger, *[await rig.open_another() for _ in range(3)]]
    raised = await asyncio.gather(*(observe(rig, met(), ledger=one, report_types=(WEBHOOK,)) for one in ledgers))
    assert sorted(raised) == [[], [], [], [("raised", "work")]]
    await rig.advance(15.0)
    resolved = await asyncio.gather(*(observe(rig, ledger=one, report_types=(WEBHOOK,)) for one in ledgers))
    assert sorted(resolved) == [[], [], [], [("resolved", "work")]]
    assert len(await rig.claim(10, types=(WEBHOOK,))) == 2, "and each change is reported once"


@pytest.mark.requirement("OBS-4")
async def test_a_round_that_read_earlier_neither_resolves_nor_raises(rig: Rig):
    before = (await rig.ledger.alert_mark()).mark
    await observe(rig, met())
    assert await observe(rig, mark=before) == [], "it read before the cause was there"
    while_true = (await rig.ledger.alert_mark()).mark
    assert await observe(rig) == [("resolved", "work")]
    assert await observe(rig, met(), mark=while_true) == [], "it read before the cause was over"
    assert await observe(rig, met()) == [("raised", "work")]


@pytest.mark.requirement("OBS-4")
async def test_a_round_resolves_only_what_it_has_checked(rig: Rig):
    here, there = met("disk-low", "a:/data"), met("disk-low", "a:/data2")
    await observe(rig, here, there, met())
    await rig.advance(15.0)
    of_a = (AlertScope(name="disk-low", subject="a:/data"),)
    assert await observe(rig, scopes=of_a) == [("resolved", "a:/data")]
    assert {one.subject for one in await opened(rig)} == {"a:/data2", "work"}, "its folder is another one"
    await rig.advance(HOUR_S)
    assert await observe(rig, met(), scopes=of_a) == [("resolved", "a:/data2")], "nobody has looked there for an hour"


@pytest.mark.requirement("OBS-4")
async def test_evaluators_with_other_settings_do_not_raise_and_resolve_an_alert_in_turns(rig: Rig):
    strict, lax = evaluator(rig, name="strict", queued_s=100.0), evaluator(rig, name="lax", queued_s=300.0)
    job_id = await rig.submit_one()
    await rig.advance(101.0)
    assert await changes(strict) == [("raised", "jobs-wait", "work")]
    for _ in range(20):
        await rig.advance(15.0)
        assert (await changes(lax), await changes(strict)) == ([], []), "also when both have seen it"
    await rig.ledger.cancel(ADMIN, job_id, CancelMode.HARD, rig.request(), grace_s=0.0, cause=None)
    await rig.advance(15.0)
    assert await changes(lax) == [], "the other one has seen it last"
    assert await changes(strict) == [("resolved", "jobs-wait", "work")]


@pytest.mark.requirement("OBS-4")
async def test_an_alert_of_an_evaluator_that_is_gone_is_resolved_by_another_one_after_a_while(rig: Rig):
    job_id = await rig.submit_one()
    await rig.advance(301.0)
    assert await changes(evaluator(rig, name="gone")) == [("raised", "jobs-wait", "work")]
    await rig.ledger.cancel(ADMIN, job_id, CancelMode.HARD, rig.request(), grace_s=0.0, cause=None)
    await rig.advance(HOLD_S - 1.0)
    assert await changes(evaluator(rig, name="there")) == []
    await rig.advance(1.0)
    assert await changes(evaluator(rig, name="there")) == [("resolved", "jobs-wait", "work")]


@pytest.mark.requirement("OBS-4")
async def test_a_change_made_by_an_evaluator_without_a_channel_is_reported_by_the_one_that_has_it(rig: Rig):
    mute, able = evaluator(rig, name="mute"), evaluator(rig, name="able")
    able = replace(able, options=AlertOptions(report_types=(WEBHOOK,)))
    job_id = await rig.submit_one()
    await rig.advance(301.0)
    assert await changes(mute) == [("raised", "jobs-wait", "work")]
    (alert,) = await opened(rig)
    for _ in range(2):
        assert await changes(able) == []
    assert await changes(mute) == [], "it has seen the alert last"
    await rig.ledger.cancel(ADMIN, job_id, CancelMode.HARD, rig.request(), grace_s=0.0, cause=None)
    assert await changes(mute) == [("resolved", "jobs-wait", "work")]
    for _ in range(2):
        assert await changes(able) == []
    reports = (await rig.ledger.jobs(JobFilter(type=WEBHOOK), limit=10)).jobs
    assert sorted(one.job_id for one in reports) == [f"{alert.id}-{kind}-webhook" for kind in ("raised", "resolved")]


def of_agents(rig: Rig, failing: Callable[[], list[str]]) -> AlertEvaluator:
    """An evaluator that also looks at agents; `failing` says which of them keep failing."""

    async def read() -> list[str]:
        return failing()

    conditions = LedgerConditions(ledger=rig.ledger, thresholds=AlertThresholds(), failing_agents=read)
    return replace(evaluator(rig), checks=(conditions.agents, conditions.waiting), counts=())


@pytest.mark.requirement("OBS-4")
async def test_a_condition_that_cannot_be_read_leaves_its_alert_open_and_the_others_work(rig: Rig):
    def unreadable() -> list[str]:
        raise LedgerUnavailable(reason="this read took too long")

    assert await changes(of_agents(rig, lambda: ["scout"])) == [("raised", "agent-failing", "scout")]
    await rig.submit_one()
    await rig.advance(HOUR_S + 1.0)
    assert await changes(of_agents(rig, unreadable)) == [("raised", "jobs-wait", "work")]
    assert {one.name for one in await opened(rig)} == {"agent-failing", "jobs-wait"}
    await rig.advance(HOUR_S)
    assert await changes(of_agents(rig, unreadable)) == []
    await rig.advance(HOUR_S / 2)
    assert await changes(evaluator(rig, name="without agents")) == [], "one that lacks the check leaves it alone"
    assert await changes(of_agents(rig, list)) == [("resolved", "agent-failing", "scout")]


@pytest.mark.requirement("OBS-4")
async def test_more_subjects_than_an_alert_may_have_resolve_none_that_still_holds(rig: Rig):
    agents = [f"m{number:02}" for number in range(SUBJECTS_MAX)]
    assert len(await changes(of_agents(rig, lambda: agents))) == SUBJECTS_MAX
    assert await changes(of_agents(rig, lambda: ["a", *agents])) == []
    assert await changes(of_agents(rig, lambda: ["a", *agents[1:]])) == [
        ("raised", "agent-failing", "a"),
        ("resolved", "agent-failing", "m00"),
    ]


@pytest.mark.requirement("OBS-4")
async def test_resolved_alerts_are_kept_for_the_days_that_are_set(rig: Rig):
    await observe(rig, met())
    await rig.advance(1.0)
    await observe(rig)
    await rig.advance(9.0)
    await observe(rig, keep_s=10.0)
    assert len(await rig.ledger.alerts()) == 1
    await rig.advance(1.0)
    await observe(rig, keep_s=10.0)
    assert await rig.ledger.alerts() == []


@pytest.mark.requirement("OBS-4")
async def test_report_is_submitted_in_the_transaction_of_the_change(rig: Rig):
    await observe(rig, met(), report_types=(WEBHOOK,))
    (alert,) = await opened(rig)
    job = await rig.job(JobId(f"{alert.id}-raised-webhook"))
    assert json.loads(job.payload or b"") == {"alert_id": alert.id, "change": "raised"}
    assert job.created_at == alert.raised_at
    await rig.advance(15.0)
    too_long = AlertObservation(id="alert-x", name="disk-low", subject="s" * 301, value=0.0, text="")
    with pytest.raises(OptionInvalid, match="subject of alert disk-low"):
        await observe(rig, too_long, report_types=(WEBHOOK,))
    assert len(await opened(rig)) == 1, "nothing of a refused round is stored"
    await observe(rig, report_types=(WEBHOOK,))
    assert (await rig.job(JobId(f"{alert.id}-resolved-webhook"))).state == "queued"


async def test_a_round_on_an_idle_ledger_reads_little_and_writes_nothing(rig: Rig):
    evaluating = evaluator(rig)
    await evaluating.run_once()
    async with read_statements(rig.ledger) as asked:
        await evaluating.run_once()
    assert len(asked) <= 8, "that is half a statement a second at the default of 15 s"
    assert all(statement.lower().startswith(("select", "(select", "--", "with ")) for statement in asked)
    assert not [one for one in asked if re.search(r"\b(insert into|update|delete from)\b", one.lower())]


# --- conditions, each brought about by its cause ---------------------------------------------------------------------


@pytest.mark.requirement("OBS-4")
async def test_a_channel_that_was_removed_keeps_no_later_round_busy(rig: Rig):
    removed = AlertOptions(report_types=(WEBHOOK,))
    await observe(rig, met(), report_types=removed.report_types)
    await rig.advance(HOLD_S + 1)
    await observe(rig, report_types=())
    evaluating = evaluator(rig)
    evaluating.options = AlertOptions(report_types=(f"{WEBHOOK}.other",))
    await evaluating.run_once()  # the first round removes old alerts, so it writes
    mark = await rig.ledger.alert_mark()
    assert (mark.unreported, mark.has_open) == (frozenset({WEBHOOK}), False)
    await evaluating.run_once()
    assert await rig.ledger.alert_mark() == mark
    evaluating.options = removed
    await evaluating.run_once()
    assert (await rig.ledger.alert_mark()).unreported == frozenset()


@pytest.mark.requirement("OBS-4")
async def test_a_round_in_which_nothing_holds_says_until_when_alerts_count_as_evaluated(rig: Rig):
    evaluating, interval_s = evaluator(rig), AlertOptions().interval_s
    assert (await rig.ledger.alert_mark()).evaluated_at is None
    await evaluating.run_once()
    first, now = await rig.ledger.alert_mark(), await rig.ledger.now()
    assert (first.evaluated_at, first.stale_at) == (now, now + timedelta(seconds=3 * interval_s))
    await evaluator(rig, name="another").run_once()
    assert await rig.ledger.alert_mark() == first, "one round is enough for both"
    await rig.advance(interval_s)
    await evaluating.run_once()
    assert (await rig.ledger.alert_mark()).stale_at == now + timedelta(seconds=4 * interval_s)


@pytest.mark.requirement("OBS-4")
async def test_the_latest_round_says_until_when_alerts_count_as_evaluated(rig: Rig):
    hourly, usual = evaluator(rig), evaluator(rig, name="after the interval was shortened")
    hourly.options = AlertOptions(interval_s=HOUR_S)
    await hourly.run_once()
    await rig.advance(usual.options.interval_s)
    await usual.run_once()
    mark, now = await rig.ledger.alert_mark(), await rig.ledger.now()
    assert (mark.evaluated_at, mark.stale_at) == (now, now + timedelta(seconds=usual.options.stale_s))


async def reports_every_change(rig: Rig, changes: int) -> None:
    """A round with so many changes, on six channels: a report for each change is ready on each channel."""
    channels = tuple(f"{WEBHOOK}.{number}" for number in range(6))
    observed = [met(subject=f"type-{number}") for number in range(changes)]
    assert len(await observe(rig, *observed, report_types=channels)) == changes
    ready = {one.type: one.ready for one in await rig.ledger.queues()}
    assert [ready[channel] for channel in channels] == [changes] * len(channels)


@pytest.mark.requirement("OBS-4")
@pytest.mark.only("sqlite")
async def test_a_round_reports_more_changes_than_one_submit_may_hold(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    """SQLite submits the reports in parts. PostgreSQL submits them at once, in the long proof as many as there can be."""
    for module in (engine_jobs, sqlite_submit):
        monkeypatch.setattr(module, "SUBMIT_MAX", 50)
    await reports_every_change(rig, 9)


@pytest.mark.prove
@pytest.mark.requirement("OBS-4")
async def test_a_round_of_the_most_changes_reports_each_on_every_channel(rig: Rig):
    assert ALERTS_MAX * 6 > SUBMIT_MAX
    await reports_every_change(rig, ALERTS_MAX)


@pytest.mark.requirement("OBS-4")
async def test_job_that_nobody_claims_for_five_minutes_raises_an_alert(rig: Rig):
    await rig.submit_one(priority=2)
    await rig.advance(200.0)
    await rig.submit_one(priority=0)  # more urgent, and not the one that has waited longest
    await rig.advance(100.0)
    assert await changes(evaluator(rig)) == []
    await rig.advance(1.0)
    assert await changes(evaluator(rig)) == [("raised", "jobs-wait", "work")]
    assert await changes(evaluator(rig)) == [], "another process, as after a restart"
    assert await changes(evaluator(rig, await rig.open_another())) == []
    await rig.claim(2)
    assert await changes(evaluator(rig)) == [("resolved", "jobs-wait", "work")]


@pytest.mark.requirement("OBS-4")
async def test_reports_that_nobody_sends_raise_no_alert_about_themselves_and_the_doctor_says_so(rig: Rig):
    await rig.submit_one(type=WEBHOOK)
    await rig.submit_one()
    await rig.advance(301.0)
    assert await changes(evaluator(rig)) == [("raised", "jobs-wait", "work")]
    findings = work_findings(await rig.ledger.queues(), [], await rig.ledger.now())
    (unsent,) = [one for one in findings if one.check == f"type {WEBHOOK}"]
    assert unsent.remedy == "start `trellis up`, or its role alerts, with TRELLIS_ALERT_WEBHOOK"


@pytest.mark.requirement("OBS-4")
async def test_queue_job_behind_the_slot_of_its_agent_is_queued_too(rig: Rig):
    for job_id in await rig.submit(2, lifecycle="queue-job", type="RESEARCH", concurrency_key="queue-job:a"):
        await rig.drive(job_id, "QUEUED")
    held = await rig.claim_one(types=("RESEARCH",), lifecycle="queue-job")
    await rig.advance(301.0)
    assert await changes(evaluator(rig)) == [("raised", "jobs-wait", "RESEARCH")]
    await rig.ledger.renew(ORCHESTRATOR, [held.lease])
    await rig.pull(held, Trigger.RETRY, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, delay_s=60.0)
    await rig.sweep()
    await rig.claim_one(types=("RESEARCH",), lifecycle="queue-job")
    assert await changes(evaluator(rig)) == [("resolved", "jobs-wait", "RESEARCH")]


def error(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "message": "m"}}).encode()


async def leave_context(rig: Rig, code: str | None) -> None:
    """A queue job leaves its first stage, with an error or with the next stage."""
    lease = await rig.drive(await rig.submit_one(lifecycle="queue-job"), "CONTEXT_ASSEMBLY")
    assert lease is not None
    step = Trigger.RETRY if code else "snapshot_ready"
    await rig.advance(1.0)
    await rig.pull(lease, step, source="CONTEXT_ASSEMBLY", by=ORCHESTRATOR, data=error(code) if code else None)


@pytest.mark.requirement("OBS-4")
async def test_rows_of_failures_are_counted_over_all_jobs_and_ended_by_a_success(rig: Rig):
    for code in ("CONTEXT_TIMEOUT", None, "CONTEXT_TIMEOUT", "UPSTREAM_UNAVAILABLE", "CONTEXT_TIMEOUT"):
        await leave_context(rig, code)
    await rig.running()
    assert await changes(evaluator(rig)) == [], "one before the success, and two since"
    await leave_context(rig, "CONTEXT_TIMEOUT")
    assert await changes(evaluator(rig)) == [("raised", "context-timeouts", "")]
    await leave_context(rig, "UPSTREAM_UNAVAILABLE")
    assert await changes(evaluator(rig)) == [], "another failure neither counts nor ends the row"
    await leave_context(rig, None)
    assert await changes(evaluator(rig)) == [("resolved", "context-timeouts", "")]


@pytest.mark.requirement("OBS-4")
async def test_a_row_that_other_failures_push_out_of_view_neither_ends_nor_begins_its_alert(rig: Rig):
    for _ in range(3):
        await leave_context(rig, "CONTEXT_TIMEOUT")
    assert await changes(evaluator(rig, steps_read=3)) == [("raised", "context-timeouts", "")]
    for _ in range(2):
        await leave_context(rig, "UPSTREAM_UNAVAILABLE")
    assert await changes(evaluator(rig, steps_read=3)) == [], (
        "one of the row is in view, and nothing says that it is over"
    )
    await leave_context(rig, None)
    assert await changes(evaluator(rig, steps_read=3)) == [("resolved", "context-timeouts", "")]


@pytest.mark.requirement("OBS-4")
async def test_three_artifacts_that_could_not_be_written_raise_an_alert_until_one_is(rig: Rig):
    for n in range(3):
        lease = await rig.writing()
        await rig.advance(1.0)
        failed = {"data": error("ARTIFACT_WRITE_FAILED")} if n else {"cause": "given back, without an error"}
        await rig.pull(lease, Trigger.RETRY, source="ARTIFACT_WRITE", by=ORCHESTRATOR, **failed)
    assert await changes(evaluator(rig)) == []
    lease = await rig.writing()
    await rig.pull(lease, Trigger.RETRY, source="ARTIFACT_WRITE", by=ORCHESTRATOR, data=error("HASH_MISMATCH"))
    assert await changes(evaluator(rig)) == [("raised", "artifact-writes", "")]
    lease = await rig.writing()
    await rig.advance(1.0)
    await rig.complete(lease, await rig.artifact_of(lease.job_id))
    assert await changes(evaluator(rig)) == [("resolved", "artifact-writes", "")]


@pytest.mark.requirement("OBS-4")
async def test_proposal_that_nobody_decides_for_48_hours_raises_an_alert(rig: Rig):
    first, *others = await rig.submit(SUBJECTS_MAX + 5, lifecycle="proposal")
    await rig.advance(48 * HOUR_S)
    assert await changes(evaluator(rig)) == []
    await rig.advance(1.0)
    raised = await changes(evaluator(rig))
    assert len(raised) == SUBJECTS_MAX, "the number of subjects of one alert is bounded"
    assert ("raised", "proposal-waits", first) in raised
    await rig.move(first, "rejected", by=actor(Role.OWNER), cause="no")
    after = await changes(evaluator(rig))
    assert ("resolved", "proposal-waits", first) in after
    assert ("raised", "proposal-waits", others[SUBJECTS_MAX - 1]) in after, "the next one is shown in its place"


@pytest.mark.requirement("OBS-4")
async def test_worker_that_falls_silent_raises_an_alert_and_one_that_drains_does_not(rig: Rig):
    lost, drained = actor(Role.WORKER, "up@home:1"), actor(Role.WORKER, "drained")
    await rig.ledger.heartbeat_worker(lost, b"{}")
    await rig.ledger.heartbeat_worker(drained, b'{"drained": true}')
    await rig.advance(31.0)
    assert await changes(evaluator(rig)) == [("raised", "worker-lost", "up@home:1")]
    (alert,) = await opened(rig)
    assert "(a process of `trellis up`) has been silent" in alert.text
    assert "`up@…` is `trellis up`" in runbook("worker-lost"), "its page says how to start it again"
    await rig.ledger.heartbeat_worker(lost, b"{}")
    assert await changes(evaluator(rig)) == [("resolved", "worker-lost", "up@home:1")]
    await rig.advance(31.0)
    await changes(evaluator(rig))
    await rig.advance(HOUR_S)
    assert await changes(evaluator(rig)) == [("resolved", "worker-lost", "up@home:1")], "it will not come back"


@pytest.mark.requirement("OBS-4")
async def test_projector_that_does_not_read_raises_an_alert_and_then_holds_retention_back(rig: Rig):
    following = await rig.ledger.subscribe(actor(Role.PROJECTOR), "projector", lease_s=5.0)
    assert following is not None
    await rig.running()
    await rig.ledger.feed(None, limit=10)
    await rig.advance(60.0)
    assert await changes(evaluator(rig)) == []
    await rig.advance(1.0)
    assert await changes(evaluator(rig)) == [("raised", "projector-lag", "projector")]
    await rig.advance(RetentionOptions().ended_s or 0.0)
    assert await changes(evaluator(rig)) == [("raised", "retention-held", "projector")]
    end = await rig.ledger.feed_end()
    assert await rig.ledger.ack(following, end, lease_s=5.0)
    assert sorted(await changes(evaluator(rig))) == [
        ("resolved", "projector-lag", "projector"),
        ("resolved", "retention-held", "projector"),
    ]


@pytest.mark.requirement("OBS-4")
async def test_a_larger_share_of_dead_queue_jobs_than_is_set_raises_an_alert(rig: Rig):
    await rig.drive(await rig.submit_one(lifecycle="queue-job"), "DEAD")
    assert await changes(evaluator(rig, dead_percent=50.0)) == [("raised", "dead-jobs", "")]
    await rig.complete_for(await rig.submit_one(lifecycle="artifact"))
    assert await changes(evaluator(rig, dead_percent=50.0)) == [("resolved", "dead-jobs", "")], "half are not more"
    assert await changes(evaluator(rig)) == [("raised", "dead-jobs", "")], "and more than 1 %"


@pytest.mark.requirement("OBS-4")
async def test_dead_letters_beyond_one_percent_raise_an_alert(rig: Rig):
    for _ in range(2):
        await rig.pull(await rig.running(), "reject", death=DEATH)
    assert await changes(evaluator(rig)) == [], "so few that the share says nothing"
    await rig.pull(await rig.running(), "reject", death=DEATH)
    assert await changes(evaluator(rig)) == [("raised", "dead-letters", "")]
    await rig.advance(HOUR_S)
    assert await changes(evaluator(rig)) == []
    await rig.advance(1.0)
    assert await changes(evaluator(rig)) == [("resolved", "dead-letters", "")]
