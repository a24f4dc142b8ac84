"""Where a token goes: to a gateway that its owner named, and unencrypted only where it stays on this machine."""

import time
from pathlib import Path

import httpx2
import pytest

from tests.http.conftest import Shell
from tests.http.scripted import Script, client_on
from trellis.app.alerts import report_channels
from trellis.app.instance import open_instance
from trellis.app.settings import read_settings
from trellis.app.wiring import component_token, development_key, make_development_key
from trellis.auth.tokens import issue
from trellis.engine.errors import SettingsInvalid
from trellis.http.address import is_readable_on_the_way
from trellis.http.calls import CallOptions
from trellis.http.errors import TokenUnprotected
from trellis.lifecycles import Role
from trellis.testing import FakeClock

ELSEWHERE = "https://elsewhere.example"
TOKEN = {"TRELLIS_TOKEN": "secret"}


@pytest.mark.parametrize(
    "file, environment, may",
    [
        ("", TOKEN, True),
        (f'gateway = "{ELSEWHERE}"', {}, True),
        (f'gateway = "{ELSEWHERE}"', TOKEN, False),
        (f'gateway = "{ELSEWHERE}"', {"TRELLIS_TOKEN_FILE": "token"}, False),
        (f'gateway = "{ELSEWHERE}"', {**TOKEN, "TRELLIS_GATEWAY": ELSEWHERE}, True),
        (f'gateway = "{ELSEWHERE}"\ntoken_file = "token"', {}, True),
        (f'gateway = "{ELSEWHERE}"\ntoken_file = "token"', TOKEN, False),
        (f'gateway = "{ELSEWHERE}"\ntoken_file = "../token"', {}, False),
        (f'gateway = "{ELSEWHERE}"\ntoken_file = "link"', {}, False),
        ('token_file = "../token"', {"TRELLIS_GATEWAY": ELSEWHERE}, True),
    ],
)
def test_a_file_in_the_working_folder_sends_no_token_of_others_anywhere(
    file: str, environment: dict[str, str], may: bool, tmp_path: Path
):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "link").symlink_to("../token")
    (folder / "trellis.toml").write_text(file)
    settings = read_settings(environment, folder)
    assert settings.token_may_go_to("gateway") == may
    if not may:
        with pytest.raises(SettingsInvalid, match="set TRELLIS_GATEWAY or give --gateway"):
            settings.model_copy().check_gateway()


@pytest.mark.parametrize(
    "file, environment, may",
    [
        ("", {"TRELLIS_MODEL_KEY": "k"}, True),
        (f'model_base_url = "{ELSEWHERE}"', {}, True),
        (f'model_base_url = "{ELSEWHERE}"', {"TRELLIS_MODEL_KEY": "k"}, False),
        (f'model_base_url = "{ELSEWHERE}"', {"TRELLIS_MODEL_KEY": "k", "TRELLIS_MODEL_BASE_URL": ELSEWHERE}, True),
        (f'model_base_url = "{ELSEWHERE}"\nmodel_key = "mine"', {}, True),
        (f'model_base_url = "{ELSEWHERE}"\nmodel_key = "mine"', {"TRELLIS_MODEL_KEY": "k"}, False),
        ('model_key = "mine"', {"TRELLIS_MODEL_BASE_URL": ELSEWHERE}, True),
    ],
)
def test_a_file_in_the_working_folder_sends_no_key_of_the_environment_anywhere(
    file: str, environment: dict[str, str], may: bool, tmp_path: Path
):
    for kind in ("model", "nlm"):
        (tmp_path / "trellis.toml").write_text(file.replace("model_", f"{kind}_"))
        named = {name.replace("MODEL", kind.upper()): value for name, value in environment.items()}
        settings, address = read_settings(named, tmp_path), f"{kind}_base_url"
        if may:
            settings.key_for(address)
            continue
        with pytest.raises(SettingsInvalid, match=f"set TRELLIS_{kind.upper()}_BASE_URL"):
            settings.key_for(address)


@pytest.mark.parametrize("place", ["orchestrator", "temporal_ca_file"])
def test_a_temporal_server_or_authority_that_a_foreign_folder_names_gets_no_api_key(place: str, tmp_path: Path):
    values = {"orchestrator": "temporal://elsewhere:7233/default", "temporal_ca_file": str(tmp_path / "ca.pem")}
    (tmp_path / "trellis.toml").write_text(f'{place} = "{values[place]}"\n')
    ours = {"TRELLIS_TEMPORAL_API_KEY": "k"} | {f"TRELLIS_{name.upper()}": value for name, value in values.items()}
    named = read_settings(ours, tmp_path).temporal
    assert named is not None
    assert named.api_key == "k"
    del ours[f"TRELLIS_{place.upper()}"]
    with pytest.raises(SettingsInvalid, match=f"set TRELLIS_{place.upper()}"):
        _ = read_settings(ours, tmp_path).temporal


@pytest.mark.parametrize("is_named", [False, True])
def test_a_webhook_that_a_foreign_folder_names_gets_no_reports_signed_with_our_key(is_named: bool, tmp_path: Path):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "trellis.toml").write_text(f'alert_webhook = "{ELSEWHERE}/hidden"\n')
    for key in (tmp_path / "alert.key", folder / "alert.key"):
        key.write_text("5a" * 32)
        key.chmod(0o600)
    ours = {"TRELLIS_ALERT_KEY_FILE": str(tmp_path / "alert.key")}
    if is_named:
        (channel,) = report_channels(read_settings({**ours, "TRELLIS_ALERT_WEBHOOK": ELSEWHERE}, folder))
        assert channel.type == "trellis.alert.webhook"
        return
    with pytest.raises(SettingsInvalid, match="set TRELLIS_ALERT_WEBHOOK") as refused:
        report_channels(read_settings(ours, folder))
    assert "hidden" not in str(refused.value)


async def test_an_instance_in_a_foreign_folder_does_not_open_a_provider_with_our_key(tmp_path: Path):
    (tmp_path / "trellis.toml").write_text(f'nlm = "openai"\nnlm_model = "m"\nnlm_base_url = "{ELSEWHERE}"\n')
    settings = read_settings({"TRELLIS_NLM_KEY": "k"}, tmp_path)
    with pytest.raises(SettingsInvalid, match="set TRELLIS_NLM_BASE_URL"):
        async with open_instance(settings, f"sqlite:///{tmp_path / 'ledger.db'}"):
            pass


def test_a_certificate_authority_that_a_foreign_folder_names_is_not_trusted_with_our_token(
    shell: Shell, address: str, monkeypatch: pytest.MonkeyPatch
):
    Path("trellis.toml").write_text('gateway_ca_file = "authority.pem"\n')
    refused = shell("agents", code=2)
    assert "does not decide where a token goes" in refused
    assert "TRELLIS_GATEWAY_CA_FILE" in refused


def test_a_command_sends_its_token_to_a_gateway_that_was_named(
    shell: Shell, address: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRELLIS_GATEWAY")
    Path("trellis.toml").write_text(f'gateway = "{address}"\n')
    refused = shell("agents", code=2)
    assert "trellis.toml" in refused
    assert "does not decide where a token goes" in refused
    assert "archivist-violin" in shell("agents", "--gateway", address)


def test_a_token_of_the_environment_is_not_shown_to_an_nlm_backend_of_the_file(tmp_path: Path):
    """Tokens that are signed here are for a few minutes and one role; the one of the environment may be a person's."""
    ledger = f"sqlite:///{tmp_path}/ledger.db"
    make_development_key(ledger)
    token = issue(development_key(ledger), name="i", roles=[Role.ORCHESTRATOR], ttl_s=60, now=time.time())
    (tmp_path / "trellis.toml").write_text('nlm_backend = "https://elsewhere.example"')
    for folder, is_shown in ((tmp_path, False), (tmp_path / "other", True)):
        settings = read_settings({"TRELLIS_TOKEN": token}, folder)
        assert (component_token(ledger, settings, Role.ORCHESTRATOR)() == token) == is_shown


@pytest.mark.parametrize(
    "url, readable",
    [
        ("http://127.0.0.1:8420", False),
        ("http://127.8.8.8", False),
        ("http://[::1]:8420", False),
        ("HTTP://LOCALHOST:8420/base", False),
        ("https://trellis.example", False),
        ("http://trellis.example", True),
        ("http://10.0.0.1:8420", True),
        ("http://0.0.0.0:8420", True),
        ("http://[::ffff:10.0.0.1]", True),
        ("http://localhost.example", True),
    ],
)
def test_url_that_sends_tokens_unencrypted_to_another_host_is_recognised(url: str, readable: bool):
    assert is_readable_on_the_way(url) == readable


async def test_a_token_goes_unencrypted_to_another_machine_only_where_that_is_allowed():
    script = Script(httpx2.Response(200, json={"items": [], "next_cursor": None}))
    for token, plain_http in ((None, False), ("secret", True), ("secret", False)):
        options, shown = CallOptions(plain_http=plain_http), (lambda token=token: token)
        async with client_on(script, FakeClock(), token=shown, options=options, url="http://gateway.example") as client:
            if token is None or plain_http:
                await client.agents.list()
            else:
                with pytest.raises(TokenUnprotected, match="TRELLIS_GATEWAY_PLAIN_HTTP"):
                    await client.agents.list()
    assert script.header("authorization") == [None, "Bearer secret"]


def test_the_file_does_not_allow_it(tmp_path: Path):
    (tmp_path / "trellis.toml").write_text("gateway_plain_http = true")
    with pytest.raises(SettingsInvalid, match="set TRELLIS_GATEWAY_PLAIN_HTTP"):
        read_settings({}, tmp_path)
