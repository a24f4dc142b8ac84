"""What every bus promises, on all of them."""

import asyncio

import pytest

from tests.bus.wire.conftest import Heard, Net, said, until
from trellis.bus.errors import BusUnavailable, NoResponders
from trellis.bus.messages import PacketWrong, Status, WorkerHeartbeat
from trellis.bus.port import HANDLERS_MAX, ReceivedPacket


async def test_every_listener_without_a_group_gets_every_packet(net: Net):
    ours, theirs = await net.bus(), await net.bus("w-1")
    one, two, subject = Heard(), Heard(), net.subject()
    await ours.listen(subject, one)
    await theirs.listen(subject, two)
    for number in range(5):
        await theirs.publish(subject, said(str(number)), trace_id="t")
    for heard in (one, two):
        await heard.until(5)
        assert sorted(heard.messages) == list("01234")
    packet = one.packets[0].packet
    assert (packet.trace_id, packet.sender_id, one.packets[0].subject) == ("t", "w-1", subject)


async def test_each_packet_goes_to_one_listener_of_a_group(net: Net):
    ours, theirs = await net.bus(), await net.bus("w-1")
    one, two, other, subject = Heard(), Heard(), Heard(), net.subject()
    await ours.listen(subject, one, group="g")
    await theirs.listen(subject, two, group="g")
    await theirs.listen(subject, other, group="another")
    for number in range(20):
        await ours.publish(subject, said(str(number)), trace_id="t")
    await other.until(20)
    await until(lambda: len(one.packets) + len(two.packets) == 20)
    assert sorted([*one.messages, *two.messages], key=int) == [str(number) for number in range(20)]


async def test_a_subject_pattern_receives_the_subjects_that_match_it(net: Net):
    bus = await net.bus()
    one, rest, mark = Heard(), Heard(), net.mark
    await bus.listen(f"a.{mark}.*", one)
    await bus.listen(f"a.{mark}.>", rest)
    for subject in (f"a.{mark}.x", f"a.{mark}.x.y", f"b.{mark}.x"):
        await bus.publish(subject, said(subject), trace_id="t")
    await rest.until(2)
    assert rest.messages == [f"a.{mark}.x", f"a.{mark}.x.y"]
    assert one.messages == [f"a.{mark}.x"]


async def test_request_on_the_bus_gets_the_answer_of_its_listener(net: Net):
    ours, theirs = await net.bus(), await net.bus("w-1")
    subject = net.subject()
    await ours.listen(subject, Heard(answer="accepted"), group="g")
    answer = await theirs.ask(subject, said("may I?"), trace_id="t-9", timeout_s=5)
    assert (answer.body.message, answer.sender_id, answer.trace_id) == ("accepted", "trellis", "t-9")


async def test_concurrent_requests_get_their_own_answers(net: Net):
    ours, theirs = await net.bus(), await net.bus("w-1")
    subject = net.subject()

    async def echo(received: ReceivedPacket) -> None:
        assert received.wants_answer
        await received.answer(received.packet.body)

    await ours.listen(subject, echo)
    asked = [theirs.ask(subject, said(str(number)), trace_id="t", timeout_s=10) for number in range(100)]
    answers = await asyncio.gather(*asked)
    assert [answer.body.message for answer in answers] == [str(number) for number in range(100)]


async def test_an_answer_without_a_question_does_nothing(net: Net):
    bus, subject = await net.bus(), net.subject()
    heard = Heard(answer="to nobody")
    await bus.listen(subject, heard)
    await bus.publish(subject, said("hello"), trace_id="t")
    await heard.until(1)
    assert not heard.packets[0].wants_answer


@pytest.mark.requirement("D29")
async def test_request_without_a_responder_fails_at_once(net: Net):
    bus = await net.bus()
    with pytest.raises(NoResponders, match="Nobody listens"):
        await bus.ask(net.subject(), said("?"), trace_id="t", timeout_s=60)


async def test_a_question_that_is_not_answered_ends(net: Net):
    bus, subject = await net.bus(), net.subject()
    await bus.listen(subject, Heard())
    with pytest.raises(BusUnavailable, match=r"though the bus at .* is there: look at .* its ledger"):
        await bus.ask(subject, said("?"), trace_id="t", timeout_s=0.05)


@pytest.mark.requirement("D29")
async def test_packet_that_needs_a_listener_fails_without_one(net: Net):
    bus, subject = await net.bus(), net.subject()
    with pytest.raises(NoResponders):
        await bus.publish(subject, said("1"), trace_id="t", needs_listener=True)
    await bus.publish(subject, said("2"), trace_id="t")
    heard = Heard()
    listening = await bus.listen(subject, heard, group="g")
    await bus.publish(subject, said("3"), trace_id="t", needs_listener=True)
    await heard.until(1)
    await listening.stop()
    with pytest.raises(NoResponders):
        await bus.publish(subject, said("4"), trace_id="t", needs_listener=True)
    assert heard.messages == ["3"]


@pytest.mark.requirement("D29")
async def test_concurrent_publishes_fail_exactly_without_a_listener(net: Net):
    bus, there, nowhere = await net.bus(), net.subject(), net.subject()
    heard = Heard()
    await bus.listen(there, heard)

    async def tell(number: int) -> bool:
        subject = there if number % 3 else nowhere
        try:
            await bus.publish(subject, said(str(number)), trace_id="t", needs_listener=True)
        except NoResponders:
            return False
        return True

    assert await asyncio.gather(*map(tell, range(200))) == [bool(number % 3) for number in range(200)]
    await heard.until(sum(1 for number in range(200) if number % 3))


async def test_a_handler_that_raises_loses_only_its_own_packet(net: Net):
    bus, subject, heard = await net.bus(), net.subject(), Heard()
    heard.failures = 2
    await bus.listen(subject, heard)
    for number in range(4):
        await bus.publish(subject, said(str(number)), trace_id="t")
    await heard.until(4)
    assert sorted(heard.messages) == list("0123")


async def test_handlers_run_at_once_up_to_a_bound(net: Net):
    bus, subject = await net.bus(), net.subject()
    inside, most, go = 0, 0, asyncio.Event()

    async def slow(_: ReceivedPacket) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await go.wait()
        inside -= 1

    listening = await bus.listen(subject, slow)
    for _ in range(HANDLERS_MAX + 20):
        await bus.publish(subject, said(""), trace_id="t")
    await until(lambda: inside == HANDLERS_MAX)
    go.set()
    await until(lambda: inside == 0)
    await listening.stop()
    assert most == HANDLERS_MAX


async def test_stop_waits_for_handlers_in_progress_and_delivers_nothing_afterwards(net: Net):
    bus, subject = await net.bus(), net.subject()
    begun, go, ended = asyncio.Event(), asyncio.Event(), []

    async def slow(received: ReceivedPacket) -> None:
        begun.set()
        await go.wait()
        ended.append(received)

    listening = await bus.listen(subject, slow)
    await bus.publish(subject, said("1"), trace_id="t")
    await begun.wait()
    stopping = asyncio.create_task(listening.stop())
    await asyncio.wait({stopping}, timeout=0.02)
    assert not stopping.done()
    go.set()
    await stopping
    assert len(ended) == 1
    await bus.publish(subject, said("2"), trace_id="t")
    await asyncio.sleep(0)
    assert len(ended) == 1


async def test_a_packet_that_receivers_would_drop_is_refused_at_its_sender(net: Net):
    bus = await net.bus()
    with pytest.raises(PacketWrong, match="worker_id"):
        await bus.publish(net.subject(), WorkerHeartbeat(worker_id="somebody else"), trace_id="t")
    with pytest.raises(PacketWrong, match="trace_id"):
        await bus.publish(net.subject(), said(""), trace_id="")


@pytest.mark.parametrize("subject", ["", "a b", "a..b", "a.>", "*", "a\r\nPUB x", ".a", "a" * 600])
async def test_a_subject_that_is_none_is_refused(net: Net, subject: str):
    bus = await net.bus()
    with pytest.raises(PacketWrong, match="no subject"):
        await bus.publish(subject, said(""), trace_id="t")
    with pytest.raises(PacketWrong, match="no subject"):
        await bus.ask(subject, said(""), trace_id="t", timeout_s=1)


async def test_a_closed_bus_takes_nothing(net: Net):
    bus = await net.bus()
    assert bus.connected
    await bus.close()
    assert not bus.connected
    with pytest.raises(BusUnavailable):
        await bus.publish(net.subject(), said(""), trace_id="t")


@pytest.mark.requirement("BUS-10")
async def test_a_durable_listener_gets_a_packet_again_when_its_handler_raised(net: Net):
    """Except on NATS without JetStream, which keeps nothing: there the packet is lost like any other."""
    bus, subject, heard = await net.bus(), net.subject(), Heard()
    keeps = net.jetstream or net.url == "local"
    heard.failures = 1
    await bus.listen(subject, heard, group="g", durable=True)
    await bus.publish(subject, said("1"), trace_id="t")
    await heard.until(1)
    await bus.publish(subject, said("2"), trace_id="t")
    await heard.until(3 if keeps else 2)
    assert sorted(heard.messages) == (["1", "1", "2"] if keeps else ["1", "2"])


async def test_a_durable_listener_answers_questions_too(net: Net):
    ours, theirs, subject = await net.bus(), await net.bus("w-1"), net.subject()
    await ours.listen(subject, Heard(answer="kept"), group="g", durable=True)
    answer = await theirs.ask(subject, said("?"), trace_id="t", timeout_s=10)
    assert (answer.body.message, answer.body.status) == ("kept", Status.RUNNING)
