"""The cases that CAP's conformance list has for a control plane, each by its id there, driven and judged over the wire and in the ledger.

The cases are told in our own words: a worker and a client that speak through the SDK do what a case is about, and the case holds when
the packets on the bus and the events in the ledger say so.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.bus.interop.plane import RAN, SUCCEEDED, TOPIC, Peer, Plane, pb, plane_on
from tests.servers.nats import NatsServer
from trellis.bus.approvals import decide
from trellis.bus.messages import CANCEL, direct_subject
from trellis.bus.safety.policy import DecisionKind
from trellis.engine.jobs import Actor, JobId, RequestId
from trellis.lifecycles import Role

WAITS = ["job_accepted", "job_scheduled"]
HANDED_OUT = [*WAITS, "job_dispatched"]
POOLED: Mapping[str, Any] = {"topics": {TOPIC: {"pools": ["code"]}}, "pools": {"code": {}}}
AGAIN: Mapping[str, Any] = {"topics": {TOPIC: {"idempotent": True, "lease_s": 9, "max_attempts": 3}}}
ONE_TRY: Mapping[str, Any] = {"topics": {TOPIC: {"lease_s": 9, "max_attempts": 1}}}
JOB = "j1"


@dataclass
class Scene:
    """Who is there: the control plane, a client and a worker that does nothing by itself."""

    plane: Plane
    client: Peer
    worker: Peer

    async def handed_out(self, number: int = 1, **request: Any) -> Any:
        """The job is with the worker, which listens at its topic; the order."""
        await self.worker.serve()
        await self.client.submit(JOB, **request)
        await self.plane.reaches(JOB, "DISPATCHED")
        return (await self.worker.got(number))[-1]

    async def next_attempt(self) -> tuple[Any, Any]:
        """The orders of an attempt that was lost, and of the one after it."""
        first = await self.handed_out()
        while len(self.worker.orders) < 2:
            await self.plane.pass_time(1)
        assert await self.plane.path(JOB) == [*HANDED_OUT, "job_lease_expired", "job_dispatched"]
        return first, self.worker.orders[1]

    async def finish(self, order: Any) -> None:
        """The worker's result is taken: whatever came before has not disturbed it."""
        await self.worker.report(order.job_id)
        await self.plane.told(self.client, JOB, "SUCCEEDED")

    async def rests(self, *path: str) -> None:
        """After everything that is under way these are all events."""
        await self.plane.settle()
        assert await self.plane.path(JOB) == list(path)

    def sent_to_workers(self) -> list[Any]:
        """Every order that went out, to whatever subject."""
        return [*self.plane.tap.packets("job.", "job_request"), *self.plane.tap.packets("worker.", "job_request")]


@dataclass(frozen=True)
class Case:
    """What the list calls it, and how it is shown."""

    name: str
    show: Callable[[Scene], Awaitable[None]]
    topics: Mapping[str, Any] = field(default_factory=dict[str, Any])
    proves: tuple[str, ...] = ()


CASES: list[Case] = []


def case(name: str, *proves: str, topics: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    def added(show: Callable[[Scene], Awaitable[None]]) -> Callable[[Scene], Awaitable[None]]:
        CASES.append(Case(name, show, topics or {}, proves))
        return show

    return added


# --- lifecycle -------------------------------------------------------------------------------------------------------


@case("lifecycle/cp-pending-to-scheduled", "BUS-1")
async def _validated(scene: Scene) -> None:
    await scene.plane.submit(JOB, labels={"worker.zone": "nowhere"})
    assert await scene.plane.state(JOB) == "PENDING"
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.rests(*WAITS, "job_deferred")  # nobody may have it
    steps = [(event.source, event.target, event.role) for event in await scene.plane.events(JOB)]
    assert steps[:2] == [(None, "PENDING", Role.GATEWAY), ("PENDING", "SCHEDULED", Role.SCHEDULER)]
    assert scene.sent_to_workers() == []


@case("lifecycle/cp-scheduled-to-dispatched", "BUS-1", "BUS-2", "D29")
async def _dispatched(scene: Scene) -> None:
    order = await scene.handed_out(labels={"team": "a"}, env={"x": "y"}, workflow_id="wf", step_index=2)
    await scene.rests(*HANDED_OUT)
    assert (order.job_id, order.env["job_id"], order.env["x"]) == (f"{JOB}@1", JOB, "y")
    assert (dict(order.labels), order.workflow_id, order.step_index) == ({"team": "a"}, "wf", 2)
    assert len(scene.sent_to_workers()) == 1
    assert scene.worker.heard[0].trace_id == f"t-{JOB}"


@case("lifecycle/cp-scheduled-to-denied", "BUS-1", "BUS-4", "BUS-12")
async def _denied(scene: Scene) -> None:
    scene.plane.kernel.says(DecisionKind.DENY, reason="not here")
    await scene.worker.serve()
    await scene.client.submit(JOB)
    await scene.plane.told(scene.client, JOB, "DENIED")
    await scene.rests(*WAITS, "job_denied")
    assert scene.sent_to_workers() == []


@case("lifecycle/cp-dispatched-to-timeout", "BUS-5", "BUS-12", "D30", topics=ONE_TRY)
async def _timed_out(scene: Scene) -> None:
    order = await scene.handed_out()
    await scene.worker.hear(CANCEL)
    await scene.plane.pass_time(8)
    assert await scene.plane.state(JOB) == "DISPATCHED"
    await scene.plane.pass_time(2)
    await scene.plane.told(scene.client, JOB, "TIMEOUT")
    await scene.rests(*HANDED_OUT, "job_timed_out")
    assert scene.worker.stops == [order.job_id]


@case("lifecycle/cp-rejects-backwards-transition", "BUS-6")
async def _never_back(scene: Scene) -> None:
    order = await scene.handed_out()
    await scene.worker.progress(order.job_id)
    await scene.plane.reaches(JOB, "RUNNING")
    for status in ("PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"):
        await scene.worker.progress(order.job_id, status)
        await scene.worker.report(order.job_id, status)
    await scene.rests(*RAN)
    await scene.finish(order)
    for status in ("PENDING", "SCHEDULED", "DISPATCHED", "RUNNING"):
        await scene.worker.progress(order.job_id, status)
        await scene.worker.report(order.job_id, status)
    for status in ("FAILED", "CANCELLED", "DENIED", "TIMEOUT", "FAILED_RETRYABLE", "FAILED_FATAL"):
        await scene.worker.report(order.job_id, status)
    await scene.rests(*SUCCEEDED)


# --- cancellation ----------------------------------------------------------------------------------------------------


@case("cancellation/cp-cancel-from-pending", "BUS-1", "BUS-12")
async def _cancelled_pending(scene: Scene) -> None:
    await scene.plane.submit(JOB)
    await scene.client.cancel(JOB)
    await scene.plane.heard_everything()
    await scene.plane.told(scene.client, JOB, "CANCELLED")
    await scene.rests("job_accepted", "job_cancelled")
    assert scene.sent_to_workers() == []


@case("cancellation/cp-cancel-from-running", "BUS-1", "BUS-6", "BUS-12", "D29")
async def _cancelled_running(scene: Scene) -> None:
    order = await scene.handed_out()
    await scene.worker.hear(CANCEL)
    await scene.worker.progress(order.job_id)
    await scene.plane.reaches(JOB, "RUNNING")
    await scene.client.cancel(JOB)
    await scene.plane.settle()
    assert (scene.worker.stops, await scene.plane.state(JOB)) == ([JOB, order.job_id], "RUNNING")
    while await scene.plane.state(JOB) == "RUNNING":  # the worker does not care, and has its grace
        await scene.worker.progress(order.job_id)
        await scene.plane.pass_time(1)
    await scene.plane.told(scene.client, JOB, "CANCELLED")
    await scene.worker.report(order.job_id)
    await scene.rests(*RAN, "job_cancelled")
    assert await scene.plane.refused(JOB) == [("late", "SUCCEEDED", "worker-1")]


@case("cancellation/cp-rejects-cancel-after-terminal", "BUS-6")
async def _not_cancelled_after_its_end(scene: Scene) -> None:
    await scene.finish(await scene.handed_out())
    await scene.client.cancel(JOB)
    await scene.plane.told(scene.client, JOB, "SUCCEEDED")
    await scene.rests(*SUCCEEDED)
    assert scene.plane.tap.packets(CANCEL) == []


# --- negotiation -----------------------------------------------------------------------------------------------------


async def _introduced(scene: Scene, sender_id: str, *, beat: Mapping[str, Any] | None = None, **shake: Any) -> Peer:
    """A worker with an ear of its own that says this of itself."""
    worker = await scene.plane.peer(sender_id, direct_subject(sender_id))
    await worker.shake(**shake)
    await worker.beat(**(beat or {}))
    await scene.plane.settle()
    return worker


@case("negotiation/selects-highest-common-version", "BUS-2", "BUS-3")
async def _common_version(scene: Scene) -> None:
    worker = await _introduced(scene, "both", ready_topics=[TOPIC], supported_versions=[1, 2, 3])
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "DISPATCHED")
    (order,) = await worker.got(1)
    assert [packet.protocol_version for packet in worker.heard] == [1]
    scene.worker = worker
    await scene.finish(order)


@case("negotiation/rejects-when-no-common-version", "BUS-3", "D68")
async def _no_common_version(scene: Scene) -> None:
    later = await _introduced(scene, "later", ready_topics=[TOPIC], supported_versions=[2, 3])
    await later.hear(TOPIC, TOPIC)  # where workers listen that never say anything
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.rests(*WAITS, "job_deferred")
    held = await scene.plane.said(JOB, "job_deferred")
    assert (held["hold"], held["reason"].partition(":")[0]) == ("placement", "VERSION_MISMATCH")
    assert "worker later serves job.test and speaks version 2, 3 of CAP" in held["reason"]
    assert (scene.sent_to_workers(), scene.client.alerts) == ([], [100])
    scene.worker = await _introduced(scene, "able", ready_topics=[TOPIC])  # supported_versions empty: not said
    await scene.plane.pass_time(6)
    await scene.finish((await scene.worker.got(1))[0])
    assert later.orders == []


@case("negotiation/required-capability-filters-dispatch", "BUS-3", topics=POOLED)
async def _capability(scene: Scene) -> None:
    await _introduced(scene, "plain", beat={"pool": "code"})
    await scene.client.submit(JOB, meta=pb.JobMetadata(requires=["gpu"]))
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.rests(*WAITS, "job_deferred")
    able = await _introduced(scene, "able", beat={"pool": "code", "capabilities": ["GPU"]})
    await scene.plane.pass_time(6)
    await able.got(1)
    await scene.rests(*WAITS, "job_deferred", "job_dispatched")
    assert len(scene.sent_to_workers()) == 1


@case("negotiation/ready-topics-filters-dispatch", "BUS-3", topics=POOLED)
async def _ready_topics(scene: Scene) -> None:
    await _introduced(scene, "elsewhere", beat={"pool": "code"}, ready_topics=["job.other"])
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.rests(*WAITS)
    ready = await _introduced(scene, "ready", beat={"pool": "code"}, ready_topics=[TOPIC])
    await ready.got(1)
    await scene.rests(*HANDED_OUT)
    assert (await scene.plane.said(JOB, "job_dispatched"))["worker_id"] == "ready"


@case("negotiation/missing-ready-topics-is-unspecified-not-error", "BUS-3", topics=POOLED)
async def _said_nothing_of_topics(scene: Scene) -> None:
    worker = await _introduced(scene, "modest", beat={"pool": "code"})
    await scene.client.submit(JOB)
    await worker.got(1)
    await scene.rests(*HANDED_OUT)
    assert scene.client.alerts == []


# --- safety ----------------------------------------------------------------------------------------------------------


@case("safety/allow-precedes-dispatch", "BUS-4")
async def _allowed_first(scene: Scene) -> None:
    scene.plane.kernel.away = True
    await scene.worker.serve()
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.rests(*WAITS)  # nobody has allowed it
    assert scene.sent_to_workers() == []
    scene.plane.kernel.away = False
    await scene.plane.reaches(JOB, "DISPATCHED")
    told = await scene.plane.said(JOB, "job_dispatched")
    assert (told["decision"]["decision"], len(await scene.worker.got(1))) == ("allow", 1)


@case("safety/deny-blocks-dispatch", "BUS-4", "BUS-12")
async def _denied_for_good(scene: Scene) -> None:
    await _denied(scene)
    scene.plane.kernel.says(DecisionKind.ALLOW)
    await scene.client.submit(JOB)
    await scene.plane.pass_time(5)
    await scene.rests(*WAITS, "job_denied")
    assert scene.sent_to_workers() == []


@case("safety/require-human-pauses-dispatch", "BUS-4", "D45")
async def _held_for_a_person(scene: Scene) -> None:
    scene.plane.kernel.says(DecisionKind.REQUIRE_HUMAN)
    await scene.worker.serve()
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.plane.pass_time(5)
    await scene.rests(*WAITS, "job_held")
    assert scene.sent_to_workers() == []
    person = Actor(role=Role.OWNER, name="ada")
    await decide(
        scene.plane.ledger, person, JobId(JOB), approve=True, note="it may go", request_id=RequestId("approval-1")
    )
    await scene.plane.reaches(JOB, "DISPATCHED")
    await scene.finish((await scene.worker.got(1))[0])
    await scene.rests(*WAITS, "job_held", "job_approved", *SUCCEEDED[2:])


@case("safety/throttle-blocks-immediate-dispatch", "BUS-4", "D45")
async def _throttled(scene: Scene) -> None:
    scene.plane.kernel.says(DecisionKind.THROTTLE, delay_s=10.0)
    await scene.worker.serve()
    await scene.client.submit(JOB)
    await scene.plane.reaches(JOB, "SCHEDULED")
    await scene.plane.pass_time(8)
    await scene.rests(*WAITS, "job_deferred")
    assert scene.sent_to_workers() == []
    scene.plane.kernel.says(DecisionKind.ALLOW)
    await scene.plane.pass_time(3)
    await scene.worker.got(1)
    await scene.rests(*WAITS, "job_deferred", "job_dispatched")


# --- duplicates and retries ------------------------------------------------------------------------------------------


@case("duplicates/cp-duplicate-result-applies-once", "BUS-6", "BUS-12", "D29")
async def _twice_is_once(scene: Scene) -> None:
    order = await scene.handed_out()
    for _ in range(3):
        await scene.worker.report(order.job_id, execution_ms=7)
    await scene.plane.told(scene.client, JOB, "SUCCEEDED")
    await scene.worker.report(order.job_id, execution_ms=7)
    await scene.plane.told(scene.client, JOB, "SUCCEEDED")
    await scene.rests(*SUCCEEDED)


@case("retries/cp-ignores-stale-attempt-result", "BUS-5", "BUS-6", "D29", topics=AGAIN)
async def _stale_result(scene: Scene) -> None:
    stale, current = await scene.next_attempt()
    before = await scene.plane.path(JOB)
    await scene.worker.report(stale.job_id)
    await scene.worker.report(stale.job_id, "FAILED")
    await scene.worker.report(current.job_id, dispatch=stale.dispatch)
    await scene.rests(*before)
    assert {kind for kind, _, _ in await scene.plane.refused(JOB)} == {"stale"}
    await scene.finish(current)
    await scene.rests(*before, "job_started", "job_succeeded")


@case("retries/cp-ignores-stale-attempt-progress", "BUS-5", "BUS-6", "D29", topics=AGAIN)
async def _stale_progress(scene: Scene) -> None:
    stale, current = await scene.next_attempt()
    before = await scene.plane.path(JOB)
    await scene.worker.progress(stale.job_id, percent=50)
    await scene.worker.progress(current.job_id, percent=50, dispatch=stale.dispatch)
    await scene.rests(*before)
    for _ in range(9):  # nor does it keep the attempt alive
        await scene.worker.progress(stale.job_id, percent=50)
        await scene.plane.pass_time(1)
    await scene.worker.got(3)
    await scene.rests(*before, "job_lease_expired", "job_dispatched")


@case("retries/cp-ignores-stale-attempt-cancel", "BUS-6", "D29", topics=AGAIN)
async def _stale_cancel(scene: Scene) -> None:
    stale, current = await scene.next_attempt()
    before = await scene.plane.path(JOB)
    told = len(scene.plane.tap.packets(CANCEL))
    await scene.client.cancel(stale.job_id)
    await scene.client.cancel(JOB, dispatch=stale.dispatch)
    await scene.rests(*before)
    assert len(scene.plane.tap.packets(CANCEL)) == told  # the worker of the current attempt is not stopped
    await scene.finish(current)
    await scene.rests(*before, "job_started", "job_succeeded")


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shown", [pytest.param(one, id=one.name, marks=pytest.mark.requirement(*one.proves)) for one in CASES]
)
async def test_our_control_plane_behaves_as_the_case_asks(interop_server: NatsServer, tmp_path: Path, shown: Case):
    async with plane_on(interop_server, tmp_path, shown.topics) as plane:
        await shown.show(Scene(plane, await plane.client(), await plane.peer("worker-1")))


def test_every_case_of_the_list_is_here_once():
    names = [one.name for one in CASES]
    assert (len(names), len(set(names))) == (21, 21)
