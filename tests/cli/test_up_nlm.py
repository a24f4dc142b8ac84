"""`trellis up` and its NLM backend: alone as a process, embedded, and what it needs."""

import re
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from tests.cli.test_up import PATIENCE_S, up
from trellis.cli.serving_nlm import addressed, take_place
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.identity import symmetric_key
from trellis.nlm_backend import open_backend
from trellis.settings import Settings, read_settings
from trellis.web.server import ListenRefused, ServerOptions, listen
from trellis.wiring import make_development_key

KEY = symmetric_key(b"a key of 32 bytes or more, for tests of up", issuer="trellis")


@pytest.mark.requirement("NLM-1")
def test_the_backend_alone_answers_takes_no_stranger_and_stops_when_it_is_told(tmp_path: Path):
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


def _cli(**settings: Any) -> Any:
    return SimpleNamespace(settings=Settings.model_validate(settings), url="sqlite:///trellis.db")


def test_an_embedded_backend_takes_a_free_port_when_nobody_chose_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        chosen = _cli(nlm_port=port)
        with pytest.raises(ListenRefused):
            take_place(chosen, None, [KEY])
        by_default = _cli()
        by_default.settings = by_default.settings.model_copy(update={"nlm_port": port})
        object.__setattr__(by_default.settings, "__pydantic_fields_set__", set())
        place = take_place(by_default, None, [KEY])
        assert place is not None
        assert place.listening.url != f"http://127.0.0.1:{port}"
        place.listening.close()


def test_no_backend_is_embedded_without_keys_beside_another_one_or_unasked():
    assert take_place(_cli(), None, []) is None
    assert take_place(_cli(nlm_backend="http://elsewhere:8421"), None, [KEY]) is None
    assert take_place(_cli(), frozenset({"gateway"}), [KEY]) is None


def test_the_parts_of_a_process_find_each_other_where_nothing_is_set(tmp_path: Path):
    everywhere = listen(ServerOptions(host="0.0.0.0", port=0), key_configured=True)
    try:
        own = addressed(read_settings({}, tmp_path), everywhere, None)
        assert own.gateway == everywhere.url.replace("0.0.0.0", "127.0.0.1")
        named = read_settings({"TRELLIS_GATEWAY": "https://gateway.example"}, tmp_path)
        assert addressed(named, everywhere, None).gateway == "https://gateway.example"
    finally:
        everywhere.close()
