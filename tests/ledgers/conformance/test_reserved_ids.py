"""Ids that the engine derives from other jobs' ids are given by the one role that derives them, and by nobody else."""

from dataclasses import replace

import asyncpg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ledgers.conformance.rig import SUBMITTER, Rig, actor
from trellis.bus.outcomes.linked_jobs import SUFFIX, derived_ids
from trellis.bus.requests import wire_id
from trellis.engine.alerts import AlertChangeKind, report_job_id
from trellis.engine.errors import IdReserved
from trellis.engine.jobs import (
    DERIVING_ROLES,
    REPORT_ID_PATTERN,
    RESERVED_ID_MARKS,
    RESERVED_ID_PATTERN,
    Epoch,
    JobId,
    NewJob,
    Submitted,
)
from trellis.engine.records import JobFilter
from trellis.lifecycles import LIFECYCLES, Role, Trigger

DERIVED = (
    *derived_ids("S", SUFFIX),
    *derived_ids("S", ".r1"),
    *derived_ids("x" * 200, ".r12"),
    derived_ids("S", ".q-1f0a9b")[0],
    wire_id(JobId("S"), Epoch(3)),
)
ORDINARY = ("S.cc", "S.c.d", "c", "r1", "S.rx", "S.r", "S@", "S@x", "S-q-1f", "S.q-", "S@1.2", "S.C")


def _submitters() -> list[tuple[str, Role]]:
    """Every lifecycle with each role that may submit there."""
    found = [(one.name, one.pull(None, Trigger.SUBMIT)) for one in LIFECYCLES.values()]
    return [(name, role) for name, submit in found if submit is not None for role in sorted(submit.actors)]


@pytest.mark.oldest_server
@pytest.mark.requirement("BUS-7", "BUS-11")
@pytest.mark.parametrize("keyed", [False, True], ids=["plain", "keyed"])
async def test_a_derived_id_is_refused_to_everybody_but_the_role_that_derives_it(rig: Rig, *, keyed: bool):
    for lifecycle, role in _submitters():
        if DERIVING_ROLES.get(lifecycle) is role:
            continue
        for job_id in DERIVED:
            job = NewJob(job_id=JobId(job_id), type="work", lifecycle=lifecycle, id_is_given=keyed)
            with pytest.raises(IdReserved, match="choose another id"):
                await rig.ledger.submit(actor(role), [job])
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == (), "nothing was stored"


@pytest.mark.requirement("BUS-7", "D36")
async def test_the_role_that_derives_ids_may_use_them_and_a_repeat_is_the_same_job(rig: Rig):
    reconciler = actor(Role.RECONCILER)
    jobs = [
        NewJob(job_id=JobId(job_id), type="t", lifecycle="bus-job", id_is_given=True, fingerprint=job_id.encode())
        for job_id in DERIVED
    ]
    assert await rig.ledger.submit(reconciler, jobs) == [Submitted(job_id=job.job_id, created=True) for job in jobs]
    by_others = await rig.ledger.submit(actor(Role.GATEWAY), jobs)
    assert by_others == [Submitted(job_id=job.job_id, created=False) for job in jobs], "it is there: nothing is made"


async def test_the_id_of_an_alerts_report_is_given_by_the_control_plane_only(rig: Rig):
    alert_id = "alert-b0dc72e7-42f2-4b48-9ed2-d3c9e29342a1"
    second = report_job_id(alert_id, AlertChangeKind.RAISED, "trellis.alert.apprise-2")
    with pytest.raises(IdReserved, match="choose another id"):
        await rig.ledger.submit(SUBMITTER, [NewJob(job_id=second, type="work", id_is_given=True)])
    with pytest.raises(IdReserved, match="choose another id"):
        await rig.ledger.submit(SUBMITTER, [NewJob(job_id=one, type="work") for one in (JobId("plain"), second)])
    job_id = report_job_id(alert_id, AlertChangeKind.RESOLVED, "trellis.alert.webhook")
    with pytest.raises(IdReserved, match="choose another id"):
        await rig.ledger.submit(SUBMITTER, [NewJob(job_id=job_id, type="work", id_is_given=True)])
    control_plane = actor(Role.CONTROL_PLANE)
    (made,) = await rig.ledger.submit(control_plane, [NewJob(job_id=job_id, type="trellis.alert.webhook")])
    assert made == Submitted(job_id=job_id, created=True)


@settings(deadline=None, max_examples=50)
@given(st.from_regex(RESERVED_ID_PATTERN) | st.from_regex(REPORT_ID_PATTERN))
def test_every_reserved_id_contains_what_many_ids_are_searched_for(job_id: str):
    assert any(mark in job_id for mark in RESERVED_ID_MARKS)


async def test_ids_similar_to_reserved_ids_are_accepted(rig: Rig):
    jobs = [NewJob(job_id=JobId(job_id), type="work", id_is_given=True) for job_id in ORDINARY]
    answers = await rig.ledger.submit(SUBMITTER, jobs)
    assert [isinstance(one, Submitted) and one.created for one in answers] == [True] * len(ORDINARY)


@pytest.mark.requirement("BUS-11")
async def test_submit_with_one_reserved_job_id_stores_no_job(rig: Rig):
    jobs = [NewJob(job_id=JobId(job_id), type="work") for job_id in ("first", "S.c", "last")]
    for group in (jobs, [replace(job, id_is_given=True) for job in jobs]):
        with pytest.raises(IdReserved):
            await rig.ledger.submit(SUBMITTER, group)
    assert (await rig.ledger.jobs(JobFilter(), limit=5)).jobs == ()


@pytest.mark.only("postgres")
@pytest.mark.oldest_server
@pytest.mark.requirement("D55")
async def test_sql_cannot_take_a_derived_id_either(rig: Rig):
    shell = await asyncpg.connect(rig.app_url)
    try:
        await shell.execute("SELECT trellis.type_id('work')")
        for job_id in DERIVED:
            with pytest.raises(asyncpg.PostgresError, match="choose another id"):
                await shell.fetchval("SELECT trellis.submit_job('work', p_job_id => $1)", job_id)
        for job_id in ORDINARY:
            assert await shell.fetchval("SELECT trellis.submit_job('work', p_job_id => $1)", job_id) == job_id
    finally:
        await shell.close()
