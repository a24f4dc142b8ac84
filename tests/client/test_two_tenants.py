"""Two tenants on one ledger from Python: no verb of a connection reaches what is another's (D62)."""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from trellis.app.wiring import new_id
from trellis.auth.principals import Principal, recorded_name
from trellis.client import JobHandle, Trellis
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.engine.records import Job
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.operations.job_changes import ChangeFilter
from trellis.testing import FakeClock
from trellis.worker.app import App
from trellis.worker.requests import BatchJob


def as_token(name: str, *roles: Role, tenant: str | None = None) -> Principal:
    """Whom a token of this name names."""
    return Principal(
        name=recorded_name(name, tenant=tenant),
        roles=frozenset(roles or {Role.SUBMITTER}),
        by_token=True,
        tenant=tenant,
    )


def trellis_of(ledger: Ledger, principal: Principal) -> Trellis:
    return Trellis(ledger, principal, clock=FakeClock(), new_id=new_id)


@dataclass(frozen=True, kw_only=True)
class World:
    """Two callers of one ledger, and a job of one of them as it was before."""

    ledger: Ledger
    owner: Trellis
    stranger: Trellis
    job: Job


@asynccontextmanager
async def world(owner: Principal, stranger: Principal) -> AsyncGenerator[World]:
    ledger = await open_ledger("sqlite:///:memory:")
    try:
        own, other = trellis_of(ledger, owner), trellis_of(ledger, stranger)
        handle = await own.submit("work", {"secret": 1}, idempotency_key="order-4711", concurrency_key="database")
        yield World(ledger=ledger, owner=own, stranger=other, job=await handle.status())
    finally:
        await ledger.close()


async def _feed(one: World) -> None:
    told = [event.job_id async for page in one.stranger.feed(follow=False) for event in page.events]
    assert one.job.job_id not in told
    assert one.job.job_id in [event.job_id async for page in one.owner.feed(follow=False) for event in page.events]
    raise NotAllowed(role="submitter", action="follow events", reason="nothing of it is there", rule="events.read")


async def _submits(one: World) -> None:
    """The same names are other keys to another caller; what is linked to another's job is refused."""
    mine = await one.stranger.submit("work", {"other": 2}, idempotency_key="order-4711", concurrency_key="database")
    assert (mine.created, mine.id != one.job.job_id) == (True, True)
    if one.stranger.principal.tenant is not None:
        assert (await mine.status()).concurrency_key != one.job.concurrency_key
    with pytest.raises(NotAllowed):
        await one.stranger.submit("work", compensates=one.job.job_id)
    await one.stranger.submit("work", parent_id=one.job.job_id)


async def _many(one: World) -> None:
    await one.stranger.submit_many("work", [1, 2], parent_id=one.job.job_id)


async def _batch(one: World) -> None:
    await one.stranger.submit_batch([BatchJob("work", parent_id=one.job.job_id)], on_complete=BatchJob("work"))


async def _handle(one: World) -> None:
    await one.stranger.handle(one.job.job_id).status()


async def _read_result(_: World) -> None:
    """It reads bytes that the caller has."""
    raise NotAllowed(role="submitter", action="read", reason="it reaches nothing", rule="jobs.read")


async def _filtered(one: World) -> None:
    """A filter passes over the jobs of others, in a preview as in a change."""
    where = ChangeFilter(type=one.job.type)
    seen = await one.stranger.preview_change("cancel", where)
    assert one.job.job_id not in [job.job_id for job in seen.examples]
    assert (await one.stranger.change_jobs("cancel", where)).taken == seen.matched
    assert (await one.owner.preview_change("cancel", where)).matched == 1
    await one.stranger.change_jobs("discard", where)


Verb = Callable[[World], Awaitable[Any]]
VERBS: dict[str, Verb] = {
    "submit": _submits,
    "submit_many": _many,
    "submit_batch": _batch,
    "submit_on": lambda one: one.stranger.submit_on(None, "work", parent_id=one.job.job_id),  # type: ignore[arg-type]
    "submit_topic": lambda one: one.stranger._admitted(_step(one)),
    "handle": _handle,
    "job": lambda one: one.stranger.job(one.job.job_id),
    "events": lambda one: one.stranger.events(one.job.job_id),
    "signals": lambda one: one.stranger.signals(one.job.job_id),
    "wait": lambda one: one.stranger.wait(one.job.job_id, 0),
    "why": lambda one: one.stranger.why(one.job),
    "feed": _feed,
    "read_result": _read_result,
    "cancel": lambda one: one.stranger.cancel(one.job.job_id),
    "signal": lambda one: one.stranger.signal(one.job.job_id, "go"),
    "dead_letter": lambda one: one.stranger.dead_letter(one.job.job_id, reason="x"),
    "declare": lambda one: one.stranger.declare(App()),
    "requeue": lambda one: one.stranger.requeue([one.job.job_id]),
    "change_jobs": lambda one: one.stranger.change_jobs("cancel", [one.job.job_id]),
    "preview_change": _filtered,
    "compensate": lambda one: one.stranger.compensate(one.job.job_id, type_="undo"),
    "pause": lambda one: one.stranger.pause("work"),
    "resume": lambda one: one.stranger.resume("work"),
    "leave_behind": lambda one: one.stranger.leave_behind("projector"),
}
HANDLE_VERBS: dict[str, Verb] = {
    "status": lambda one: one.stranger.handle(one.job.job_id).status(),
    "events": lambda one: one.stranger.handle(one.job.job_id).events(),
    "signals": lambda one: one.stranger.handle(one.job.job_id).signals(),
    "artifacts": lambda one: one.stranger.handle(one.job.job_id).artifacts(),
    "result": lambda one: one.stranger.handle(one.job.job_id).result(0),
    "cancel": lambda one: one.stranger.handle(one.job.job_id).cancel(),
    "signal": lambda one: one.stranger.handle(one.job.job_id).signal("go"),
}
STRANGERS = {
    "another tenant": as_token("iryna", tenant="globex"),
    "a tenant's operator": as_token("iryna", *(set(Role) - {Role.NLM_BACKEND}), tenant="globex"),
    "another name": as_token("mallory"),
}


def _step(one: World) -> Any:
    from trellis.bus.requests import JobRequest, new_bus_job
    from trellis.bus.topics import Topics

    said = {"job_id": "step", "topic": "job.x", "parent_job_id": one.job.job_id, "workflow_id": "w", "step_index": 1}
    return new_bus_job(JobRequest.checked(said), Topics(), trace_id="")


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")}


def test_every_verb_has_a_case_here():
    assert (set(VERBS), set(HANDLE_VERBS)) == (public(Trellis), public(JobHandle))


@pytest.mark.requirement("D62", "AUTH-1")
@pytest.mark.parametrize("stranger", STRANGERS)
async def test_no_verb_reaches_a_job_of_another(stranger: str):
    principal = STRANGERS[stranger]
    owner = as_token("iryna", tenant="acme" if principal.tenant else None)
    async with world(owner, principal) as one:
        before = await one.owner.events(one.job.job_id)
        for name, verb in {**VERBS, **{f"handle.{name}": verb for name, verb in HANDLE_VERBS.items()}}.items():
            with pytest.raises(NotAllowed):
                assert await verb(one) is None, name
            assert await one.ledger.job(one.job.job_id) == one.job, name
        assert await one.owner.events(one.job.job_id) == before


@pytest.mark.requirement("D62")
async def test_missing_job_is_refused_like_a_foreign_job():
    async with world(as_token("iryna"), as_token("mallory")) as one:
        told = set()
        for job_id in (one.job.job_id, "not-there"):
            for verb in (one.stranger.job, one.stranger.cancel, one.stranger.events):
                with pytest.raises(NotAllowed) as refusal:
                    await verb(job_id)
                told.add((verb.__name__, str(refusal.value)))
        assert len(told) == 3


@pytest.mark.requirement("D62", "D43")
async def test_the_owner_and_the_operator_cancel_each_in_its_own_role():
    operator = as_token("olha", Role.SUBMITTER, Role.CONTROL_PLANE)
    async with world(as_token("iryna"), operator) as one:
        assert (await one.stranger.cancel(one.job.job_id, "hard")).state == "cancelled"
        assert (await one.ledger.events(one.job.job_id))[-1].role is Role.CONTROL_PLANE
        own = await one.owner.submit("work")
        await own.cancel("hard")
        assert (await own.events())[-1].role is Role.SUBMITTER
    async with world(as_token("iryna"), as_token("olha", Role.OWNER)) as one:
        with pytest.raises(NotAllowed):
            await one.stranger.cancel(one.job.job_id, "hard")
    async with world(as_token("iryna"), as_token("iryna", Role.OWNER)) as one:
        assert (await one.stranger.cancel(one.job.job_id, "hard")).state == "cancelled"
        assert (await one.ledger.events(one.job.job_id))[-1].role is Role.SUBMITTER


@pytest.mark.requirement("D62")
async def test_without_a_token_whoever_opens_the_file_has_all_of_it():
    local = Principal(name="client@host:2", roles=frozenset({Role.WORKER, Role.SUBMITTER}))
    async with world(as_token("iryna"), local) as one:
        assert (await one.stranger.job(one.job.job_id)).job_id == one.job.job_id
        assert (await one.stranger.cancel(JobId(one.job.job_id), "hard")).state == "cancelled"
