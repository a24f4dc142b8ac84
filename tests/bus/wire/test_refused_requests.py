"""A client whose request does not fit is told so over NATS too, where the packet itself is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import nats
import pytest

from tests.bus.wire.conftest import PATIENCE_S, Heard, Net
from tests.bus.wire.test_refusals import bent, good
from tests.servers.nats import caught_up
from trellis.app.wiring import SystemClock
from trellis.bus.messages import ALERT, CANCEL, RESULT, SUBMIT, BusAlert, ErrorCode, JobCancel, JobResult, Status
from trellis.bus.scheduling.intake import BusIntake
from trellis.bus.submitter import BacklogLimit
from trellis.bus.topics import Topics
from trellis.bus.wire.alerts import ALERTS_AT_ONCE
from trellis.engine.jobs import JobId
from trellis.engine.ledger import Ledger
from trellis.ledgers import open_ledger
from trellis.testing import FakeClock


@pytest.fixture
async def ledger() -> AsyncIterator[Ledger]:
    opened = await open_ledger("sqlite:///:memory:")
    yield opened
    await opened.close()


def named(job_id: str, change: Callable[[Any], object] = lambda _: None) -> bytes:
    def both(message: Any) -> None:
        message.job_request.job_id = job_id
        message.job_request.meta.idempotency_key = ""
        change(message)

    return bent(both)


async def there(ledger: Ledger, job_id: str) -> None:
    await reaches(ledger, job_id, "PENDING")


async def reaches(ledger: Ledger, job_id: str, state: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (job := await ledger.job(JobId(job_id))) is None or job.state != state:
            await SystemClock().sleep(0.005)


@pytest.mark.requirement("BUS-2", "BUS-12")
async def test_invalid_request_is_answered_with_a_result_unless_its_id_belongs_to_another_job(
    nats_net: Net, ledger: Ledger
):
    bus, results, alerts = await nats_net.bus(), Heard(), Heard()
    clock = FakeClock()
    intake = BusIntake(
        ledger=ledger, bus=bus, topics=Topics(), room=BacklogLimit(ledger=ledger, clock=clock), clock=clock
    )
    await intake.start()
    await bus.listen(RESULT, results)
    await bus.listen(ALERT, alerts)
    client = await nats.connect(nats_net.url)
    await client.publish(SUBMIT, good())
    await caught_up(client)
    await there(ledger, "job-1")

    def odd(message: Any) -> None:
        message.job_request.topic = "no topic"

    await client.publish(SUBMIT, named("job-1", odd))
    await client.publish(SUBMIT, named("free", odd))
    await client.publish(SUBMIT, named("mine", lambda message: message.job_request.labels.update(retry_of="x")))
    await caught_up(client)
    await results.until(2)
    await alerts.until(3)
    await client.close()
    told = {body.job_id: body for received in results.packets if isinstance(body := received.packet.body, JobResult)}
    assert set(told) == {"free", "mine"}
    assert {(body.status, body.error_code) for body in told.values()} == {(Status.FAILED, "INVALID_INPUT")}
    assert "topic" in told["free"].error_message
    assert "labels/retry_of" in told["mine"].error_message
    codes = [body.code for received in alerts.packets if isinstance(body := received.packet.body, BusAlert)]
    assert codes == [ErrorCode.INVALID_INPUT] * 3, "each once: the bus has told people already"
    await intake.stop()
    assert bus.on_refused is None


@pytest.mark.requirement("BUS-11")
async def test_alerts_about_requests_with_a_used_id_are_rate_limited(nats_net: Net, ledger: Ledger):
    bus, alerts = await nats_net.bus(), Heard()
    room = BacklogLimit(ledger=ledger, clock=FakeClock())
    intake = BusIntake(ledger=ledger, bus=bus, topics=Topics(), room=room, clock=FakeClock())
    await intake.start()
    await bus.listen(ALERT, alerts)
    client = await nats.connect(nats_net.url)
    for number in range(50):
        await client.publish(SUBMIT, named("mine", lambda message, n=number: message.job_request.env.update(n=str(n))))
    await client.publish(SUBMIT, named("last"))
    await caught_up(client)
    await there(ledger, "last")
    await intake.stop()
    await client.close()
    await alerts.until(ALERTS_AT_ONCE)
    assert [body.code for one in alerts.packets if isinstance(body := one.packet.body, BusAlert)] == [
        ErrorCode.DUPLICATE
    ] * ALERTS_AT_ONCE


@pytest.mark.requirement("BUS-1")
async def test_cancels_right_behind_their_requests_are_not_lost_where_requests_come_over_a_stream(
    stream_net: Net, ledger: Ledger
):
    """Requests come over JetStream and cancels over plain NATS: sent back to back, a cancel overtakes its request."""
    bus, clock = await stream_net.bus(), FakeClock()
    intake = BusIntake(
        ledger=ledger, bus=bus, topics=Topics(), room=BacklogLimit(ledger=ledger, clock=clock), clock=clock
    )
    await intake.start()
    client = await nats.connect(stream_net.url)
    jobs = [f"j{number}" for number in range(10)]
    for job_id in jobs:
        await client.publish(SUBMIT, named(job_id))
        await client.publish(CANCEL, good("client-1", JobCancel(job_id=job_id, requested_by="client-1")))
    await caught_up(client)
    for job_id in jobs:
        await reaches(ledger, job_id, "CANCELLED")
    await client.close()
    await intake.stop()
