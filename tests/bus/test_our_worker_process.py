"""`trellis worker --bus` as a process on a real NATS server, and what its command line refuses."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.bus.wire.conftest import new_id, now
from tests.servers.nats import NatsServer, running_nats
from tests.servers.ready_python import ready_python
from trellis.app.wiring import SystemClock
from trellis.bus.messages import (
    ASK_FIRST,
    HANDSHAKE,
    JOB_ID_IN_ENV,
    PROGRESS,
    RESULT,
    Dispatch,
    Handshake,
    JobOrder,
    JobProgress,
    JobResult,
    Status,
)
from trellis.bus.pointers import PointerPart, Pointers, make_pointers
from trellis.bus.port import Bus, ReceivedPacket
from trellis.bus.requests import JobRequest
from trellis.bus.wire import BusOptions, open_bus
from trellis.cli import main
from trellis.cli.bus_worker import LOOK_S, ProcessLoad, print_served
from trellis.cli.invocation import Cli
from trellis.cli.output import Output
from trellis.storage.objects.open import open_objects
from trellis.testing import FakeClock
from trellis.worker.options import as_worker_id

PATIENCE_S = 60.0
WORKER = "reader-1"


class Plane:
    """A control plane as a script, on its own connection."""

    def __init__(self, bus: Bus, pointers: Pointers) -> None:
        self.bus, self.pointers = bus, pointers
        self.met: asyncio.Queue[Handshake] = asyncio.Queue()
        self.results: asyncio.Queue[JobResult] = asyncio.Queue()

    async def open(self) -> None:
        await self.bus.listen(HANDSHAKE, self._heard)
        await self.bus.listen(PROGRESS, self._heard, group="trellis")
        await self.bus.listen(RESULT, self._heard, group="trellis", durable=True)

    async def _heard(self, received: ReceivedPacket) -> None:
        body = received.packet.body
        if isinstance(body, Handshake):
            self.met.put_nowait(body)
        elif isinstance(body, JobProgress | JobResult) and received.wants_answer:
            await received.answer(JobProgress(job_id=body.job_id, message="accepted"))
            if isinstance(body, JobResult):
                self.results.put_nowait(body)

    async def run(self, topic: str, payload: Any) -> JobResult:
        pointer = await self.pointers.put(json.dumps(payload).encode(), part=PointerPart.CONTEXT)
        job_id = str(uuid4())
        said = {
            "job_id": f"{job_id}@1",
            "topic": topic,
            "context_ptr": pointer,
            "env": {ASK_FIRST: "ask", JOB_ID_IN_ENV: job_id},
        }
        order = JobOrder(
            request=JobRequest.model_validate(said), dispatch=Dispatch(dispatch_id="d-1", worker_id=WORKER)
        )
        await self.bus.publish(f"worker.{WORKER}.jobs", order, trace_id="trace", needs_listener=True)
        return await asyncio.wait_for(self.results.get(), PATIENCE_S)


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with running_nats(jetstream=True) as made:
        yield made


@pytest.fixture
async def plane(server: NatsServer, tmp_path: Path) -> AsyncIterator[Plane]:
    bus = await open_bus(BusOptions(url=server.url), clock=SystemClock(), now=now, new_id=new_id)
    objects = await open_objects(f"file://{tmp_path / 'objects'}")
    made = Plane(bus, make_pointers(objects, None))
    await made.open()
    yield made
    await bus.close()
    await objects.close()


@pytest.fixture
def process(server: NatsServer, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).resolve().parents[2]
    started = subprocess.Popen(
        [ready_python(), "-m", "trellis", "worker", "examples.bus_worker:app", "--bus", server.url, "--name", WORKER],
        cwd=root,
        env={**os.environ, "TRELLIS_OBJECTS": f"file://{tmp_path / 'objects'}"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


@pytest.mark.requirement("BUS-2")
async def test_a_worker_process_serves_topics_until_it_is_told_to_stop(
    plane: Plane, process: subprocess.Popen[str]
) -> None:
    met = await asyncio.wait_for(plane.met.get(), PATIENCE_S)
    assert (met.component_id, met.ready_topics[0]) == (WORKER, "job.text.count")
    result = await plane.run("job.text.count", {"text": "two words"})
    assert (result.status, result.worker_id) == (Status.SUCCEEDED, WORKER)
    assert json.loads(await plane.pointers.read(result.result_ptr)) == {"words": 2, "characters": 9}
    refused = await plane.run("job.text.count", {"texts": "?"})
    assert (refused.status, refused.error_code) == (Status.FAILED_FATAL, "INVALID_INPUT")
    process.send_signal(signal.SIGTERM)
    _, errors = await asyncio.to_thread(process.communicate, timeout=PATIENCE_S)
    assert (process.returncode, "Traceback" in errors) == (0, False)


async def test_worker_logs_that_it_waits_for_the_bus(server: NatsServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.kill()
    options, cli = BusOptions(url=server.url, sender_id=WORKER), Cli(ledger=None, data=None, out=Output(as_json=False))
    bus = await open_bus(options, clock=SystemClock(), now=now, new_id=new_id)
    try:
        clock = FakeClock()
        telling = asyncio.create_task(print_served(cli, bus, "it serves job.echo", clock))
        await asyncio.sleep(0)
        assert clock.sleeping == 1
        told = capsys.readouterr().err
        assert (f"waiting for {server.url}, which does not answer" in told, "serves" in told) == (True, False)
        server.restart()
        async with asyncio.timeout(PATIENCE_S):
            while not bus.connected:
                await SystemClock().sleep(0.01)
        clock.advance(LOOK_S)
        await asyncio.wait_for(telling, PATIENCE_S)
        assert "it serves job.echo" in capsys.readouterr().err
    finally:
        await bus.close()


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str]:
        code = main(["worker", "examples.bus_worker:app", *arguments])
        return code, " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--bus", "local"), "the local bus is inside one process"),
        (("--bus", "http://somewhere"), "write nats://host:4222"),
        (("--bus", "nats://127.0.0.1:1", "--prefetch", "3"), "leave it out with --bus"),
        (("--bus", "nats://127.0.0.1:1", "--no-hints"), "leave it out with --bus"),
        (("--bus", "nats://127.0.0.1:1", "--label", "blue"), "write NAME=VALUE"),
        (("--bus", "nats://127.0.0.1:1", "--name", "w.1"), "use letters, digits, - and _"),
        (("--bus", "nats://127.0.0.1:1", "--concurrency", "0"), "it must be from 1"),
        (("--bus", "nats://127.0.0.1:1"), "set TRELLIS_OBJECTS or TRELLIS_REDIS"),
        (("--pool", "code"), "give --bus too"),
        (("--label", "a=b"), "give --bus too"),
    ],
)
def test_worker_settings_that_cannot_work_are_refused_with_a_remedy(
    command: Callable[..., tuple[int, str]], arguments: tuple[str, ...], message: str
):
    code, told = command(*arguments)
    assert code != 0
    assert message in told


def test_the_load_is_the_share_of_the_machine_that_the_process_used():
    used, passed = iter([0.0, 1.0, 1.0, 9.0]), iter([0.0, 2.0, 2.0, 4.0])
    load = ProcessLoad(used_s=lambda: next(used), elapsed=lambda: next(passed), cores=2)
    assert [load(), load(), load()] == [25.0, 0.0, 200.0]


@pytest.mark.parametrize(
    "name, made", [("worker@host.example:7", "worker-host-example-7"), ("w-1", "w-1"), ("", "worker")]
)
def test_a_process_name_becomes_an_id_that_a_bus_can_have(name: str, made: str):
    assert as_worker_id(name) == made
