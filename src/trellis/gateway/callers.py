"""Who asks: a bearer token becomes a principal, and a route's rule is asked before anything is looked up (AUTH-5, D27).

Authority comes before existence: a role without the right learns nothing, not even whether a thing is there.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Header, Request, Security
from fastapi.security import HTTPAuthorizationCredentials

from trellis.engine.authority import Principal
from trellis.engine.errors import NotAllowed
from trellis.engine.jobs import Actor
from trellis.engine.matrices import permit
from trellis.identity import Identity, TrustedKey
from trellis.instance import Instance
from trellis.web.limits import RateLimits, RefusalBounds
from trellis.web.problems import Problem, correlation_of
from trellis.web.tokens import VerifiedTokens, bearer

KEY_CHARS_MAX = 200
CALLER_STATE_KEY = "trellis.who"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayState:
    """What every route works with; in the app's state."""

    instance: Instance
    keys: Sequence[TrustedKey]
    limits: RateLimits
    inbox_limits: RateLimits
    """Of entries; beside the limit of all requests (D51)."""
    refusals: RefusalBounds
    new_id: Callable[[], str]
    tokens: VerifiedTokens = field(default_factory=VerifiedTokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Somebody who may do what this route does."""

    principal: Principal
    identity: Identity
    actor: Actor
    """The principal in the role that gives the right."""
    correlation_id: str
    """The request's own: as its header says, else made for it."""
    given_correlation_id: str | None = None
    """The same where the caller chose it; None for one that was made."""

    def may(self, rule: str) -> bool:
        """Whether another rule lets the caller, too."""
        try:
            self.permit(rule)
        except NotAllowed:
            return False
        return True

    def permit(self, rule: str, *, own: bool | None = None) -> Actor:
        """Ask another rule, or the same one now that the thing is known."""
        return permit(self.principal, rule, own=own)


def gateway_of(request: Request) -> GatewayState:
    """What this app works with."""
    return request.app.state.gateway


async def authenticate(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Security(bearer)]
) -> tuple[Principal, Identity]:
    """The principal of the token, looked at once for each request; raises Problem 401, TokenRefused, Problem 429."""
    known: tuple[Principal, Identity] | None = request.scope.get(CALLER_STATE_KEY)
    if known is not None:
        return known
    if len(request.headers.getlist("authorization")) > 1:
        raise Problem("AUTH_REQUIRED", "Two Authorization headers were sent; send one token.")
    if credentials is None:
        detail = "No token was sent; put `Authorization: Bearer TOKEN`, a token of `trellis token issue`."
        raise Problem("AUTH_REQUIRED", detail)
    gateway = gateway_of(request)
    identity = gateway.tokens.verify(credentials.credentials, gateway.keys, now=time.time())
    principal = identity.principal()
    request.scope["trellis.principal"] = principal
    gateway.limits.take(request, principal)
    request.scope[CALLER_STATE_KEY] = (principal, identity)
    return principal, identity


class RequiresRule:
    """A dependency: the caller, if rule `name` lets it. Tests read the rule of each route from here."""

    def __init__(self, rule: str) -> None:
        self.rule = rule

    async def __call__(
        self, request: Request, who: Annotated[tuple[Principal, Identity], Depends(authenticate)]
    ) -> Caller:
        """The caller; raises NotAllowed, which is answered, logged and audited in one place (`refusals`)."""
        principal, identity = who
        actor = permit(principal, self.rule)
        correlation_id = correlation_of(request) or ""
        return Caller(
            principal=principal,
            identity=identity,
            actor=actor,
            correlation_id=correlation_id,
            given_correlation_id=correlation_id if request.scope.get("trellis.correlation_given") else None,
        )

    async def admit(self, request: Request) -> None:
        """Raise what asking would raise, before anything of the body is read."""
        await self(request, await authenticate(request, await bearer(request)))


def requires(rule: str) -> Any:
    """For a parameter of a route: the caller, if this rule lets it."""
    return Depends(RequiresRule(rule))


async def idempotency_key(
    value: Annotated[str | None, Header(alias="Idempotency-Key", description="Repeat a request safely.")] = None,
) -> str | None:
    """The key of a request that may come twice, bare or in quotes; raises Problem."""
    if value is None:
        return None
    key = value[1:-1] if len(value) >= 2 and value[0] == value[-1] == '"' else value
    if not 1 <= len(key) <= KEY_CHARS_MAX or not key.isprintable() or not key.isascii():
        detail = f"Idempotency-Key must be 1 to {KEY_CHARS_MAX} printable ASCII characters."
        raise Problem("VALIDATION_FAILED", detail)
    return key


KeyHeader = Annotated[str | None, Depends(idempotency_key)]


async def instance_of(request: Request) -> Instance:
    """What this app serves. A coroutine, as every dependency here: FastAPI would send a function to a thread."""
    return gateway_of(request).instance


InstanceOf = Annotated[Instance, Depends(instance_of)]
