"""Signed packets over a real server: neither a copy nor an old one is taken, and what a stream brings again is."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.bus.test_signatures import OURS, THEIRS, pem, private_file, public_pem
from tests.bus.wire.conftest import Heard, Net, new_id, now, said
from trellis.bus.messages import ALERT, RESULT, JobResult, Packet, Status
from trellis.bus.wire.cap import encode
from trellis.bus.wire.nats import NatsBus
from trellis.bus.wire.signatures import PacketKeys


@pytest.fixture
def known(tmp_path: Path) -> dict[str, Any]:
    """A control plane that has the key of w-1, and requires signatures of nobody else."""
    (tmp_path / "known").mkdir()
    (tmp_path / "known" / "w-1.pem").write_bytes(public_pem(THEIRS))
    return {"key_file": private_file(tmp_path / "own.pem", pem(OURS)), "keys_dir": tmp_path / "known"}


WORKER = PacketKeys(sender_id="w-1", own=THEIRS)


def packet(message: str) -> Packet:
    return Packet(trace_id="t", sender_id="w-1", created_at=now(), body=said(message))


async def raw(bus: NatsBus, subject: str, data: bytes) -> None:
    """As anybody on the server may send it."""
    link = bus._connection.up()
    await bus._connection.send(link, subject, data)
    await bus._connection.taken(link)


@pytest.mark.requirement("BUS-2")
async def test_a_copy_a_redirected_packet_and_an_unsigned_one_of_a_known_sender_are_dropped_with_alerts(
    nats_net: Net, known: dict[str, Any]
):
    bus, here, there, heard, alerts = (
        await nats_net.bus(**known),
        nats_net.subject(),
        nats_net.subject(),
        Heard(),
        Heard(),
    )
    for subject in (here, there):
        await bus.listen(subject, heard)
    await bus.listen(ALERT, alerts)
    signed = encode(packet("first"), WORKER, subject=here, message_id=new_id())
    await raw(bus, here, signed)
    await heard.until(1)
    await raw(bus, here, signed)
    await raw(bus, there, signed)
    await raw(bus, here, encode(packet("unsigned"), PacketKeys()))
    await alerts.until(3)
    told = alerts.messages
    for reason in ("it was sent before", f"it was signed for {here}", "its sender must sign"):
        assert any(reason in one for one in told), told
    await raw(bus, here, encode(packet("last"), WORKER, subject=here, message_id=new_id()))
    await heard.until(2)
    assert heard.messages == ["first", "last"]


async def test_questions_and_answers_between_those_who_sign_pass(nats_net: Net, known: dict[str, Any], tmp_path: Path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "trellis.pem").write_bytes(public_pem(OURS))
    bus, subject = await nats_net.bus(**known, require_signatures=True), nats_net.subject()
    key = private_file(tmp_path / "w-1.key", pem(THEIRS))
    worker = await nats_net.bus("w-1", key_file=key, keys_dir=tmp_path / "theirs", require_signatures=True)
    await bus.listen(subject, Heard(answer="yes"))
    for _ in range(2):
        answer = await worker.ask(subject, said("may I?"), trace_id="t", timeout_s=30)
        assert (answer.sender_id, answer.body) == ("trellis", said("yes", "answered"))


@pytest.mark.requirement("BUS-10")
async def test_a_signed_packet_of_a_stream_is_as_old_as_it_was_when_it_was_kept_and_comes_again_after_a_failure(
    stream_net: Net, known: dict[str, Any]
):
    bus, heard = await stream_net.bus(**known), Heard()
    first = await bus.listen(RESULT, Heard(), group="g", durable=True)
    await first.stop()
    result = JobResult(job_id="j", status=Status.SUCCEEDED, worker_id="w-1")
    made = Packet(trace_id="t", sender_id="w-1", created_at=now(), body=result)
    await raw(bus, RESULT, encode(made, WORKER, subject=RESULT, message_id=new_id()))
    late = await stream_net.bus(**known)
    late._now = lambda: now() + timedelta(hours=5)  # it comes back long after the packet was kept
    heard.failures = 1
    await late.listen(RESULT, heard, group="g", durable=True)
    await heard.until(2)
    assert [received.packet.body for received in heard.packets] == [result, result]
