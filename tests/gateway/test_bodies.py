"""What bodies may cost: values, errors and bytes have bounds, large ones stay off the event loop, and who has gone is no crash."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.conftest import VIOLIN, Gateway
from tests.gateway.door import Door, opened, token
from tests.gateway.test_callbacks import JOB, NOW, SECRET
from tests.gateway.world import LOGICIAN, make_world
from trellis.gateway import idempotency
from trellis.lifecycles import Role
from trellis.net.signatures import job_key, signed_headers
from trellis.web import bodies
from trellis.web.bodies import ERRORS_TOLD_MAX, INLINE_BYTES_MAX, PIECES_MAX, parse
from trellis.web.problems import Problem

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
def test_what_is_no_json_and_long_is_refused_at_once(body: bytes, told: str):
    with pytest.raises(Problem, match=told):
        parse(body)


async def test_a_large_body_that_is_wrong_everywhere_is_not_told_where(door: Door):
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

    monkeypatch.setattr(bodies, "_check_tree", noting("read", bodies._check_tree))
    monkeypatch.setattr(idempotency, "_fingerprint", noting("fingerprinted", idempotency._fingerprint))
    await make_world(gateway, "somebody")
    text = ", and so on\n" * 80_000
    for wish, here in (({"summary": "s", "text": text}, False), ({"summary": "s", "text": "1. Ask.\n"}, True)):
        where.clear()
        answer = await gateway.client("orchestrator").post(f"/logic/{LOGICIAN}/propose", json=wish)
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
async def test_of_a_callback_that_no_body_makes_good_none_is_read(tmp_path: Path, name: str):
    read: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        read.append(1)
        yield b"{}"

    async with opened(tmp_path, now=lambda: NOW, secrets=(SECRET,) if name in REFUSED else ()) as door:
        answer = await door.client.post(RESULT, content=body(), headers=REFUSED.get(name, _signed()))
        assert (answer.status_code, read) == (401, []), answer.text
        assert len((await door.instance.objects.list("audit/")).items) == 1


@pytest.mark.parametrize("path", ["/jobs", RESULT])
async def test_who_leaves_while_sending_is_no_crash(door: Door, path: str, caplog: pytest.LogCaptureFixture):
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
