"""Bearer tokens: reading one from a request, and caching verified ones."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi.security import HTTPBearer

from trellis.auth.tokens import Identity, TrustedKey, verify

TOKENS_MAX = 1_000

bearer = HTTPBearer(auto_error=False, description="A token of `trellis token issue --role ROLE`.")


@dataclass(slots=True)
class VerifiedTokens:
    """Caches verified tokens, so that a signature is checked once and not in every request.

    Holds valid tokens only, by digest, until they expire. The cache is cleared when the key objects change.
    """

    _keys: tuple[TrustedKey, ...] = ()
    _known: dict[bytes, Identity] = field(default_factory=dict[bytes, Identity])

    def verify(self, token: str, keys: Sequence[TrustedKey], *, now: float) -> Identity:
        """Verify a token as `trellis.auth.tokens.verify` does, with the cache."""
        trusted, digest = tuple(keys), hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        if [*map(id, trusted)] != [*map(id, self._keys)]:
            self._known.clear()
            self._keys = trusted
        known = self._known.pop(digest, None)
        identity = known if known is not None and known.expires_at > now else verify(token, trusted, now=now)
        if len(self._known) >= TOKENS_MAX:
            del self._known[next(iter(self._known))]  # the least recently used one
        self._known[digest] = identity
        return identity
