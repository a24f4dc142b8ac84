"""What an application declares about a job type holds for every submit that does not choose an option by name (D66)."""

from dataclasses import replace

import pytest

from tests.ledgers.conformance.rig import ADMIN, SUBMITTER, WORKER, Rig, actor
from trellis.engine.errors import ConcurrencyKeyMissing, NotAllowed, OptionInvalid
from trellis.engine.jobs import DECLARED_MAX, ChosenOptions, JobId, NewJob, Priority, Submitted, TypeOptions
from trellis.engine.records import Job, JobPlace
from trellis.lifecycles import Role

FETCH = TypeOptions(
    type="http.fetch",
    priority=Priority.CRITICAL,
    max_attempts=4,
    max_deaths=1,
    deadline_s=3600.0,
    concurrency_limit=2,
    compensation="http.forget",
)
KEY = "user:host"
WAYS = pytest.mark.parametrize("key", [None, KEY], ids=["plain", "keyed"])
"""The two ways that jobs go into a ledger."""


async def stored(rig: Rig, **named: object) -> Job:
    job_id = await rig.submit_one(type="http.fetch", **named)
    job = await rig.ledger.job(job_id)
    assert job is not None
    return job


def seconds(job: Job) -> float | None:
    return None if job.deadline_at is None else (job.deadline_at - job.created_at).total_seconds()


@pytest.mark.requirement("D66")
async def test_declared_options_hold_for_every_job_of_a_call(rig: Rig):
    await rig.ledger.declare_types(WORKER, [replace(FETCH, deadline_s=None)])
    for chosen, attempts in ((0, 4), (ChosenOptions.MAX_ATTEMPTS, 9)):
        for job_id in await rig.submit(3, type="http.fetch", chosen=chosen, max_attempts=9):
            job = await rig.job(job_id)
            assert (job.priority, job.max_attempts, job.deadline_at) == (Priority.CRITICAL, attempts, None)


@pytest.mark.requirement("D66")
async def test_jobs_of_a_call_keep_their_links_when_their_type_declares_a_deadline(rig: Rig):
    await rig.ledger.declare_types(WORKER, [FETCH])
    links = {"correlation_id": "order-7", "trace": "00-1", "parent_id": JobId("cause")}
    for job_id in await rig.submit(2, type="http.fetch", chosen=0, **links):
        job = await rig.job(job_id)
        assert (job.correlation_id, job.trace, job.parent_id, seconds(job)) == (*links.values(), 3600.0)


@WAYS
@pytest.mark.requirement("D66")
async def test_missing_submit_options_come_from_the_declared_type(rig: Rig, key: str | None):
    await rig.ledger.declare_types(WORKER, [FETCH])
    job = await stored(rig, chosen=0, concurrency_key=key)
    assert (job.priority, job.max_attempts, seconds(job)) == (Priority.CRITICAL, 4, 3600.0)
    assert job.spared == 0


@WAYS
@pytest.mark.requirement("D66")
async def test_a_submit_overrides_by_name_and_only_what_it_names(rig: Rig, key: str | None):
    await rig.ledger.declare_types(WORKER, [FETCH])
    named = {"priority": Priority.BATCH, "max_attempts": 9, "deadline_s": 60.0}
    bits = {
        "priority": ChosenOptions.PRIORITY,
        "max_attempts": ChosenOptions.MAX_ATTEMPTS,
        "deadline_s": ChosenOptions.DEADLINE,
    }
    for name, bit in bits.items():
        job = await stored(rig, chosen=bit, concurrency_key=key, **named)
        told = {"priority": job.priority, "max_attempts": job.max_attempts, "deadline_s": seconds(job)}
        declared = {"priority": Priority.CRITICAL, "max_attempts": 4, "deadline_s": 3600.0}
        assert told == declared | {name: named[name]}
    whole = await stored(rig, concurrency_key=key, **named)
    assert (whole.priority, whole.max_attempts, seconds(whole)) == (Priority.BATCH, 9, 60.0)
    without = await stored(rig, chosen=ChosenOptions.DEADLINE, concurrency_key=key)
    assert without.deadline_at is None, "a submit may say that there is no deadline"


@pytest.mark.requirement("D66", "D49")
async def test_the_declared_limit_holds_for_the_keys_that_submits_give(rig: Rig):
    await rig.ledger.declare_types(WORKER, [FETCH])
    for _ in range(3):
        await stored(rig, chosen=ChosenOptions.CONCURRENCY_KEY, concurrency_key=KEY)
    for _ in range(2):
        await stored(
            rig, chosen=ChosenOptions.CONCURRENCY_KEY | ChosenOptions.CONCURRENCY_LIMIT, concurrency_key="user:other"
        )
    held = await rig.claim(10, types=("http.fetch",))
    assert len(held) == 2 + 1


@pytest.mark.requirement("D66")
async def test_a_death_of_a_worker_counts_as_the_type_declares_it(rig: Rig):
    await rig.ledger.declare_types(WORKER, [FETCH])
    job = await stored(rig, chosen=0)
    await rig.claim_one(types=("http.fetch",))
    await rig.lose_lease()
    assert await rig.state(job.job_id) == "dead_lettered", "max_deaths is 1"


@WAYS
@pytest.mark.requirement("D66")
async def test_a_type_whose_application_computes_the_key_takes_no_job_without_one(rig: Rig, key: str | None):
    await rig.ledger.declare_types(WORKER, [replace(FETCH, keyed=True)])
    before = rig.new_job(type="http.fetch", chosen=0, idempotency_key=key and "once", fingerprint=b"1")
    beside = rig.new_job(type="other", chosen=0)
    with pytest.raises(ConcurrencyKeyMissing) as caught:
        await rig.ledger.submit(SUBMITTER, [beside, before])
    assert caught.value.data["type"] == "http.fetch"
    assert "--app" in str(caught.value)
    assert "--concurrency-key" in str(caught.value)
    assert await rig.ledger.job(beside.job_id) is None
    for chosen in (ChosenOptions.CONCURRENCY_KEY, ChosenOptions.ALL):
        job = await stored(rig, chosen=chosen, concurrency_key=key)
        assert job.concurrency_key == key, "the application's function may say that a job has none"


@pytest.mark.requirement("D66", "DJ-5")
async def test_a_repeated_submit_is_answered_also_when_its_type_needs_a_key_by_now(rig: Rig):
    once = rig.new_job(type="http.fetch", chosen=0, idempotency_key="once", fingerprint=b"1")
    await rig.ledger.submit(SUBMITTER, [once])
    await rig.ledger.declare_types(WORKER, [replace(FETCH, keyed=True)])
    again = replace(once, job_id=rig.new_id())
    assert await rig.ledger.submit(SUBMITTER, [again]) == [Submitted(job_id=once.job_id, created=False)]


@pytest.mark.requirement("D66")
async def test_the_last_declaration_holds_unless_only_new_types_are_declared(rig: Rig):
    await rig.ledger.declare_types(WORKER, [FETCH, TypeOptions(type="other")])
    await rig.ledger.declare_types(ADMIN, [replace(FETCH, max_attempts=7)])
    assert await rig.ledger.declared_types("http.fetch") == [replace(FETCH, max_attempts=7)]
    await rig.ledger.declare_types(WORKER, [FETCH, TypeOptions(type="third")], only_new=True)
    named = {one.type: one.max_attempts for one in await rig.ledger.declared_types()}
    assert named == {"http.fetch": 7, "other": 5, "third": 5}
    another = await rig.open_another()
    await another.submit(SUBMITTER, [NewJob(job_id=JobId("there"), type="http.fetch", chosen=0)])
    assert (await rig.job(JobId("there"))).max_attempts == 7, "another process sees it at once"


async def test_submitter_declares_no_type_options_and_declarations_are_bounded(rig: Rig):
    with pytest.raises(NotAllowed):
        await rig.ledger.declare_types(actor(Role.SUBMITTER), [FETCH])
    with pytest.raises(OptionInvalid):
        await rig.ledger.declare_types(WORKER, [FETCH] * (DECLARED_MAX + 1))
    assert await rig.ledger.declared_types() == []
    job = await stored(rig, chosen=0)
    assert (job.priority, job.max_attempts, job.place) == (Priority.BATCH, 5, JobPlace.READY)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": 10**9},
        {"max_deaths": -1},
        {"deadline_s": -5.0},
        {"concurrency_limit": 0},
        {"compensation": "x" * 100_000},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_options_that_no_submit_may_have_are_not_declared(rig: Rig, wrong: dict[str, object]):
    with pytest.raises(OptionInvalid, match=next(iter(wrong))):
        await rig.ledger.declare_types(WORKER, [replace(FETCH, **wrong)])  # type: ignore[arg-type]
    assert await rig.ledger.declared_types() == []


@pytest.mark.only("postgres")
@pytest.mark.requirement("D66")
async def test_the_sql_function_takes_what_the_type_declares(rig: Rig):
    assert rig.admin_sql is not None
    await rig.ledger.declare_types(WORKER, [FETCH])
    await rig.admin_sql("select trellis.submit_job('http.fetch', p_job_id => 'as-declared')")
    await rig.admin_sql(
        "select trellis.submit_job('http.fetch', p_job_id => 'named', p_max_attempts => 2, p_priority => 'batch')"
    )
    declared, named = await rig.job(JobId("as-declared")), await rig.job(JobId("named"))
    assert (declared.priority, declared.max_attempts, seconds(declared)) == (Priority.CRITICAL, 4, 3600.0)
    assert (named.priority, named.max_attempts, seconds(named)) == (Priority.BATCH, 2, 3600.0)
    await rig.ledger.declare_types(WORKER, [replace(FETCH, keyed=True)])
    with pytest.raises(Exception, match="concurrency key"):
        await rig.admin_sql("select trellis.submit_job('http.fetch')")
    await rig.admin_sql("select trellis.submit_job('http.fetch', p_job_id => 'keyed', p_concurrency_key => 'host')")
    assert (await rig.job(JobId("keyed"))).concurrency_key == "user:host"
