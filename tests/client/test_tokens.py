"""`connect(url, token=…)`: authority without HTTP."""

import time
from pathlib import Path

import pytest

from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import connect, make_development_key, token_key
from trellis.auth.principals import Principal
from trellis.auth.tokens import issue
from trellis.client import Trellis
from trellis.engine.errors import KeyUnusable, NotAllowed, SettingsInvalid, TokenExpired, TokenRefused
from trellis.lifecycles import Role
from trellis.testing import FakeClock, sandbox
from trellis.worker.app import App


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    address = f"sqlite:///{tmp_path / 'ledger.db'}"
    make_development_key(address)
    return address


def token_for(address: str, *roles: Role, settings: Settings | None = None, ttl_s: float = 60, ago_s: float = 0) -> str:
    key = token_key(address, settings or Settings.model_validate({}))
    return issue(key, name="ada", roles=roles, ttl_s=ttl_s, now=time.time() - ago_s)


@pytest.mark.requirement("D46")
async def test_a_token_gives_its_roles_and_its_name_and_nothing_else(url: str):
    async with connect(url, token=token_for(url, Role.SUBMITTER), name="ignored") as trellis:
        assert (trellis.principal.name, trellis.principal.roles) == ("ada", {Role.SUBMITTER})
        job = await trellis.submit("t")
        assert (await job.events())[0].actor == "ada"
        with pytest.raises(NotAllowed, match="the token of ada gives submitter"):
            await trellis.pause("t")
    async with connect(url, token=token_for(url, Role.CONTROL_PLANE)) as trellis:
        await trellis.pause("t")
    async with connect(url, token=token_for(url, Role.PROJECTOR), operator=True) as trellis:
        with pytest.raises(NotAllowed, match="submit jobs"):
            await trellis.submit("t")
        with pytest.raises(NotAllowed, match="pause"):
            await trellis.pause("t")


@pytest.mark.requirement("D46")
async def test_without_a_token_a_local_file_gives_what_it_gave(url: str):
    async with connect(url) as trellis:
        assert trellis.principal.roles == {Role.WORKER, Role.SUBMITTER}
    async with connect(url, operator=True) as trellis:
        assert Role.CONTROL_PLANE in trellis.principal.roles


@pytest.mark.requirement("D46")
async def test_a_bad_token_opens_nothing(url: str, tmp_path: Path):
    other = f"sqlite:///{tmp_path / 'other.db'}"
    make_development_key(other)
    expired = token_for(url, Role.WORKER, ttl_s=10, ago_s=20)
    for bad in (token_for(other, Role.OWNER), expired, "", "nonsense"):
        with pytest.raises(TokenRefused):
            await connect(url, token=bad).__aenter__()
    assert not (tmp_path / "ledger.db").exists()


async def test_a_token_cannot_be_checked_with_a_key_that_others_can_read_or_that_is_gone(url: str, tmp_path: Path):
    good, key = token_for(url, Role.WORKER), tmp_path / "ledger.db.key"
    key.chmod(0o644)
    with pytest.raises(KeyUnusable, match="chmod 600"):
        await connect(url, token=good).__aenter__()
    key.chmod(0o600)
    key.write_text("not a key")
    with pytest.raises(KeyUnusable, match="hexadecimal"):
        await connect(url, token=good).__aenter__()
    key.unlink()
    with pytest.raises(KeyUnusable, match="cannot be read"):
        await connect(url, token=good).__aenter__()


async def test_the_token_of_the_settings_is_used_where_none_is_given(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "token").write_text(token_for(url, Role.SUBMITTER) + "\n")
    monkeypatch.setenv("TRELLIS_TOKEN_FILE", "token")
    async with connect(url) as trellis:
        assert trellis.principal.roles == {Role.SUBMITTER}
    monkeypatch.setenv("TRELLIS_TOKEN", token_for(url, Role.WORKER))
    async with connect(url) as trellis:
        assert trellis.principal.roles == {Role.WORKER}
    async with connect(url, token=token_for(url, Role.OWNER)) as trellis:
        assert trellis.principal.roles == {Role.OWNER}
    monkeypatch.setenv("TRELLIS_TOKEN", "")
    with pytest.raises(SettingsInvalid, match="TRELLIS_TOKEN"):  # it does not fall back to other rights
        await connect(url).__aenter__()


def test_a_token_is_kept_out_of_shared_files_and_of_what_is_printed(tmp_path: Path):
    settings = read_settings({"TRELLIS_TOKEN": "very.secret.token"}, tmp_path)
    assert settings.shown_token() == "very.secret.token"
    assert "secret" not in repr(settings) + str(settings)
    (tmp_path / "trellis.toml").write_text('token = "very.secret.token"\n')
    with pytest.raises(SettingsInvalid, match="TRELLIS_TOKEN") as refusal:
        read_settings({}, tmp_path)
    assert "secret" not in str(refusal.value)
    with pytest.raises(SettingsInvalid, match="cannot be read"):
        read_settings({"TRELLIS_TOKEN_FILE": str(tmp_path / "none")}, Path("/")).shown_token()


async def test_a_token_that_expires_ends_what_its_bearer_may_do_and_not_what_it_may_see():
    async with sandbox(App()) as box:
        clock = FakeClock()
        principal = Principal(name="ada", roles=frozenset({Role.SUBMITTER}), until=clock.monotonic() + 60)
        trellis = Trellis(box.ledger, principal, clock=clock, new_id=lambda: f"id-{clock()}")
        job = await trellis.submit("t")
        clock.advance(60)
        with pytest.raises(TokenExpired, match="connect again"):
            await trellis.submit("t")
        with pytest.raises(TokenExpired):
            await job.cancel()
        assert (await job.status()).state == "queued"


@pytest.mark.requirement("D46")
async def test_on_postgresql_a_token_narrows_what_the_database_role_may(
    postgres_url: str, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KeyUnusable, match="TRELLIS_TOKEN_KEY_FILE"):
        await connect(postgres_url, token=token_for(url, Role.SUBMITTER)).__aenter__()
    monkeypatch.setenv("TRELLIS_TOKEN_KEY_FILE", str(tmp_path / "ledger.db.key"))
    good = token_for(url, Role.SUBMITTER)
    async with connect(postgres_url, token=good) as trellis:
        await trellis.submit("t")
        with pytest.raises(NotAllowed, match="control-plane"):
            await trellis.pause("t")
    with pytest.raises(TokenRefused, match="signature"):
        await connect(postgres_url, token=good[:-4] + "AAAA").__aenter__()
    async with connect(postgres_url) as trellis:
        await trellis.pause("t")
