"""Sign-in codes: `trellis up` prints a link with a code, and the console exchanges the code for a token, once.

Only a gateway that uses the development key makes codes, and only when nobody but this machine can reach it. A code is
shown to whoever started the gateway and to nobody else: other users of the machine reach the address too, so an address
that gave a token to every caller on loopback would let them in. Codes live in the memory of the process, as digests.
"""

import hashlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from trellis.auth.tokens import TrustedKey, issue
from trellis.engine.admin_acts import TOKEN_ISSUED, NewAct
from trellis.engine.errors import Refused
from trellis.engine.jobs import Actor
from trellis.engine.ledger import Ledger
from trellis.lifecycles import Role

CODE_BYTES = 32
CODE_CHARS_MAX = 100
CODE_TTL_S = 15 * 60.0
CODES_MAX = 10
TOKEN_TTL_S = 12 * 3600.0
ROLES = (Role.OWNER, Role.CONTROL_PLANE)
"""What the person who started the instance is on the command line, too."""


class SignInRefused(Refused):
    """The sign-in code is refused: {problem}. Paste a token of `trellis token issue` instead."""

    code = "AUTH_REQUIRED"


@dataclass(frozen=True, kw_only=True)
class SignInCodes:
    """Makes codes and exchanges them. `name` is the person whom the tokens name."""

    key: TrustedKey
    name: str
    now: Callable[[], float]
    _expires_at: dict[str, float] = field(default_factory=dict[str, float])

    def new_code(self) -> str:
        """A code that works once, within 15 minutes. The oldest code ends when there are too many."""
        while len(self._expires_at) >= CODES_MAX:
            del self._expires_at[next(iter(self._expires_at))]
        code = secrets.token_urlsafe(CODE_BYTES)
        self._expires_at[_digest(code)] = self.now() + CODE_TTL_S
        return code

    async def exchange(self, code: str, ledger: Ledger) -> str:
        """A token for the code, recorded in the ledger like every token; raises SignInRefused."""
        expires_at = self._expires_at.pop(_digest(code), None)
        if expires_at is None:
            raise SignInRefused(problem="it was used before, or this process did not make it")
        if expires_at <= self.now():
            raise SignInRefused(problem=f"it was valid for {CODE_TTL_S / 60:g} minutes")
        roles = ", ".join(role.value for role in ROLES)
        act = NewAct(
            event=TOKEN_ISSUED, subject=self.name, target=f"{roles} for {TOKEN_TTL_S / 3600:g} h", cause="console"
        )
        await ledger.record_act(Actor(role=Role.CONTROL_PLANE, name=self.name), act)
        return issue(self.key, name=self.name, roles=ROLES, ttl_s=TOKEN_TTL_S, now=self.now())


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode()).hexdigest()
