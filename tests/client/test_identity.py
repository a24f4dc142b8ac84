"""Tokens: what is issued is accepted, for a while, as what it says; everything else is refused with what to change."""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable
from typing import Any

import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from trellis.auth.tokens import (
    LEEWAY_S,
    TOKEN_CHARS_MAX,
    TTL_S_MAX,
    Identity,
    TrustedKey,
    issue,
    roles_of,
    symmetric_key,
    verify,
)
from trellis.engine.errors import OptionInvalid, TokenExpired, TokenRefused
from trellis.lifecycles import Role

NOW = 1_800_000_000.0
SECRET = bytes(range(32))
KEY = symmetric_key(SECRET, issuer="trellis")
HEADER = {"alg": "HS256", "typ": "JWT"}
CLAIMS = {"iss": "trellis", "sub": "ada", "aud": "trellis", "role": "submitter", "iat": int(NOW), "exp": int(NOW) + 60}


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def sealed(header: bytes, claims: bytes, secret: bytes = SECRET) -> str:
    """Signed by hand with HS256, whatever the parts say."""
    body = f"{b64(header)}.{b64(claims)}"
    return f"{body}.{b64(hmac.new(secret, body.encode(), hashlib.sha256).digest())}"


def token(header: dict[str, Any] | None = None, without: str | None = None, **claims: Any) -> str:
    """A good token, but for what is given."""
    said = {name: value for name, value in {**CLAIMS, **claims}.items() if name != without}
    return sealed(json.dumps({**HEADER, **(header or {})}).encode(), json.dumps(said).encode())


def unsigned(alg: str) -> str:
    return token({"alg": alg}).rpartition(".")[0] + "."


def tampered(**claims: Any) -> str:
    """Somebody else's claims under a good signature."""
    head, _, signature = token().split(".")
    return f"{head}.{b64(json.dumps({**CLAIMS, **claims}).encode())}.{signature}"


def cut() -> str:
    return token()[:-3]


BAD: dict[str, tuple[Callable[[], str], str]] = {
    # malformed
    "empty": (lambda: "", "three parts"),
    "a word": (lambda: "secret", "three parts"),
    "two parts": (lambda: token().rpartition(".")[0], "three parts"),
    "five parts, encrypted": (lambda: "a.b.c.d.e", "three parts"),
    "a newline inside": (lambda: token() + "\n", "three parts"),
    "padding": (lambda: token() + "==", "three parts"),
    "not ASCII": (lambda: "é" + token(), "three parts"),
    "too long": (lambda: token(filler="x" * TOKEN_CHARS_MAX), "limit"),
    "a header that is no JSON": (lambda: sealed(b"{", json.dumps(CLAIMS).encode()), "damaged"),
    "claims that are no JSON": (lambda: sealed(json.dumps(HEADER).encode(), b"{"), "damaged"),
    "claims that are a list": (lambda: sealed(json.dumps(HEADER).encode(), b"[1]"), "damaged"),
    "claims nested without end": (lambda: sealed(json.dumps(HEADER).encode(), b"[" * 3000), "damaged"),
    "a claim that comes twice": (
        lambda: sealed(json.dumps(HEADER).encode(), json.dumps(CLAIMS).encode()[:-1] + b', "role": "owner"}'),
        "damaged",
    ),
    "a number that is none": (
        lambda: sealed(json.dumps(HEADER).encode(), json.dumps({**CLAIMS, "exp": float("inf")}).encode()),
        "damaged",
    ),
    # signature and algorithm
    "alg none": (lambda: unsigned("none"), "algorithm"),
    "alg None": (lambda: unsigned("None"), "algorithm"),
    "alg none with a signature": (lambda: token({"alg": "none"}), "algorithm"),
    "no signature": (lambda: token().rpartition(".")[0] + ".", "signature"),
    "a cut signature": (cut, "signature|damaged"),
    "another key": (lambda: sealed(json.dumps(HEADER).encode(), json.dumps(CLAIMS).encode(), b"x" * 32), "signature"),
    "an empty key": (lambda: sealed(json.dumps(HEADER).encode(), json.dumps(CLAIMS).encode(), b""), "signature"),
    "a public key as secret": (
        lambda: sealed(
            json.dumps(HEADER).encode(), json.dumps(CLAIMS).encode(), RSAKey.generate_key(2048).as_pem(private=False)
        ),
        "signature",
    ),
    "a stronger algorithm of the same key": (lambda: token({"alg": "HS512"}), "algorithm"),
    "an asymmetric algorithm": (lambda: token({"alg": "ES256"}), "algorithm"),
    "no algorithm": (lambda: sealed(b'{"typ": "JWT"}', json.dumps(CLAIMS).encode()), "algorithm|damaged"),
    "changed claims": (lambda: tampered(role="owner"), "signature"),
    "an own key in the header": (lambda: token({"jwk": {"kty": "oct", "k": "AAAA"}}), "header|damaged"),
    "an address of a key": (lambda: token({"jku": "keys.example"}), "header|damaged"),
    "a critical extension": (lambda: token({"crit": ["b64"], "b64": False}), "header|damaged"),
    "another type": (lambda: token({"typ": "at+jwt"}), "typ"),
    # whose, for whom, until when
    "another issuer": (lambda: token(iss="somebody"), "issuer"),
    "no issuer": (lambda: token(without="iss"), "issuer"),
    "a list of issuers": (lambda: token(iss=["trellis"]), "issuer"),
    "another audience": (lambda: token(aud="garden"), "audience"),
    "no audience": (lambda: token(without="aud"), "audience"),
    "other audiences": (lambda: token(aud=["garden", "trellis2"]), "audience"),
    "no name": (lambda: token(without="sub"), "sub"),
    "an empty name": (lambda: token(sub=" "), "sub"),
    "a name that is a number": (lambda: token(sub=7), "sub"),
    "a name with a NUL": (lambda: token(sub="a\0b"), "sub"),
    "a name without end": (lambda: token(sub="x" * 201), "sub"),
    "expired": (lambda: token(iat=int(NOW) - 90, exp=int(NOW) - 30), "expired 30 s ago"),
    "expiring now": (lambda: token(iat=int(NOW) - 90, exp=int(NOW)), "expired"),
    "no end": (lambda: token(without="exp"), "no exp"),
    "no beginning": (lambda: token(without="iat"), "no iat"),
    "an end in words": (lambda: token(exp="tomorrow"), "exp"),
    "an end that is true": (lambda: token(exp=True), "exp"),
    "an end before time": (lambda: token(exp=-1), "exp"),
    "an end beyond counting": (lambda: token(exp=2**60), "exp"),
    "a far end": (lambda: token(exp=int(NOW + TTL_S_MAX) + 1), "limit"),
    "issued in the future": (lambda: token(iat=int(NOW + LEEWAY_S) + 2), "future"),
    "not yet good": (lambda: token(nbf=int(NOW) + 30), "future"),
    # what it may do
    "an unknown role": (lambda: token(role="root"), "role is 'root'"),
    "a role in other letters": (lambda: token(role="Submitter"), "role"),
    "no role": (lambda: token(without="role"), "role"),
    "an empty list of roles": (lambda: token(role=[]), "role"),
    "one unknown role of several": (lambda: token(role=["submitter", "root"]), "role is 'root'"),
    "a role inside a role": (lambda: token(role=[["owner"]]), "role"),
    "roles by number": (lambda: token(role=1), "role"),
    "more roles than there are": (lambda: token(role=["worker"] * 40), "role"),
    "a job that is no id": (lambda: token(job_id="../job"), "job_id is '../job'"),
    "jobs in a list": (lambda: token(job_id=["job-7"]), "job_id"),
}


def test_base_token_of_the_invalid_tokens_is_valid():
    said = Identity(name="ada", roles=frozenset({Role.SUBMITTER}), issuer="trellis", expires_at=NOW + 60)
    assert verify(token(), [KEY], now=NOW) == said
    assert verify(token(aud=["garden", "trellis"]), [KEY], now=NOW) == said


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("name", BAD)
def test_a_bad_token_is_refused_and_says_what_is_wrong(name: str):
    make, says = BAD[name]
    with pytest.raises(TokenRefused, match=says) as refusal:
        verify(make(), [KEY], now=NOW)
    assert refusal.value.code == ("TOKEN_EXPIRED" if "expir" in name else "AUTH_REQUIRED")
    assert len(str(refusal.value)) < 500, "a message repeats no more of a token than it needs"


def test_invalid_token_cases_are_at_least_25():
    assert len(BAD) >= 25


@pytest.mark.requirement("D46")
@pytest.mark.parametrize("roles", [{Role.WORKER}, {Role.SUBMITTER, Role.CONTROL_PLANE}, set(Role)], ids=len)
def test_an_issued_token_gives_exactly_the_roles_it_names_until_it_expires(roles: set[Role]):
    made = issue(KEY, name="ada", roles=roles, ttl_s=60, now=NOW)
    assert verify(made, [KEY], now=NOW + 59) == Identity(
        name="ada", roles=frozenset(roles), issuer="trellis", expires_at=NOW + 60
    )
    with pytest.raises(TokenExpired):
        verify(made, [KEY], now=NOW + 60)


@pytest.mark.requirement("AUTH-5")
def test_a_token_may_be_for_one_job():
    made = issue(KEY, name="nlm", roles={Role.NLM_BACKEND}, ttl_s=60, now=NOW, job_id="job-7")
    assert verify(made, [KEY], now=NOW).job_id == "job-7"


@pytest.mark.parametrize(
    "changes",
    [{"job_id": "no id"}, {"ttl_s": 0}, {"ttl_s": TTL_S_MAX + 1}, {"ttl_s": float("nan")}, {"roles": []}, {"name": ""}],
)
def test_a_token_that_would_be_refused_is_not_issued(changes: dict[str, Any]):
    with pytest.raises(OptionInvalid):
        issue(KEY, **{"name": "ada", "roles": [Role.WORKER], "ttl_s": 60, "now": NOW, **changes})


def test_a_short_secret_is_no_key():
    with pytest.raises(OptionInvalid, match="32 bytes"):
        symmetric_key(b"x" * 31, issuer="trellis")


def test_an_unknown_role_is_answered_with_those_there_are():
    assert roles_of(["worker", "owner"]) == {Role.WORKER, Role.OWNER}
    with pytest.raises(OptionInvalid, match="choose one of owner, frontend"):
        roles_of(["root"])


@pytest.mark.parametrize(
    "key,algorithm", [(OKPKey.generate_key("Ed25519"), "Ed25519"), (ECKey.generate_key("P-256"), "ES256")]
)
def test_a_key_of_another_kind_is_a_value_like_any_other(key: OKPKey | ECKey, algorithm: str):
    """A gateway trusts other issuers with the same function."""
    outside = TrustedKey(key=key, algorithm=algorithm, issuer="idp", key_id="k1")
    made = issue(outside, name="ada", roles=[Role.OWNER], ttl_s=60, now=NOW)
    assert verify(made, [KEY, outside], now=NOW).roles == {Role.OWNER}
    with pytest.raises(TokenRefused, match="issuer"):
        verify(made, [KEY], now=NOW)
    rotated = TrustedKey(key=key, algorithm=algorithm, issuer="idp", key_id="k2")
    with pytest.raises(TokenRefused, match="kid"):
        verify(made, [KEY, rotated], now=NOW)
    # The issuer's public key as the secret of our algorithm: the oldest trick.
    with pytest.raises(TokenRefused, match="algorithm"):
        verify(
            sealed(json.dumps({**HEADER, "kid": "k1"}).encode(), json.dumps({**CLAIMS, "iss": "idp"}).encode()),
            [KEY, outside],
            now=NOW,
        )


@pytest.mark.requirement("AUTH-5")
def test_token_of_one_issuer_cannot_name_another_issuer():
    other = symmetric_key(b"o" * 32, issuer="other")
    forged = jwt.encode({"alg": "HS256"}, {**CLAIMS}, OctKey.import_key(b"o" * 32))
    with pytest.raises(TokenRefused, match="signature"):
        verify(forged, [KEY, other], now=NOW)
