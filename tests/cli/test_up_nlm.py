"""`trellis up` and its NLM backend: alone as a process, embedded, and what it needs."""

import json
import re
import signal
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from tests.cli.test_up import PATIENCE_S, up
from tests.net.listening import make_certificates
from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import make_development_key
from trellis.auth.tokens import symmetric_key
from trellis.cli import main
from trellis.cli.up_nlm import bind_nlm_endpoint, open_embedded, why_no_queue, with_own_addresses
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.http_server.server import ListenRefused, ServerOptions, listen
from trellis.nlm_backend import open_backend

KEY = symmetric_key(b"a key of 32 bytes or more, for tests of up", issuer="trellis")


@pytest.mark.requirement("NLM-1", "D42")
def test_the_nlm_backend_alone_answers_refuses_requests_without_a_token_and_stops_on_a_signal(tmp_path: Path):
    environment = {"TRELLIS_NLM_PORT": "0", "TRELLIS_GATEWAY": "https://gateway.example"}
    with up(tmp_path, "--roles", "nlm", **environment) as running:
        found = re.search(r"^nlm +(http://127\.0\.0\.1:\d+)$", running.said, re.MULTILINE)
        assert found is not None, running.said
        assert "ledger    sqlite:///nlm.db" in running.said
        with httpx2.Client(base_url=found[1]) as client:
            assert client.get("/health").json()["status"] == "ok"
            assert client.post("/jobs/process", json={}).status_code == 401
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 0
        assert running.process.stdout is not None
        assert running.process.stdout.read() == "stopped\n"
    assert (tmp_path / "nlm.db").exists()
    assert not (tmp_path / "trellis.db").exists()  # the main ledger is not its own


async def test_a_backend_that_cannot_know_its_gateway_does_not_start(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 't.db'}"
    make_development_key(url)
    with pytest.raises(SettingsInvalid, match="TRELLIS_GATEWAY"):
        async with open_backend(Settings.model_validate({"port": 0}), url):
            pass
    with pytest.raises(KeyUnusable, match="TRELLIS_CALLBACK_KEY_FILE"):
        async with open_backend(Settings.model_validate({}), "postgresql://localhost/x"):
            pass


async def test_tokens_are_sent_to_the_gateway_only(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 't.db'}"
    make_development_key(url)
    chosen = {"gateway": "http://127.0.0.1:8420", "outgoing": ["http://127.0.0.1:9000"]}
    async with open_backend(Settings.model_validate(chosen), url) as backend:
        assert backend.holder.driver.delivery.links.trusted == frozenset({"http://127.0.0.1:8420"})
        assert backend.parts.intake.trusted == frozenset({"http://127.0.0.1:8420"})
        backend.parts.intake.outgoing.check("http://127.0.0.1:9000/snapshot")


@pytest.mark.parametrize(
    "chosen,gateway,has_backend,reason",
    [
        ({}, True, True, None),
        ({}, True, False, "TRELLIS_NLM_BACKEND"),
        ({}, False, True, "TRELLIS_GATEWAY"),
        ({"nlm_backend": "http://127.0.0.1:8421"}, True, False, None),
        ({"nlm_backend": "http://127.0.0.1:8421"}, False, False, "TRELLIS_GATEWAY"),
        ({"nlm_backend": "https://nlm.example"}, True, False, "TRELLIS_GATEWAY"),
        ({"nlm_backend": "https://nlm.example", "gateway": "https://gateway.example"}, False, False, None),
        ({"tls_cert_file": "c.pem", "tls_key_file": "k.pem"}, False, True, "certificate"),
        ({"token_jwks_file": "keys.json", "token_issuer": "i"}, True, True, "TRELLIS_TOKEN_SIGNING_KEY_FILE"),
    ],
)
def test_queue_jobs_are_driven_where_they_can_get_somewhere(
    tmp_path: Path, chosen: dict[str, Any], gateway: bool, has_backend: bool, reason: str | None
):
    cli = _cli(**chosen)
    cli.url = f"sqlite:///{tmp_path / 't.db'}"
    make_development_key(cli.url)
    listening = listen(ServerOptions(host="127.0.0.1", port=0), key_configured=True) if gateway else None
    found = why_no_queue(
        cli, with_own_addresses(cli.settings, listening, None), cast("Any", object()) if has_backend else None
    )
    if listening is not None:
        listening.close()
    assert found is None if reason is None else reason in (found or "")


def test_process_without_a_signing_key_logs_why_and_claims_no_queue_jobs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """With a key set and nothing to sign with it cannot show who it is."""
    assert main(["token", "key", "2026-02", "--out", str(tmp_path / "private.jwk")]) == 0
    jwks = tmp_path / "keys.json"
    jwks.write_text(json.dumps({"keys": [json.loads(capsys.readouterr().out)]}))
    jwks.chmod(0o644)
    keys = {"TRELLIS_TOKEN_JWKS_FILE": str(jwks), "TRELLIS_TOKEN_ISSUER": "https://issuer.example.test"}
    with up(tmp_path, "--port", "0", **keys) as running:
        said = running.said
        assert re.search(r"^nlm +none: .*TRELLIS_TOKEN_SIGNING_KEY_FILE", said, re.MULTILINE), said
        assert re.search(r"^queue +none, jobs stay PENDING: ", said, re.MULTILINE), said
        assert "queue-orchestrator" not in said


async def test_behind_a_certificate_the_parts_need_the_address_that_it_names(tmp_path: Path):
    certificates = make_certificates(tmp_path, "gateway.example")
    tls: dict[str, Any] = {"tls_cert_file": certificates.chain, "tls_key_file": certificates.key}
    said: list[str] = []
    cli = _cli(nlm_port=0, **tls)
    cli.url, cli.out = f"sqlite:///{tmp_path / 't.db'}", SimpleNamespace(line=said.append)
    make_development_key(cli.url)
    listening = listen(ServerOptions(host="127.0.0.1", port=0, **tls), key_configured=True)
    place = bind_nlm_endpoint(cli, None, [KEY])
    try:
        settings = with_own_addresses(cli.settings, listening, place)
        assert settings.gateway is None
        async with AsyncExitStack() as stack:
            assert await open_embedded(cli, settings, place, stack, asked_for=False) is None
            assert "TRELLIS_GATEWAY" in said[-1]
            with pytest.raises(SettingsInvalid, match="certificate"):
                await open_embedded(cli, settings, place, stack, asked_for=True)
    finally:
        listening.close()


async def test_a_backend_beside_postgresql_says_that_its_jobs_are_this_machines(tmp_path: Path):
    notes: list[str] = []
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    cli = _cli(nlm_port=0, gateway="http://127.0.0.1:8420", token_key_file=key, callback_key_file=key)
    cli.url, cli.out = "postgresql://localhost/x", SimpleNamespace(line=lambda _: None, note=notes.append)
    place = bind_nlm_endpoint(cli, None, [KEY])
    assert place is not None
    here = cli.settings.model_copy(update={"nlm_ledger": f"sqlite:///{tmp_path / 'nlm.db'}"})
    try:
        async with AsyncExitStack() as stack:
            assert await open_embedded(cli, here, place, stack, asked_for=False) is not None
        (note,) = notes
        assert "nlm.db" in note
        assert "TRELLIS_NLM_LEDGER" in note
    finally:
        place.listening.close()


def _cli(**settings: Any) -> Any:
    return SimpleNamespace(settings=Settings.model_validate(settings), url="sqlite:///trellis.db")


def test_an_embedded_backend_takes_a_free_port_when_nobody_chose_one_and_says_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen = _cli(nlm_port=port)
        with pytest.raises(ListenRefused, match=r"The NLM backend does not listen on .*port with TRELLIS_NLM_PORT"):
            bind_nlm_endpoint(chosen, None, [KEY])
        by_default = _cli()
        by_default.settings = by_default.settings.model_copy(update={"nlm_port": port})
        object.__setattr__(by_default.settings, "__pydantic_fields_set__", set())
        place = bind_nlm_endpoint(by_default, None, [KEY])
        assert place is not None
        assert place.described == f"{place.listening.url} (port {port} is in use; TRELLIS_NLM_PORT chooses one)"
        assert place.listening.url != f"http://127.0.0.1:{port}"
        place.listening.close()


def test_no_backend_is_embedded_without_keys_beside_another_one_or_unasked():
    assert bind_nlm_endpoint(_cli(), None, []) is None
    assert bind_nlm_endpoint(_cli(nlm_backend="http://elsewhere:8421"), None, [KEY]) is None
    assert bind_nlm_endpoint(_cli(), frozenset({"gateway"}), [KEY]) is None


def test_the_parts_of_a_process_find_each_other_where_nothing_is_set(tmp_path: Path):
    everywhere = listen(ServerOptions(host="0.0.0.0", port=0), key_configured=True)
    try:
        own = with_own_addresses(read_settings({}, tmp_path), everywhere, None)
        assert own.gateway == everywhere.url.replace("0.0.0.0", "127.0.0.1")
        assert own.named_gateway is None, "no report of an alert links to an address of this machine only"
        named = read_settings({"TRELLIS_GATEWAY": "https://gateway.example"}, tmp_path)
        filled = with_own_addresses(named, everywhere, None)
        assert (filled.gateway, filled.named_gateway) == ("https://gateway.example", "https://gateway.example")
    finally:
        everywhere.close()
