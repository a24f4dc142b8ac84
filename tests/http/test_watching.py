"""How a run stands: every newer state that is seen, the last one always, soon after its event or at the latest by polling."""

from collections.abc import Sequence
from typing import Any

import httpx2
import pytest

from tests.http.scripted import Pieces, client_on, in_time, problem
from trellis.http.errors import NotFound
from trellis.http.shapes import EXAMPLE_RUN, RunStatus
from trellis.testing import EPOCH_S, FakeClock

EXAMPLE: dict[str, Any] = RunStatus.model_json_schema()["examples"][0]


class Gateway(httpx2.AsyncBaseTransport):
    """A run whose status.json is at `versions[k]` when it is looked at for the k-th time, and a stream that gives `hints`."""

    def __init__(self, clock: FakeClock, versions: Sequence[int], hints: bytes | None) -> None:
        self._clock, self._versions, self._hints = clock, list(versions), hints
        self.looked: list[float] = []
        self.not_modified = 0

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/events/stream":
            return self._stream()
        self.looked.append(self._clock.monotonic() - EPOCH_S)
        version = self._versions.pop(0) if len(self._versions) > 1 else self._versions[0]
        if version == 0:
            return _fresh(problem(404, "NOT_FOUND", **{"Retry-After": "1"}))
        if request.headers.get("If-None-Match") == f'"{version}"':
            self.not_modified += 1
            return httpx2.Response(304, stream=Pieces([]))
        status = "completed" if version == 9 else "running"
        return _fresh(httpx2.Response(200, json={**EXAMPLE, "version": version, "status": status}))

    def _stream(self) -> httpx2.Response:
        if self._hints is None:
            return _fresh(problem(403, "FORBIDDEN"))
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, stream=Pieces([self._hints]))


def _fresh(made: httpx2.Response) -> httpx2.Response:
    return httpx2.Response(made.status_code, headers=made.headers, stream=Pieces([made.content]))


async def watched(gateway: Gateway, clock: FakeClock) -> list[int]:
    async with client_on(gateway, clock) as client:

        async def all_of() -> list[int]:
            return [state.version async for state in client.runs.watch(EXAMPLE_RUN)]

        return await in_time(clock, all_of())


@pytest.mark.requirement("RUN-4", "RUN-5")
async def test_without_a_stream_it_is_looked_at_every_five_seconds_and_what_is_unchanged_is_not_sent():
    clock = FakeClock()
    gateway = Gateway(clock, [0, 1, *[1] * 20, 4, 4, 9], None)
    assert await watched(gateway, clock) == [1, 4, 9]
    gaps = [later - earlier for earlier, later in zip(gateway.looked, gateway.looked[1:], strict=False)]
    assert max(gaps) == 5.0
    assert gaps[-10:] == [5.0] * 10
    assert gateway.not_modified == 21


@pytest.mark.requirement("RUN-5")
async def test_event_triggers_reads_until_the_document_has_its_version():
    clock = FakeClock()
    hints = b'id: 1\ndata: {"type": "run.status.changed", "runId": "%s", "version": 9}\n\n' % EXAMPLE_RUN.encode()
    gateway = Gateway(clock, [1, 1, 1, 2, 2, 9], hints)
    assert await watched(gateway, clock) == [1, 2, 9]
    assert gateway.looked[-1] < 2.0


async def test_an_older_state_is_never_given_after_a_newer_one():
    clock = FakeClock()
    assert await watched(Gateway(clock, [2, 1, 3, 2, 9], None), clock) == [2, 3, 9]


async def test_waiting_ends_with_the_run_or_with_its_time():
    clock = FakeClock()
    async with client_on(Gateway(clock, [1, 3, 9], None), clock) as client:
        assert (await in_time(clock, client.runs.wait(EXAMPLE_RUN, timeout_s=60))).status == "completed"
    async with client_on(Gateway(clock, [3], None), clock) as client:
        with pytest.raises(TimeoutError, match="is running after 60 s"):
            await in_time(clock, client.runs.wait(EXAMPLE_RUN, timeout_s=60))


async def test_a_run_that_is_not_there_is_not_waited_for():
    class Empty(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
            return _fresh(problem(404, "NOT_FOUND"))

    clock = FakeClock()
    async with client_on(Empty(), clock) as client:
        with pytest.raises(NotFound):
            await in_time(clock, client.runs.wait(EXAMPLE_RUN))
