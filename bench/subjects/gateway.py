"""The gateway over HTTP: one process serves, another asks. Who asks speaks raw HTTP/1.1, so that asking is cheap.

    worker(task)           serve until ended; writes where it is beside the marks
    status(task)           polls of one run's status, each answered with the document
    not_modified(task)     the same with the ETag, each answered 304
    submits(task)          POST /jobs
    fan_out(task)          `concurrency` listeners, and `jobs` events at `per_s`

Those who ask report a dictionary of figures; processor time is the server's.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import trellis.ledgers.postgres.ledger
import trellis.ledgers.sqlite.ledger
import trellis.storage.objects.local  # noqa: F401 - as above: imported before the gate opens
from bench.measures import percentile
from bench.processes import cpu_s
from bench.task import Task
from trellis.app.instance import open_instance
from trellis.app.settings import read_settings
from trellis.app.wiring import new_id
from trellis.auth.tokens import issue, symmetric_key
from trellis.cli.long_running import tune_server
from trellis.engine.jobs import Actor, JobId, NewJob
from trellis.gateway import GatewayOptions, create_app
from trellis.gateway.hub import StreamOptions
from trellis.http_server.server import ServerOptions, listen, serve_gateway
from trellis.ledgers import open_ledger
from trellis.lifecycles import Role
from trellis.runs.orchestration import TriggerKind

KEY = symmetric_key(b"for the benchmark: 32 bytes.....", issuer="bench")
AGENT = "archivist-violin"
OPTIONS = GatewayOptions(requests_per_second=1e9, burst=10**9, streams=StreamOptions(listeners_per_principal_max=5_000))
LISTENING = ServerOptions(host="127.0.0.1", port=0)
JOB_PREFIX = "fan-out-"
CONNECTING_AT_ONCE = 50
CONNECTED_S_MAX = 60.0
SETTLE_S = 1.0
HEARD_S_MAX = 30.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where the server is."""

    port: int
    pid: int
    run_id: str

    @classmethod
    def read(cls, task: Task) -> "Place":
        """As the server wrote it."""
        return cls(**task.read_place())


async def worker(task: Task) -> None:
    """Serve. There is one run, and nobody works on it."""
    tune_server()
    folder = Path(task.objects)
    settings = read_settings({"TRELLIS_OBJECTS": folder.as_uri(), "TRELLIS_MEMORY": f"{folder}/memory.git"}, folder)
    async with open_instance(settings, task.url) as instance:
        await instance.plant()
        app = create_app(instance, [KEY], monotonic=time.monotonic, new_id=new_id, options=OPTIONS)
        run = await instance.layer.trigger(AGENT, {}, kind=TriggerKind.MANUAL)
        place = listen(LISTENING, key_configured=True)

        def ready() -> None:
            task.write_place(port=place.sockets[0].getsockname()[1], run_id=run.job_id)

        await serve_gateway(app, place, LISTENING, asyncio.Event(), ready=ready)


# --- requests ------------------------------------------------------------------------------------------------------


async def status(task: Task) -> dict[str, float]:
    """The document, every time."""
    place = Place.read(task)
    return await _asked(task, place, _get(f"/runs/{place.run_id}/status"), b"200")


async def not_modified(task: Task) -> dict[str, float]:
    """Nothing has changed, every time: the run was written down (1) and queued (2)."""
    place = Place.read(task)
    request = _get(f"/runs/{place.run_id}/status", 'If-None-Match: "1", "2"')
    return await _asked(task, place, request, b"304")


async def submits(task: Task) -> dict[str, float]:
    """A job each; it is durable when the answer comes."""
    return await _asked(task, Place.read(task), post_job(), b"202")


def post_job(**fields: str) -> bytes:
    """The request that submits a job."""
    body = json.dumps({"type": "bench", "payload": {"n": 1}, **fields})
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
    return _request("POST", "/jobs", head) + body.encode()


def _get(path: str, *headers: str) -> bytes:
    return _request("GET", path, *headers)


def _request(method: str, path: str, *headers: str) -> bytes:
    token = issue(KEY, name="bench", roles=[Role.OWNER], ttl_s=3_600, now=time.time())
    lines = (f"{method} {path} HTTP/1.1", "Host: bench", f"Authorization: Bearer {token}", *headers)
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _asked(task: Task, place: Place, request: bytes, expected: bytes) -> dict[str, float]:
    """`jobs` requests over `concurrency` connections, one after another on each."""
    await request_again(
        place.port, request, expected, connections=task.concurrency, each=4
    )  # what is made at the first request
    each = task.jobs // task.concurrency
    began, cpu = time.perf_counter(), cpu_s([place.pid])
    await request_again(place.port, request, expected, connections=task.concurrency, each=each)
    seconds, used = time.perf_counter() - began, cpu_s([place.pid]) - cpu
    count = each * task.concurrency
    return {"per_s": count / seconds, "cpu_us": used / count * 1e6}


async def request_again(port: int, request: bytes, expected: bytes, *, connections: int = 1, each: int = 1) -> None:
    """Send the same request `each` times over each of the connections; raises when the status is another."""
    loop = asyncio.get_running_loop()
    asking = [_Asking(request, expected, each, loop.create_future()) for _ in range(connections)]
    for one in asking:
        await loop.create_connection(lambda one=one: one, "127.0.0.1", port)
    await asyncio.gather(*(one.done for one in asking))


class _Asking(asyncio.Protocol):
    """One connection that asks the same again and again."""

    def __init__(self, request: bytes, expected: bytes, left: int, done: "asyncio.Future[None]") -> None:
        self._request, self._expected, self._left, self.done = request, expected, left, done
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found or len(body) < _content_length(head):
            return
        if head[9:12] != self._expected:
            self._fail(f"{head.decode()}\n{body.decode()}")
            return
        self._got = b""
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self._transport.close()
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the server closed the connection: {exc}")

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self._transport.close()
            self.done.set_exception(RuntimeError(why))


def _content_length(head: bytes) -> int:
    at = head.lower().find(b"content-length:")
    return 0 if at < 0 else int(head[at + 15 :].split(b"\r\n", 1)[0])


# --- listeners -----------------------------------------------------------------------------------------------------


async def fan_out(task: Task) -> dict[str, float]:
    """Listeners of jobs that are submitted to the ledger."""
    ledger, submitter = await open_ledger(task.url), Actor(role=Role.SUBMITTER, name="bench")

    async def submit(number: int) -> None:
        await ledger.submit(submitter, [NewJob(job_id=JobId(f"{JOB_PREFIX}{number}"), type="bench")])

    try:
        return await hear(task, submit)
    finally:
        await ledger.close()


async def hear(task: Task, submit: Callable[[int], Awaitable[None]]) -> dict[str, float]:
    """From before the submit of a job to each listener's hearing of it; and what a listener costs that hears nothing."""
    place, loop = Place.read(task), asyncio.get_running_loop()
    await request_again(place.port, _get("/events/stream?for_s=0", "Connection: close"), b"200", connections=1, each=1)
    before = _memory_kib(place.pid)
    ears = await _listen(task, place, loop.time)
    await asyncio.sleep(SETTLE_S)
    memory, cpu, idle_began = _memory_kib(place.pid) - before, cpu_s([place.pid]), loop.time()
    await asyncio.sleep(SETTLE_S)
    idle_cpu, idle_s = cpu_s([place.pid]) - cpu, loop.time() - idle_began
    cpu = cpu_s([place.pid])
    sent = await _submit_at_a_pace(task, submit, loop.time)
    await asyncio.wait_for(asyncio.gather(*(ear.all_heard for ear in ears)), HEARD_S_MAX)
    used = cpu_s([place.pid]) - cpu
    late = [(at - sent[number]) * 1e3 for ear in ears for number, at in ear.heard.items()]
    assert len(late) == task.jobs * task.concurrency
    for ear in ears:
        ear.close()
    return {
        "p50_ms": percentile(late, 0.5),
        "p99_ms": percentile(late, 0.99),
        "memory_kib": memory / task.concurrency,
        "idle_cpu": idle_cpu / idle_s * 100,
        "cpu_us": used / len(late) * 1e6,
    }


async def _listen(task: Task, place: Place, now: Callable[[], float]) -> "list[_Ear]":
    loop, request = asyncio.get_running_loop(), _get("/events/stream")
    ears = [_Ear(request, task.jobs, now, loop.create_future(), loop.create_future()) for _ in range(task.concurrency)]
    for first in range(0, len(ears), CONNECTING_AT_ONCE):
        some = ears[first : first + CONNECTING_AT_ONCE]
        for ear in some:
            await loop.create_connection(lambda ear=ear: ear, "127.0.0.1", place.port)
        await asyncio.wait_for(asyncio.gather(*(ear.connected for ear in some)), CONNECTED_S_MAX)
    return ears


async def _submit_at_a_pace(
    task: Task, submit: Callable[[int], Awaitable[None]], now: Callable[[], float]
) -> dict[int, float]:
    sent: dict[int, float] = {}
    for number in range(task.jobs):
        sent[number] = now()
        await submit(number)
        await asyncio.sleep(1 / task.per_s)
    return sent


class _Ear(asyncio.Protocol):
    """One listener: when it heard of which job."""

    MARK = f'"jobId":"{JOB_PREFIX}'.encode()

    def __init__(
        self,
        request: bytes,
        jobs: int,
        now: Callable[[], float],
        connected: "asyncio.Future[None]",
        all_heard: "asyncio.Future[None]",
    ) -> None:
        self._request, self._jobs, self._now = request, jobs, now
        self.connected, self.all_heard = connected, all_heard
        self.heard: dict[int, float] = {}
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now, parts = self._now(), (self._rest + data).split(b"\n\n")
        self._rest = parts.pop()
        for part in parts:
            at = part.find(self.MARK)
            if at >= 0:
                number = int(part[at + len(self.MARK) :].partition(b'"')[0])
                assert number not in self.heard, "heard twice"
                self.heard[number] = now
        if parts and not self.connected.done():
            self.connected.set_result(None)
        if len(self.heard) == self._jobs and not self.all_heard.done():
            self.all_heard.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        for waiting in (self.connected, self.all_heard):
            if not waiting.done():
                waiting.set_exception(RuntimeError(f"the server closed the stream: {exc} {self._rest!r}"))

    def close(self) -> None:
        """Go away."""
        self._transport.abort()


def _memory_kib(pid: int) -> float:
    """Resident memory."""
    found: dict[str, Any] = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    )
    return float(found["VmRSS"].split()[0])
