"""Bearer tokens: where a request carries one, and who it names."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi.security import HTTPBearer

from trellis.auth.tokens import Identity, TrustedKey, verify

TOKENS_MAX = 1_000

bearer = HTTPBearer(auto_error=False, description="A token of `trellis token issue --role ROLE`.")


@dataclass(slots=True)
class VerifiedTokens:
    """Tokens that were verified, so that a signature is looked at once and not in every request.

    Only good ones, by digest, while they last; all are forgotten when the keys are not the same objects any more.
    """

    _keys: tuple[TrustedKey, ...] = ()
    _known: dict[bytes, Identity] = field(default_factory=dict[bytes, Identity])

    def verify(self, token: str, keys: Sequence[TrustedKey], *, now: float) -> Identity:
        """As `identity.verify`."""
        trusted, digest = tuple(keys), hashlib.sha256(token.encode(errors="surrogatepass")).digest()
        if [*map(id, trusted)] != [*map(id, self._keys)]:
            self._known.clear()
            self._keys = trusted
        known = self._known.pop(digest, None)
        identity = known if known is not None and known.expires_at > now else verify(token, trusted, now=now)
        if len(self._known) >= TOKENS_MAX:
            del self._known[next(iter(self._known))]  # the one that was not used for the longest time
        self._known[digest] = identity
        return identity
