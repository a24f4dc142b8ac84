"""One request: asked again when that is safe and sensible, and never otherwise."""

import asyncio
import datetime as dt
import ipaddress
import json
import random
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.http.scripted import Script, Silent, client_on, in_time, problem
from trellis.engine.errors import (
    IdempotencyMismatch,
    InvalidTransition,
    NotAllowed,
    OptionInvalid,
    TokenExpired,
    TokenRefused,
    TrellisError,
)
from trellis.http import calls as calls_module
from trellis.http.address import checked_url
from trellis.http.calls import CallOptions, path_of
from trellis.http.client import open_client
from trellis.http.errors import (
    AlreadyThere,
    AnswerInvalid,
    Conflict,
    Forbidden,
    GatewayFailed,
    GatewayNotThere,
    GatewayRefused,
    GatewayUnavailable,
    GatewayUntrusted,
    GatewayUrlInvalid,
    KeyTaken,
    LeaseGone,
    NotFound,
    RequestInvalid,
    TokenIsOver,
    TokenNotTaken,
    TooFast,
    TooLarge,
    VersionDiffers,
    WrongState,
)
from trellis.testing import EPOCH_S, FakeClock

BEGUN = {"run_id": "run_1", "agent_slug": "a", "status": "requested"}
LOST = httpx2.ReadError("the connection was closed")


def begun() -> httpx2.Response:
    return httpx2.Response(202, json=BEGUN)


async def start(script: httpx2.AsyncBaseTransport, clock: FakeClock, **options: Any) -> Any:
    async with client_on(script, clock, **options) as client:
        return await in_time(clock, client.runs.start("a"))


@pytest.mark.requirement("DJ-5")
async def test_a_lost_answer_is_asked_for_again_under_the_same_key():
    script = Script(LOST, httpx2.ConnectError("refused"), begun())
    assert (await start(script, FakeClock())).run_id == "run_1"
    keys = script.header("Idempotency-Key")
    assert len(keys) == 3
    assert len(set(keys)) == 1
    assert None not in keys
    assert len(set(script.header("X-Correlation-ID"))) == 1


async def test_a_client_that_needs_a_listener_tries_a_refused_connection_again_only_after_an_answer():
    refused = httpx2.ConnectError("All connection attempts failed")
    refused.__cause__ = ExceptionGroup("", [ConnectionRefusedError(111, "Connection refused")])
    clock, options = FakeClock(), CallOptions(needs_listener=True)
    with pytest.raises(GatewayNotThere, match="was not sent"):
        await start(Script(refused, begun()), clock, options=options)
    assert clock.monotonic() == EPOCH_S
    assert (await start(Script(refused, begun()), clock)).run_id == "run_1", "a program may start before its gateway"
    async with client_on(Script(begun(), refused, refused, begun()), clock, options=options) as client:
        for _ in range(2):
            assert (await in_time(clock, client.runs.start("a"))).run_id == "run_1"


async def test_every_call_has_a_key_of_its_own_and_a_given_one_is_kept():
    script, clock = Script(lambda _: begun()), FakeClock()
    async with client_on(script, clock) as client:
        for key in (None, None, "mine"):
            await in_time(clock, client.runs.start("a", idempotency_key=key))
    first, second, third = script.header("Idempotency-Key")
    assert first != second
    assert third == "mine"


@pytest.mark.parametrize("key", ["", "x" * 201, "ключ", "a\nb"])
async def test_a_key_that_no_header_can_carry_is_refused_before_it_is_sent(key: str):
    script = Script(begun())
    async with client_on(script, FakeClock()) as client:
        with pytest.raises(OptionInvalid):
            await client.runs.start("a", idempotency_key=key)
    assert script.requests == []


async def test_waits_grow_and_are_a_random_share_of_the_longest():
    async def waited(draw: float) -> float:
        clock = FakeClock()
        await start(Script(LOST, LOST, LOST, begun()), clock, draw=draw)
        return clock.monotonic() - EPOCH_S

    assert await waited(0.0) == 0.0
    assert await waited(0.5) == pytest.approx(0.05 + 0.1 + 0.2)
    assert await waited(1.0) == pytest.approx(0.1 + 0.2 + 0.4)


@pytest.mark.parametrize(
    "headers, least_s",
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "Sun, 15 Nov 2026 09:00:12 GMT", "Date": "Sun, 15 Nov 2026 09:00:00 GMT"}, 12.0),
        ({"Retry-After": "soon"}, 0.0),
        ({}, 0.0),
    ],
)
@pytest.mark.parametrize("status, code", [(429, "RATE_LIMITED"), (502, "UPSTREAM_UNAVAILABLE"), (503, ""), (504, "")])
async def test_a_busy_gateway_is_asked_again_when_it_wants_to_be(
    status: int, code: str, headers: dict[str, str], least_s: float
):
    clock = FakeClock()
    await start(Script(problem(status, code, **headers), begun()), clock)
    assert clock.monotonic() - EPOCH_S == pytest.approx(least_s + 0.05)


async def test_client_does_not_wait_for_a_retry_after_beyond_its_time():
    clock = FakeClock()
    with pytest.raises(TooFast) as refused:
        await start(Script(problem(429, "RATE_LIMITED", "wait a minute", **{"Retry-After": "60"})), clock)
    assert str(refused.value) == "wait a minute"
    assert refused.value.retry_after_s == 60
    assert clock.monotonic() == EPOCH_S


@pytest.mark.parametrize("reply", [LOST, problem(503, "UPSTREAM_UNAVAILABLE", "the ledger is away")])
async def test_after_its_time_a_call_says_how_to_learn_what_happened(reply: Any):
    clock = FakeClock()
    script = Script(reply)
    with pytest.raises(GatewayUnavailable, match="idempotency_key='id-1'") as gone:
        await start(script, clock)
    assert gone.value.data["idempotency_key"] == script.header("Idempotency-Key")[0]
    assert clock.monotonic() - EPOCH_S <= 30.0
    assert len(script.requests) > 5


async def test_a_gateway_that_never_answers_costs_the_calls_time_and_no_more():
    clock = FakeClock()
    with pytest.raises(GatewayUnavailable):
        await start(Silent(), clock, options=CallOptions(timeout_s=12.0))
    assert clock.monotonic() - EPOCH_S == 12.0


@pytest.mark.parametrize(
    "status, code, kind, also",
    [
        (401, "AUTH_REQUIRED", TokenNotTaken, TokenRefused),
        (401, "TOKEN_EXPIRED", TokenIsOver, TokenExpired),
        (403, "FORBIDDEN", Forbidden, NotAllowed),
        (404, "NOT_FOUND", NotFound, TrellisError),
        (405, "METHOD_NOT_ALLOWED", RequestInvalid, TrellisError),
        (409, "CONFLICT", Conflict, TrellisError),
        (409, "INVALID_TRANSITION", WrongState, InvalidTransition),
        (409, "DUPLICATE_ENTRY", AlreadyThere, Conflict),
        (409, "LEASE_LOST", LeaseGone, Conflict),
        (412, "PRECONDITION_FAILED", VersionDiffers, TrellisError),
        (413, "PAYLOAD_TOO_LARGE", TooLarge, TrellisError),
        (422, "VALIDATION_FAILED", RequestInvalid, TrellisError),
        (422, "IDEMPOTENCY_MISMATCH", KeyTaken, IdempotencyMismatch),
        (500, "INTERNAL_ERROR", GatewayFailed, TrellisError),
        (418, "A_WORD_OF_A_NEWER_GATEWAY", RequestInvalid, TrellisError),
    ],
)
async def test_refused_request_raises_its_own_error_and_is_not_retried(
    status: int, code: str, kind: type[GatewayRefused], also: type[TrellisError]
):
    script = Script(problem(status, code, "say {why}"))
    with pytest.raises(also) as refused:
        await start(script, FakeClock())
    error = refused.value
    assert type(error) is kind
    assert str(error) == "say {why}"
    assert (error.status, error.correlation_id, error.problem["code"]) == (status, "c-1", code)
    assert len(script.requests) == 1


async def test_an_answer_that_is_no_problem_document_is_refused_by_its_status():
    with pytest.raises(NotFound, match="404"):
        await start(Script(httpx2.Response(404, text="<html>nginx</html>")), FakeClock())


@pytest.mark.parametrize(
    "reply",
    [
        httpx2.Response(200, text="<html>"),
        httpx2.Response(200, json={"run_id": 7}),
        httpx2.Response(302, headers={"Location": "http://elsewhere/"}),
        httpx2.Response(200, content=b"x" * 5_000),
    ],
)
async def test_response_that_is_not_from_a_gateway_is_reported_as_such(
    reply: httpx2.Response, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calls_module, "ANSWER_BYTES_MAX", 4_000)
    script = Script(reply)
    with pytest.raises(AnswerInvalid):
        await start(script, FakeClock())
    assert [request.url.host for request in script.requests] == ["gateway"]


async def test_the_token_is_read_for_each_request_and_never_sent_when_it_could_break_the_header():
    tokens = iter(["one", "two", "bad\r\nX-Evil: 1"])
    script, clock = Script(lambda _: begun()), FakeClock()
    async with client_on(script, clock, token=lambda: next(tokens)) as client:
        for _ in range(2):
            await in_time(clock, client.runs.start("a"))
        with pytest.raises(TokenRefused) as refused:
            await in_time(clock, client.runs.start("a"))
    assert script.header("Authorization") == ["Bearer one", "Bearer two"]
    assert "Evil" not in str(refused.value)


async def test_a_body_is_json_that_every_reader_understands_alike():
    script, clock = Script(lambda _: begun()), FakeClock()
    async with client_on(script, clock) as client:
        await in_time(clock, client.runs.start("a", {"topic": "лук", "n": 1}))
        with pytest.raises(ValueError, match="not JSON compliant"):
            await in_time(clock, client.runs.start("a", {"n": float("nan")}))
    assert json.loads(script.requests[0].content) == {"agent_slug": "a", "params": {"topic": "лук", "n": 1}}
    assert len(script.requests) == 1


@pytest.mark.parametrize("part", ["", ".", ".."])
def test_an_id_cannot_lead_to_another_path(part: str):
    with pytest.raises(OptionInvalid):
        path_of("runs", part, "cancel")


def test_id_is_encoded_as_one_path_segment():
    assert path_of("runs", "a/../b?c#d", "status") == "/runs/a%2F..%2Fb%3Fc%23d/status"


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "gateway",
            "ftp://host",
            "http://",
            "http:///path",
            "http://host:99999",
            "http://host:x",
            "http://host:0",
        ),
        *("http://user:secret@host", "http://host/?a=b", "http://host/#a", "http://ho st", "http://host\n"),
        *("http://[::1", "http://hö.st", "postgresql://host/db"),
    ],
)
def test_invalid_gateway_url_is_refused(url: str):
    with pytest.raises(GatewayUrlInvalid) as refused:
        checked_url(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8420", "https://trellis.example", "HTTPS://[::1]:8420/base/"])
def test_addresses_of_gateways_are_taken(url: str):
    assert checked_url(url) == url


async def test_a_base_path_is_kept():
    script, clock = Script(begun()), FakeClock()
    async with client_on(script, clock, url="https://host/trellis") as client:
        await in_time(clock, client.runs.start("a"))
    assert str(script.requests[0].url) == "https://host/trellis/agents/run"


# --- certificates ----------------------------------------------------------------------------------------------------


async def test_a_certificate_must_be_signed_by_an_authority_that_is_trusted(tmp_path: Path):
    clock = FakeClock()
    async with tls_server(tmp_path) as (url, ca_file):
        parts: dict[str, Any] = {"token": lambda: None, "clock": clock, "rng": random.Random(1), "new_id": lambda: "id"}
        async with open_client(url, **parts) as client:
            with pytest.raises(GatewayUntrusted, match="ca_file"):
                await client.health()
        async with open_client(url, **parts, ca_file=ca_file) as client:
            assert (await client.health()).status == "ok"
    with pytest.raises(OptionInvalid, match="ca_file"):
        async with open_client(url, **parts, ca_file=tmp_path / "nothing.pem"):
            pass


@asynccontextmanager
async def tls_server(folder: Path) -> AsyncIterator[tuple[str, Path]]:
    certificate, key = _self_signed(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    body = b'{"status": "ok", "checks": {}}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head % len(body) + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", certificate


def _self_signed(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "cert.pem", folder / "key.pem"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate, private
