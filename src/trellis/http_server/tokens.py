"""Bearer tokens: reading one from a request, and caching verified ones."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_

from fastapi.requests import HTTPConnection
from fastapi.security import HTTPBearer

from trellis.auth.principals import Principal
from trellis.auth.tokens import Identity, TrustedKey, verify
from trellis.http_server.problems import Problem

TOKENS_MAX = 1_000


class BearerToken(HTTPBearer):
    """A route dependency: the token in the `Authorization` header of a request."""

    async def __call__(self, request: HTTPConnection) -> str | None:  # type: ignore[override] - only the token is used
        """The token; None if there is none, or another scheme. Raises Problem 401 for two headers."""
        sent = [value for name, value in request.scope["headers"] if name == b"authorization"]
        if len(sent) > 1:
            raise Problem("AUTH_REQUIRED", "Two Authorization headers were sent; send one token.")
        scheme, _, token = sent[0].decode("latin-1").partition(" ") if sent else ("", "", "")
        return token.strip() or None if scheme.lower() == "bearer" else None


bearer = BearerToken(scheme_name="HTTPBearer", description="A token of `trellis token issue --role ROLE`.")


@dataclass(slots=True)
class VerifiedTokens:
    """Caches verified tokens, so that a signature is checked once and not in every request.

    Holds valid tokens only, by digest, until they expire. The cache is cleared when the key objects change.
    """

    _keys: tuple[TrustedKey, ...] = ()
    _known: dict[bytes, tuple[Principal, Identity]] = field(default_factory=dict[bytes, "tuple[Principal, Identity]"])

    def caller(self, token: str | None, keys: Sequence[TrustedKey], *, now: float) -> tuple[Principal, Identity]:
        """Who sent this token, and what it says; raises Problem 401 without a token, TokenRefused."""
        if token is None:
            detail = "No token was sent; put `Authorization: Bearer TOKEN`, a token of `trellis token issue`."
            raise Problem("AUTH_REQUIRED", detail)
        trusted, digest = tuple(keys), hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        if len(trusted) != len(self._keys) or not all(map(is_, trusted, self._keys)):
            self._known.clear()
            self._keys = trusted
        known = self._known.pop(digest, None)
        if known is None or known[1].expires_at <= now:
            identity = verify(token, trusted, now=now)
            known = identity.principal(), identity
        if len(self._known) >= TOKENS_MAX:
            del self._known[next(iter(self._known))]  # the least recently used one
        self._known[digest] = known
        return known
