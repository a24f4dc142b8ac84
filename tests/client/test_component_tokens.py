"""Tokens that one component shows another: the configured one, else its own, short-lived and for one job where that is enough."""

import time
from pathlib import Path

import pytest

from trellis.app.settings import Settings
from trellis.app.wiring import (
    ComponentToken,
    component_token,
    limited_token,
    make_development_key,
    outgoing_tls,
    token_key,
    trusted_keys,
)
from trellis.auth.tokens import issue, verify
from trellis.engine.errors import KeyUnusable, SettingsInvalid
from trellis.lifecycles import Role
from trellis.testing import FakeClock


def settings(**chosen: object) -> Settings:
    return Settings.model_validate(chosen)


@pytest.fixture
def url(tmp_path: Path) -> str:
    made = f"sqlite:///{tmp_path}/t.db"
    make_development_key(made)
    return made


def test_a_component_signs_its_own_short_lived_tokens_for_one_job_or_for_all(url: str):
    token = component_token(url, settings(), Role.NLM_BACKEND)
    keys = trusted_keys(url, settings())
    now = time.time()
    for_all, for_one = verify(token(), keys, now=now), verify(token("job-1"), keys, now=now)
    assert (for_all.roles, for_all.job_id) == (frozenset({Role.NLM_BACKEND}), None)
    assert (for_one.roles, for_one.job_id) == (frozenset({Role.NLM_BACKEND}), "job-1")
    assert for_all.expires_at - now <= 600
    assert token() == token()


def test_a_token_of_a_component_is_renewed_at_half_of_its_time(url: str):
    clock = FakeClock()
    token = ComponentToken(settings(), token_key(url, settings()), Role.ORCHESTRATOR, now=clock)
    first = token()
    clock.advance(299.0)
    assert token() == first
    clock.advance(1.0)
    assert token() != first


def test_a_configured_token_is_used_for_the_roles_it_gives_and_no_others(url: str):
    key = token_key(url, settings())
    shown = issue(key, name="backend", roles=[Role.NLM_BACKEND], ttl_s=600.0, now=time.time())
    configured = settings(token=shown)
    assert component_token(url, configured, Role.NLM_BACKEND)() == shown
    made = component_token(url, configured, Role.ORCHESTRATOR)()
    assert verify(made, trusted_keys(url, configured), now=time.time()).roles == frozenset({Role.ORCHESTRATOR})


@pytest.mark.requirement("AUTH-3")
def test_a_token_for_a_job_is_signed_for_it_and_never_the_configured_one(url: str):
    shown = issue(token_key(url, settings()), name="b", roles=[Role.NLM_BACKEND], ttl_s=600.0, now=time.time())
    configured = settings(token=shown)
    made = verify(
        limited_token(url, configured, Role.NLM_BACKEND)("job-1"), trusted_keys(url, configured), now=time.time()
    )
    assert (made.roles, made.job_id) == (frozenset({Role.NLM_BACKEND}), "job-1")
    only_verifies = settings(token=shown, token_jwks_file="keys.json", token_issuer="https://tokens.example")
    with pytest.raises(KeyUnusable, match=r"for each job.*TRELLIS_TOKEN_SIGNING_KEY_FILE"):
        limited_token(url, only_verifies, Role.NLM_BACKEND)


def test_an_authority_that_cannot_be_read_is_named(tmp_path: Path):
    assert outgoing_tls(settings()) is None
    with pytest.raises(SettingsInvalid, match="TRELLIS_GATEWAY_CA_FILE"):
        outgoing_tls(settings(gateway_ca_file=tmp_path / "none.pem"))
    (tmp_path / "no.pem").write_text("no certificate")
    with pytest.raises(SettingsInvalid, match="TRELLIS_GATEWAY_CA_FILE"):
        outgoing_tls(settings(gateway_ca_file=tmp_path / "no.pem"))


def test_without_a_key_to_sign_with_a_component_has_no_token():
    with pytest.raises(KeyUnusable):
        component_token("postgresql://localhost/x", settings(), Role.NLM_BACKEND)
