"""How the gateway serves the console: which addresses are its page, what browsers may do with responses, and sign-in."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.gateway.conftest import KEY, Client, Gateway
from tests.gateway.listening import listening
from tests.gateway.serving import serving
from tests.gateway.world import proposal
from trellis.app.settings import Settings
from trellis.auth.tokens import verify
from trellis.engine.admin_acts import TOKEN_ISSUED
from trellis.gateway import GatewayOptions, console
from trellis.gateway.sign_in import CODE_TTL_S, CODES_MAX, SignInCodes
from trellis.lifecycles import Role

PAGE = b"<!doctype html><title>Trellis</title>" + b" " * 2_000


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """A console of two files, as a build leaves it."""
    folder = tmp_path / "files"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_bytes(PAGE)
    (folder / "assets" / "index-abc.js").write_bytes(b"export {};" * 500)
    return folder


@pytest.fixture
def client(gateway: Gateway, built: Path) -> Client:
    """A browser at a gateway with that console."""
    app = FastAPI()
    console.install(app, built)
    gateway.app.router.routes[:] = [
        *app.router.routes[-3:],
        *(route for route in gateway.app.router.routes if getattr(route, "name", "") not in {"page", "asset"}),
    ]
    return gateway.anonymous()


async def test_page_is_at_the_root_and_at_every_screen_and_hides_no_address_of_the_api(client: Client):
    for path in ("/", "/console/runs", "/console/runs/run_1", "/console/no/such/screen"):
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, PAGE)
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
    assert (await client.get("/runs")).status_code == 401
    missing = await client.get("/no-such-thing", headers={"Accept": "text/html"})
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    assert (await client.post("/console/runs")).status_code == 405


async def test_assets_are_cached_for_good_and_compressed(client: Client):
    answer = await client.get("/assets/index-abc.js")
    assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert answer.headers["content-type"].startswith("text/javascript")
    assert answer.headers["content-encoding"] == "gzip"
    assert answer.content == b"export {};" * 500
    plain = await client.get("/assets/index-abc.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content
    for name in ("missing.js", "..%2findex.html", "%2e%2e/index.html"):
        assert (await client.get(f"/assets/{name}")).status_code == 404


async def test_page_runs_only_scripts_of_the_gateway(client: Client):
    policy = (await client.get("/")).headers["content-security-policy"]
    rules = {name: value for name, _, value in (one.strip().partition(" ") for one in policy.split(";"))}
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert rules["frame-ancestors"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert "unsafe" not in policy


@pytest.mark.requirement("PIPE-13")
async def test_every_response_says_what_a_browser_may_do_with_it(
    gateway: Gateway, client: Client, make_gateway: Callable[..., Gateway]
):
    async def crash() -> None:
        raise RuntimeError("for the test")

    gateway.app.add_api_route("/crash", crash)
    gateway.app.state.sign_in = codes = SignInCodes(key=KEY, name="iryna", now=time.time)
    person, note = gateway.client(Role.OWNER), await proposal(gateway)
    busy = make_gateway(GatewayOptions(requests_per_second=0.1, burst=1)).client(Role.OWNER)
    answers = {
        "200 of the API": await person.get("/runs"),
        "304": await person.get(f"/proposals/{note}", headers={"If-None-Match": '"1"'}),
        "401": await client.get("/runs"),
        "403": await gateway.client(Role.SUBMITTER).get("/runs"),
        "404 of the API": await person.get("/nowhere"),
        "404 of an asset": await client.get("/assets/nowhere.js"),
        "405": await person.delete("/runs"),
        "413": await person.post("/jobs", content=b" " * 2_000_000, headers={"Content-Type": "application/json"}),
        "422": await person.get("/runs?limit=0"),
        "429": [await busy.get("/runs") for _ in range(2)][-1],
        "500": await client.get("/crash"),
        "200 of an asset": await client.get("/assets/index-abc.js"),
        "200 of the page": await client.get("/console/runs"),
        "200 of the sign-in": await client.post("/sign-in", json={"code": codes.new_code()}),
        "401 of the sign-in": await client.post("/sign-in", json={"code": "guessed"}),
        "200 of the reference": await client.get("/docs"),
        "200 of the description": await client.get("/openapi.json"),
    }
    assert [one for one, answer in answers.items() if not one.startswith(str(answer.status_code))] == []
    async with listening(gateway.app, Authorization=f"Bearer {gateway.token(Role.OWNER)}") as listener:
        assert (listener.status, listener.headers["content-type"].split(";")[0]) == (200, "text/event-stream")
        headers = {**{one: answer.headers for one, answer in answers.items()}, "200 of a stream": listener.headers}
    for name, sent in headers.items():
        policy = sent["content-security-policy"]
        assert "default-src 'none'" in policy, name
        assert "frame-ancestors 'none'" in policy, name
        assert "unsafe" not in policy, name
        assert sent["x-content-type-options"] == "nosniff", name
        assert sent["referrer-policy"] == "no-referrer", name
        assert sent["cross-origin-resource-policy"] == "same-origin", name


def test_answer_to_an_unreadable_request_is_protected_too(tmp_path: Path):
    import socket

    with (
        serving(f"sqlite:///{tmp_path}/t.db", [KEY], settings=Settings.model_validate({})) as served,
        socket.create_connection(("127.0.0.1", served.port)) as connection,
    ):
        connection.sendall(b"no http at all\r\n\r\n")
        answer = connection.recv(65_536).decode()
    assert answer.startswith("HTTP/1.1 400 ")
    assert "content-security-policy: default-src 'none'" in answer
    assert "x-content-type-options: nosniff" in answer


async def test_gateway_without_a_built_console_says_what_is_missing(tmp_path: Path, gateway: Gateway):
    app = FastAPI()
    (tmp_path / "missing.txt").write_text("Node is too old: <18>")
    console.install(app, tmp_path)
    gateway.app.router.routes[:0] = app.router.routes[-3:]
    answer = await gateway.anonymous().get("/")
    assert answer.status_code == 503
    assert "Node is too old: &lt;18&gt;" in answer.text
    assert "make console" in answer.text
    assert (await gateway.anonymous().get("/system/live")).status_code == 200
    assert not console.is_built(tmp_path)


async def test_sign_in_code_becomes_one_token_that_the_ledger_records(gateway: Gateway):
    codes = SignInCodes(key=KEY, name="iryna", now=time.time)
    gateway.app.state.sign_in = codes
    code = codes.new_code()
    answer = await gateway.anonymous().post("/sign-in", json={"code": code})
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    identity = verify(answer.json()["token"], [KEY], now=time.time())
    assert (identity.name, identity.roles) == ("iryna", {Role.OWNER, Role.CONTROL_PLANE})
    token = answer.json()["token"]
    assert (await gateway.client(token=token).get("/runs")).status_code == 200
    acts = [one for one in await gateway.instance.ledger.acts(limit=10) if one.event == TOKEN_ISSUED]
    assert [(one.subject, one.cause) for one in acts] == [("iryna", "console")]
    for wrong in (code, "guessed"):
        again = await gateway.anonymous().post("/sign-in", json={"code": wrong})
        assert (again.status_code, again.json()["code"]) == (401, "AUTH_REQUIRED")


async def test_sign_in_codes_expire_and_are_few(gateway: Gateway):
    now = [1_000_000.0]
    codes = SignInCodes(key=KEY, name="iryna", now=lambda: now[0])
    gateway.app.state.sign_in = codes
    first, *others = [codes.new_code() for _ in range(CODES_MAX + 1)]
    refused = await gateway.anonymous().post("/sign-in", json={"code": first})
    assert refused.status_code == 401, "the oldest code made room"
    now[0] += CODE_TTL_S
    late = await gateway.anonymous().post("/sign-in", json={"code": others[-1]})
    assert (late.status_code, "15 minutes" in late.json()["detail"]) == (401, True)


async def test_gateway_with_a_configured_key_makes_no_sign_in_links(make_gateway: Callable[..., Gateway]):
    answer = await make_gateway().anonymous().post("/sign-in", json={"code": "any"})
    assert answer.status_code == 404
    assert "trellis token issue" in answer.json()["detail"]
