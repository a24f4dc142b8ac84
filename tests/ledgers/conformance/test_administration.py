"""What is no transition of a job has its own table of roles: a role that is not in it is refused, and nothing changes."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import pytest

from tests.ledgers.conformance.rig import ADMIN, Rig, actor
from trellis.auth.principals import ADMINISTRATION, Verb
from trellis.engine.admin_acts import AdminAct, NewAct
from trellis.engine.alerts import AlertObservation, AlertRound
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor, JobId, TypeOptions
from trellis.engine.records import AuditHead, JobFilter, RetentionOptions, SweepOptions
from trellis.engine.schedules import ScheduleSpec, new_record
from trellis.lifecycles import Role

KEY = "user:k"


@dataclass(frozen=True)
class Case:
    """A verb, a stage where it would change something, and what shows that it has."""

    verb: Verb
    prepare: Callable[[Rig], Awaitable[object]]
    act: Callable[[Rig, Actor], Awaitable[object]]
    changed: Callable[[Rig], Awaitable[bool]]


async def _one_job(rig: Rig) -> None:
    await rig.submit_one()


async def _two_jobs(rig: Rig) -> None:
    await rig.submit(2)


async def _two_jobs_of_a_key(rig: Rig) -> None:
    await rig.submit(2, concurrency_key=KEY)


async def _a_rest_that_is_over(rig: Rig) -> None:
    await rig.submit_one(delay_s=5.0)
    await rig.advance(6.0)


async def _nothing_is_handed_out(rig: Rig) -> bool:
    return await rig.claim(1) == []


async def _one_is_handed_out(rig: Rig) -> bool:
    return len(await rig.claim(2)) == 1


async def _nothing(rig: Rig) -> None:
    assert await rig.claim(1) == []


async def _somebody_follows(rig: Rig) -> bool:
    return await rig.ledger.subscribe(actor(Role.PROJECTOR, "another"), "here", lease_s=60.0) is None


async def _a_follower(rig: Rig) -> None:
    assert await rig.ledger.subscribe(actor(Role.PROJECTOR), "here", lease_s=60.0) is not None


async def _nobody_is_waited_for(rig: Rig) -> bool:
    return not any(seen.waits for seen in await rig.ledger.followers())


async def _both_are_handed_out(rig: Rig) -> bool:
    return len(await rig.claim(2)) == 2


async def _a_job_with_a_name(rig: Rig) -> None:
    await rig.submit_one(job_id=JobId("named"))


async def _something_was_said(rig: Rig) -> bool:
    return bool(await rig.ledger.signals(JobId("named"), limit=1))


async def _it_is_handed_out(rig: Rig) -> bool:
    return len(await rig.claim(1)) == 1


AT_ONCE = RetentionOptions(ended_s=0.0, testing=True)
HEAD = AuditHead(number=0, sha256="0" * 64, position=None)


async def _an_ended_job(rig: Rig) -> None:
    await rig.cancel(await rig.submit_one())
    await rig.advance(1.0)


async def _nothing_is_there(rig: Rig) -> bool:
    return (await rig.ledger.jobs(JobFilter(), limit=1)).jobs == ()


async def _a_head_is_stored(rig: Rig) -> bool:
    return await rig.ledger.audit_head() is not None


ACT = NewAct(event="agent.status.changed", subject="gardener", source="active", target="paused")
FIRST_ACT = AdminAct(**{**asdict(ACT), "id": ""}, no=1, at=datetime.now(UTC), role=Role.OWNER, actor="anna", node=None)


async def _an_act(rig: Rig) -> None:
    await rig.ledger.record_act(ADMIN, ACT)


async def _an_act_is_recorded(rig: Rig) -> bool:
    return [act.subject for act in await rig.ledger.acts()] == ["gardener"]


async def _observe(rig: Rig, by: Actor) -> object:
    seen = AlertObservation(id="alert-1", name="jobs-wait", subject="work", value=301.0, text="it waits")
    return await rig.ledger.observe_alerts(by, AlertRound(mark=0, scopes=(), observed=(seen,)))


async def _an_alert_is_open(rig: Rig) -> bool:
    return [alert.id for alert in await rig.ledger.alerts(only_open=True)] == ["alert-1"]


async def _no_act_waits(rig: Rig) -> bool:
    return await rig.ledger.acts(unpublished=True) == []


async def _the_type_is_declared(rig: Rig) -> bool:
    return bool(await rig.ledger.declared_types("work"))


async def _an_issuer_is_recorded(rig: Rig) -> bool:
    return await rig.ledger.home_issuer() is not None


SCHEDULE = ScheduleSpec(name="s", cron="0 * * * *", type="work")


async def _save(rig: Rig, by: Actor) -> None:
    await rig.ledger.save_schedule(by, new_record(SCHEDULE, "anna", await rig.ledger.now()))


async def _a_schedule(rig: Rig) -> None:
    await _save(rig, ADMIN)


async def _advance(rig: Rig, by: Actor) -> None:
    (known,) = await rig.ledger.schedules()
    await rig.ledger.advance_schedule(by, known)


async def _a_schedule_is_there(rig: Rig) -> bool:
    return bool(await rig.ledger.schedules())


async def _no_schedule_is_there(rig: Rig) -> bool:
    return not await rig.ledger.schedules()


async def _it_has_moved_on(rig: Rig) -> bool:
    return [known.version for known in await rig.ledger.schedules()] == [2]


CASES = [
    Case("pause", _one_job, lambda rig, by: rig.ledger.pause(by, "work", paused=True), _nothing_is_handed_out),
    Case("limit_rate", _two_jobs, lambda rig, by: rig.ledger.limit_rate(by, "work", 0.001), _one_is_handed_out),
    Case("limit_held", _two_jobs, lambda rig, by: rig.ledger.limit_held(by, "work", 1), _one_is_handed_out),
    Case(
        "declare_types",
        _nothing,
        lambda rig, by: rig.ledger.declare_types(by, [TypeOptions(type="work")]),
        _the_type_is_declared,
    ),
    Case("save_schedule", _nothing, _save, _a_schedule_is_there),
    Case("remove_schedule", _a_schedule, lambda rig, by: rig.ledger.remove_schedule(by, "s"), _no_schedule_is_there),
    Case("advance_schedule", _a_schedule, _advance, _it_has_moved_on),
    Case("follow", _nothing, lambda rig, by: rig.ledger.subscribe(by, "here", lease_s=60.0), _somebody_follows),
    Case("leave_behind", _a_follower, lambda rig, by: rig.ledger.release_retention(by, "here"), _nobody_is_waited_for),
    Case("set_home_issuer", _nothing, lambda rig, by: rig.ledger.set_home_issuer(by, "i"), _an_issuer_is_recorded),
    Case("limit_key", _two_jobs_of_a_key, lambda rig, by: rig.ledger.limit_key(by, KEY, 2), _both_are_handed_out),
    Case(
        "sweep",
        _a_rest_that_is_over,
        lambda rig, by: rig.ledger.sweep(by, SweepOptions(elect=False)),
        _it_is_handed_out,
    ),
    Case(
        "remark",
        _a_job_with_a_name,
        lambda rig, by: rig.ledger.annotate(by, JobId("named"), "job_result_refused", b"{}"),
        _something_was_said,
    ),
    Case("retain", _an_ended_job, lambda rig, by: rig.ledger.retain(AT_ONCE, by=by), _nothing_is_there),
    Case("seal", _nothing, lambda rig, by: rig.ledger.extend_audit_chain(by, HEAD, after=None), _a_head_is_stored),
    Case("record_act", _nothing, lambda rig, by: rig.ledger.record_act(by, ACT), _an_act_is_recorded),
    Case("observe_alerts", _nothing, _observe, _an_alert_is_open),
    Case("publish_acts", _an_act, lambda rig, by: rig.ledger.acts_published(by, [FIRST_ACT]), _no_act_waits),
]


@pytest.mark.requirement("AUTH-2")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.verb)
async def test_a_role_that_may_not_administer_changes_nothing(rig: Rig, case: Case):
    await case.prepare(rig)
    for role in sorted(set(Role) - ADMINISTRATION[case.verb]):
        with pytest.raises(NotAllowed) as caught:
            await case.act(rig, actor(role))
        assert caught.value.data["role"] == role.value
    assert not await case.changed(rig)


@pytest.mark.parametrize(
    "case,role",
    [(case, role) for case in CASES for role in sorted(ADMINISTRATION[case.verb])],
    ids=lambda value: value.verb if isinstance(value, Case) else value.value,
)
async def test_a_role_that_may_administer_does(rig: Rig, case: Case, role: Role):
    await case.prepare(rig)
    await case.act(rig, actor(role))
    assert await case.changed(rig)


async def test_resume_requires_the_right_to_pause(rig: Rig):
    await rig.submit_one()
    await rig.ledger.pause(ADMIN, "work", paused=True)
    with pytest.raises(NotAllowed):
        await rig.ledger.pause(actor(Role.WORKER), "work", paused=False)
    assert await rig.claim(1) == []


async def test_a_sweep_that_would_not_be_elected_is_refused_all_the_same(rig: Rig):
    await rig.sweep(elect=True)
    with pytest.raises(NotAllowed):
        await rig.ledger.sweep(actor(Role.SUBMITTER), SweepOptions())


def test_the_table_says_who_may_do_what():
    assert {verb: sorted(role.value for role in roles) for verb, roles in ADMINISTRATION.items()} == {
        "pause": ["control-plane"],
        "limit_rate": ["control-plane", "orchestrator", "worker"],
        "limit_key": ["control-plane", "orchestrator"],
        "limit_held": ["control-plane", "orchestrator"],
        "declare_types": ["control-plane", "worker"],
        "save_schedule": ["control-plane", "owner", "worker"],
        "remove_schedule": ["control-plane", "owner"],
        "advance_schedule": ["orchestrator", "worker"],
        "sweep": ["control-plane", "sweeper"],
        "retain": ["control-plane", "sweeper"],
        "follow": ["control-plane", "projector"],
        "leave_behind": ["control-plane"],
        "set_home_issuer": ["control-plane", "gateway"],
        "replace_home_issuer": ["control-plane"],
        "restore": ["control-plane", "owner"],
        "remark": ["control-plane", "gateway", "reconciler", "scheduler", "worker"],
        "send_signal": ["control-plane", "orchestrator", "owner", "submitter", "worker"],
        "record_act": ["control-plane", "gateway", "owner"],
        "publish_acts": ["control-plane", "owner", "projector"],
        "observe_alerts": ["control-plane"],
        "seal": ["control-plane", "owner", "projector"],
    }
