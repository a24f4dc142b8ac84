"""Which names a principal may have, and how the ledger records who acted (D62)."""

import time

import pytest

from trellis.auth.principals import name_fault, party_of, recorded_name, sender_name
from trellis.auth.tokens import TrustedKey, issue, symmetric_key, verify
from trellis.engine.errors import OptionInvalid, TokenRefused
from trellis.lifecycles import Role

HOME = symmetric_key(b"of the instance's own issuer: 32 bytes", issuer="trellis")
OTHER = symmetric_key(b"of another issuer, whom we trust, too.", issuer="https://tokens.example")
REFUSED = {
    "iryna ": "space",
    " iryna": "space",
    "": "1 to 200",
    "x" * 201: "1 to 200",
    "iry\u200bna": "cannot be seen",
    "iry\u00adna": "cannot be seen",
    "iryna\u3164": "cannot be seen",
    "iryna\ufe0f": "cannot be seen",
    "iry\u202ena": "cannot be seen",
    "iry\tna": "cannot be seen",
    "\u0430dmin": "CYRILLIC and LATIN",
    "\uff29ryna": "NFKC",
    "e\u0301ve": "NFKC",
    "<tenant=acme>iryna": "begins with '<'",
    "db:reports:iryna": "begins with 'db:'",
}
TAKEN = (
    "iryna",
    "a submitter",
    "Ірина",
    "Ελένη",
    "山田太郎",
    "Jiří Novák",
    "worker-7@host:12",
    "auth0|123",
    "김철수 Kim",
)


def token(name: str, key: TrustedKey = HOME, **bound: str) -> str:
    return issue(key, name=name, roles=[Role.SUBMITTER], ttl_s=60, now=time.time(), **bound)


@pytest.mark.requirement("D62")
@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_can_be_taken_for_another_is_refused_when_it_is_issued(name: str):
    with pytest.raises(OptionInvalid, match=REFUSED[name]):
        token(name)


@pytest.mark.requirement("D62")
@pytest.mark.parametrize("name", [name for name in REFUSED if name])
def test_and_when_it_is_verified(name: str, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as lax:
        lax.setattr("trellis.auth.tokens.name_fault", lambda _: None)
        signed = token(name)
    with pytest.raises(TokenRefused, match=REFUSED[name]):
        verify(signed, [HOME], now=time.time())


@pytest.mark.requirement("D62")
@pytest.mark.parametrize("name", TAKEN)
def test_names_of_people_and_programs_are_taken_as_they_are(name: str):
    assert name_fault(name) is None
    assert verify(token(name), [HOME, OTHER], now=time.time()).name == name


@pytest.mark.requirement("D62")
def test_no_two_owners_are_recorded_alike():
    now = time.time()
    names = [
        verify(token("iryna"), [HOME, OTHER], now=now).name,
        verify(token("iryna", OTHER), [HOME, OTHER], now=now).name,
        verify(token("iryna", tenant="acme"), [HOME, OTHER], now=now).name,
        verify(token("iryna", tenant="globex"), [HOME, OTHER], now=now).name,
        verify(token("iryna", OTHER, tenant="acme"), [HOME, OTHER], now=now).name,
        verify(token("iryna"), [HOME], now=now, home="https://tokens.example").name,
        sender_name("iryna"),
    ]
    assert len(set(names)) == len(names)
    assert verify(token("iryna", OTHER), [OTHER], now=now).name == "iryna", "to its own instance"


@pytest.mark.requirement("D62")
def test_a_party_is_a_tenant_or_else_an_owner():
    acme = [recorded_name(name, tenant="acme") for name in ("iryna", "olha")]
    assert party_of(acme[0]) == party_of(acme[1]) != party_of(recorded_name("iryna", tenant="globex"))
    assert party_of(recorded_name("iryna", issuer="https://x", tenant="acme")) != party_of(acme[0])
    assert [party_of(name) for name in ("iryna", "<bus>w", "<iss=https://x>iryna")] == [
        "iryna",
        "<bus>w",
        "<iss=https://x>iryna",
    ]
    assert party_of(recorded_name("x", issuer="a> tenant=acme")) != party_of(acme[0]), "an issuer cannot write a tenant"


@pytest.mark.requirement("D62")
@pytest.mark.parametrize(
    "claim, value", [("tenant", ""), ("tenant", "a b"), ("tenant", "<x>"), ("agent", "Not A Slug")]
)
def test_a_claim_that_binds_nothing_is_refused(claim: str, value: str):
    with pytest.raises(OptionInvalid, match=claim):
        token("iryna", tenant=value) if claim == "tenant" else token("iryna", agent=value)
