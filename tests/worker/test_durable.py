"""Durable functions: steps, waits and children of a handler, which survive every restart of it."""

import asyncio
import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.worker.conftest import Stand
from trellis.engine.errors import OptionInvalid, PermanentError, TransientError
from trellis.engine.jobs import Actor, JobId, ReasonCode, RequestId
from trellis.engine.records import JobFilter
from trellis.engine.retry_policy import RetryPolicy
from trellis.lifecycles import Role
from trellis.worker.app import App
from trellis.worker.context import UNAWAITED_LOOK, Context, SyncContext
from trellis.worker.durable import ChildFailed, ChildHandle, DurableStepFailed, SignalTimeout

SUBMITTER = Actor(role=Role.SUBMITTER, name="test")
AT_ONCE = RetryPolicy(base_s=0.0, max_s=0.0)


@dataclass(frozen=True)
class Part:
    """What a child returns."""

    number: int
    twice: int


class Shop:
    """An application with a few workflows, which counts what happens outside."""

    def __init__(self) -> None:
        self.app = App()
        self.effects: Counter[str] = Counter()
        self.attempts = 0
        app = self.app

        @app.job("part", max_attempts=1)
        async def part(ctx: Context, number: int) -> Part:
            self.effects[f"part {number}"] += 1
            if number < 0:
                raise ValueError("negative")
            return Part(number, 2 * number)


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def signal(stand: Stand, job_id: str, name: str, body: bytes = b"null") -> None:
    await stand.ledger.send_signal(SUBMITTER, JobId(job_id), name, body)


async def test_a_step_runs_once_however_often_its_handler_begins(stand: Stand, shop: Shop):
    @shop.app.job("order", retry=AT_ONCE)
    async def order(ctx: Context, item: str) -> list[Any]:
        shop.attempts += 1

        def charge(amount: int, *, currency: str) -> dict[str, Any]:
            shop.effects["charge"] += 1
            return {"amount": amount, "in": currency}

        async def ship() -> datetime:
            shop.effects["ship"] += 1
            return datetime(2026, 1, 1, tzinfo=UTC)

        paid = await ctx.step("charge", charge, 7, currency="EUR")
        if shop.attempts == 1:
            raise TransientError("once")
        return [paid, await ctx.step("ship", ship), item]

    handle = await stand.submit("order", "violin")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == [{"amount": 7, "in": "EUR"}, "2026-01-01T00:00:00Z", "violin"]
    assert (shop.effects, shop.attempts) == ({"charge": 1, "ship": 1}, 2)


async def test_a_sleeping_job_holds_nothing_and_goes_on_in_time(stand: Stand, shop: Shop):
    @shop.app.job("reminder")
    async def reminder(ctx: Context) -> str:
        await ctx.step("first", lambda: shop.effects.update(["first"]))
        await ctx.sleep(3600)
        await ctx.step("second", lambda: shop.effects.update(["second"]))
        return "done"

    handle = await stand.submit("reminder")
    await stand.run_until_idle(shop.app)
    job = await stand.job(handle)
    assert (job.state, job.lease_expires_at) == ("suspended", None)
    assert shop.effects == {"first": 1}
    stand.clock.advance(3599)
    await stand.sweep()
    assert (await stand.job(handle)).state == "suspended"
    stand.clock.advance(2)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "done"
    assert shop.effects == {"first": 1, "second": 1}
    assert (await stand.job(handle)).attempt == 1


async def test_sleep_until_a_time_that_has_passed_does_not_wait(stand: Stand, shop: Shop):
    @shop.app.job("late")
    async def late(ctx: Context) -> str:
        await ctx.sleep_until(datetime.now(UTC) - timedelta(days=36500))
        await ctx.sleep(0)
        with pytest.raises(OptionInvalid, match="time zone"):
            await ctx.sleep_until(datetime(2030, 1, 1))  # noqa: DTZ001 - the point of the test
        for call, says in (
            (ctx.sleep, "sleep is '1h': it must be a number of seconds"),
            (ctx.sleep_until, "a datetime"),
        ):
            with pytest.raises(OptionInvalid, match=says):
                await call("1h")  # type: ignore[arg-type]
        return "at once"

    handle = await stand.submit("late")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "at once"


async def test_gather_returns_the_results_of_children_with_their_types(stand: Stand, shop: Shop):
    @shop.app.job("parent")
    async def parent(ctx: Context) -> int:
        parts = [ctx.spawn("part", n) for n in range(5)]
        values: list[Part] = await ctx.gather(*parts)
        assert [type(value) for value in values] == [Part] * 5
        alone: ChildHandle[Part] = ctx.spawn("part", 100)
        return sum(value.twice for value in values) + (await alone).twice

    handle = await stand.submit("parent")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == 220
    assert set(shop.effects.values()) == {1}
    children = await stand.ledger.children(JobId(handle.id), since=None, limit=100)
    assert len(children.job_ids) == 6


async def test_a_failed_child_is_a_typed_error(stand: Stand, shop: Shop):
    @shop.app.job("careful")
    async def careful(ctx: Context) -> list[str]:
        bad, good = ctx.spawn("part", -1), ctx.spawn("part", 1)
        with pytest.raises(ChildFailed, match="negative") as failure:
            await ctx.gather(good, bad)
        assert failure.value.job_id == bad.id
        both = await ctx.gather(good, bad, return_exceptions=True)
        return [type(value).__name__ for value in both]

    handle = await stand.submit("careful")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == ["Part", "ChildFailed"]


async def test_an_uncaught_failure_of_a_child_fails_its_parent_until_both_are_requeued(stand: Stand, shop: Shop):
    luck = {"part": -1}

    @shop.app.job("unlucky", max_attempts=1)
    async def unlucky(ctx: Context) -> str:
        if luck["part"] < 0:
            raise ValueError("no luck")
        return "lucky"

    @shop.app.job("whole")
    async def whole(ctx: Context) -> str:
        return await ctx.spawn("unlucky")

    handle = await stand.submit("whole")
    await stand.run_until_idle(shop.app)
    job = await stand.job(handle)
    assert job.state == "failed"
    luck["part"] = 1
    (child,) = (await stand.ledger.children(JobId(handle.id), since=None, limit=9)).job_ids
    admin = Actor(role=Role.CONTROL_PLANE, name="operator")
    for n, job_id in enumerate((child, JobId(handle.id))):
        await stand.ledger.requeue(admin, [job_id], RequestId(f"r{n}"), limit=1, cause="repaired")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "lucky"


async def test_first_returns_the_child_that_ended_first(stand: Stand, shop: Shop):
    @shop.app.job("race")
    async def race(ctx: Context) -> int:
        slow = ctx.spawn("part", 1, delay_s=1000.0)
        quick = ctx.spawn("part", 2)
        winner = await ctx.first(slow, quick)
        assert winner.handle is quick
        return winner.value.twice

    handle = await stand.submit("race")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == 4


async def test_signals_are_read_in_their_order_and_each_once(stand: Stand, shop: Shop):
    @shop.app.job("approval")
    async def approval(ctx: Context) -> list[Any]:
        first = await ctx.wait_signal("vote")
        second = await ctx.wait_signal("vote")
        return [first, second]

    handle = await stand.submit("approval")
    await signal(stand, handle.id, "vote", b'"early"')
    await stand.run_until_idle(shop.app)
    assert (await stand.job(handle)).state == "suspended"
    await signal(stand, handle.id, "other", b'"not this"')
    await signal(stand, handle.id, "vote", b'"late"')
    await stand.run_until_idle(shop.app)
    assert await handle.result() == ["early", "late"]


async def test_waiting_for_a_signal_ends_in_time(stand: Stand, shop: Shop):
    @shop.app.job("impatient")
    async def impatient(ctx: Context) -> str:
        try:
            return await ctx.wait_signal("go", timeout_s=60)
        except SignalTimeout:
            await ctx.sleep(10)
            return f"gave up, then {await ctx.wait_signal('go')}"

    handle = await stand.submit("impatient")
    await stand.run_until_idle(shop.app)
    stand.clock.advance(61)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    await signal(stand, handle.id, "go", b'"came late"')
    assert (await stand.job(handle)).state == "suspended", "it sleeps, and waits for no signal"
    stand.clock.advance(11)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "gave up, then came late"


async def test_a_changed_handler_is_told_apart_and_repaired_by_a_requeue(stand: Stand, shop: Shop):
    code = {"second": "ship"}

    @shop.app.job("order")
    async def order(ctx: Context) -> str:
        await ctx.step("charge", lambda: 1)
        await ctx.step(code["second"], lambda: 2)
        await ctx.wait_signal("go")
        return "done"

    handle = await stand.submit("order")
    await stand.run_until_idle(shop.app)
    code["second"] = "pack"
    await signal(stand, handle.id, "go")
    await stand.run_until_idle(shop.app)
    job = await stand.job(handle)
    assert job.state == "failed"
    with pytest.raises(
        Exception, match=r"durable call 2 of this handler is ctx.step 'pack'; .* it was ctx.step 'ship'"
    ):
        await handle.result()
    code["second"] = "ship"
    admin = Actor(role=Role.CONTROL_PLANE, name="operator")
    await stand.ledger.requeue(admin, [JobId(handle.id)], RequestId("r"), limit=1, cause="repaired")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "done"


@pytest.mark.parametrize("now", ["other arguments", "another order", "fewer calls", "another kind"])
async def test_every_way_not_to_fit_the_journal_is_found(stand: Stand, shop: Shop, now: str):
    code = {"now": "as it was"}

    @shop.app.job("order")
    async def order(ctx: Context) -> str:
        changed = code["now"]
        if changed == "fewer calls":
            return "done"
        first, second = ("b", "a") if changed == "another order" else ("a", "b")
        if changed == "another kind":
            await ctx.sleep(5)
        await ctx.step(first, lambda n: n, 2 if changed == "other arguments" else 1)
        await ctx.step(second, lambda: 2)
        await ctx.wait_signal("go")
        return "done"

    handle = await stand.submit("order")
    await stand.run_until_idle(shop.app)
    code["now"] = now
    await signal(stand, handle.id, "go")
    await stand.run_until_idle(shop.app)
    job = await stand.job(handle)
    assert job.state == "failed"
    letter = (await stand.ledger.outcomes([job.job_id]))[0].error or ""
    assert "when this job ran before" in letter


async def test_version_keeps_old_jobs_on_the_old_code(stand: Stand, shop: Shop):
    code = {"new": False}

    @shop.app.job("tax")
    async def tax(ctx: Context) -> str:
        rate = "old"
        if code["new"] and await ctx.version("new-rate"):
            rate = await ctx.step("rate", lambda: "new")
        await ctx.wait_signal("go")
        return rate

    old = await stand.submit("tax")
    await stand.run_until_idle(shop.app)
    code["new"] = True
    new = await stand.submit("tax")
    await stand.run_until_idle(shop.app)
    for handle in (old, new):
        await signal(stand, handle.id, "go")
    await stand.run_until_idle(shop.app)
    assert [await old.result(), await new.result()] == ["old", "new"]


async def test_a_handler_that_never_ends_begins_anew_with_an_empty_journal(stand: Stand, shop: Shop):
    @shop.app.job("loop")
    async def loop(ctx: Context, n: int) -> str:
        vote = await ctx.wait_signal("vote")
        part = await ctx.spawn("part", n)
        if vote == "stop":
            return f"stopped after {n}, {part.number}"
        return await ctx.continue_as_new(n + 1)

    handle = await stand.submit("loop", 0)
    for vote in (b'"go"', b'"go"', b'"stop"'):
        await signal(stand, handle.id, "vote", vote)
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "stopped after 2, 2"
    assert len(await stand.ledger.read_journal(JobId(handle.id))) == 5, "its input and the calls since"
    assert len((await stand.ledger.children(JobId(handle.id), since=None, limit=9)).job_ids) == 3


async def test_a_job_that_began_anew_keeps_its_newer_input_after_a_requeue(stand: Stand, shop: Shop):
    broken = True

    @shop.app.job("loop")
    async def loop(ctx: Context, n: int) -> int:
        if n < 2:
            await ctx.continue_as_new(n + 1)
        await ctx.step("seen", lambda: n)
        if broken:
            raise PermanentError("not yet")
        return n

    handle = await stand.submit("loop", 0)
    await stand.run_until_idle(shop.app)
    broken = False
    await requeue(stand, handle.id)
    await stand.run_until_idle(shop.app)
    assert await handle.result() == 2


async def test_the_progress_of_a_suspended_job_can_be_read(stand: Stand, shop: Shop):
    @shop.app.job("long")
    async def long(ctx: Context) -> str:
        await ctx.step("half", lambda: None)
        ctx.progress({"done": 1, "of": 2})
        return await ctx.wait_signal("go")

    handle = await stand.submit("long")
    await stand.run_until_idle(shop.app)
    job = await handle.status()
    assert (job.state, json.loads(job.progress or b"null")) == ("suspended", {"done": 1, "of": 2})


async def test_a_sync_handler_has_the_same_calls(stand: Stand, shop: Shop):
    @shop.app.job("sync")
    def sync(ctx: SyncContext) -> list[Any]:
        one = ctx.step("one", lambda n: n + 1, 1)
        ctx.sleep(60)
        (part,) = ctx.gather(ctx.spawn("part", 3))
        return [one, part.twice, ctx.wait_signal("go"), ctx.version("v")]

    handle = await stand.submit("sync")
    await stand.run_until_idle(shop.app)
    stand.clock.advance(61)
    await stand.sweep()
    await signal(stand, handle.id, "go", b"5")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == [2, 6, 5, 1]


async def test_a_handler_that_catches_everything_is_suspended_all_the_same(stand: Stand, shop: Shop):
    @shop.app.job("greedy")
    async def greedy(ctx: Context) -> str:
        with suppress(BaseException):
            await ctx.wait_signal("go")
        return "done"

    handle = await stand.submit("greedy")
    await stand.run_until_idle(shop.app)
    assert (await stand.job(handle)).state == "suspended"
    await signal(stand, handle.id, "go")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "done"


async def test_spawn_refuses_ids_of_the_caller(stand: Stand, shop: Shop):
    @shop.app.job("wrong")
    async def wrong(ctx: Context) -> str:
        with pytest.raises(OptionInvalid, match="job_id"):
            ctx.spawn("part", 1, job_id="mine")
        return "refused"

    handle = await stand.submit("wrong")
    await stand.run_until_idle(shop.app)
    assert await handle.result() == "refused"


async def test_spawned_children_are_submitted_when_the_handler_just_returns(stand: Stand, shop: Shop):
    @shop.app.job("fire")
    async def fire(ctx: Context) -> str:
        return ctx.spawn("part", 9).id

    handle = await stand.submit("fire")
    await stand.run_until_idle(shop.app)
    (outcome,) = await stand.ledger.outcomes([JobId(await handle.result())])
    assert (outcome.state, shop.effects["part 9"]) == ("succeeded", 1)


async def requeue(stand: Stand, *job_ids: str) -> None:
    admin = Actor(role=Role.CONTROL_PLANE, name="operator")
    for job_id in job_ids:
        await stand.ledger.requeue(admin, [JobId(job_id)], RequestId(f"requeue {job_id}"), limit=1, cause="repaired")


async def test_a_failed_step_that_is_caught_is_the_outcome_of_the_step(stand: Stand, shop: Shop):
    """It is not made again when the handler is repeated, and the handler goes the same way."""

    @shop.app.job("pay")
    async def pay(ctx: Context) -> list[str]:
        def charge() -> str:
            shop.effects["charge"] += 1
            if shop.effects["charge"] == 1:
                raise ValueError("declined")
            return "paid"

        told = []
        try:
            told.append(await ctx.step("charge", charge))
        except DurableStepFailed as failure:
            told.append(f"{failure.type}: {failure.message}")
        await ctx.sleep(3600)
        return [*told, await ctx.step("then", lambda: "done")]

    handle = await stand.submit("pay")
    await stand.run_until_idle(shop.app)
    stand.clock.advance(3601)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    assert await handle.result() == ["ValueError: declined", "done"]
    assert shop.effects == {"charge": 1}


async def test_an_uncaught_error_of_a_step_is_that_of_the_attempt(stand: Stand, shop: Shop):
    @shop.app.job("flaky", retry=AT_ONCE, max_attempts=3)
    async def flaky(ctx: Context) -> str:
        def call() -> str:
            shop.effects["call"] += 1
            raise PermanentError("no") if shop.effects["call"] > 1 else TransientError("later")

        return await ctx.step("call", call)

    handle = await stand.submit("flaky")
    await stand.run_until_idle(shop.app)
    job = await stand.job(handle)
    assert (job.state, shop.effects["call"]) == ("failed", 2), "transient, then permanent"


@pytest.mark.parametrize("result,says", [("x" * 2_000_000, "2000002 bytes"), ({"at": object()}, "unknown type")])
async def test_a_step_whose_result_cannot_be_stored_is_not_made_again(
    stand: Stand, shop: Shop, result: object, says: str
):
    """It has happened, and another attempt would make it happen once more."""

    @shop.app.job("pay", retry=AT_ONCE, max_attempts=3)
    async def pay(ctx: Context) -> None:
        def charge() -> object:
            shop.effects["charge"] += 1
            return result

        await ctx.step("charge", charge)

    handle = await stand.submit("pay")
    await stand.run_until_idle(shop.app)
    assert shop.effects == {"charge": 1}
    (letter,) = await stand.ledger.dead_letters(JobFilter(), limit=10)
    assert (letter.job_id, letter.reason_code) == (handle.id, ReasonCode.VALIDATION_FAILED)
    assert "the step 'charge' has run, and its result cannot be stored: " in letter.last_error
    assert says in letter.last_error


async def test_a_call_without_await_fails_the_job_and_is_named(stand: Stand, shop: Shop):
    @shop.app.job("forgetful")
    async def forgetful(ctx: Context, call: str) -> str:
        for number in range(UNAWAITED_LOOK):
            await ctx.step(f"before {number}", lambda: None)
        match call:
            case "step":
                ctx.step("charge", lambda: shop.effects.update(["charge"]))  # pyright: ignore[reportUnusedCoroutine]
            case "submit":
                ctx.submit("other")  # pyright: ignore[reportUnusedCoroutine]
            case _:
                later = ctx.step("charge", lambda: shop.effects.update(["charge"]))
                await later
        return "done"

    ends: dict[str, tuple[str, str | None]] = {}
    for call in ("step", "submit", "later"):
        handle = await stand.submit("forgetful", call)
        await stand.run_until_idle(shop.app)
        (outcome,) = await stand.ledger.outcomes([JobId(handle.id)])
        ends[call] = (outcome.state, outcome.error)
    text = "PermanentError: the handler called ctx.{0}(…) without await, so nothing was done: write `await ctx.{0}(…)`"
    assert ends == {
        "step": ("failed", text.format("step")),
        "submit": ("failed", text.format("submit")),
        "later": ("succeeded", None),
    }
    assert shop.effects == {"charge": 1}


async def test_two_durable_calls_at_once_are_refused(stand: Stand, shop: Shop):
    @shop.app.job("both")
    async def both(ctx: Context) -> Any:
        async def slow() -> int:
            await asyncio.sleep(0)
            return 1

        return await asyncio.gather(ctx.step("a", slow), ctx.step("b", slow))

    @shop.app.job("nested")
    async def nested(ctx: Context) -> Any:
        return await ctx.step("outer", lambda: ctx.step("inner", lambda: 1))

    for type_ in ("both", "nested"):
        handle = await stand.submit(type_)
        await stand.run_until_idle(shop.app)
        (outcome,) = await stand.ledger.outcomes([JobId(handle.id)])
        assert (outcome.state, "one durable call at a time" in (outcome.error or "")) == ("failed", True), type_


async def test_a_failed_parent_is_repaired_with_the_children_that_went_on(stand: Stand, shop: Shop):
    luck = {"good": False}

    @shop.app.job("unlucky", max_attempts=1)
    async def unlucky(ctx: Context) -> str:
        if not luck["good"]:
            raise ValueError("no luck")
        return "lucky"

    @shop.app.job("whole")
    async def whole(ctx: Context) -> list[Any]:
        late = ctx.spawn("part", 5, delay_s=1000.0)
        return await ctx.gather(ctx.spawn("unlucky"), late)

    handle = await stand.submit("whole")
    await stand.run_until_idle(shop.app)
    assert (await stand.job(handle)).state == "failed"
    await stand.sweep()
    luck["good"] = True
    children = (await stand.ledger.children(JobId(handle.id), since=None, limit=9)).job_ids
    failed = [one.job_id for one in await stand.ledger.outcomes(children) if one.has_ended]
    await requeue(stand, *failed, handle.id)
    await stand.run_until_idle(shop.app)
    assert (await stand.job(handle)).state == "suspended", "it waits for the other child"
    stand.clock.advance(1001)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    lucky, part = await handle.result()
    assert (lucky, part["twice"]) == ("lucky", 10)


async def test_first_is_repaired_and_a_caught_failure_is_not_asked_again(stand: Stand, shop: Shop):
    luck = {"good": False}

    @shop.app.job("unlucky", max_attempts=1)
    async def unlucky(ctx: Context) -> str:
        if not luck["good"]:
            raise ValueError("no luck")
        return "lucky"

    @shop.app.job("race", retry=AT_ONCE)
    async def race(ctx: Context) -> list[Any]:
        caught = "no"
        try:
            await ctx.gather(ctx.spawn("unlucky"))
        except ChildFailed:
            caught = await ctx.step("note", lambda: "yes")
        winner = await ctx.first(ctx.spawn("unlucky"))
        return [caught, winner.value]

    handle = await stand.submit("race")
    await stand.run_until_idle(shop.app)
    assert (await stand.job(handle)).state == "failed"
    luck["good"] = True
    children = (await stand.ledger.children(JobId(handle.id), since=None, limit=9)).job_ids
    await requeue(stand, *children)
    await stand.run_until_idle(shop.app)
    await requeue(stand, handle.id)
    await stand.run_until_idle(shop.app)
    assert await handle.result() == ["yes", "lucky"]


async def test_a_mismatch_that_is_caught_still_fails_the_job(stand: Stand, shop: Shop):
    code = {"step": "a"}

    @shop.app.job("greedy")
    async def greedy(ctx: Context) -> str:
        with suppress(Exception):
            await ctx.step(code["step"], lambda: 1)
        await ctx.wait_signal("go")
        return "done"

    handle = await stand.submit("greedy")
    await stand.run_until_idle(shop.app)
    code["step"] = "b"
    await signal(stand, handle.id, "go")
    await stand.run_until_idle(shop.app)
    (outcome,) = await stand.ledger.outcomes([JobId(handle.id)])
    assert (outcome.state, "when this job ran before" in (outcome.error or "")) == ("failed", True)


async def test_a_version_in_a_loop_is_the_same_in_every_round(stand: Stand, shop: Shop):
    code = {"new": False}

    @shop.app.job("loop")
    async def loop(ctx: Context) -> list[int]:
        rounds = []
        for _ in range(3):
            version = await ctx.version("change") if code["new"] else 0
            rounds.append(version)
            if version:
                await ctx.step("new", lambda: 1)
            await ctx.wait_signal("next")
        return rounds

    handle = await stand.submit("loop")
    await stand.run_until_idle(shop.app)
    code["new"] = True
    for _ in range(3):
        await signal(stand, handle.id, "next")
        await stand.run_until_idle(shop.app)
    assert await handle.result() == [0, 0, 0]


async def test_waits_that_cannot_be_stored_fail_the_job_with_the_reason(stand: Stand, shop: Shop):
    others: list[Any] = []

    @shop.app.job("name")
    async def name(ctx: Context) -> None:
        await ctx.wait_signal("x" * 201)

    @shop.app.job("foreign")
    async def foreign(ctx: Context) -> None:
        others.append(ctx.spawn("part", 1))
        if len(others) > 1:
            await ctx.gather(others[0])

    @shop.app.job("entry")
    async def entry(ctx: Context) -> None:
        await ctx.journal("@input", lambda: 1)

    await stand.submit("foreign")
    await stand.run_until_idle(shop.app)
    for type_, wrong in (("name", "1 to 200 characters"), ("foreign", "of another handler"), ("entry", "begin with @")):
        handle = await stand.submit(type_, max_attempts=1)
        await stand.run_until_idle(shop.app)
        (outcome,) = await stand.ledger.outcomes([JobId(handle.id)])
        assert (outcome.has_ended, wrong in (outcome.error or "")) == (True, True), (type_, outcome)


async def test_an_uncaught_timeout_of_a_signal_is_not_tried_again(stand: Stand, shop: Shop):
    @shop.app.job("late")
    async def late(ctx: Context) -> None:
        shop.attempts += 1
        await ctx.wait_signal("go", timeout_s=60)

    handle = await stand.submit("late")
    await stand.run_until_idle(shop.app)
    stand.clock.advance(61)
    await stand.sweep()
    await stand.run_until_idle(shop.app)
    assert ((await stand.job(handle)).state, shop.attempts) == ("failed", 2)


async def test_the_bounds_of_a_journal_hold_for_waits(stand: Stand, shop: Shop, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trellis.worker.durable.JOURNAL_ENTRIES_MAX", 3)

    @shop.app.job("sleepy")
    async def sleepy(ctx: Context) -> None:
        for _ in range(10):
            await ctx.sleep(1)

    handle = await stand.submit("sleepy")
    for _ in range(6):
        await stand.run_until_idle(shop.app)
        stand.clock.advance(2)
        await stand.sweep()
    (outcome,) = await stand.ledger.outcomes([JobId(handle.id)])
    assert (outcome.state, "ctx.continue_as_new" in (outcome.error or "")) == ("failed", True)
