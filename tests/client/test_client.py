"""The caller's side on a real ledger."""

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine
from pathlib import Path
from typing import Any

import apsw
import pytest

from trellis.app.wiring import SystemClock, connect, make_development_key, new_id
from trellis.auth.principals import Principal
from trellis.client import Trellis
from trellis.engine.errors import (
    IdempotencyMismatch,
    IdReserved,
    InvalidTransition,
    JobCancelled,
    JobDeadLettered,
    JobFailed,
    JobNotFound,
    NotAllowed,
    OptionInvalid,
    PayloadInvalid,
    PermanentError,
    UnknownJobType,
)
from trellis.engine.jobs import SUBMIT_MAX, Moved, NotMoved
from trellis.engine.records import JobFilter
from trellis.lifecycles import Role
from trellis.testing import Sandbox, sandbox
from trellis.worker.app import App
from trellis.worker.context import Context
from trellis.worker.payloads import Undo
from trellis.worker.requests import BatchJob

app = App()
undone: list[str] = []


@app.job("double", compensation="undo.double")
async def double(ctx: Context, n: int) -> int:
    return 2 * n


@app.job("undo.double")
async def undo_double(ctx: Context, undo: Undo[int, int]) -> None:
    assert undo.result == 2 * undo.payload
    undone.append(undo.job_id)


@app.job("broken")
async def broken(ctx: Context) -> None:
    raise PermanentError("it will never work")


@app.job("dead", max_attempts=1)
async def dead(ctx: Context) -> None:
    raise RuntimeError("it went wrong")


@pytest.fixture
async def box(tmp_path: Path) -> AsyncGenerator[Sandbox]:
    undone.clear()
    async with sandbox(app, f"sqlite:///{tmp_path / 'ledger.db'}") as opened:
        yield opened


def as_roles(box: Sandbox, *roles: Role) -> Trellis:
    principal = Principal(name="somebody", roles=frozenset(roles))
    return Trellis(box.ledger, principal, clock=SystemClock(), new_id=new_id, app=app)


async def test_a_result_is_waited_for_and_typed(box: Sandbox):
    job = await box.submit("double", 21)
    waiting = asyncio.ensure_future(job.result(timeout_s=30))
    await box.run_until_idle()
    assert await waiting == 42
    assert (await job.status()).state == "succeeded"


async def test_waiting_ends_when_the_time_is_over(box: Sandbox):
    job = await box.submit("double", 1)
    with pytest.raises(TimeoutError, match="queued"):
        await job.result(timeout_s=0.05)


@pytest.mark.parametrize(
    "type_,error,says", [("broken", JobFailed, "never work"), ("dead", JobDeadLettered, "went wrong")]
)
async def test_a_job_that_did_not_succeed_says_why(box: Sandbox, type_: str, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        await box.run(type_)


async def test_a_cancelled_job_has_no_result(box: Sandbox):
    job = await box.submit("double", 1)
    cancelled = await job.cancel(cause="changed my mind")
    assert cancelled.state == "cancelled"
    with pytest.raises(JobCancelled, match="changed my mind"):
        await job.result()
    with pytest.raises(InvalidTransition, match="cancelled"):
        await job.cancel()


@pytest.mark.requirement("DJ-5")
async def test_the_same_key_is_the_same_job_and_another_request_is_refused(box: Sandbox):
    submits = [box.submit("double", 5, idempotency_key="k") for _ in range(100)]
    jobs = await asyncio.gather(*submits)
    assert len({job.id for job in jobs}) == 1
    assert [job.created for job in jobs].count(True) == 1
    with pytest.raises(IdempotencyMismatch, match="'k'"):
        await box.submit("double", 6, idempotency_key="k")


async def test_a_given_id_is_kept_and_submitting_it_again_finds_the_job(box: Sandbox):
    first = await box.submit("double", 5, job_id="order-7")
    again = await box.submit("double", 5, job_id="order-7")
    assert (first.id, first.created, again.id, again.created) == ("order-7", True, "order-7", False)
    with pytest.raises(IdempotencyMismatch):
        await box.submit("double", 6, job_id="order-7")


@pytest.mark.requirement("BUS-11")
async def test_an_id_that_the_engine_derives_is_refused(box: Sandbox):
    for role in (Role.SUBMITTER, Role.WORKER, Role.GATEWAY, Role.ORCHESTRATOR):
        with pytest.raises(IdReserved, match="choose another id"):
            await as_roles(box, role).submit("double", 1, job_id="theirs.c")
    assert (await box.ledger.jobs(JobFilter(), limit=5)).jobs == ()


async def test_submit_many_checks_all_jobs_and_submits_in_chunks(box: Sandbox):
    jobs = await box.trellis.submit_many("double", range(SUBMIT_MAX + 3))
    assert len({job.id for job in jobs}) == SUBMIT_MAX + 3
    (depth,) = await box.ledger.queues()
    assert depth.ready == SUBMIT_MAX + 3
    with pytest.raises(OptionInvalid, match="one job"):
        await box.trellis.submit_many("double", [1, 2], idempotency_key="k")


async def test_bad_input_writes_nothing(box: Sandbox):
    attempts: list[tuple[Coroutine[Any, Any, Any], type[Exception]]] = [
        (box.submit("unknown", 1), UnknownJobType),
        (box.submit("double", "not a number"), PayloadInvalid),
        (box.submit("double", 1, delay_s=-1), OptionInvalid),
        (box.submit("double", 1, deadline_s=0), OptionInvalid),
        (box.trellis.submit_many("double", [1, "two"]), PayloadInvalid),
    ]
    for attempt, refusal in attempts:
        with pytest.raises(refusal):
            await attempt
    assert (await box.ledger.jobs(JobFilter(), limit=10)).jobs == ()


@pytest.mark.requirement("DJ-17", "D36")
async def test_a_chain_is_undone_newest_first_and_each_job_once(box: Sandbox):
    jobs = []
    for n in range(3):
        jobs.append(await box.submit("double", n))
        await box.run_until_idle()
        await box.advance(1)
    undoing = asyncio.ensure_future(box.trellis.compensate(*(job.id for job in jobs), timeout_s=30))
    while not undoing.done():
        await box.run_until_idle()
    handles = await undoing
    assert undone == [job.id for job in reversed(jobs)]
    again = await box.trellis.compensate(jobs[0].id)
    assert again[0].id == handles[2].id
    for job in jobs:
        assert (await job.events())[-1].type == "job_compensated"


@pytest.mark.requirement("DJ-17")
async def test_compensate_requires_a_succeeded_job_with_a_compensation(box: Sandbox):
    waiting = await box.submit("double", 1)
    with pytest.raises(OptionInvalid, match="only succeeded"):
        await box.trellis.compensate(waiting.id)
    with pytest.raises(JobNotFound):
        await box.trellis.compensate("nobody")


async def test_operators_requeue_pause_and_resume(box: Sandbox):
    job = await box.submit("broken")
    await box.run_until_idle()
    with pytest.raises(JobNotFound, match="'nobody'"):
        await box.trellis.requeue([job.id, "nobody"])
    assert (await job.status()).generation == 0, "one unknown id: no job is requeued"
    (moved,) = await box.trellis.requeue([job.id], cause="fixed")
    assert isinstance(moved, Moved)
    (refused,) = await box.trellis.requeue([job.id])
    assert isinstance(refused, NotMoved)
    assert (await job.status()).generation == 1
    await box.trellis.pause("broken")
    await box.run_until_idle()
    assert (await job.status()).state == "queued"
    await box.trellis.resume("broken")
    await box.run_until_idle()
    assert (await job.status()).state == "failed"


async def test_the_feed_yields_every_event_once_and_goes_on_from_a_position(box: Sandbox):
    await box.run("double", 1)
    seen = [event.id async for page in box.trellis.feed(follow=False) for event in page.events]
    position = [page.position async for page in box.trellis.feed(follow=False)][-1]
    job = await box.submit("double", 2)
    later = [event.id async for page in box.trellis.feed(position, follow=False) for event in page.events]
    assert len(seen) == len(set(seen)) == 4
    assert later == [f"{job.id}-1"]


@pytest.mark.requirement("D46")
async def test_client_refuses_a_forbidden_call_before_the_ledger_is_called(box: Sandbox):
    job = await box.submit("broken")
    submitter, nobody = as_roles(box, Role.SUBMITTER), as_roles(box, Role.PROJECTOR)
    for refused in (submitter.requeue([job.id]), submitter.pause("broken"), nobody.cancel(job.id)):
        with pytest.raises(NotAllowed):
            await refused
    with pytest.raises(NotAllowed, match="submit jobs"):
        await nobody.submit("double", 1)
    await submitter.submit("double", 1)


@pytest.mark.requirement("D46")
async def test_a_local_file_makes_an_operator_only_with_its_private_key(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    async with connect(url) as trellis:
        job = await trellis.submit("any.type", {"n": 1})
        with pytest.raises(NotAllowed, match=r"connect\(…, operator=True\) adds control-plane"):
            await trellis.requeue([job.id])
    with pytest.raises(NotAllowed, match="cannot be read"):
        await connect(url, operator=True).__aenter__()
    key = make_development_key(url)
    assert key.stat().st_mode & 0o777 == 0o600
    async with connect(url, operator=True) as trellis:
        await trellis.pause("any.type")
    key.chmod(0o644)
    with pytest.raises(NotAllowed, match="chmod 600"):
        await connect(url, operator=True).__aenter__()


@pytest.mark.parametrize("end,jobs", [("COMMIT", 1), ("ROLLBACK", 0)])
async def test_a_submit_in_the_callers_own_transaction_shares_its_fate(
    box: Sandbox, tmp_path: Path, end: str, jobs: int
):
    connection = apsw.Connection(str(tmp_path / "ledger.db"))
    connection.execute("BEGIN IMMEDIATE")
    handle = await box.trellis.submit_on(connection, "double", 4)
    connection.execute(end)
    connection.close()
    assert len((await box.ledger.jobs(JobFilter(), limit=10)).jobs) == jobs
    await box.run_until_idle()
    if jobs:
        assert await handle.result() == 8


async def test_arguments_of_the_wrong_shape_are_refused_by_name(box: Sandbox):
    client: Any = box.trellis
    one = BatchJob("double", 1)
    calls: list[tuple[Coroutine[Any, Any, Any], str]] = [
        (client.submit_many("double", 3), "payloads is 3: it must be a list of payloads"),
        (client.submit_many("double", "abc"), "payloads is 'abc': it must be a list of payloads"),
        (client.submit_batch([("double", 1)], on_complete=one), "jobs[0] is ('double', 1): it must be a BatchJob"),
        (client.submit_batch(one, on_complete=one), "it must be a list of jobs"),
        (client.submit_batch([one], on_complete="double"), "on_complete is 'double': it must be a BatchJob"),
        (client.preview_change("cancel", {"type": "double"}), "where is {'type': 'double'}: it must be a filter"),
        (client.change_jobs("cancel", {"type": "double"}), "it must be a list of job ids, or a ChangeFilter"),
        (client.change_jobs("cancel", "some-job"), "jobs is 'some-job': it must be a list of job ids"),
        (client.requeue("some-job"), "jobs is 'some-job': it must be a list of job ids, or a JobFilter"),
    ]
    for call, says in calls:
        with pytest.raises(OptionInvalid, match=re.escape(says)):
            await call
