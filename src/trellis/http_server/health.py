"""Liveness, readiness and metrics of a process.

`live` is for process supervisors. It checks no dependency, because restarting does not repair a database. `ready` is
for load balancers. It probes all dependencies of the process concurrently and answers in under a second, whatever is
down. Neither needs a token, and neither reveals anything confidential. `/metrics` names job types and services.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from trellis.engine.errors import SettingsInvalid, TrellisError
from trellis.engine.metrics import MEDIA_TYPE, SOURCES_DOWN, Sample, exposition, process_metrics
from trellis.engine.outage_log import Failures

PROBE_S = 0.8
"""Timeout of one probe in seconds. Probes run concurrently, so this also bounds the whole answer."""
HEAD_BYTES_MAX = 8 * 1024
HEAD_S = 2.0
PORT_MAX = 65_535
CONNECTIONS_MAX = 50
OK = "ok"
INSTANCE_HEADER = "X-Trellis-Instance"
"""Header that names the process that answered `/system/ready`: a random name, chosen at start."""
NOT_HERE = "there are /system/live, /system/ready and /metrics"
NO_ANSWER = "UPSTREAM_UNAVAILABLE"

Probe = Callable[[], Awaitable[object]]
"""Returns when the dependency answers, and raises when it does not."""
GaugeSource = Callable[[], Awaitable[list[Sample]]]
"""Reads gauges from where they are stored."""


class NotAnswering(TrellisError):
    """{dependency} does not answer: {reason}."""

    code = "UPSTREAM_UNAVAILABLE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Readiness:
    """The result for each dependency: `ok`, or an error code."""

    status: str
    checks: Mapping[str, str]

    @property
    def is_ready(self) -> bool:
        """Whether the process can serve requests."""
        return self.status == OK


class ProcessHealth:
    """The health of this process. Concurrent calls share one round of probes."""

    def __init__(self, probes: Mapping[str, Probe] | None = None) -> None:
        self._probes: dict[str, Probe] | None = None if probes is None else dict(probes)
        self._round: asyncio.Task[Readiness] | None = None
        self._failures: dict[str, Failures] = {}
        self._gauges: list[GaugeSource] = []
        self._is_stopping = False
        self._reading: asyncio.Task[bytes] | None = None

    def needs(self, **probes: Probe) -> None:
        """Add dependencies. Before the first call the process counts as starting, and is not ready."""
        self._probes = {**(self._probes or {}), **probes}

    def stopping(self) -> None:
        """Make the process count as not ready from now on: it has been told to stop, and finishes what it holds."""
        self._is_stopping = True

    async def ready(self) -> Readiness:
        """Probe all dependencies, unless the process is about to stop."""
        if self._is_stopping:
            return Readiness(status="stopping", checks={})
        if self._round is None or self._round.done():
            self._round = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._round)

    def measures(self, *sources: GaugeSource) -> None:
        """Add sources of gauges to the metrics of this process."""
        self._gauges += sources

    async def metrics(self) -> bytes:
        """The metrics of this process in Prometheus' text format. Concurrent calls share one reading."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_metrics())
        return await asyncio.shield(self._reading)

    async def _read_metrics(self) -> bytes:
        return exposition(await self.samples())

    async def samples(self) -> list[Sample]:
        """What was counted, and the gauges of every source that answers in time. The others are counted as down."""
        samples = process_metrics.samples()
        reading = [asyncio.ensure_future(source()) for source in self._gauges]
        if reading:
            await asyncio.wait(reading, timeout=PROBE_S)
        down = 0
        for one in reading:
            if one.done() and not one.cancelled() and one.exception() is None:
                samples += one.result()
                continue
            down += 1
            one.cancel()
            one.add_done_callback(_forget)
        return [*samples, Sample(SOURCES_DOWN, (), down)]

    async def _ask(self) -> Readiness:
        if self._probes is None:
            return Readiness(status="starting", checks={})
        results = await asyncio.gather(*(self._result(name, probe) for name, probe in self._probes.items()))
        checks = dict(zip(self._probes, results, strict=True))
        return Readiness(status=OK if set(checks.values()) <= {OK} else "degraded", checks=checks)

    async def _result(self, name: str, probe: Probe) -> str:
        """`ok`, or the error code. A probe that ignores its cancellation is not waited for."""
        asking = asyncio.ensure_future(probe())
        await asyncio.wait({asking}, timeout=PROBE_S)
        now = asyncio.get_running_loop().time()
        failures = self._failures.setdefault(name, Failures(f"health of {name}"))
        if not asking.done():
            asking.cancel()
            asking.add_done_callback(_forget)
            failures.failed(NotAnswering(dependency=name, reason=f"nothing for {PROBE_S:g} s"), now=now)
            return NO_ANSWER
        error = None if asking.cancelled() else asking.exception()
        if error is None:
            failures.succeeded(now=now)
            return OK
        failures.failed(error, now=now)
        return error.code if isinstance(error, TrellisError) else NO_ANSWER


def _forget(task: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of an abandoned probe, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


@asynccontextmanager
async def health_listener(address: str | None, health: ProcessHealth) -> AsyncGenerator[str | None]:
    """Serve the health of this process at `host:port`, if given; yields the bound address. Raises SettingsInvalid."""
    if address is None:
        yield None
        return
    host, _, port = address.rpartition(":")
    listener = _HealthServer(health)
    if int(port) > PORT_MAX:  # uvloop would listen on the rest of a division
        detail = f"nobody can listen on {address}: a port is at most {PORT_MAX}"
        raise SettingsInvalid(source="TRELLIS_HEALTH_ADDRESS", detail=detail)
    try:
        server = await asyncio.start_server(listener.serve, host.strip("[]"), int(port), limit=HEAD_BYTES_MAX)
    except OSError as error:
        detail = f"nobody can listen on {address}: {getattr(error, 'strerror', None) or error}"
        raise SettingsInvalid(source="TRELLIS_HEALTH_ADDRESS", detail=detail) from error
    async with server:
        taken = server.sockets[0].getsockname()[1]
        yield f"http://{host}:{taken}"


class _HealthServer:
    """A minimal HTTP server for load balancers: one GET, one response, then the connection is closed."""

    def __init__(self, health: ProcessHealth) -> None:
        self._health, self._open = health, 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        self._open += 1
        try:
            async with asyncio.timeout(HEAD_S):
                if self._open <= CONNECTIONS_MAX:
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(await self._answer(head))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a malformed or slow request gets no response
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in {b"GET", b"HEAD"}:
            return _response(HTTPStatus.METHOD_NOT_ALLOWED, {"status": "only GET is answered here"}, method)
        if path == b"/system/live":
            return _response(HTTPStatus.OK, {"status": OK}, method)
        if path == b"/metrics":
            return _bytes_response(HTTPStatus.OK, await self._health.metrics(), MEDIA_TYPE, method)
        if path not in {b"/system/ready", b"/system/health"}:
            return _response(HTTPStatus.NOT_FOUND, {"status": NOT_HERE}, method)
        readiness = await self._health.ready()
        status = HTTPStatus.OK if readiness.is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return _response(status, {"status": readiness.status, "checks": dict(readiness.checks)}, method)


def _response(status: HTTPStatus, document: dict[str, Any], method: bytes) -> bytes:
    return _bytes_response(status, json.dumps(document).encode(), "application/json", method)


def _bytes_response(status: HTTPStatus, body: bytes, media_type: str, method: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: {media_type}\r\ncache-control: no-store\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == b"HEAD" else body)
