"""Issues and verifies tokens: JWTs that name a caller and its roles.

Claims: `role` (one role or several), `sub` (the actor's name), `aud` (trellis), `iss`, `iat`, `exp`, and optional
bounds: `job_id` limits the token to one job, `tenant` to one tenant, `agent` to one agent.

Invariants:
- A key is trusted with exactly one algorithm and one issuer, so that a token can choose neither. The caller sets both
  (`TrustedKey`), for every kind of key.
- Every token expires soon: `exp` and `iat` are required, and the time between them is bounded.
- Before its signature is verified, nothing of a token is used but the hint which key to try.
- A key set holds only public keys, each with its own name and algorithm. A token's headers can supply neither a key nor
  the address of one.
- The time is an argument.
"""

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

from trellis.auth.principals import NAME_CHARS_MAX, TENANT_PATTERN, Principal, name_fault, recorded_name
from trellis.engine.errors import KeyUnusable, OptionInvalid, TokenExpired, TokenRefused
from trellis.engine.jobs import JOB_ID_PATTERN
from trellis.engine.text import nearest
from trellis.lifecycles import Role

if TYPE_CHECKING:  # cryptography is loaded with the first key: without one nothing is signed or verified
    from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

AUDIENCE = "trellis"
TTL_S_DEFAULT = 3600.0
TTL_S_MAX = 24 * 3600.0
LEEWAY_S = 5.0
"""How far the clocks of issuer and verifier may differ."""
TOKEN_CHARS_MAX = 8_192
AGENT_PATTERN = r"^[a-z0-9][a-z0-9-]{0,62}$"
"""The same pattern as the slug of an agent."""
SHOWN_CHARS_MAX = 60
SYMMETRIC_BYTES_MIN = 32
"""An HS256 key shorter than its digest is weaker than the algorithm promises."""
HEADERS = frozenset({"alg", "typ", "kid"})
CURVES: Mapping[str, tuple[str, str]] = MappingProxyType({"Ed25519": ("OKP", "Ed25519"), "ES256": ("EC", "P-256")})
"""The algorithms of key sets, each with the only key type it accepts."""
KEYS_MAX = 50
KEY_SET_BYTES_MAX = 64 * 1024
KEY_ID_CHARS_MAX = 200

_BOUND: Mapping[str, str] = MappingProxyType(
    {"job_id": JOB_ID_PATTERN, "tenant": TENANT_PATTERN, "agent": AGENT_PATTERN}
)
"""The claims that bind a token, and the pattern of each."""
_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_ISSUE = "get a new one: trellis token issue --role ROLE"

Key: TypeAlias = "OctKey | RSAKey | ECKey | OKPKey"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustedKey:
    """A key, the only algorithm it is used with, and the issuer whose tokens it verifies."""

    key: Key
    algorithm: str
    issuer: str
    key_id: str | None = None
    """The `kid` of its tokens, where an issuer has several keys."""
    ttl_s_max: float = TTL_S_MAX

    def __post_init__(self) -> None:
        # Load the signing library with the key, not during the first request.
        import_module("joserfc.jwt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The contents of a verified token."""

    name: str
    """The owner as the ledger records it (`auth/principals.py`).

    That is the subject, with a prefix for another issuer or a tenant.
    """
    roles: frozenset[Role]
    issuer: str
    expires_at: float
    """Seconds since 1970."""
    job_id: str | None = None
    """The only job this token is for: the "own" job of roles limited to their own."""
    key_id: str | None = None
    """Which of the issuer's keys signed it."""
    tenant: str | None = None
    """The only tenant whose jobs this token reaches."""
    agent: str | None = None
    """The only agent this token acts for."""

    def principal(self, *, until: float | None = None, limit: str = "") -> Principal:
        """The principal that all layers below the entrances see.

        `limit` says what else decides, for the message of a refusal.
        """
        held = " and ".join(sorted(role.value for role in self.roles))
        return Principal(
            name=self.name,
            roles=self.roles,
            because=f"the token of {self.name} gives {held}{limit}",
            until=until,
            by_token=True,
            job_id=self.job_id,
            tenant=self.tenant,
            agent=self.agent,
        )


def symmetric_key(secret: bytes, *, issuer: str) -> TrustedKey:
    """An HS256 key from a secret of at least 32 bytes. Every verifier with this key can also issue tokens."""
    from joserfc.jwk import OctKey

    if len(secret) < SYMMETRIC_BYTES_MIN:
        expected = f"a secret for HS256 has {SYMMETRIC_BYTES_MIN} bytes or more"
        raise OptionInvalid(option="secret", value=f"{len(secret)} bytes", expected=expected)
    return TrustedKey(key=OctKey.import_key(secret), algorithm="HS256", issuer=issuer)


def key_set(body: bytes, *, issuer: str) -> tuple[TrustedKey, ...]:
    """The public keys of a JWK set. Raises KeyUnusable, which says what to correct."""
    if len(body) > KEY_SET_BYTES_MAX:
        raise KeyUnusable(reason=f"the key set has {len(body)} bytes and the limit is {KEY_SET_BYTES_MAX}")
    key_entries = _jwk(body).get("keys")
    entries: list[Any] = cast("list[Any]", key_entries) if isinstance(key_entries, list) else []
    if not 1 <= len(entries) <= KEYS_MAX:
        raise KeyUnusable(reason=f'a key set is {{"keys": […]}} with 1 to {KEYS_MAX} keys')
    keys = tuple(_public_key(entry, issuer) for entry in entries)
    names = [str(key.key_id) for key in keys]
    if len(set(names)) != len(names):
        raise KeyUnusable(reason="the key set has one kid for two keys; every kid is one key")
    return keys


def private_key(body: bytes, *, issuer: str) -> TrustedKey:
    """The signing key from a private JWK. Raises KeyUnusable."""
    return _imported(_jwk(body), issuer, private=True)


def make_private_jwk(key_id: str, algorithm: str) -> dict[str, str]:
    """A new key pair as a private JWK. The public key is the same without `d`. Raises OptionInvalid."""
    from joserfc.jwk import ECKey, OKPKey

    if algorithm not in CURVES:
        raise OptionInvalid(option="--alg", value=algorithm, expected=f"choose one of {', '.join(CURVES)}")
    if not _is_key_id(key_id):
        expected = f"it must be text of 1 to {KEY_ID_CHARS_MAX} printable ASCII characters"
        raise OptionInvalid(option="kid", value=key_id[:SHOWN_CHARS_MAX], expected=expected)
    key = OKPKey.generate_key("Ed25519") if algorithm == "Ed25519" else ECKey.generate_key("P-256")
    own = {"kid": key_id, "alg": algorithm, "use": "sig"}
    return own | {name: str(value) for name, value in key.as_dict(private=True).items() if name not in own}


def ttl_fault(key: TrustedKey, ttl_s: float) -> str | None:
    """Why a token of this key cannot be valid for so long; None if it can."""
    if math.isfinite(ttl_s) and 1 <= ttl_s <= key.ttl_s_max:
        return None
    return f"it must be from 1 to {key.ttl_s_max:g} seconds ({key.ttl_s_max / 3600:g} h)"


def issue(
    key: TrustedKey,
    *,
    name: str,
    roles: Iterable[Role],
    ttl_s: float,
    now: float,
    job_id: str | None = None,
    tenant: str | None = None,
    agent: str | None = None,
) -> str:
    """A token that `verify` accepts with the same key for `ttl_s`. Raises OptionInvalid."""
    from joserfc import jwt

    chosen = [role.value for role in Role if role in set(roles)]
    if not chosen:
        raise OptionInvalid(option="role", value="", expected="a token without a role is good for nothing")
    if (fault := ttl_fault(key, ttl_s)) is not None:
        raise OptionInvalid(option="ttl", value=ttl_s, expected=fault)
    if (fault := name_fault(name)) is not None:
        raise OptionInvalid(option="sub", value=name[:SHOWN_CHARS_MAX], expected=fault)
    bound = {"job_id": job_id, "tenant": tenant, "agent": agent}
    for claim, value in bound.items():
        if value is not None and not _fits(claim, value):
            expected = f"it must match {_BOUND[claim]}"
            raise OptionInvalid(option=claim, value=value[:SHOWN_CHARS_MAX], expected=expected)
    claims = {
        "iss": key.issuer,
        "sub": name,
        "aud": AUDIENCE,
        "role": chosen[0] if len(chosen) == 1 else chosen,
        "iat": int(now),
        "exp": int(now + ttl_s),
        **{claim: value for claim, value in bound.items() if value is not None},
    }
    header = {"alg": key.algorithm, **({"kid": key.key_id} if key.key_id is not None else {})}
    return jwt.encode(header, claims, key.key, algorithms=[key.algorithm])


def signed_statement(key: TrustedKey, kind: str, facts: Mapping[str, Any]) -> str:
    """Facts that this key has signed, as a compact JWS. `kind` is its `typ`. It is no token: it names no audience."""
    from joserfc import jws

    named = {"kid": key.key_id} if key.key_id is not None else {}
    header = {"alg": key.algorithm, "typ": kind, **named}
    body = json.dumps({"iss": key.issuer, **facts}, separators=(",", ":"), sort_keys=True)
    return jws.serialize_compact(header, body.encode(), key.key, algorithms=[key.algorithm])


def verify(token: str, keys: Sequence[TrustedKey], *, now: float, home: str | None = None) -> Identity:
    """The identity in a valid token. Raises TokenRefused, which says what to change.

    `home` is the instance's own issuer, whose subjects the ledger records unchanged. Default: the issuer of the first
    key.
    """
    from joserfc import jws
    from joserfc.errors import JoseError

    if len(token) > TOKEN_CHARS_MAX:
        _refuse(f"it has {len(token)} characters and the limit is {TOKEN_CHARS_MAX}", _ISSUE)
    if not _SHAPE.fullmatch(token):
        _refuse("it is not three parts of base64 joined by dots", "pass what `trellis token issue` printed, whole")
    try:
        signed = jws.extract_compact(token.encode("ascii"))
        hint = _object(signed.payload)
        header = _object(base64.urlsafe_b64decode(_padded(token.partition(".")[0])))
    except (JoseError, ValueError, TypeError, KeyError, RecursionError):
        _refuse(
            "it is damaged: header or claims are not JSON objects", "pass what `trellis token issue` printed, whole"
        )
    key = _chosen(header, hint, keys)
    try:
        genuine = jws.validate_compact(signed, key.key, [key.algorithm])
    except (JoseError, ValueError, TypeError):
        genuine = False
    if not genuine:
        _refuse(
            "its signature does not fit the key of this ledger", f"it was made for another ledger or changed; {_ISSUE}"
        )
    own = keys[0].issuer if home is None else home
    return _identity(hint, key, now, None if key.issuer == own else key.issuer)


def is_trusted(identity: Identity, keys: Iterable[TrustedKey]) -> bool:
    """Whether the key that signed this identity's token is still among these."""
    return (identity.issuer, identity.key_id) in {(key.issuer, key.key_id) for key in keys}


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """Roles by name. Raises OptionInvalid, which lists them."""
    roles: set[Role] = set()
    for name in names:
        if name not in set(Role):
            near = nearest(name, Role)
            hint = "" if near is None else f"; did you mean {near}?"
            raise OptionInvalid(option="--role", value=name, expected=f"choose one of {', '.join(Role)}{hint}")
        roles.add(Role(name))
    return frozenset(roles)


# --- inside ----------------------------------------------------------------------------------------------------------


def _public_key(entry: Any, issuer: str) -> TrustedKey:
    if not isinstance(entry, dict):
        raise KeyUnusable(reason="an entry of the key set is no object")
    jwk = cast("dict[str, Any]", entry)
    if "d" in jwk or jwk.get("kty") == "oct":
        raise KeyUnusable(reason="the key set holds a secret; whoever verifies needs the public key alone")
    return _imported(jwk, issuer, private=False)


def _imported(jwk: dict[str, Any], issuer: str, *, private: bool) -> TrustedKey:
    from joserfc.errors import JoseError
    from joserfc.jwk import ECKey, OKPKey

    key_id, algorithm = jwk.get("kid"), jwk.get("alg")
    if not isinstance(key_id, str) or not _is_key_id(key_id):
        raise KeyUnusable(reason="a key has no kid: name each, so that the next one can be told from it")
    named = f"key {key_id!r}"
    if not isinstance(algorithm, str) or algorithm not in CURVES:
        raise KeyUnusable(reason=f"{named} has alg {_shown(algorithm)}; it must say {' or '.join(CURVES)}")
    if (jwk.get("kty"), jwk.get("crv")) != CURVES[algorithm]:
        raise KeyUnusable(reason=f"{named} is no key for {algorithm}: kty and crv must be {CURVES[algorithm]}")
    if jwk.get("use", "sig") != "sig":
        raise KeyUnusable(reason=f"{named} is for {_shown(jwk['use'])} and not for signatures")
    if private and "d" not in jwk:
        raise KeyUnusable(reason=f"{named} is public; signing needs the private one")
    parts = {name: jwk[name] for name in ("kty", "crv", "x", "y", "d") if name in jwk}
    try:
        key = OKPKey.import_key(parts) if algorithm == "Ed25519" else ECKey.import_key(parts)
    except (JoseError, ValueError, TypeError, KeyError):
        raise KeyUnusable(reason=f"{named} is damaged") from None
    return TrustedKey(key=key, algorithm=algorithm, issuer=issuer, key_id=key_id)


def _jwk(body: bytes) -> dict[str, Any]:
    try:
        return _object(body)
    except (ValueError, TypeError, RecursionError):
        raise KeyUnusable(reason="it is no JSON object, or has a name twice") from None


def _is_key_id(text: str) -> bool:
    return 1 <= len(text) <= KEY_ID_CHARS_MAX and text.isascii() and text.isprintable()


def _padded(part: str) -> str:
    return part + "=" * (-len(part) % 4)


def _chosen(header: Mapping[str, Any], hint: Mapping[str, Any], keys: Sequence[TrustedKey]) -> TrustedKey:
    """The only trusted key that may have signed the token."""
    odd = sorted(set(header) - HEADERS)
    if odd:
        _refuse(f"its header has {_shown(odd[0])}, which is not understood here", _ISSUE)
    if str(header.get("typ", "JWT")).upper() != "JWT":
        _refuse(f"its typ is {_shown(header['typ'])}", "only JWT is taken here")
    issuer, key_id = hint.get("iss"), header.get("kid")
    of_issuer = [key for key in keys if key.issuer == issuer]
    if not of_issuer:
        known = " or ".join(sorted({key.issuer for key in keys}))
        _refuse(f"its issuer (iss) is {_shown(issuer)}", f"only {known} is trusted here; {_ISSUE}")
    fitting = [key for key in of_issuer if key.key_id is None or key.key_id == key_id]
    if len(fitting) != 1:
        _refuse(f"its kid {_shown(key_id)} names no key of issuer {_shown(issuer)}", _ISSUE)
    if header.get("alg") != fitting[0].algorithm:
        _refuse(
            f"its algorithm is {_shown(header.get('alg'))}", f"this key is for {fitting[0].algorithm} alone; {_ISSUE}"
        )
    return fitting[0]


def _identity(claims: Mapping[str, Any], key: TrustedKey, now: float, foreign_issuer: str | None) -> Identity:
    audience = claims.get("aud")
    if AUDIENCE not in (cast("list[Any]", audience) if isinstance(audience, list) else [audience]):
        _refuse(f"its audience (aud) is {_shown(audience)}", f"a token for this ledger has {AUDIENCE!r}")
    name = claims.get("sub")
    fault = name_fault(name) if isinstance(name, str) else "it must be text"
    if fault is not None or not isinstance(name, str):
        _refuse(f"its name (sub) is {ascii(name)[:SHOWN_CHARS_MAX]}", str(fault))
    tenant = _bound(claims, "tenant")
    recorded = recorded_name(name, issuer=foreign_issuer, tenant=tenant)
    if len(recorded) > NAME_CHARS_MAX:
        _refuse(
            f"its name is recorded as {_shown(recorded)}", f"with issuer and tenant at most {NAME_CHARS_MAX} characters"
        )
    return Identity(
        name=recorded,
        roles=_roles(claims.get("role")),
        issuer=key.issuer,
        expires_at=_expiry(claims, key, now),
        job_id=_bound(claims, "job_id"),
        key_id=key.key_id,
        tenant=tenant,
        agent=_bound(claims, "agent"),
    )


def _bound(claims: Mapping[str, Any], claim: str) -> str | None:
    """The value this claim binds the token to; None without the claim.

    An invalid claim must not leave the token unbound.
    """
    if claim not in claims or (claims[claim] is None and claim == "job_id"):
        return None
    value = claims[claim]
    if not isinstance(value, str) or not _fits(claim, value):
        _refuse(f"its {claim} is {_shown(value)}", f"it must match {_BOUND[claim]}, or be left out")
    return value


def _expiry(claims: Mapping[str, Any], key: TrustedKey, now: float) -> float:
    issued_at, expires_at = (_moment(claims, name) for name in ("iat", "exp"))
    if expires_at <= now:
        raise TokenExpired(problem=f"it expired {now - expires_at:.0f} s ago", remedy=_ISSUE)
    if issued_at > now + LEEWAY_S or ("nbf" in claims and _moment(claims, "nbf") > now + LEEWAY_S):
        _refuse("it begins in the future", "compare this machine's clock with the issuer's")
    if expires_at - issued_at > key.ttl_s_max:
        _refuse(
            f"it is good for {expires_at - issued_at:.0f} s and the limit is {key.ttl_s_max:g} s",
            f"ask for a shorter one (--ttl); {_ISSUE}",
        )
    return expires_at


def _moment(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if value is None:
        _refuse(f"it has no {name}", f"a token says when it was issued and when it ends; {_ISSUE}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 2**53:
        _refuse(f"its {name} is {_shown(value)}", "it must be a number of seconds since 1970")
    return float(value)


def _roles(value: Any) -> frozenset[Role]:
    names: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [value]
    known = {role.value for role in Role}
    if not names or len(names) > len(known):
        _refuse("its role names nothing or too much", f"choose of {', '.join(Role)}")
    for name in names:
        if not isinstance(name, str) or name not in known:
            _refuse(f"its role is {_shown(name)}", f"choose one of {', '.join(Role)}")
    return frozenset(Role(name) for name in names)


def _fits(claim: str, text: str) -> bool:
    return re.fullmatch(_BOUND[claim], text) is not None


def _object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Duplicate names are refused, because parsers disagree about their meaning."""
    value: Any = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise TypeError("no object")
    return cast("dict[str, Any]", value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    claims = dict(pairs)
    if len(claims) != len(pairs):
        raise ValueError("a name comes twice")
    return claims


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"


def _refuse(problem: str, remedy: str) -> NoReturn:
    raise TokenRefused(problem=problem, remedy=remedy)
