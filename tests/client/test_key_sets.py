"""Key sets: several keys, rotation without a restart, and nothing but public keys."""

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from trellis.app.settings import Settings, read_settings
from trellis.app.wiring import KeySetFile, callback_secrets, make_development_key, token_key, trusted_keys
from trellis.auth.tokens import TrustedKey, issue, key_set, make_private_jwk, private_key, verify
from trellis.engine.errors import KeyUnusable, LedgerUrlInvalid, OptionInvalid, SettingsInvalid, TokenRefused
from trellis.lifecycles import Role

ISSUER = "https://issuer.example.test"


def public(*jwks: dict[str, str]) -> dict[str, Any]:
    return {"keys": [{name: value for name, value in jwk.items() if name != "d"} for jwk in jwks]}


def signer(jwk: dict[str, str]) -> TrustedKey:
    return private_key(json.dumps(jwk).encode(), issuer=ISSUER)


def signed(jwk: dict[str, str]) -> str:
    return issue(signer(jwk), name="iryna", roles=[Role.OWNER], ttl_s=600, now=time.time())


def is_taken(token: str, keys: Iterable[TrustedKey]) -> bool:
    try:
        verify(token, list(keys), now=time.time())
    except TokenRefused:
        return False
    return True


class Watched:
    """A key set on disk, looked at with a clock of the test."""

    def __init__(self, path: Path, *jwks: dict[str, str]) -> None:
        self.path, self.seconds, self._changes = path, 0.0, 0
        self.write(public(*jwks))
        self.keys = KeySetFile(path, issuer=ISSUER, monotonic=lambda: self.seconds)

    def write(self, value: object) -> None:
        self.path.write_text(value if isinstance(value, str) else json.dumps(value))
        self.path.chmod(0o644)
        self._changes += 1
        # Two writes within one tick of the disk's clock must still be told apart.
        stamp = 1_700_000_000 + self._changes
        os.utime(self.path, (stamp, stamp))


OLD, NEW = make_private_jwk("2026-01", "Ed25519"), make_private_jwk("2026-02", "ES256")


@pytest.mark.requirement("AUTH-5")
def test_keys_are_changed_without_a_restart_and_an_old_one_counts_until_it_is_removed(tmp_path: Path):
    watched = Watched(tmp_path / "keys.json", OLD)
    old, new = signed(OLD), signed(NEW)
    assert (is_taken(old, watched.keys), is_taken(new, watched.keys)) == (True, False)
    watched.write(public(OLD, NEW))
    assert not is_taken(new, watched.keys)  # looked at a moment ago
    watched.seconds += 1.0
    assert (is_taken(old, watched.keys), is_taken(new, watched.keys), len(watched.keys)) == (True, True, 2)
    watched.write(public(NEW))
    watched.seconds += 1.0
    assert (is_taken(old, watched.keys), is_taken(new, watched.keys)) == (False, True)


def test_half_written_key_set_keeps_the_last_valid_keys_and_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    watched = Watched(tmp_path / "keys.json", OLD)
    for broken in ('{"keys": [', "", '{"keys": []}', json.dumps({"keys": [OLD]})):
        watched.write(broken)
        watched.seconds += 1.0
        assert is_taken(signed(OLD), watched.keys)
        assert "key_set_unusable" in caplog.text
        assert OLD["d"] not in caplog.text
        caplog.clear()
    watched.path.unlink()
    watched.seconds += 1.0
    assert is_taken(signed(OLD), watched.keys)
    watched.write(public(NEW))
    watched.seconds += 1.0
    assert not is_taken(signed(OLD), watched.keys)


@pytest.mark.parametrize(
    "keys, says",
    [
        ([OLD], "holds a secret"),
        ([{"kty": "oct", "k": "c2VjcmV0", "kid": "1", "alg": "HS256"}], "holds a secret"),
        ([], "1 to 50 keys"),
        ([{}] * 51, "1 to 50 keys"),
        (["x"], "no object"),
        ([{**public(OLD)["keys"][0], "kid": None}], "no kid"),
        ([{**public(OLD)["keys"][0], "alg": "EdDSA"}], "Ed25519 or ES256"),
        ([{**public(OLD)["keys"][0], "alg": "none"}], "Ed25519 or ES256"),
        ([{**public(OLD)["keys"][0], "alg": "HS256"}], "Ed25519 or ES256"),
        ([{**public(OLD)["keys"][0], "alg": "ES256"}], "no key for ES256"),
        ([{**public(OLD)["keys"][0], "crv": "X25519"}], "no key for Ed25519"),
        ([{**public(NEW)["keys"][0], "crv": "P-384"}], "no key for ES256"),
        ([{**public(OLD)["keys"][0], "use": "enc"}], "not for signatures"),
        ([{**public(OLD)["keys"][0], "x": "AAAA"}], "damaged"),
        ([{**public(NEW)["keys"][0], "y": public(NEW)["keys"][0]["x"]}], "damaged"),
        (public(OLD)["keys"] * 2, "every kid is one key"),
    ],
)
def test_a_key_set_that_cannot_be_meant_is_refused_at_the_start(tmp_path: Path, keys: list[Any], says: str):
    with pytest.raises(KeyUnusable, match=says) as refusal:
        key_set(json.dumps({"keys": keys}).encode(), issuer=ISSUER)
    assert OLD["d"] not in str(refusal.value)


def test_a_key_set_that_others_can_write_is_not_trusted(tmp_path: Path):
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(public(OLD)))
    path.chmod(0o666)
    with pytest.raises(KeyUnusable, match="chmod go-w"):
        KeySetFile(path, issuer=ISSUER, monotonic=time.monotonic)
    with pytest.raises(KeyUnusable, match="cannot be read"):
        KeySetFile(tmp_path / "missing.json", issuer=ISSUER, monotonic=time.monotonic)


# --- what the settings say -------------------------------------------------------------------------------------------


def settings(**given: object) -> Settings:
    return Settings.model_validate(given)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """A public key set, a private key and a secret, as an operator would keep them."""
    made = {"jwks": tmp_path / "keys.json", "private": tmp_path / "private.jwk", "secret": tmp_path / "secret.key"}
    made["jwks"].write_text(json.dumps(public(OLD, NEW)))
    made["private"].write_text(json.dumps(NEW))
    made["secret"].write_text("ab" * 32)
    for name in ("private", "secret"):
        made[name].chmod(0o600)
    return made


@pytest.mark.requirement("AUTH-5")
def test_without_a_key_nobody_is_trusted(tmp_path: Path):
    with pytest.raises(KeyUnusable, match="TRELLIS_TOKEN_JWKS_FILE"):
        trusted_keys("postgresql://localhost/x", settings())
    with pytest.raises(KeyUnusable):
        trusted_keys(f"sqlite:///{tmp_path}/t.db", settings())


def test_a_configured_key_set_takes_the_place_of_the_development_key(tmp_path: Path, files: dict[str, Path]):
    url = f"sqlite:///{tmp_path}/t.db"
    make_development_key(url)
    chosen = settings(token_jwks_file=files["jwks"], token_issuer=ISSUER, token_signing_key_file=files["private"])
    development = issue(token_key(url, settings()), name="me", roles=[Role.OWNER], ttl_s=60, now=time.time())
    assert is_taken(development, trusted_keys(url, settings()))
    assert not is_taken(development, trusted_keys(url, chosen))
    own = issue(token_key(url, chosen), name="me", roles=[Role.OWNER], ttl_s=60, now=time.time())
    assert is_taken(own, trusted_keys(url, chosen))


def test_public_key_set_cannot_sign_tokens(files: dict[str, Path]):
    chosen = settings(token_jwks_file=files["jwks"], token_issuer=ISSUER)
    with pytest.raises(KeyUnusable, match="TRELLIS_TOKEN_SIGNING_KEY_FILE"):
        token_key("postgresql://localhost/x", chosen)
    files["private"].write_text(json.dumps(public(NEW)["keys"][0]))
    with pytest.raises(KeyUnusable, match="needs the private one"):
        token_key("postgresql://localhost/x", settings(token_signing_key_file=files["private"], token_issuer=ISSUER))
    files["private"].chmod(0o644)
    with pytest.raises(KeyUnusable, match="chmod 600"):
        token_key("postgresql://localhost/x", settings(token_signing_key_file=files["private"], token_issuer=ISSUER))


@pytest.mark.parametrize(
    "environment, says",
    [
        ({"TRELLIS_TOKEN_JWKS_FILE": "k"}, "TRELLIS_TOKEN_ISSUER"),
        ({"TRELLIS_TOKEN_SIGNING_KEY_FILE": "k"}, "TRELLIS_TOKEN_ISSUER"),
        (
            {"TRELLIS_TOKEN_JWKS_FILE": "k", "TRELLIS_TOKEN_ISSUER": "i", "TRELLIS_TOKEN_KEY_FILE": "s"},
            "exclude each other",
        ),
        ({"TRELLIS_TLS_CERT_FILE": "c"}, "belong together"),
        ({"TRELLIS_PORT": "99999"}, "TRELLIS_PORT"),
        ({"TRELLIS_NLM_BASE_URL": "https://me:planted@nlm.example.test"}, "credentials do not belong in it"),
        ({"TRELLIS_MODEL_BASE_URL": "https://planted@model.example.test"}, "credentials do not belong in it"),
        (
            {"TRELLIS_MODEL_BASE_URL": "127.0.0.1:8199/v1"},
            "TRELLIS_MODEL_BASE_URL: it must look like http://host:port/v1",
        ),
        ({"TRELLIS_MODEL_BASE_URL": "localhost:8199/v1"}, "it must look like"),
        ({"TRELLIS_MODEL_BASE_URL": "https://model.example.test/v1#planted"}, "it must look like"),
        ({"TRELLIS_NLM_BASE_URL": "localhost:8199/v1"}, "TRELLIS_NLM_BASE_URL: it must look like"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_without_repeating_a_secret(
    tmp_path: Path, environment: dict[str, str], says: str
):
    with pytest.raises(SettingsInvalid, match=says) as refusal:
        read_settings(environment, tmp_path)
    assert "planted" not in str(refusal.value)


def test_the_address_of_a_model_server_may_have_a_query(tmp_path: Path):
    address = "https://model.example.test/v1?api-version=1"
    settings = read_settings({"TRELLIS_MODEL_BASE_URL": address, "TRELLIS_NLM_BASE_URL": address}, tmp_path)
    assert (settings.model_base_url, settings.nlm_base_url) == (address, address)


def test_a_secret_of_the_wrong_kind_in_the_file_is_not_repeated(tmp_path: Path):
    (tmp_path / "trellis.toml").write_text('nlm_key = ["planted"]\n')
    with pytest.raises(SettingsInvalid) as refusal:
        read_settings({}, tmp_path)
    assert "planted" not in str(refusal.value)


def test_secrets_of_callbacks_come_from_their_file_or_the_development_key(tmp_path: Path, files: dict[str, Path]):
    url = f"sqlite:///{tmp_path}/t.db"
    make_development_key(url)
    assert len(callback_secrets(url, settings())) == 1
    assert callback_secrets("postgresql://localhost/x", settings()) == ()
    files["secret"].write_text("ab" * 32 + "\n" + "cd" * 32 + "\n")
    found = callback_secrets("postgresql://localhost/x", settings(callback_key_file=files["secret"]))
    assert found == (b"\xab" * 32, b"\xcd" * 32)
    files["secret"].chmod(0o644)
    with pytest.raises(KeyUnusable, match="chmod 600"):
        callback_secrets(url, settings(callback_key_file=files["secret"]))


@pytest.mark.parametrize("kid, alg", [("", "Ed25519"), ("x" * 201, "Ed25519"), ("a\nb", "ES256"), ("k", "RS256")])
def test_a_key_that_cannot_be_meant_is_not_made(kid: str, alg: str):
    with pytest.raises(OptionInvalid):
        make_private_jwk(kid, alg)


def test_an_address_in_an_error_shows_no_password():
    url = "postgresql://me:planted@db.example.test/app?password=planted&sslmode=no"
    error = LedgerUrlInvalid(url=url, reason="no such mode")
    assert "planted" not in str(error) + repr(error.data)
    assert "postgresql://me:***@db.example.test/app?password=***&sslmode=no" in str(error)
