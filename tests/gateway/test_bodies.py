"""What bodies may cost: values, errors and bytes have bounds, large ones stay off the event loop, and who has gone is no crash."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from fastapi.routing import APIRoute

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.door import Door, opened, token
from tests.gateway.test_callbacks import JOB, NOW, SECRET
from tests.gateway.world import LOGICIAN, make_world
from trellis.gateway import idempotency
from trellis.gateway.app import ROUTES
from trellis.http_server import bodies
from trellis.http_server.bodies import (
    ERRORS_TOLD_MAX,
    INLINE_BYTES_MAX,
    PIECES_MAX,
    UNAUTHENTICATED_MAX,
    UNAUTHENTICATED_OF_ADDRESS_MAX,
    AdmissionCheck,
    UnauthenticatedBodies,
    parse,
)
from trellis.http_server.problems import Problem
from trellis.lifecycles import Role
from trellis.net.signatures import job_key, signed_headers
from trellis.nlm_backend import app as nlm

JSON = {"content-type": "application/json"}
TEN_MIB = 10 * 1024 * 1024
RESULT = f"/jobs/{JOB}/result"


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path, now=lambda: NOW, secrets=(SECRET,)) as made:
        yield made


# --- values and errors -----------------------------------------------------------------------------------------------

MANY = {
    "numbers": b"[" + b"0," * 500_000 + b"0]",
    "empty lists": b"[" + b"[]," * 3_400_000 + b"[]]",
    "names": b"{" + b",".join(b'"%d":0' % number for number in range(PIECES_MAX + 1)) + b"}",
    "lists side by side": b"[]" * 1_000_000,
    "after a text full of quotes": b'["' + b'\\"' * 100_000 + b'",' + b"[]," * PIECES_MAX + b"[]]",
}


@pytest.mark.parametrize("name", MANY)
def test_more_values_than_the_bound_are_refused_before_there_is_any(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(bodies.json, "loads")
    with pytest.raises(Problem, match=f"more than {PIECES_MAX} commas and opening brackets"):
        parse(MANY[name])


@pytest.mark.parametrize(
    "value",
    [
        {"text": ", [{" * (TEN_MIB // 5)},
        {"text": '\\"[,' * (TEN_MIB // 8)},
        [0] * (PIECES_MAX - 1),
        ["[" * PIECES_MAX] * 2,
    ],
    ids=["a text of brackets", "a text of quotes", "as many as may be", "two texts"],
)
def test_a_large_body_of_few_values_is_read(value: Any):
    assert parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "body, told",
    [
        (b"," * (PIECES_MAX + 1), "commas"),
        (b"]" + b"," * (PIECES_MAX + 1), "no JSON"),
        (b'"' + b'\\",' * (PIECES_MAX + 1), "no JSON"),
        (b'"' + b"," * (PIECES_MAX + 1) + b"\\", "no JSON"),
        (b"[" * (PIECES_MAX + 1), "32 levels"),
    ],
    ids=["commas", "a bracket that nothing opened", "a text without an end", "half an escape", "deep"],
)
def test_long_body_that_is_no_json_is_refused_at_once(body: bytes, told: str):
    with pytest.raises(Problem, match=told):
        parse(body)


async def test_a_large_body_with_many_errors_is_refused_without_a_list_of_them(door: Door):
    names = b",".join(b'"a name that nobody knows %d":0' % number for number in range(ERRORS_TOLD_MAX * 2))
    inside = b'{"summary": "s", "updates": [{' + names + b"}]}"
    for path, body in (("/jobs", b"{" + names + b', "type": "a"}'), (f"/memory/{VIOLIN}/propose", inside)):
        assert len(body) > INLINE_BYTES_MAX
        answer = await door("POST", path, token(Role.ORCHESTRATOR, Role.SUBMITTER), content=body, headers=JSON)
        assert (answer.status_code, answer.json()["code"]) == (422, "VALIDATION_FAILED"), answer.text
        assert "places; GET /openapi.json" in answer.json()["detail"]


async def test_a_large_body_is_read_and_fingerprinted_beside_the_event_loop(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
):
    where: list[tuple[str, bool]] = []

    def noting(name: str, call: Any) -> Any:
        def noted(*given: Any, **named: Any) -> Any:
            where.append((name, threading.current_thread() is threading.main_thread()))
            return call(*given, **named)

        return noted

    monkeypatch.setattr(bodies, "_check_pieces", noting("read", bodies._check_pieces))
    monkeypatch.setattr(idempotency, "_fingerprint", noting("fingerprinted", idempotency._fingerprint))
    await make_world(gateway, "somebody")
    text = ", and so on\n" * 80_000
    for wish, here in (({"summary": "s", "text": text}, False), ({"summary": "s", "text": "1. Ask.\n"}, True)):
        where.clear()
        answer = await gateway.client("orchestrator").post(
            f"/logic/{LOGICIAN}/propose", json=wish, headers={"Idempotency-Key": f"{here}"}
        )
        assert answer.status_code == 202, answer.text
        assert where == [("read", here), ("fingerprinted", here)]


# --- bytes, and who has gone -----------------------------------------------------------------------------------------


async def test_bodies_under_way_have_a_bound_and_are_given_back(door: Door):
    held = door.app.state.bodies
    held.bytes_max = 1_000
    wish = json.dumps({"type": "a", "payload": "x" * 600}).encode()
    came, go_on = asyncio.Event(), asyncio.Event()

    async def slowly() -> AsyncIterator[bytes]:
        yield wish[:-1]
        came.set()
        await go_on.wait()
        yield wish[-1:]

    headers = {**JSON, "authorization": f"Bearer {token(Role.SUBMITTER)}"}
    slow = asyncio.ensure_future(door.client.post("/jobs", content=slowly(), headers=headers))
    await came.wait()
    over = await door.client.post("/jobs", content=wish, headers=headers)
    assert (over.status_code, over.json()["code"], over.headers["retry-after"]) == (503, "OVERLOADED", "1")
    go_on.set()
    assert (await slow).status_code == 202
    assert held.bytes == 0
    assert (await door.client.post("/jobs", content=wish, headers=headers)).status_code == 202
    assert held.bytes == 0


def _signed(**changed: str) -> dict[str, str]:
    made = signed_headers(job_key(SECRET, "nlm-backend", JOB), id_="m1", timestamp=int(NOW), body=b"{}")
    return {**JSON, **made, **changed}


REFUSED = {
    "no signature": _signed(**{"webhook-signature": ""}),
    "no id": _signed(**{"webhook-id": "a b"}),
    "stale": _signed(**{"webhook-timestamp": str(int(NOW) - 301)}),
    "ahead": _signed(**{"webhook-timestamp": str(int(NOW) + 301)}),
}


@pytest.mark.requirement("D26")
@pytest.mark.parametrize("name", [*REFUSED, "no secret"])
async def test_body_of_a_callback_refused_by_its_headers_is_not_read(tmp_path: Path, name: str):
    read: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"{}"

    async with opened(tmp_path, now=lambda: NOW, secrets=(SECRET,) if name in REFUSED else ()) as door:
        answer = await door.client.post(RESULT, content=body(), headers=REFUSED.get(name, _signed()))
        assert (answer.status_code, read) == (401, []), answer.text
        (act,) = await door.instance.ledger.acts()
        assert (act.event, act.subject, act.job_id, act.role) == ("callback.refused", JOB, JOB, Role.GATEWAY)


@pytest.mark.parametrize("path", ["/jobs", RESULT])
async def test_client_that_disconnects_while_sending_causes_no_crash(
    door: Door, path: str, caplog: pytest.LogCaptureFixture
):
    sent: list[dict[str, Any]] = []
    parts = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    given = {**_signed(), "authorization": f"Bearer {token(Role.SUBMITTER)}"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }

    async def receive() -> Any:
        return next(parts)

    async def send(message: Any) -> None:
        sent.append(message)

    await door.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert door.app.state.bodies.bytes == 0
    assert not caplog.records


# --- bodies of senders that are not authenticated yet ----------------------------------------------------------------


async def _stalled(
    door: Door, until: asyncio.Event, came: asyncio.Semaphore, size: int, address: str = "192.0.2.1"
) -> httpx2.Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"x" * size
        came.release()
        await until.wait()
        yield b"x"

    transport = httpx2.ASGITransport(app=door.app, client=(address, 40_000))
    async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
        return await client.post(RESULT, content=body(), headers=_signed())


async def test_bodies_without_authentication_take_nothing_of_what_the_others_may_have(door: Door):
    """However many stall, none of their bytes counts where those of an owner do, and only so many stall at once."""
    until, came = asyncio.Event(), asyncio.Semaphore(0)
    stalled = [asyncio.ensure_future(_stalled(door, until, came, 60_000)) for _ in range(135)]
    for _ in range(UNAUTHENTICATED_OF_ADDRESS_MAX):
        await came.acquire()
    done, waiting = await asyncio.wait(stalled, timeout=0.05)
    assert (len(waiting), {one.result().status_code for one in done}) == (UNAUTHENTICATED_OF_ADDRESS_MAX, {503})
    assert door.app.state.bodies.bytes == 0
    wish = json.dumps({"type": "a", "payload": "x" * 5_000}).encode()
    assert (await door("POST", "/jobs", token(Role.SUBMITTER), content=wish, headers=JSON)).status_code == 202
    until.set()
    assert {(await one).status_code for one in waiting} == {401}
    assert (await _stalled(door, until, came, 10)).status_code == 401, "there is room again"


async def test_senders_without_authentication_share_what_there_is_by_address():
    arriving = UnauthenticatedBodies()
    with contextlib.ExitStack() as stack:
        addresses = [f"192.0.2.{number}" for number in range(UNAUTHENTICATED_MAX // UNAUTHENTICATED_OF_ADDRESS_MAX)]
        for address in addresses:
            for _ in range(UNAUTHENTICATED_OF_ADDRESS_MAX):
                stack.enter_context(arriving.arriving(address))
            with pytest.raises(Problem, match="without a token"), arriving.arriving(address):
                pass
        with pytest.raises(Problem, match="without a token"), arriving.arriving("192.0.2.200"):
            pass
    with arriving.arriving("192.0.2.200"):
        pass


@pytest.mark.parametrize(
    "network, next_to_it", [("2001:db8::{:x}:1", "2001:db8:0:1::1"), ("::ffff:192.0.2.1", "192.0.2.2")]
)
async def test_addresses_of_one_ipv6_network_count_as_one_client(door: Door, network: str, next_to_it: str):
    until, came = asyncio.Event(), asyncio.Semaphore(0)
    addresses = [network.format(number + 1) for number in range(UNAUTHENTICATED_OF_ADDRESS_MAX)]
    stalled = [asyncio.ensure_future(_stalled(door, until, came, 10, address)) for address in addresses]
    for _ in addresses:
        await came.acquire()
    same = "192.0.2.1" if "ffff" in network else "2001:db8::"
    assert (await _stalled(door, until, came, 10, same)).status_code == 503
    until.set()
    assert (await _stalled(door, until, came, 10, next_to_it)).status_code == 401
    assert {(await one).status_code for one in stalled} == {401}


async def test_a_callback_that_stalls_or_is_large_is_ended_soon(door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "UNAUTHENTICATED_S", 0.01)
    monkeypatch.setattr(bodies.StrictRoute, "body_s", 0.5)  # of those who are authenticated
    slow = await _stalled(door, asyncio.Event(), asyncio.Semaphore(0), 10)
    assert (slow.status_code, "within 0.01 s" in slow.text) == (408, True), slow.text
    large = await door.client.post(RESULT, content=b"x" * 65_537, headers=_signed())
    assert (large.status_code, "65536 bytes" in large.text) == (413, True)


def test_every_other_route_authenticates_before_it_reads_a_body(door_routes: list[APIRoute]):
    read_before = [
        route.path
        for route in door_routes
        if route.body_field is not None
        and not any(isinstance(one.call, AdmissionCheck) for one in route.dependant.dependencies)
    ]
    assert read_before == ["/sign-in"], "its credential is in the body; the bounds are those of a callback"


@pytest.fixture
def door_routes() -> list[APIRoute]:
    routers = [module.router for module in ROUTES] + [nlm.jobs, nlm.questions, nlm.system]
    return [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
