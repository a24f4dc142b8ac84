"""What clients send over the bus: accepted once, refused aloud, and never lost because the ledger was away."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest
import pytest_asyncio

from tests.bus.holding_parts import parts_of
from tests.bus.rig import SENDER, TOPIC, Rig, quiet
from trellis.bus.errors import BusRequestInvalid
from trellis.bus.messages import (
    ALERT,
    CANCEL,
    RESULT,
    SUBMIT,
    BusAlert,
    Dispatch,
    ErrorCode,
    JobCancel,
    JobOrder,
    JobResult,
    Packet,
    PacketBody,
    PacketRefused,
    Status,
)
from trellis.bus.port import ReceivedPacket
from trellis.bus.requests import JobRequest
from trellis.bus.scheduling.intake import KEPT_MAX, REFUSALS, SENDER_MAX, BusIntake
from trellis.bus.submitter import COUNT_FRESH_S, BacklogLimit
from trellis.bus.topics import Topics
from trellis.bus.wire import cap
from trellis.bus.wire.local import LocalBus
from trellis.bus.wire.signatures import PacketKeys
from trellis.engine.errors import LedgerUnavailable
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.lifecycles import Role


@dataclass
class Client:
    """Somebody on the bus who submits, and hears what is said to everybody."""

    bus: LocalBus
    intake: BusIntake
    heard: list[PacketBody] = field(default_factory=list[PacketBody])
    accepted: list[int] = field(default_factory=list[int])

    async def listen(self) -> None:
        for subject in (ALERT, RESULT):
            await self.bus.listen(subject, self._take)

    async def send(self, subject: str, body: PacketBody, trace_id: str = "trace-1") -> None:
        """As it comes in: the intake has dealt with it when this returns."""
        packet = self.bus.packet(body, trace_id)
        handler = self.intake.on_submit if subject == SUBMIT else self.intake.on_cancel
        await handler(ReceivedPacket(subject=subject, packet=packet, answer=self._nothing))
        await quiet()

    async def _take(self, received: ReceivedPacket) -> None:
        self.heard.append(received.packet.body)

    async def _nothing(self, body: PacketBody) -> None:
        raise AssertionError(f"nobody asked for {body}")

    @property
    def alerts(self) -> list[ErrorCode]:
        return [body.code for body in self.heard if isinstance(body, BusAlert)]

    @property
    def results(self) -> list[JobResult]:
        return [body for body in self.heard if isinstance(body, JobResult)]


def intake_of(rig: Rig, topics: Topics) -> BusIntake:
    room = BacklogLimit(ledger=rig.ledger, clock=rig.clock)
    return BusIntake(ledger=rig.ledger, bus=rig.bus, topics=topics, room=room, clock=rig.clock)


@pytest_asyncio.fixture(loop_scope="session")
async def client(rig: Rig) -> AsyncIterator[Client]:
    made = Client(rig.sender("client-1"), intake_of(rig, rig.topics))

    async def accept(job_id: JobId) -> None:
        assert await rig.job(job_id)
        made.accepted.append(1)

    made.intake.accepted = accept
    await made.listen()
    yield made
    await made.intake.stop()


def request(job_id: str = "mine", **said: object) -> JobRequest:
    return JobRequest.model_validate({"job_id": job_id, "topic": TOPIC, **said})


@pytest.mark.on_both
@pytest.mark.requirement("BUS-1", "BUS-2")
async def test_a_request_on_the_bus_becomes_a_job_of_its_sender(rig: Rig, client: Client):
    await client.send(SUBMIT, request(priority="critical", tenant_id="acme"))
    job = await rig.job("mine")
    assert (job.state, job.priority.name, job.correlation_id) == ("PENDING", "CRITICAL", "trace-1")
    (event,) = await rig.events("mine")
    assert (event.role, event.actor) == (Role.GATEWAY, "<bus>client-1")
    assert client.accepted == [1]
    assert client.heard == []


@pytest.mark.requirement("OBS-6")
async def test_a_job_goes_on_with_the_trace_of_its_client_and_with_nothing_else(rig: Rig, client: Client):
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await client.send(SUBMIT, request(env={"TRACEPARENT": trace}))
    await client.send(SUBMIT, request("other", env={"TRACEPARENT": "no trace"}))
    traced = (await rig.job("mine")).trace
    assert traced is not None
    assert traced.split("-")[1] == trace.split("-")[1]
    assert (await rig.job("other")).trace != "no trace"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-11")
async def test_the_same_request_again_is_the_same_job_and_another_body_is_refused(rig: Rig, client: Client):
    await client.send(SUBMIT, request())
    await client.send(SUBMIT, request())
    assert client.heard == []
    assert client.accepted == [1]
    before = (await rig.job("mine")).payload
    await client.send(SUBMIT, request(context_ptr="objects://other"))
    assert client.alerts == [ErrorCode.DUPLICATE]
    assert client.results == [], "the job of that id goes on, and has one result of its own"
    assert (await rig.job("mine")).payload == before
    assert await rig.path("mine") == ["job_accepted"]


@pytest.mark.requirement("BUS-11", "BUS-12")
async def test_the_same_request_after_the_end_gets_the_same_result_again(rig: Rig, client: Client):
    await client.send(SUBMIT, request())
    await client.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    before = await rig.path("mine")
    await client.send(SUBMIT, request())
    await client.send(SUBMIT, request())
    assert [(result.job_id, result.status) for result in client.results] == [("mine", Status.CANCELLED)] * 2
    assert rig.bus.message_ids == [None, None], "a bus that keeps packets does not take it for the one it knows"
    assert await rig.path("mine") == before
    assert client.accepted == [1]


@pytest.mark.requirement("BUS-11")
async def test_an_id_of_another_lifecycle_is_taken_too(rig: Rig, client: Client):
    await rig.ledger.submit(
        Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=JobId("mine"), type="t", id_is_given=True)]
    )
    await client.send(SUBMIT, request())
    assert client.alerts == [ErrorCode.DUPLICATE]


@pytest.mark.requirement("BUS-2", "BUS-12")
async def test_a_request_that_cannot_be_taken_is_refused_aloud(rig: Rig, client: Client):
    await client.send(SUBMIT, request(labels={"trellis.retry_attempt": "1"}))
    assert client.alerts == [ErrorCode.INVALID_INPUT]
    (result,) = client.results
    assert (result.job_id, result.status, result.worker_id) == ("mine", Status.FAILED, SENDER)
    assert (result.error_code, result.error_code_enum) == ("INVALID_INPUT", ErrorCode.INVALID_INPUT)
    assert "trellis.retry_attempt" in result.error_message
    assert await rig.ledger.job(JobId("mine")) is None


@pytest.mark.requirement("BUS-11")
@pytest.mark.parametrize("job_id", ["theirs.c", "theirs.r1", "theirs.q-1f", "theirs@1"])
async def test_an_id_that_the_engine_derives_is_refused(rig: Rig, client: Client, job_id: str):
    await client.send(SUBMIT, request(job_id))
    assert client.alerts == [ErrorCode.INVALID_INPUT]
    assert "choose another id" in client.results[0].error_message
    assert await rig.ledger.job(JobId(job_id)) is None


@pytest.mark.requirement("BUS-2")
async def test_a_job_id_too_long_for_its_wire_id_is_refused(rig: Rig, client: Client):
    await client.send(SUBMIT, request("x" * 161))
    assert client.alerts == [ErrorCode.INVALID_INPUT]
    assert "160" in client.results[0].error_message
    assert await rig.ledger.job(JobId("x" * 161)) is None


async def test_a_bad_request_with_the_id_of_a_job_gets_no_result_in_its_name(rig: Rig, client: Client):
    await rig.submit(job_id="mine")
    await client.send(SUBMIT, request(labels={"retry_of": "x"}))
    assert client.alerts == [ErrorCode.INVALID_INPUT]
    assert client.results == []


async def test_a_request_with_a_dispatch_of_its_own_is_a_request(rig: Rig, client: Client):
    await client.send(SUBMIT, JobOrder(request=request(), dispatch=Dispatch(dispatch_id="forged")))
    assert await rig.state("mine") == "PENDING"


async def test_other_packets_on_the_subject_are_dropped(rig: Rig, client: Client):
    await client.send(SUBMIT, JobCancel(job_id="mine", requested_by="me"))
    assert client.heard == []
    assert (await rig.ledger.queues()) == []


@pytest.mark.requirement("BUS-10")
async def test_bus_request_is_neither_accepted_nor_refused_during_a_ledger_outage(rig: Rig, client: Client):
    class Away:
        """A ledger that does not answer."""

        def __getattr__(self, name: str) -> object:
            raise LedgerUnavailable(reason=f"no {name}")

    client.intake.ledger = Away()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(LedgerUnavailable):
        await client.send(SUBMIT, request())
    assert client.heard == []
    client.intake.ledger = rig.ledger
    await client.send(SUBMIT, request())
    assert await rig.state("mine") == "PENDING"


async def test_request_sent_once_is_taken_in_by_the_listener(rig: Rig, client: Client):
    await client.intake.start()
    await client.bus.publish(SUBMIT, request(), trace_id="t")
    await client.intake.stop()
    assert await rig.state("mine") == "PENDING"


# --- cancel -----------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-1", "BUS-8")
async def test_a_client_cancels_a_job_that_waits_at_once(rig: Rig, client: Client):
    job_id = await rig.submit(by="<bus>client-1")
    await client.send(CANCEL, JobCancel(job_id=job_id, reason="never mind", requested_by="client-1"))
    last = (await rig.events(job_id))[-1]
    assert (last.target, last.role, last.actor, last.cause) == (
        "CANCELLED",
        Role.SUBMITTER,
        "<bus>client-1",
        "never mind",
    )


@pytest.mark.requirement("BUS-1")
async def test_a_client_asks_the_holder_of_a_job_to_stop(rig: Rig, client: Client):
    await rig.worker("w1", TOPIC)
    job_id = await rig.submit(by="<bus>client-1")
    await rig.run()
    await client.send(CANCEL, JobCancel(job_id=job_id, requested_by="client-1"))
    (hold,) = await rig.ledger.holds([JobId(job_id)])
    assert hold.cancel
    assert hold.state == "DISPATCHED"


async def test_packets_to_workers_are_not_read_as_requests_of_a_client(rig: Rig, client: Client):
    job_id = await rig.submit()
    ours = Packet(
        trace_id="t",
        sender_id=SENDER,
        created_at=client.bus.packet(request(), "t").created_at,
        body=JobCancel(job_id=job_id, requested_by=SENDER),
    )
    await client.intake.on_cancel(ReceivedPacket(subject=CANCEL, packet=ours, answer=client._nothing))
    assert await rig.state(job_id) == "PENDING"


@pytest.mark.requirement("BUS-7", "BUS-12")
async def test_cancel_of_a_retried_job_reaches_its_retry(rig: Rig, client: Client):
    parts = parts_of(rig)
    await parts.result(await parts.dispatched(job_id="a", by="<bus>client-1"), "w1", Status.FAILED_RETRYABLE)
    await parts.follow_up()
    assert await parts.jobs() == {"a": "FAILED", "a.r1": "SCHEDULED"}
    await client.send(CANCEL, JobCancel(job_id="a", requested_by="client-1"))
    await parts.follow_up()
    assert await parts.jobs() == {"a": "FAILED", "a.r1": "CANCELLED"}


async def test_only_jobs_of_the_bus_can_be_cancelled_over_the_bus(rig: Rig, client: Client):
    await rig.ledger.submit(Actor(role=Role.SUBMITTER, name="s"), [NewJob(job_id=JobId("local"), type="t")])
    for job_id in ("local", "unknown"):
        await client.send(CANCEL, JobCancel(job_id=job_id, requested_by="client-1"))
    assert await rig.state("local") == "queued"


@pytest.mark.on_both
@pytest.mark.requirement("BUS-2", "BUS-11", "BUS-12")
async def test_a_request_over_the_backlog_limit_is_refused_and_may_be_repeated(rig: Rig, client: Client):
    client.intake.topics = Topics.model_validate({"topics": {TOPIC: {"waiting_max": 2}}})
    for job_id in ("a", "b", "c", "a"):
        await client.send(SUBMIT, request(job_id))
    assert (client.accepted, client.alerts) == ([1, 1], [ErrorCode.RESOURCE_EXHAUSTED])
    (told,) = client.results
    assert (told.job_id, told.status, told.error_code) == ("c", Status.FAILED, "RESOURCE_EXHAUSTED")
    assert told.error_message.startswith(f"2 jobs wait on {TOPIC} and 2 is the limit; nothing was stored")
    assert await rig.ledger.job(JobId("c")) is None
    await client.send(CANCEL, JobCancel(job_id="a", reason="no longer", requested_by="client-1"))
    rig.clock.advance(COUNT_FRESH_S)
    await client.send(SUBMIT, request("c"))
    assert (await rig.job("c")).state == "PENDING"
    assert (client.accepted, len(client.alerts)) == ([1, 1, 1], 1)


@pytest.mark.parametrize(
    "said, told",
    [
        ({"topic": "job.*", "job_id": "a"}, r"topic: up to 16 words .* as in job\.echo; no wildcards"),
        ({"topic": "job.echo", "job_id": "a b"}, r"job_id: letters, digits and"),
    ],
)
def test_a_field_of_the_wrong_type_is_refused_and_the_expected_type_is_named(said: dict[str, str], told: str):
    with pytest.raises(BusRequestInvalid, match=told):
        JobRequest.checked(said)


# --- cancels that come before their requests -----------------------------------------------------------------------------


@pytest.mark.requirement("BUS-1")
async def test_early_cancel_survives_a_short_ledger_outage(rig: Rig, client: Client):
    class NoCancels:
        """The ledger, whose cancels do not answer."""

        def __getattr__(self, name: str) -> object:
            if name == "cancel":
                raise LedgerUnavailable(reason="away")
            return getattr(rig.ledger, name)

    await client.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    client.intake.ledger = NoCancels()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(LedgerUnavailable):
        await client.send(SUBMIT, request())
    client.intake.ledger = rig.ledger
    await client.send(SUBMIT, request())  # as a stream brings it again
    assert await rig.state("mine") == "CANCELLED"


@pytest.mark.requirement("BUS-1")
async def test_a_sender_with_many_cancels_of_unknown_jobs_pushes_out_nobody_elses(rig: Rig, client: Client):
    await client.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    early = client.intake._early
    for sender in range(2 * KEPT_MAX // SENDER_MAX):
        noisy = rig.sender(f"noisy-{sender}")
        for number in range(SENDER_MAX + 1):
            early.keep(noisy.packet(JobCancel(job_id=f"n{number}", requested_by="noisy"), "t"))
    assert len(early._kept) == KEPT_MAX
    await client.send(SUBMIT, request())
    assert await rig.state("mine") == "CANCELLED"


async def test_a_job_that_is_submitted_after_a_cancel_of_its_id_runs(rig: Rig, client: Client):
    await client.send(CANCEL, JobCancel(job_id="mine", requested_by="client-1"))
    rig.clock.advance(20)
    await client.send(SUBMIT, request())
    rig.clock.advance(20)
    await quiet()
    assert await rig.state("mine") == "PENDING"


# --- refusals under others' ids -------------------------------------------------------------------------------------------


@pytest.mark.requirement("BUS-12")
async def test_no_refusal_is_published_under_the_id_or_the_wire_id_of_a_job(rig: Rig, client: Client):
    await rig.worker("silent", TOPIC, direct=False)
    await rig.submit(job_id="mine")
    await rig.run()
    for named in ("mine", "mine@1", "mine@1\n", "mine\x00@7", "other@1"):
        error = PacketRefused(ErrorCode.INVALID_INPUT, "bad", job_id=named, trace_id="t", sender_id="client-2")
        await client.intake.on_refused(SUBMIT, error)
    await quiet()
    assert [result.job_id for result in client.results] == ["other@1"]
    assert rig.workers.outstanding(TOPIC) == 1


@pytest.mark.requirement("BUS-12")
async def test_refusals_to_a_sender_of_many_bad_requests_are_bounded_and_others_get_theirs(rig: Rig, client: Client):
    for sender, number in (("noisy", 2 * REFUSALS.at_once), ("quiet", 1)):
        for one in range(number):
            error = PacketRefused(ErrorCode.INVALID_INPUT, "bad", job_id=f"{sender}{one}", sender_id=sender)
            await client.intake.on_refused(SUBMIT, error)
    told = [body.job_id for _, body in rig.bus.published if isinstance(body, JobResult)]
    assert (len(told), told[-1]) == (REFUSALS.at_once + 1, "quiet0")


@pytest.mark.requirement("BUS-2", "BUS-9", "D68")
@pytest.mark.parametrize("place", ["context_ref", "compensation/context_ref"])
def test_a_reference_that_expires_at_no_time_is_refused_and_every_other_can_be_sent(place: str):
    def asked(expires_at: str) -> JobRequest:
        said: dict[str, object] = {"context_ref": {"uri": "objects://ctx/x", "expires_at": expires_at}}
        return JobRequest.checked(
            {"job_id": "j", "topic": TOPIC, **(said if "/" not in place else {"compensation": said})}
        )

    for wrong in ("tomorrow", "2030-01-31", "2030-02-31T00:00:00Z", "2030-01-31T12:00:00", "0001-01-01T00:00:00+23:00"):
        with pytest.raises(BusRequestInvalid, match=f"{place}/expires_at: a time as in RFC 3339"):
            asked(wrong)
    for right in ("", "2030-01-31T12:00:00Z", "2030-01-31T12:00:00.123456789+05:30", "9999-12-31T23:59:59.9Z"):
        sent = JobOrder(request=asked(right), dispatch=Dispatch())
        now = datetime(2026, 1, 1, tzinfo=UTC)
        assert cap.encode(Packet(trace_id="t", sender_id="s", created_at=now, body=sent), PacketKeys())
