"""Hints are few: one tells of all that was committed before it was sent."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import urlsplit

import pytest

from trellis.engine.jobs import Actor, JobId, Mismatch, NewJob, Submitted
from trellis.ledgers.postgres.connection import PostgresConnection, connect
from trellis.ledgers.postgres.lanes import LaneOptions
from trellis.ledgers.postgres.ledger import PostgresLedger
from trellis.ledgers.postgres.notifier import (
    CARRIED_HINT,
    EVENTS_GAP_S,
    NOTIFY_EVENTS,
    NOTIFY_WORK,
    UNHEARD_EVENTS_GAP_S,
    UNHEARD_GAP_S,
    WORK_GAP_S,
    HintSender,
    PostgresNotifier,
)
from trellis.lifecycles import Role


class Channel:
    """Takes one hint at a time, each when the test lets it."""

    def __init__(self, *, is_heard: bool = True) -> None:
        self.sent = 0
        self.gate = asyncio.Event()
        self.is_heard = is_heard

    async def send(self) -> bool:
        self.sent += 1
        await self.gate.wait()
        return self.is_heard


async def test_hints_of_callers_that_are_answered_together_are_one():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=60.0)
    for _ in range(16):
        sender.hint()
    await sender.close()
    assert channel.sent == 1


async def test_a_hint_that_comes_while_one_is_sent_is_sent_after_it():
    channel = Channel()
    sender = HintSender(channel.send, gap_s=0.0)
    sender.hint()
    await asyncio.sleep(0)
    sender.hint()
    sender.hint()
    assert channel.sent == 1
    channel.gate.set()
    await sender.close()
    assert channel.sent == 2


async def test_a_hint_waits_for_the_gap_and_closing_does_not():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=60.0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    assert channel.sent == 1
    await sender.close()
    assert channel.sent == 2


async def test_a_hint_whose_task_was_cancelled_before_it_began_is_sent_later():
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=0.0)
    before = asyncio.all_tasks()
    sender.hint()
    (sending,) = asyncio.all_tasks() - before
    sending.cancel()
    async with asyncio.timeout(5):
        await sender.close()
    assert channel.sent == 1


@pytest.mark.parametrize("is_heard, sent", [(True, 2), (False, 1)])
async def test_hints_are_fewer_while_nobody_listens(is_heard: bool, sent: int):
    channel = Channel(is_heard=is_heard)
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=0.0, unheard_gap_s=60.0)
    sender.hint()
    for _ in range(3):
        await asyncio.sleep(0)
    sender.hint()
    for _ in range(9):
        await asyncio.sleep(0)
    assert channel.sent == sent
    await sender.close()
    assert channel.sent == 2


@pytest.mark.parametrize("is_heard, sent", [(None, 1), (True, 0)])
async def test_a_hint_that_comes_while_a_transaction_carries_one_waits_for_it(is_heard: bool | None, sent: int):
    """It is sent when the transaction has carried none, and after the gap when it has."""
    channel = Channel()
    channel.gate.set()
    sender = HintSender(channel.send, gap_s=60.0)
    assert sender.hold()
    assert not sender.hold()
    sender.hint()
    assert channel.sent == 0
    sender.release(is_heard=is_heard)
    for _ in range(3):
        await asyncio.sleep(0)
    assert channel.sent == sent
    assert not sender.hold(), "a hint was sent just now"
    await sender.close()
    assert channel.sent == 1


@pytest.mark.parametrize("is_heard", [None, True])
async def test_a_hint_waits_for_a_transaction_no_longer_than_a_gap(is_heard: bool | None):
    channel, has_begun = Channel(), asyncio.Event()
    channel.gate.set()

    async def send() -> bool:
        has_begun.set()
        return await channel.send()

    sender = HintSender(send, gap_s=0.001)
    assert sender.hold()
    sender.hint()
    sender.hint()
    await asyncio.wait_for(has_begun.wait(), 5)
    sender.release(is_heard=is_heard)
    await sender.close()
    assert channel.sent == 1


async def test_a_transaction_that_fails_keeps_no_hint_back(postgres_url: str):
    notifier = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    try:
        with contextlib.suppress(ZeroDivisionError), notifier.work() as hint:
            assert hint.is_wanted
            raise ZeroDivisionError
        with notifier.work() as hint:
            assert hint.is_wanted
    finally:
        await notifier.close()


@contextlib.asynccontextmanager
async def connected(url: str) -> AsyncGenerator[PostgresConnection]:
    connection = await connect(url)
    try:
        yield connection
    finally:
        await connection.close()


async def is_heard(connection: PostgresConnection) -> bool:
    return await connection.fetchval(NOTIFY_WORK)


async def test_a_sender_learns_whether_somebody_listens(postgres_url: str):
    """A worker that begins to listen is told of the work that comes after a short gap, not a long one."""
    assert WORK_GAP_S < UNHEARD_GAP_S
    sender = await connect(postgres_url)
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    try:
        assert not await is_heard(sender)
        assert not await is_heard(sender), "the sender keeps no lock"
        await listener.wait(5)  # the beginning counts as a hint
        assert await is_heard(sender)
        listener.skip_next_notify()
        waiting = asyncio.create_task(listener.wait(30))
        await is_heard(sender)
        await asyncio.wait_for(waiting, 5)
    finally:
        await listener.close()
        await sender.close()


async def begin_to_listen_to_events(notifier: PostgresNotifier) -> None:
    begun = notifier.events
    await notifier.wait_for_events(begun, 60)
    assert notifier.events > begun, "the beginning counts as a hint"


async def test_a_sender_of_hints_of_events_learns_whether_somebody_listens_to_events(postgres_url: str):
    """A worker that waits for work alone does not make every other worker tell of its events often."""
    assert EVENTS_GAP_S < UNHEARD_EVENTS_GAP_S
    worker, gateway = (PostgresNotifier(postgres_url, LaneOptions(), on=True) for _ in range(2))
    async with connected(postgres_url) as sender:
        try:
            await worker.wait(60)
            assert (await is_heard(sender), await sender.fetchval(NOTIFY_EVENTS)) == (True, False)
            await begin_to_listen_to_events(gateway)
            assert (await is_heard(sender), await sender.fetchval(NOTIFY_EVENTS)) == (True, True)
            await worker.close()
            assert (await is_heard(sender), await sender.fetchval(NOTIFY_EVENTS)) == (True, True)
        finally:
            await worker.close()
            await gateway.close()


async def test_a_listener_that_could_not_have_the_lock_takes_it_later(postgres_url: str):
    gateway = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    lock = "hashtextextended('trellis.event_listeners', 0)"
    async with connected(postgres_url) as sender, connected(postgres_url) as other:
        try:
            await other.execute(f"select pg_advisory_lock({lock})")
            await begin_to_listen_to_events(gateway)
            await other.execute(f"select pg_advisory_unlock({lock})")
            assert not await sender.fetchval(NOTIFY_EVENTS)
            async with asyncio.timeout(60):
                await gateway.wait_for_events(gateway.events, 0.001)
                while not await sender.fetchval(NOTIFY_EVENTS):
                    await gateway.wait_for_events(gateway.events, 0.001)
        finally:
            await gateway.close()


@pytest.mark.parametrize(
    "function", ["pg_try_advisory_lock(bigint)", "pg_advisory_unlock(bigint)", "pg_try_advisory_lock_shared(bigint)"]
)
async def test_a_login_that_may_not_look_for_listeners_sends_and_receives_hints(postgres_url: str, function: str):
    """Whoever hardens a server may take functions from everybody. Hints need only `pg_notify`."""
    url, name = urlsplit(postgres_url), f"looks_{len(function)}"
    hardened = url._replace(netloc=f"{name}@{url.netloc.rpartition('@')[2]}").geturl()
    async with connected(postgres_url) as owner:
        await owner.execute(f"revoke execute on function {function} from public")
        await owner.execute(f"create role {name} login in role trellis_app")
        sender, listener = (PostgresNotifier(hardened, LaneOptions(), on=True) for _ in range(2))
        try:
            await begin_to_listen_to_events(listener)
            for send in (sender.notify_events, sender.notify):
                waiting = asyncio.create_task(listener.wait_for_events(listener.events, 60))
                await asyncio.sleep(0)
                begun = listener.events
                send()
                await waiting
                assert listener.events > begun
        finally:
            await sender.close()
            await listener.close()
            await owner.execute(f"drop role {name}")


@pytest.mark.parametrize("is_heard, rest_s", [(True, EVENTS_GAP_S), (False, UNHEARD_EVENTS_GAP_S)])
async def test_hints_of_events_are_fewer_while_nobody_listens_to_events(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, is_heard: bool, rest_s: float
):
    gaps: list[float] = []
    has_rested = asyncio.Event()
    notifier, loop = PostgresNotifier(postgres_url, LaneOptions(), on=True), asyncio.get_running_loop()
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    later = loop.call_later

    def call_later(delay_s: float, *args: Any, **options: Any) -> asyncio.TimerHandle:
        if delay_s in {EVENTS_GAP_S, UNHEARD_EVENTS_GAP_S}:
            gaps.append(delay_s)
            has_rested.set()
        return later(delay_s, *args, **options)

    try:
        if is_heard:
            await begin_to_listen_to_events(listener)
        monkeypatch.setattr(loop, "call_later", call_later)
        notifier.notify_events()
        await asyncio.wait_for(has_rested.wait(), 20)
        assert gaps == [rest_s]
    finally:
        await notifier.close()
        await listener.close()


@pytest.mark.parametrize("setting", ["", "statement_timeout=100"])
async def test_a_login_that_keeps_the_lock_of_listeners_stops_no_hint(postgres_url: str, setting: str):
    """The listener's login may wait for less time than the lock is waited for."""
    sender, other = await connect(postgres_url), await connect(postgres_url)
    url = f"{postgres_url}{'&' if '?' in postgres_url else '?'}{setting}"
    listener = PostgresNotifier(url, LaneOptions(), on=True)
    try:
        await other.execute("select pg_advisory_lock(hashtextextended('trellis.listeners', 0))")
        assert await is_heard(sender)
        await listener.wait(10)
        listener.skip_next_notify()
        waiting = asyncio.create_task(listener.wait(30))
        await is_heard(sender)
        await asyncio.wait_for(waiting, 5)
    finally:
        await listener.close()
        await sender.close()
        await other.close()


HINTS_SENT_APART = "select count(*) from pg_stat_activity where query = $1 and datname = current_database()"


async def test_a_submit_carries_its_hint_unless_another_one_does(postgres_url: str):
    """Commits with a notification wait for one another, so a submit beside another one sends its hint afterwards."""
    ledger, other = await PostgresLedger.open(postgres_url), await connect(postgres_url)
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    actor = Actor(role=Role.SUBMITTER, name="test")

    async def submit_and_hear(job_id: str) -> int:
        listener.skip_next_notify()
        waiting = asyncio.create_task(listener.wait(30))
        await asyncio.wait_for(ledger.submit(actor, [NewJob(job_id=JobId(job_id), type="test")]), 5)
        await asyncio.wait_for(waiting, 5)
        return await other.fetchval(HINTS_SENT_APART, NOTIFY_WORK)

    try:
        await listener.wait(5)  # the beginning counts as a hint
        assert await submit_and_hear("alone") == 0
        async with other.transaction():
            assert await other.fetchval(f"select {CARRIED_HINT}")
            assert await submit_and_hear("beside another") == 1
    finally:
        await ledger.close()
        await listener.close()
        await other.close()


async def test_a_submit_that_waits_for_another_transaction_keeps_no_other_hint_back(postgres_url: str):
    """Its transaction was to carry the hint. What this process does meanwhile is told without it."""
    ledger, other = await PostgresLedger.open(postgres_url), await connect(postgres_url)
    listener = PostgresNotifier(postgres_url, LaneOptions(), on=True)
    actor = Actor(role=Role.SUBMITTER, name="test")
    taken = NewJob(job_id=JobId("taken"), type="test", id_is_given=True, fingerprint=b"x")
    try:
        await ledger.submit(actor, [NewJob(job_id=JobId("first"), type="test")])
        await listener.wait(5)
        async with other.transaction():
            await other.execute("set local idle_in_transaction_session_timeout = 0")
            await other.execute("select submit_job('test', p_job_id => 'taken')")
            submitting = asyncio.create_task(ledger.submit(actor, [taken]))
            async with asyncio.timeout(20), connected(postgres_url) as watcher:
                while not await watcher.fetchval("select count(*) from pg_locks where not granted"):
                    pass
            listener.skip_next_notify()
            waiting = asyncio.create_task(listener.wait(30))
            ledger._notifier.notify()
            await asyncio.wait_for(waiting, 5)
            assert not submitting.done()
        assert await asyncio.wait_for(submitting, 20) == [Mismatch(key="taken", job_id=taken.job_id)]
    finally:
        await ledger.close()
        await listener.close()
        await other.close()


@pytest.mark.parametrize("function", ["pg_notify(text, text)", "pg_try_advisory_xact_lock(bigint)"])
async def test_a_login_that_may_send_no_hint_submits_without_one(postgres_url: str, function: str):
    """Whoever hardens a server may take functions from everybody that a hint needs. Work is found by polling then."""
    actor, url, name = Actor(role=Role.SUBMITTER, name="test"), urlsplit(postgres_url), f"hardened_{function[:9]}"
    hardened = url._replace(netloc=f"{name}@{url.netloc.rpartition('@')[2]}").geturl()
    async with connected(postgres_url) as owner:
        await owner.execute(f"revoke execute on function {function} from public")
        await owner.execute(f"create role {name} login in role trellis_app")
        try:
            ledger = await PostgresLedger.open(hardened)
            for job_id in map(JobId, ("one", "two")):
                answers = await ledger.submit(actor, [NewJob(job_id=job_id, type="test")])
                assert answers == [Submitted(job_id=job_id, created=True)]
            await ledger.close()
        finally:
            await owner.execute(f"drop role {name}")
