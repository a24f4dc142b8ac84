"""Packets that cannot be taken: dropped, told about on `sys.alert` by CAP's code, and the next good one is handled."""

from collections.abc import Callable
from typing import Any

import nats
import pytest

from tests.bus.test_cap import AT, BODIES, PLAIN
from tests.bus.wire.conftest import Heard, Net, until
from tests.servers.nats import caught_up
from trellis.bus.messages import ALERT, RESULT, SUBMIT, AlertSeverity, BusAlert, ErrorCode, Packet, PacketRefused
from trellis.bus.wire.alerts import ALERT_EVERY_S, ALERTS_AT_ONCE, ALL_AT_ONCE, SENDERS_MAX, AlertLimit
from trellis.bus.wire.cap import encode
from trellis.testing import FakeClock


def good(sender_id: str = "client-1", body: Any = BODIES["request"]) -> bytes:
    return encode(Packet(trace_id="trace-1", sender_id=sender_id, created_at=AT, body=body), PLAIN)


def bent(change: Callable[[Any], object]) -> bytes:
    from cap.packet_boundary import parse_packet

    message = parse_packet(good())
    change(message)
    return message.SerializeToString()


ZOO: dict[str, tuple[Callable[[], bytes], ErrorCode, AlertSeverity]] = {
    "noise": (lambda: b"\xff\xfe\xfd", ErrorCode.MALFORMED_PACKET, AlertSeverity.ERROR),
    "nothing at all": (lambda: b"", ErrorCode.MALFORMED_PACKET, AlertSeverity.ERROR),
    "JSON": (lambda: b'{"job_id": "job-1"}', ErrorCode.MALFORMED_PACKET, AlertSeverity.ERROR),
    "another version": (
        lambda: bent(lambda message: setattr(message, "protocol_version", 2)),
        ErrorCode.VERSION_MISMATCH,
        AlertSeverity.ERROR,
    ),
    "no payload": (
        lambda: bent(lambda message: message.ClearField("job_request")),
        ErrorCode.MALFORMED_PACKET,
        AlertSeverity.ERROR,
    ),
    "no trace": (
        lambda: bent(lambda message: setattr(message, "trace_id", "")),
        ErrorCode.MALFORMED_PACKET,
        AlertSeverity.ERROR,
    ),
    "a topic that is none": (
        lambda: bent(lambda message: setattr(message.job_request, "topic", "a b")),
        ErrorCode.INVALID_INPUT,
        AlertSeverity.WARNING,
    ),
}


@pytest.mark.requirement("BUS-2")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("durable", [False, True])
async def test_a_bad_packet_is_an_alert_and_the_next_good_one_is_handled(nats_net: Net, name: str, durable: bool):
    await check_zoo(nats_net, *ZOO[name], durable=durable)


@pytest.mark.requirement("BUS-2")
async def test_invalid_packet_is_not_redelivered_by_the_stream(stream_net: Net):
    await check_zoo(stream_net, *ZOO["a topic that is none"], durable=True)


async def check_zoo(
    net: Net, make: Callable[[], bytes], code: ErrorCode, severity: AlertSeverity, *, durable: bool
) -> None:
    bus, heard, alerts = await net.bus(), Heard(), Heard()
    refused: list[tuple[str, PacketRefused]] = []

    async def on_refused(subject: str, error: PacketRefused) -> None:
        refused.append((subject, error))

    bus.on_refused = on_refused
    await bus.listen(SUBMIT, heard, group="trellis", durable=durable)
    await bus.listen(ALERT, alerts)
    client = await nats.connect(net.url)
    await client.publish(SUBMIT, make())
    await client.publish(SUBMIT, good())
    await caught_up(client)
    await heard.until(1)
    await alerts.until(1)
    await until(lambda: refused)
    await client.close()
    alert = alerts.packets[0].packet.body
    assert isinstance(alert, BusAlert)
    assert (alert.code, alert.severity) == (code, severity)
    assert alert.details["subject"] == SUBMIT
    assert [error.error_code for _, error in refused] == [code]
    assert len(heard.packets) == 1


async def test_alerts_about_invalid_packets_are_rate_limited(nats_net: Net):
    bus, heard, alerts = await nats_net.bus(), Heard(), Heard()
    await bus.listen(RESULT, heard)
    await bus.listen(ALERT, alerts)
    client = await nats.connect(nats_net.url)
    for _ in range(500):
        await client.publish(RESULT, b"\xff\xff")
    await client.publish(RESULT, good("w-1", BODIES["result"]))
    await caught_up(client)
    await heard.until(1)
    await client.close()
    await alerts.until(ALERTS_AT_ONCE)
    assert len(alerts.packets) == ALERTS_AT_ONCE


async def test_a_bad_alert_is_no_reason_for_another_alert(nats_net: Net):
    bus, alerts = await nats_net.bus(), Heard()
    await bus.listen(ALERT, alerts)
    client = await nats.connect(nats_net.url)
    await client.publish(ALERT, b"\xff\xff")
    await client.publish(ALERT, good("w-1", BODIES["alert"]))
    await caught_up(client)
    await client.close()
    await alerts.until(1)
    assert alerts.packets[0].packet.body == BODIES["alert"]


def test_alerts_that_were_left_out_are_counted_in_the_next():
    clock = FakeClock()
    limit = AlertLimit(clock)
    told = [limit.left_out(ErrorCode.TIMEOUT) for _ in range(ALERTS_AT_ONCE + 7)]
    assert told == [0] * ALERTS_AT_ONCE + [None] * 7
    assert limit.left_out(ErrorCode.NOT_FOUND) == 0
    clock.advance(ALERT_EVERY_S)
    assert limit.left_out(ErrorCode.TIMEOUT) == 7
    assert limit.left_out(ErrorCode.TIMEOUT) is None


def test_alerts_are_limited_for_each_sender_and_for_all_of_them_together():
    clock = FakeClock()
    limit = AlertLimit(clock)
    assert [limit.left_out(ErrorCode.TIMEOUT, "noisy") for _ in range(9)] == [0] * ALERTS_AT_ONCE + [None] * 4
    assert limit.left_out(ErrorCode.TIMEOUT, "quiet") == 0
    many = [limit.left_out(ErrorCode.TIMEOUT, f"invented-{number}") for number in range(3 * SENDERS_MAX)]
    assert many.count(0) == ALL_AT_ONCE - ALERTS_AT_ONCE - 1
    assert len(limit._codes[ErrorCode.TIMEOUT].by_sender) == SENDERS_MAX
    assert limit.left_out(ErrorCode.NOT_FOUND, "noisy") == 0


@pytest.mark.parametrize("reply", ["sys.job.cancel", "job.a", "$JS.API.STREAM.DELETE.TRELLIS"])
async def test_answers_go_only_to_inbox_subjects(nats_net: Net, reply: str):
    bus, subject, heard = await nats_net.bus(), nats_net.subject(), Heard(answer="yes")
    await bus.listen(subject, heard)
    client = await nats.connect(nats_net.url)
    await client.publish(subject, good("w-1", BODIES["progress"]), reply=reply)
    await client.publish(subject, good("w-1", BODIES["progress"]), headers={"Trellis-Reply": reply})
    await caught_up(client)
    await client.close()
    await heard.until(2)
    assert not any(received.wants_answer for received in heard.packets)
