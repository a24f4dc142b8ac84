"""Tokens: who a caller says it is, signed by somebody who may say so.

A token is a JWT. Its claims: `role` (one of ours, or several), `sub` (the actor's name), `aud` (trellis), `iss`, `iat`, `exp`.

What holds:
- a key is trusted together with the one algorithm it is for and the one issuer that signs with it, so that a token can
  choose neither; both are values of the caller (`TrustedKey`), whatever kind of key it is;
- every token ends, and soon: `exp` and `iat` are required, and the time between them has a bound;
- nothing of a token counts before its signature was verified but the hint which key to use;
- the time comes in as an argument.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from joserfc import jws, jwt
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OctKey, OKPKey, RSAKey

from trellis.engine.errors import OptionInvalid, TokenExpired, TokenRefused
from trellis.engine.text import is_storable
from trellis.lifecycles import Role

AUDIENCE = "trellis"
TTL_S_DEFAULT = 3600.0
TTL_S_MAX = 24 * 3600.0
LEEWAY_S = 5.0
"""How far the clocks of issuer and verifier may differ."""
TOKEN_CHARS_MAX = 8_192
NAME_CHARS_MAX = 200
SHOWN_CHARS_MAX = 60
SYMMETRIC_BYTES_MIN = 32
"""A key for HS256 that is shorter than its digest is weaker than the algorithm's name."""
HEADERS = frozenset({"alg", "typ", "kid"})

_SHAPE = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*")
_ISSUE = "get a new one: trellis token issue --role ROLE"

Key = OctKey | RSAKey | ECKey | OKPKey


@dataclass(frozen=True, kw_only=True, slots=True)
class TrustedKey:
    """A key, the only algorithm it is used with, and the issuer whose tokens it verifies."""

    key: Key
    algorithm: str
    issuer: str
    key_id: str | None = None
    """The `kid` of its tokens, where an issuer has several keys."""
    ttl_s_max: float = TTL_S_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a verified token says."""

    name: str
    roles: frozenset[Role]
    issuer: str
    expires_at: float
    """Seconds since 1970."""


def symmetric_key(secret: bytes, *, issuer: str) -> TrustedKey:
    """A secret of 32 bytes or more as a key for HS256: whoever verifies with it could also issue."""
    if len(secret) < SYMMETRIC_BYTES_MIN:
        expected = f"a secret for HS256 has {SYMMETRIC_BYTES_MIN} bytes or more"
        raise OptionInvalid(option="secret", value=f"{len(secret)} bytes", expected=expected)
    return TrustedKey(key=OctKey.import_key(secret), algorithm="HS256", issuer=issuer)


def issue(key: TrustedKey, *, name: str, roles: Iterable[Role], ttl_s: float, now: float) -> str:
    """A token that `verify` with the same key accepts for `ttl_s`; raises OptionInvalid."""
    chosen = [role.value for role in Role if role in set(roles)]
    if not chosen:
        raise OptionInvalid(option="role", value="", expected="a token without a role is good for nothing")
    if not (math.isfinite(ttl_s) and 1 <= ttl_s <= key.ttl_s_max):
        raise OptionInvalid(option="ttl", value=ttl_s, expected=f"it must be from 1 to {key.ttl_s_max:g} seconds")
    if not _is_name(name):
        expected = f"it must be text of 1 to {NAME_CHARS_MAX} characters"
        raise OptionInvalid(option="sub", value=name[:SHOWN_CHARS_MAX], expected=expected)
    claims = {
        "iss": key.issuer,
        "sub": name,
        "aud": AUDIENCE,
        "role": chosen[0] if len(chosen) == 1 else chosen,
        "iat": int(now),
        "exp": int(now + ttl_s),
    }
    header = {"alg": key.algorithm, **({"kid": key.key_id} if key.key_id is not None else {})}
    return jwt.encode(header, claims, key.key, algorithms=[key.algorithm])


def verify(token: str, keys: Sequence[TrustedKey], *, now: float) -> Identity:
    """Whom the token names and as what; raises TokenRefused, which says what to change."""
    if len(token) > TOKEN_CHARS_MAX:
        _refuse(f"it has {len(token)} characters and the limit is {TOKEN_CHARS_MAX}", _ISSUE)
    if not _SHAPE.fullmatch(token):
        _refuse("it is not three parts of base64 joined by dots", "pass what `trellis token issue` printed, whole")
    try:
        signed = jws.extract_compact(token.encode("ascii"))
        hint = _object(signed.payload)
        header = cast("Mapping[str, Any]", signed.headers())
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
    return _identity(hint, key, now)


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """Roles by name; raises OptionInvalid, which lists them."""
    found: set[Role] = set()
    for name in names:
        if name not in set(Role):
            raise OptionInvalid(option="--role", value=name, expected=f"choose one of {', '.join(Role)}")
        found.add(Role(name))
    return frozenset(found)


# --- inside ----------------------------------------------------------------------------------------------------------


def _chosen(header: Mapping[str, Any], hint: Mapping[str, Any], keys: Sequence[TrustedKey]) -> TrustedKey:
    """The one trusted key that the token may have been signed with."""
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


def _identity(claims: Mapping[str, Any], key: TrustedKey, now: float) -> Identity:
    audience = claims.get("aud")
    if AUDIENCE not in (cast("list[Any]", audience) if isinstance(audience, list) else [audience]):
        _refuse(f"its audience (aud) is {_shown(audience)}", f"a token for this ledger has {AUDIENCE!r}")
    name = claims.get("sub")
    if not isinstance(name, str) or not _is_name(name):
        _refuse(f"its name (sub) is {_shown(name)}", f"it must be text of 1 to {NAME_CHARS_MAX} characters")
    return Identity(
        name=name, roles=_roles(claims.get("role")), issuer=key.issuer, expires_at=_expiry(claims, key, now)
    )


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


def _is_name(name: str) -> bool:
    return 1 <= len(name) <= NAME_CHARS_MAX and bool(name.strip()) and name.isprintable() and is_storable(name)


def _object(body: bytes) -> dict[str, Any]:
    """A JSON object; a name that comes twice would mean one thing here and another elsewhere."""
    value: Any = json.loads(body, object_pairs_hook=_once, parse_constant=_no_constant)
    if not isinstance(value, dict):
        raise TypeError("no object")
    return cast("dict[str, Any]", value)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _no_constant(text: str) -> NoReturn:
    raise ValueError(text)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "…"


def _refuse(problem: str, remedy: str) -> NoReturn:
    raise TokenRefused(problem=problem, remedy=remedy)
