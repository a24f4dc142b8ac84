"""Every bad token is refused with what to change, and never repeated; every good kind is taken."""

import base64
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from tests.gateway.description import description
from tests.gateway.door import KEY, Door, opened, token
from trellis.auth.tokens import (
    AUDIENCE,
    Identity,
    TrustedKey,
    key_set,
    make_private_jwk,
    private_key,
    symmetric_key,
    verify,
)
from trellis.engine.errors import TokenExpired, TokenRefused
from trellis.http_server import tokens as tokens_module
from trellis.http_server.tokens import VerifiedTokens
from trellis.lifecycles import Role

ISSUER = "https://issuer.example.test"
SECRET = b"for tests of the door: 32 bytes."
JWKS = {kid: make_private_jwk(kid, alg) for kid, alg in (("ed-1", "Ed25519"), ("es-1", "ES256"))}
SIGNERS = {kid: private_key(json.dumps(jwk).encode(), issuer=ISSUER) for kid, jwk in JWKS.items()}
PUBLIC = [{name: value for name, value in jwk.items() if name != "d"} for jwk in JWKS.values()]
TRUSTED = (KEY, *key_set(json.dumps({"keys": PUBLIC}).encode(), issuer=ISSUER))


@cache
def stranger() -> RSAKey:
    """A key that nobody trusts; made when a test needs it, because that costs half a second."""
    return RSAKey.generate_key(2048)


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with opened(tmp_path, keys=TRUSTED) as made:
        yield made


def now() -> int:
    return int(time.time())


def claims(**changed: Any) -> dict[str, Any]:
    """Good claims of the tests' issuer, with changes; None takes one away."""
    made = {
        "iss": "tests",
        "sub": "iryna",
        "aud": AUDIENCE,
        "role": "owner",
        "iat": now(),
        "exp": now() + 600,
    } | changed
    return {name: value for name, value in made.items() if value is not None}


def part(value: object) -> str:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(body).rstrip(b"=").decode()


def hs256(payload: object, header: object = None, secret: bytes = SECRET) -> str:
    """Any header and any payload under a good signature."""
    signed = f"{part({'alg': 'HS256', 'typ': 'JWT'} if header is None else header)}.{part(payload)}"
    return f"{signed}.{part(hmac.digest(secret, signed.encode(), sha256))}"


def by(signed_by: str, payload: dict[str, Any], **header: Any) -> str:
    """Signed with a key of the set, whatever the header says."""
    signer = SIGNERS[signed_by]
    return jwt.encode(
        {"alg": signer.algorithm, "kid": signed_by, **header}, payload, signer.key, algorithms=[signer.algorithm]
    )


def from_issuer(**changed: Any) -> dict[str, Any]:
    return claims(iss=ISSUER, **changed)


def unsigned(header: dict[str, Any], payload: dict[str, Any] | None = None, signature: str = "") -> str:
    return f"{part(header)}.{part(payload or claims())}.{signature}"


def grafted() -> str:
    """The signature of one token under the claims of another."""
    head, _, signature = hs256(claims(role="frontend")).split(".")
    return f"{head}.{part(claims(role='owner'))}.{signature}"


def loose_bits() -> str:
    """The same bytes, written in another way: the last character has bits that mean nothing."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    good = hs256(claims())
    return good[:-1] + alphabet[alphabet.index(good[-1]) ^ 1]


def public_as_secret(kid: str) -> str:
    """HS256 with the public key as the secret: what anybody could make if the token chose the algorithm."""
    key = SIGNERS[kid].key
    assert isinstance(key, OKPKey | ECKey)
    pem = key.as_pem(private=False)
    return hs256(from_issuer(), {"alg": "HS256", "typ": "JWT", "kid": kid}, pem)


def embedded(name: str, value: object) -> str:
    return hs256(claims(), {"alg": "HS256", "typ": "JWT", name: value})


OTHER_ED = OKPKey.generate_key("Ed25519")
OTHER_EC = ECKey.generate_key("P-256")
P384 = ECKey.generate_key("P-384")

BAD: dict[str, Callable[[], str]] = {
    # no signature, or somebody else's
    "alg none": lambda: unsigned({"alg": "none"}),
    "alg None": lambda: unsigned({"alg": "None"}),
    "alg NONE": lambda: unsigned({"alg": "NONE"}),
    "alg nOnE with a signature": lambda: unsigned({"alg": "nOnE"}, signature=part(b"x" * 32)),
    "alg none of the key set": lambda: unsigned({"alg": "none", "kid": "ed-1"}, from_issuer()),
    "no alg": lambda: unsigned({"typ": "JWT"}, signature=part(b"x" * 32)),
    "alg is a list": lambda: hs256(claims(), {"alg": ["HS256"]}),
    "alg is null": lambda: hs256(claims(), {"alg": None}),
    "empty signature": lambda: hs256(claims()).rpartition(".")[0] + ".",
    "signature of zeros": lambda: hs256(claims()).rpartition(".")[0] + "." + part(bytes(32)),
    "short signature": lambda: hs256(claims())[:-8],
    "truncated in the claims": lambda: hs256(claims())[:60],
    "another secret": lambda: hs256(claims(), secret=b"another secret, also of 32 bytes"),
    "empty secret": lambda: hs256(claims(), secret=b""),
    "claims of another token": grafted,
    "bits that mean nothing": loose_bits,
    "another Ed25519 key": lambda: jwt.encode(
        {"alg": "Ed25519", "kid": "ed-1"}, from_issuer(), OTHER_ED, algorithms=["Ed25519"]
    ),
    "another ES256 key": lambda: jwt.encode(
        {"alg": "ES256", "kid": "es-1"}, from_issuer(), OTHER_EC, algorithms=["ES256"]
    ),
    "ES256 of zeros": lambda: unsigned({"alg": "ES256", "kid": "es-1"}, from_issuer(), part(bytes(64))),
    "Ed25519 of zeros": lambda: unsigned({"alg": "Ed25519", "kid": "ed-1"}, from_issuer(), part(bytes(64))),
    # an algorithm that the key is not for
    "HS256 with the public Ed25519 key": lambda: public_as_secret("ed-1"),
    "HS256 with the public ES256 key": lambda: public_as_secret("es-1"),
    "HS384": lambda: jwt.encode({"alg": "HS384"}, claims(), OctKey.import_key(SECRET * 2), algorithms=["HS384"]),
    "RS256": lambda: jwt.encode({"alg": "RS256"}, claims(), stranger(), algorithms=["RS256"]),
    "RS256 of the key set": lambda: jwt.encode(
        {"alg": "RS256", "kid": "ed-1"}, from_issuer(), stranger(), algorithms=["RS256"]
    ),
    "PS256": lambda: jwt.encode({"alg": "PS256"}, claims(), stranger(), algorithms=["PS256"]),
    "another curve": lambda: jwt.encode({"alg": "ES384", "kid": "es-1"}, from_issuer(), P384, algorithms=["ES384"]),
    "ES256 under the name of the Ed25519 key": lambda: by("es-1", from_issuer(), kid="ed-1"),
    "Ed25519 that says EdDSA": lambda: unsigned(
        {"alg": "EdDSA", "kid": "ed-1"}, from_issuer(), by("ed-1", from_issuer()).rpartition(".")[2]
    ),
    "lower-case algorithm": lambda: hs256(claims(), {"alg": "hs256"}),
    # tricks with the key's name
    "no kid": lambda: jwt.encode({"alg": "Ed25519"}, from_issuer(), SIGNERS["ed-1"].key, algorithms=["Ed25519"]),
    "unknown kid": lambda: by("ed-1", from_issuer(), kid="ed-2"),
    "kid is a path": lambda: by("ed-1", from_issuer(), kid="../../../../dev/null"),
    "kid is SQL": lambda: by("ed-1", from_issuer(), kid="x' UNION SELECT 'key' --"),
    "kid is a list": lambda: hs256(from_issuer(), {"alg": "HS256", "kid": ["ed-1"]}),
    "kid is empty": lambda: by("ed-1", from_issuer(), kid=""),
    "kid in other letters": lambda: by("ed-1", from_issuer(), kid="ED-1"),
    "kid with a line break": lambda: by("ed-1", from_issuer(), kid="ed-1\r\nX: y"),
    # keys and addresses that the token brings itself
    "jku": lambda: embedded("jku", "http://127.0.0.1:1/keys"),
    "x5u": lambda: embedded("x5u", "http://127.0.0.1:1/chain"),
    "x5c": lambda: embedded("x5c", ["MIIB"]),
    "jwk": lambda: jwt.encode(
        {"alg": "Ed25519", "kid": "ed-1", "jwk": OTHER_ED.as_dict(private=False)},
        from_issuer(),
        OTHER_ED,
        algorithms=["Ed25519"],
    ),
    "crit": lambda: hs256(claims(), {"alg": "HS256", "crit": ["exp"]}),
    "b64": lambda: hs256(claims(), {"alg": "HS256", "b64": False, "crit": ["b64"]}),
    "zip": lambda: embedded("zip", "DEF"),
    "cty nested": lambda: hs256(hs256(claims()).encode(), {"alg": "HS256", "cty": "JWT"}),
    "nested without cty": lambda: hs256(hs256(claims()).encode()),
    "typ of another kind": lambda: hs256(claims(), {"alg": "HS256", "typ": "dpop+jwt"}),
    "encrypted": lambda: ".".join(part(b"x") for _ in range(5)),
    # claims
    "no audience": lambda: hs256(claims(aud=None)),
    "another audience": lambda: hs256(claims(aud="shop")),
    "audience that begins the same": lambda: hs256(claims(aud="trellis.example.test")),
    "audience is a number": lambda: hs256(claims(aud=1)),
    "audience is an object": lambda: hs256(claims(aud={"trellis": True})),
    "no issuer": lambda: hs256(claims(iss=None)),
    "another issuer": lambda: hs256(claims(iss="elsewhere")),
    "issuer with a slash more": lambda: by("ed-1", claims(iss=ISSUER + "/")),
    "issuer is a list": lambda: by("ed-1", claims(iss=[ISSUER])),
    "issuer of another key": lambda: by("ed-1", claims(iss="tests")),
    "expired": lambda: hs256(claims(iat=now() - 700, exp=now() - 100)),
    "expired just now": lambda: hs256(claims(iat=now() - 700, exp=now() - 1)),
    "no end": lambda: hs256(claims(exp=None)),
    "no beginning": lambda: hs256(claims(iat=None)),
    "good for a year": lambda: hs256(claims(exp=now() + 366 * 86_400)),
    "end is text": lambda: hs256(claims(exp=str(now() + 600))),
    "end is infinite": lambda: hs256(json.dumps(claims(exp=0)).replace('"exp": 0', '"exp": Infinity').encode()),
    "end is not a number": lambda: hs256(json.dumps(claims(exp=0)).replace('"exp": 0', '"exp": NaN').encode()),
    "end is huge": lambda: hs256(json.dumps(claims(exp=0)).replace('"exp": 0', '"exp": 1e400').encode()),
    "end is true": lambda: hs256(claims(exp=True)),
    "end is negative": lambda: hs256(claims(exp=-1)),
    "not yet": lambda: hs256(claims(nbf=now() + 300)),
    "nbf is text": lambda: hs256(claims(nbf="now")),
    "issued in the future": lambda: hs256(claims(iat=now() + 300, exp=now() + 400)),
    "no role": lambda: hs256(claims(role=None)),
    "unknown role": lambda: hs256(claims(role="root")),
    "no role in the list": lambda: hs256(claims(role=[])),
    "one unknown role in the list": lambda: hs256(claims(role=["owner", "root"])),
    "a hundred roles": lambda: hs256(claims(role=["owner"] * 100)),
    "role is an object": lambda: hs256(claims(role={"owner": 1})),
    "role in other letters": lambda: hs256(claims(role="Owner")),
    "no name": lambda: hs256(claims(sub=None)),
    "empty name": lambda: hs256(claims(sub="")),
    "name with a line break": lambda: hs256(claims(sub="iryna\nrole=owner")),
    "name of a thousand letters": lambda: hs256(claims(sub="i" * 1_000)),
    "name is half a character": lambda: hs256(claims(sub="\ud800")),
    "a claim twice": lambda: hs256(b'{"role":"frontend",' + json.dumps(claims()).encode()[1:]),
    "a header twice": lambda: hs256(claims(), b'{"alg":"none","alg":"HS256"}'),
    "claims are a list": lambda: hs256([claims()]),
    "claims are no JSON": lambda: hs256(b"{"),
    "claims are not UTF-8": lambda: hs256(b'{"iss": "\xff"}'),
    "claims nested deep": lambda: hs256(b'{"a":' + b"[" * 2_500 + b"]" * 2_500 + b"}"),
    # what is no token at all
    "empty": lambda: "",
    "a word": lambda: "letmein",
    "null": lambda: "null",
    "dots": lambda: "..",
    "two parts": lambda: hs256(claims()).rpartition(".")[0],
    "four parts": lambda: hs256(claims()) + ".x",
    "standard base64": lambda: hs256(claims()).replace("-", "+").replace("_", "/") + "==",
    "a space inside": lambda: hs256(claims()).replace(".", ". ", 1),
    "huge": lambda: hs256(claims(x="y" * 20_000)),
    "wide letters": lambda: "ｅｙＪ.ｅｙＪ.ｘ",  # noqa: RUF001 - the wide letters are the point
}


@pytest.mark.requirement("AUTH-5")
async def test_every_bad_token_is_refused_with_what_to_change_and_never_repeated(
    door: Door, caplog: pytest.LogCaptureFixture
):
    assert len(BAD) >= 40
    for name, make in BAD.items():
        bad = make()
        # As bytes: a client would refuse to send some of them.
        headers = [(b"authorization", b"Bearer " + bad.encode("utf-8", "surrogatepass"))]
        answer = await door.client.send(httpx2.Request("GET", "http://test/agents", headers=headers))  # type: ignore[arg-type]
        assert answer.status_code == 401, (name, answer.text)
        problem = answer.json()
        assert answer.headers["content-type"] == "application/problem+json", name
        assert answer.headers["www-authenticate"].startswith("Bearer"), name
        assert problem["code"] == ("TOKEN_EXPIRED" if name.startswith("expired") else "AUTH_REQUIRED"), name
        assert "token" in problem["detail"], (name, problem)
        assert any(word in problem["detail"] for word in (";", "`")), (
            f"{name}: {problem['detail']} says nothing to change"
        )
        for shown in (answer.text, caplog.text):
            assert not [piece for piece in bad.split(".") if len(piece) > 12 and piece in shown], name


@pytest.mark.requirement("AUTH-5")
async def test_a_bad_token_is_refused_on_every_route_before_anything_else(door: Door):
    bad = hs256(claims(), secret=b"another secret, also of 32 bytes")
    checked = 0
    for path, operations in description()["paths"].items():
        for method, operation in operations.items():
            if {"HTTPBearer": []} not in operation.get("security", []):
                continue
            url = path.replace("{run_id}", "run_2026-02-14_080000_abc123")
            given = (b"{", {"content-type": "application/json"}) if "requestBody" in operation else (None, {})
            for token_ in (None, bad):
                answer = await door(method.upper(), url, token_, content=given[0], headers=given[1])
                assert answer.status_code == 401, (method, path, answer.text)
            checked += 1
    assert checked >= 10


@pytest.mark.requirement("AUTH-5")
async def test_no_token_scheme_but_bearer_and_no_token_in_the_address(door: Door):
    good = token()
    for headers in ({}, {"Authorization": f"Basic {good}"}, {"Authorization": good}, {"Cookie": f"token={good}"}):
        answer = await door("GET", f"/agents?token={good}&access_token={good}", headers=headers)
        assert (answer.status_code, good in answer.text) == (401, False)


GOOD: dict[str, Callable[[], str]] = {
    "HS256": lambda: hs256(claims()),
    "HS256 without typ": lambda: hs256(claims(), {"alg": "HS256"}),
    "Ed25519": lambda: by("ed-1", from_issuer()),
    "ES256": lambda: by("es-1", from_issuer()),
    "several roles": lambda: hs256(claims(role=["frontend", "owner"])),
    "several audiences": lambda: hs256(claims(aud=["shop", AUDIENCE])),
    "begins now": lambda: hs256(claims(nbf=now())),
    "claims nobody asked for": lambda: hs256(claims(jti="1", email="a@b.example")),
    "issued by the program": lambda: token(Role.OWNER, key=SIGNERS["ed-1"]),
}


@pytest.mark.parametrize("name", GOOD)
async def test_every_good_kind_of_token_is_taken(door: Door, name: str):
    answer = await door("GET", "/agents", GOOD[name]())
    assert answer.status_code == 200, answer.text


def trusted(key: TrustedKey) -> tuple[str, str, str | None]:
    return key.algorithm, key.issuer, key.key_id


def test_a_key_set_gives_each_key_its_own_algorithm_and_the_one_issuer():
    assert [trusted(key) for key in TRUSTED[1:]] == [("Ed25519", ISSUER, "ed-1"), ("ES256", ISSUER, "es-1")]


# --- tokens that were verified before --------------------------------------------------------------------------------


@pytest.mark.requirement("AUTH-5")
async def test_a_token_that_was_taken_before_is_refused_once_its_key_is_gone_or_is_another(tmp_path: Path):
    keys, stranger = [KEY], symmetric_key(b"another secret that has 32 bytes", issuer=KEY.issuer)
    async with opened(tmp_path, keys=keys) as door:
        shown = token()
        assert [(await door("GET", "/agents", shown)).status_code for _ in range(2)] == [200, 200]
        keys[:] = [stranger]
        assert (await door("GET", "/agents", shown)).status_code == 401
        keys[:] = [KEY]
        assert (await door("GET", "/agents", shown)).status_code == 200
        keys.clear()
        assert (await door("GET", "/agents", shown)).status_code == 401


@pytest.mark.requirement("AUTH-5")
def test_a_token_is_verified_once_and_not_longer_than_it_is_good(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []

    def look(shown: str, keys: Sequence[TrustedKey], *, now: float) -> Identity:
        looked.append(shown)
        return verify(shown, keys, now=now)

    monkeypatch.setattr(tokens_module, "verify", look)
    tokens, shown, changed = VerifiedTokens(), token(ttl_s=60), token(ttl_s=60)[:-4] + "AAAA"
    first = tokens.caller(shown, [KEY], now=time.time())
    assert tokens.caller(shown, [KEY], now=time.time() + 50) is first
    assert looked == [shown]
    with pytest.raises(TokenExpired):
        tokens.caller(shown, [KEY], now=time.time() + 61)
    for _ in range(2):
        with pytest.raises(TokenRefused, match="signature"):
            tokens.caller(changed, [KEY], now=time.time())
    assert looked == [shown, shown, changed, changed]


def test_no_more_tokens_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokens_module, "TOKENS_MAX", 2)
    tokens, shown = VerifiedTokens(), [token(name=name) for name in ("a", "b", "c")]
    for one in [*shown[:2], shown[0], shown[2]]:
        tokens.caller(one, [KEY], now=time.time())
    assert [principal.name for principal, _ in tokens._known.values()] == ["a", "c"]
