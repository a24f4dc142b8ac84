"""How much the provider is asked: at once, a second, and not while it is down (circuit, Retry-After)."""

import asyncio

import pytest

from tests.nlm_backend.conftest import EXTRACTIVE, Stand, provider_calls, until
from tests.nlm_backend.test_stages import WAY
from trellis.lifecycles import Role
from trellis.nlm.provider import NlmUnavailable
from trellis.nlm_backend.errors import CircuitOpen, ProviderHeld, fault_of
from trellis.nlm_backend.limits import CircuitState, ProviderCircuit, RequestPace
from trellis.testing import FakeClock


def test_five_failures_in_a_row_open_the_circuit_and_one_try_decides_after_thirty_seconds():
    clock = FakeClock()
    circuit = ProviderCircuit(clock.monotonic)
    for _ in range(4):
        circuit.admit("p")
        circuit.failed(None)
    circuit.answered()
    for _ in range(5):
        assert circuit.state is CircuitState.CLOSED
        assert circuit.admit("p") is False
        circuit.failed(None)
    assert circuit.state is CircuitState.OPEN
    assert circuit.closed_for_s() == 30.0
    with pytest.raises(CircuitOpen):
        circuit.admit("p")
    clock.advance(30.0)
    assert circuit.admit("p") is True
    with pytest.raises(CircuitOpen):
        circuit.admit("p")  # one tries, the others wait for what it finds
    circuit.failed(None)
    assert circuit.state is CircuitState.OPEN
    clock.advance(30.0)
    assert circuit.admit("p") is True
    circuit.tried()  # it was cut, and says nothing
    assert circuit.admit("p") is True
    circuit.answered()
    assert (circuit.state, circuit.closed_for_s()) == (CircuitState.CLOSED, 0.0)
    assert circuit.admit("p") is False


def test_circuit_keeps_and_bounds_the_wait_that_the_provider_asked_for():
    clock = FakeClock()
    circuit = ProviderCircuit(clock.monotonic)
    circuit.failed(20.0)
    circuit.failed(5.0)
    with pytest.raises(ProviderHeld):
        circuit.admit("p")
    clock.advance(20.0)
    circuit.admit("p")
    circuit.failed(1e9)
    assert circuit.closed_for_s() == 3_600.0


def test_the_pace_gives_one_turn_after_the_other_and_none_that_comes_too_late():
    clock = FakeClock()
    pace = RequestPace(clock.monotonic, 2.0)
    assert [pace.wait_s(10.0) for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    assert pace.wait_s(1.0) is None
    assert pace.wait_s(10.0) == 2.0  # what came too late took nothing
    clock.advance(60.0)
    assert pace.wait_s(10.0) == 0.0
    assert RequestPace(clock.monotonic, None).wait_s(0.0) == 0.0


def test_a_closed_circuit_is_no_rate_limit_and_a_retry_after_is():
    assert fault_of(CircuitOpen(provider="p", reason="r", retry_after_s=9.0)).fault == "NLM_UNAVAILABLE"
    assert fault_of(ProviderHeld(provider="p", reason="r", retry_after_s=9.0)).fault == "RATE_LIMIT"
    assert fault_of(NlmUnavailable(provider="p", reason="r", status=503)).fault == "NLM_UNAVAILABLE"


@pytest.mark.requirement("NLM-3")
async def test_open_circuit_spares_a_failing_provider_and_refuses_jobs(stand: Stand):
    working = stand.backend(*[{"status": 503}] * 5, EXTRACTIVE, concurrency=1)
    for number in range(7):
        await working.post(stand.order(f"job-{number}"))
    for _ in range(7):  # one at a time: between two of them nothing is under way
        await working.work()
    assert provider_calls(working.backend) == 5  # the sixth and seventh found the circuit open
    codes = [stand.gateway.of(f"job-{number}")[0]["error"]["code"] for number in range(7)]
    assert codes == ["NLM_UNAVAILABLE"] * 7
    refused = await working.post(stand.order("job-later"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "30")
    health = (await working.client().get("/health")).json()
    assert (health["status"], health["circuit"]) == ("degraded", "open")
    stand.clock.advance(30.0)
    assert (await working.post(stand.order("job-later"))).status_code == 202
    await working.work()
    assert await stand.states("job-later@1") == WAY
    assert (await working.client().get("/health")).json()["circuit"] == "closed"


async def test_a_retry_after_of_the_provider_is_kept_for_the_next_job(stand: Stand):
    working = stand.backend({"status": 429, "retry_after_s": 12}, EXTRACTIVE)
    await working.post(stand.order("job-1"))
    await working.work()
    refused = await working.post(stand.order("job-2"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "12")
    stand.clock.advance(12.0)
    assert (await working.post(stand.order("job-2"))).status_code == 202
    await working.work()
    assert await stand.states("job-2@1") == WAY
    assert provider_calls(working.backend) == 2


async def test_no_more_questions_than_the_settings_allow_are_asked_at_once_or_in_a_second(stand: Stand):
    slow = {"after_s": 5, "answer": {"answer": "x", "found": False}}
    working = stand.backend(slow, concurrency=2)
    client = working.client(Role.OWNER)
    asked = {"question": "Who made it?", "sources": [{"ref": "a.md", "text": "Anna Koval made the violin."}]}
    asking = [asyncio.ensure_future(client.post("/query", json=asked | {"agent": f"a{n}"})) for n in range(4)]
    await until(lambda: len(working.provider.asked) == 2)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(working.provider.asked) == 2
    stand.clock.advance(5.0)
    await until(lambda: len(working.provider.asked) == 4)
    stand.clock.advance(5.0)
    assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}

    paced = stand.backend(per_second=0.5)
    client = paced.client(Role.OWNER)
    asking = [asyncio.ensure_future(client.post("/query", json=asked | {"agent": f"a{n}"})) for n in range(2)]
    await until(lambda: len(paced.provider.asked) == 1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(paced.provider.asked) == 1
    stand.clock.advance(2.0)
    await until(lambda: len(paced.provider.asked) == 2)
    await asyncio.gather(*asking)
